"""Step times of zerobench's stages beside DDP, FSDP2 and the floor, in one process group and one run.

A plain loop without anything of ``zerobench compare`` around it, to hold that against:

    torchrun --nproc_per_node N benchmarks/gpu_step.py MODEL:BATCH:SEQ:STEPS:MODE,MODE ...

MODEL: gpt2 or llama-1.3b, as transformers builds them. MODE: floor (forward and backward alone, bf16 parameters), zero0
to zero3, zero3keep (gathered between forward and backward), each with ``+nccl`` or ``+peer`` behind it over that
communicator instead of the one that ``auto`` chooses, or with a setting of the engine
(``zero3@push_gradient_bytes=0``), ddp (autocast), fsdp2; with ``-block`` behind it every block is compiled. Prints a
JSON line a mode: three windows' mean milliseconds a step, milliseconds until the host is through with a step that it
starts on an idle device, and peak GB of torch's allocator and of the device. Beside them the medians of the last
window's single steps by CUDA events, taken over ranks in two ways: from last rank's end to last rank's end
(``median_ms``, as in result files), and the slowest rank of each step (``slowest_median_ms``), which counts what ranks
run ahead of each other and fall back; and joules that a step of the windows takes of one GPU, the mean over ranks (null
where the driver does not count them). What the sampler of ``compare`` costs shows beside

    python -m zerobench.bench.sampler samples.jsonl UUID ... &
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerobench
from zerobench import models
from zerobench.bench.assess import step_times_of_all
from zerobench.host.nvml import Nvml

NAMES = {"gpt2": "hf:gpt2", "llama-1.3b": "llama-1.3b"}
WARMUP_STEPS = 8
WINDOWS = 3
HOST_STEPS = 4
Run = Callable[[], object]


def blocks_of(model: nn.Module) -> nn.ModuleList:
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 2)


def floor(model: nn.Module, batch: dict[str, Any]) -> tuple[Run, Run, Run]:
    model.bfloat16()
    parameters = list(model.parameters())

    def forward_backward() -> None:
        for parameter in parameters:
            parameter.grad = None
        model(**batch).loss.backward()

    return forward_backward, lambda: None, lambda: None


def ours(model: nn.Module, batch: dict[str, Any], name: str) -> tuple[Run, Run, Run]:
    name, _, setting = name.partition("@")
    key, _, value = setting.partition("=")
    config = {
        "stage": int(name[4]),
        "precision": "bf16",
        "reshard_after_forward": not name.startswith("zero3keep"),
        "communicator": name.partition("+")[2] or "auto",
        "optimizer": {"lr": 1e-5},
    }
    engine = zerobench.initialize(model, config=config | ({key: json.loads(value)} if setting else {}))
    return lambda: engine.backward(engine(**batch).loss), engine.step, engine.close


def peer(model: nn.Module, batch: dict[str, Any], name: str, *, compiled: bool) -> tuple[Run, Run, Run]:
    network: nn.Module = model
    autocast = name == "ddp"
    if name == "ddp":
        network = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=not compiled
        )
    else:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for block in blocks_of(model):
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def forward_backward() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = network(**batch).loss
        loss.backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return forward_backward, step, lambda: None


def prepare(
    model_name: str, mode: str, batch_size: int, seq_length: int, device: torch.device
) -> tuple[Run, Run, Run]:
    name, _, compiled = mode.partition("-")
    with device:
        model = models.build(models.resolve(NAMES[model_name], {}), seed=0)
    ids = torch.randint(0, 32000, (batch_size, seq_length), device=device)
    if compiled:
        for block in blocks_of(model):
            if name.startswith("zero"):
                block.forward = torch.compile(block.forward)  # hooks stay outside
            else:
                block.compile()
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    if name == "floor":
        return floor(model, batch)
    if name.startswith("zero"):
        return ours(model, batch, name)
    return peer(model, batch, name, compiled=bool(compiled))


def host_ms(forward_backward: Run, step: Run) -> float:
    """Until the host is through with a step that it starts on an idle device: the mean of some."""
    host_s = 0.0
    for _ in range(HOST_STEPS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        forward_backward()
        step()
        host_s += time.perf_counter() - start_s
    torch.cuda.synchronize()
    return host_s / HOST_STEPS * 1e3


def measure(model_name: str, mode: str, batch_size: int, seq_length: int, steps: int) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    device = torch.device("cuda", torch.cuda.current_device())
    free_before = torch.cuda.mem_get_info()[0]
    forward_backward, step, close = prepare(model_name, mode, batch_size, seq_length, device)

    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]

    def run(step_num: int) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        start_s = time.perf_counter()
        events[0].record()
        for index in range(step_num):
            forward_backward()
            step()
            events[min(index + 1, steps)].record()
        torch.cuda.synchronize()
        return (time.perf_counter() - start_s) / step_num * 1e3

    run(WARMUP_STEPS)
    nvml, uuid = Nvml(), str(torch.cuda.get_device_properties(device).uuid)
    energy_j = nvml.energy_j(uuid)
    windows = [run(steps) for _ in range(WINDOWS)]
    joules = [None if energy_j is None else (nvml.energy_j(uuid) or 0.0) - energy_j] * dist.get_world_size()
    nvml.close()
    dist.all_gather_object(joules, joules[0])
    ranks: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(ranks, [begin.elapsed_time(end) for begin, end in pairwise(events)])
    found = {
        "model": model_name,
        "mode": mode,
        "gpus": dist.get_world_size(),
        "batch_size": batch_size,
        "seq_length": seq_length,
        "step_ms": [round(value, 2) for value in windows],
        "median_ms": round(median(step_times_of_all(ranks)), 2),
        "slowest_median_ms": round(median(map(max, *ranks) if len(ranks) > 1 else ranks[0]), 2),
        "host_ms": round(host_ms(forward_backward, step), 2),
        "joules_per_step": None if None in joules else round(fmean(joules) / (WINDOWS * steps), 1),
        "torch_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "device_used_gb": round((free_before - torch.cuda.mem_get_info()[0]) / 1e9, 2),
    }
    close()
    return found


def run_spec(run: str) -> tuple[str, int, int, int, list[str]]:
    model_name, batch_size, seq_length, steps, modes = run.split(":")
    if model_name not in NAMES:
        raise argparse.ArgumentTypeError(f"model {model_name!r} is none of {', '.join(NAMES)}")
    return model_name, int(batch_size), int(seq_length), int(steps), modes.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=run_spec, metavar="MODEL:BATCH:SEQ:STEPS:MODE,MODE")
    runs = parser.parse_args().runs
    if "LOCAL_RANK" not in os.environ:
        parser.error("start it with torchrun, one process a GPU")
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    for model_name, batch_size, seq_length, steps, modes in runs:
        for mode in modes:
            found = measure(model_name, mode, batch_size, seq_length, steps)
            if dist.get_rank() == 0:
                print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

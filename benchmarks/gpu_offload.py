"""Step times with optimizer state on the host, beside what limits them, on one GPU or several:

    torchrun --nproc_per_node N benchmarks/gpu_offload.py --num-layers 16 --batch-size 4 --seq-length 2048 MODE ...

The model is a Llama of 7B width (4096 wide, 32 heads, 11008 in between, 32000 tokens; --width 13b: 5120, 40, 13824)
with checkpointed blocks, as transformers builds it. MODE is one of

    disk       the disk in --nvme-path: raw requests, as many reads as writes, and the step that they allow
    limits     the roofline's parts: forward and backward alone (bf16); the CPU's Adam on this rank's share of the
               state while both directions of pinned copies run; the copies alone
    host       stage 2, optimizer on the host
    host-clip  the same with clipping, whose updates wait for the norm
    host-beside  the same without clipping and with optimizer_in_backward
    host3      stage 3, optimizer and parameters on the host
    split:R    stage 2, the share R of the state on the host
    nvme       stage 2, optimizer on NVMe, in files in --nvme-path
    nvme:GIB   the same with GIB of host memory for what fits
    nvme3      stage 3, optimizer and parameters on NVMe; nvme3:GIB as above
    auto       stage 2, on the host what does not fit on the GPU (--device-memory-gib makes it smaller)
    auto-beside  the same with optimizer_in_backward
    device     stage 2, nothing on the host
    fsdp2      FSDP2 with CPUOffloadPolicy and torch's fused AdamW

Each mode prints a JSON line: the median of the steps' milliseconds, host to device synchronised after each step (as the
peers' own benchmark does for offload), all samples, peak GB of torch's allocator and of the GPU as the driver counts,
GB of host memory. Behind `limits` in the same call, modes with state on the host also show their own roofline: of the
CPU's Adam and of the copies as much as the share on the host takes.

With --checksum our modes run under torch's deterministic algorithms and end with the checksum of all masters. The exit
status then says whether all of them came to an end, and to the same one. One step and one of warm-up make three in all:

    torchrun --nproc_per_node 4 benchmarks/gpu_offload.py --width 13b --num-layers 40 --batch-size 1 \\
      --steps 1 --warmup-steps 1 --checksum --nvme-path DIR nvme host
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist

import zerobench
from zerobench.host.cpu_shares import part_of
from zerobench.models.materialise import materialise, on_meta
from zerobench.strategies.shared import checksum

Step = Callable[[], object]
WIDTHS = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40},
}


def make_model(options: argparse.Namespace, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        num_hidden_layers=options.num_layers,
        **WIDTHS[options.width],
        attn_implementation="sdpa",
        dtype=dtype,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.gradient_checkpointing_enable()
    return model.train()


def ours(
    model: Any, batch: dict[str, Any], mode: str, *, nvme_path: str, limit_bytes: int | None
) -> tuple[Step, zerobench.Engine]:
    name, _, ratio = mode.partition(":")
    config: dict[str, Any] = {
        "stage": 3 if name in ("host3", "nvme3") else 2,
        "precision": "bf16",
        "optimizer": {"lr": 1e-5},
    }
    if name in ("nvme", "nvme3"):
        config["offload_optimizer"] = {"device": "nvme", "nvme_path": nvme_path, "io_allow_fallback": True}
        if ratio:
            config["offload_optimizer"]["host_memory_bytes"] = int(float(ratio) * (1 << 30))
    elif name != "device":
        config["offload_optimizer"] = {"device": "cpu", "ratio": float(ratio or 1.0)}
    if name in ("auto", "auto-beside"):
        config["offload_optimizer"] |= {"ratio": "auto", "device_memory_bytes": limit_bytes}
    if name in ("host3", "nvme3"):
        config["offload_param"] = {"device": "nvme" if name == "nvme3" else "cpu"}
    if name == "host-clip":
        config["gradient_clipping"] = 1.0
    if name in ("host-beside", "auto-beside"):
        config["optimizer_in_backward"] = True
    engine = zerobench.initialize(model, config=config, materialise=materialise)

    def step() -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    return step, engine


def fsdp2(model: Any, batch: dict[str, Any]) -> tuple[Step, None]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mp_policy=policy, offload_policy=CPUOffloadPolicy(), reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, None


def floor(model: Any, batch: dict[str, Any]) -> Step:
    parameters = list(model.parameters())

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        model(**batch).loss.backward()

    return step


def outside_bytes() -> int:
    """On the GPU, by the driver's count, and not torch's."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def leave_to_torch(limit_bytes: int | None) -> None:
    """Torch gets what is left of the limit beside all else, as on a smaller GPU."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    share = 1.0 if limit_bytes is None else min((limit_bytes - outside_bytes()) / total, 1.0)
    torch.cuda.set_per_process_memory_fraction(share)


def timed(step: Step, *, step_num: int, warmup_num: int) -> list[float]:
    for _ in range(warmup_num):
        step()
    samples = []
    for _ in range(step_num):
        torch.cuda.synchronize()
        dist.barrier()
        start_s = time.perf_counter()
        step()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start_s) * 1e3)
    return samples


def windowed(step: Step, *, step_num: int) -> float:
    """Milliseconds a step without a stop in between: updates may run beside the next forward."""
    torch.cuda.synchronize()
    dist.barrier()
    start_s = time.perf_counter()
    for _ in range(step_num):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / step_num * 1e3


class Copies:
    """Both directions of pinned copies, over and over, from a thread of their own."""

    def __init__(self, size_bytes: int = 256 << 20) -> None:
        pinned = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        device = [torch.empty(size_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._pairs = [(device[0], pinned[0]), (pinned[1], device[1])]
        self._size_bytes = size_bytes
        self._stop = threading.Event()
        self._moved_bytes = [0, 0]

    def _run(self, direction: int) -> None:
        destination, source = self._pairs[direction]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not self._stop.is_set():
                destination.copy_(source, non_blocking=True)
                stream.synchronize()
                self._moved_bytes[direction] += self._size_bytes

    def beside(self, work: Callable[[], object]) -> tuple[float, list[float]]:
        """Seconds of the work, and GB/s of each direction meanwhile."""
        self._stop.clear()
        self._moved_bytes = [0, 0]
        threads = [threading.Thread(target=self._run, args=(direction,)) for direction in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        before, start_s = list(self._moved_bytes), time.perf_counter()
        work()
        took_s = time.perf_counter() - start_s
        rates = [
            (after - first) / took_s / 1e9 for after, first in zip(self._moved_bytes, before, strict=True)
        ]
        self._stop.set()
        for thread in threads:
            thread.join()
        return took_s, rates


def limits(
    options: argparse.Namespace, batch: dict[str, Any], *, numel_of_adam: int = 1 << 28
) -> dict[str, Any]:
    """The parts of max(forward and backward, Adam beside both transfers, PCIe) for this rank, in milliseconds."""
    from zerobench import _native
    from zerobench.micro.adam_arrays import MIXES, Arrays

    with torch.device("cuda"):
        model = make_model(options, torch.bfloat16)
    numel = sum(parameter.numel() for parameter in model.parameters())
    step = floor(model, batch)
    compute_ms = median(timed(step, step_num=options.steps, warmup_num=2))
    del model, step
    torch.cuda.empty_cache()

    core = _native.load()
    ranks = dist.get_world_size()
    allowed = sorted(os.sched_getaffinity(0))
    cpus = part_of(allowed, int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    pool = core.ThreadPool(len(cpus), cpus=cpus)
    arrays = Arrays(numel_of_adam, MIXES[-1])
    hyperparameters = core.AdamHyperparameters(
        lr=1e-5, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, decoupled=True
    )
    runner = arrays.runner(core, hyperparameters)
    runner.step(pool, step=1)
    copies = Copies()
    shard_numel = numel / ranks
    adam_s, adam_alone_s, rates = [], [], []
    for number in range(2, 7):
        start_s = time.perf_counter()
        runner.step(pool, step=number)
        adam_alone_s.append(time.perf_counter() - start_s)
        took_s, _ = copies.beside(lambda number=number: runner.step(pool, step=number))
        adam_s.append(took_s)
        rates.append(copies.beside(lambda: time.sleep(0.3))[1])
    slowest_gb_s = min(median(rate[direction] for rate in rates) for direction in range(2))
    adam_ms = median(adam_s) / numel_of_adam * shard_numel * 1e3
    pcie_ms = 2 * shard_numel / slowest_gb_s / 1e9 * 1e3
    return {
        "mode": "limits",
        "params_m": round(numel / 1e6),
        "forward_backward_ms": round(compute_ms, 1),
        "adam_beside_copies_ms": round(adam_ms, 1),
        "adam_alone_ms": round(median(adam_alone_s) / numel_of_adam * shard_numel * 1e3, 1),
        "pcie_ms": round(pcie_ms, 1),
        "pcie_gb_s": round(slowest_gb_s, 1),
        "roofline_ms": round(max(compute_ms, adam_ms, pcie_ms), 1),
    }


def disk(options: argparse.Namespace) -> dict[str, Any]:
    """What the disk allows: raw requests over files of their own, reading and writing at once as a step does."""
    from zerobench.micro.io_disk import Disk, IoSetting

    setting = IoSetting(engine="io_uring", block_bytes=1 << 20, depth=32)
    files = Disk(
        [Path(options.nvme_path)], settings=[setting], chunk_bytes=16 << 20, file_bytes=None, sample_s=2.0
    )
    rates = [files.sample_raw(setting, "both") for _ in range(4)][1:]
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in make_model(options, torch.bfloat16).parameters())
    return {
        "mode": "disk",
        "params_m": round(numel / 1e6),
        "raw_both_gb_s": [round(rate / 1e9, 2) for rate in rates],
        # Master and two moments of float32, read and written; beside them parameters read twice and written once.
        "roofline_ms": round(2 * 12 * numel / median(rates) * 1e3, 1),
        "roofline_with_parameters_ms": round((2 * 12 + 3 * 2) * numel / median(rates) * 1e3, 1),
    }


def roofline(parts: dict[str, Any], ratio: float) -> float:
    """Milliseconds at least with this share of the state on the host."""
    return max(parts["forward_backward_ms"], ratio * parts["adam_beside_copies_ms"], ratio * parts["pcie_ms"])


def measure(
    mode: str, options: argparse.Namespace, batch: dict[str, Any], parts: dict[str, Any]
) -> dict[str, Any]:
    limit_bytes = None if options.device_memory_gib is None else round(options.device_memory_gib * (1 << 30))
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    leave_to_torch(limit_bytes)
    if mode == "limits":
        return limits(options, batch)
    if mode == "disk":
        return disk(options)
    began_s = time.perf_counter()
    if mode == "fsdp2":
        with torch.device("cuda"):
            model = make_model(options, torch.float32)
        step, engine = fsdp2(model, batch)
    else:  # made unit by unit: the whole in fp32 need not fit on a GPU
        model = on_meta(lambda: make_model(options, torch.float32))
        step, engine = ours(model, batch, mode, nvme_path=options.nvme_path, limit_bytes=limit_bytes)
    leave_to_torch(limit_bytes)
    step()  # in which auto chooses
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    leave_to_torch(limit_bytes)
    samples = timed(step, step_num=options.steps, warmup_num=options.warmup_steps - 1)
    found = {
        "mode": mode,
        "step_ms": round(median(samples), 1),
        "window_ms": round(windowed(step, step_num=options.steps), 1),
        "samples_ms": [round(sample, 1) for sample in samples],
        "torch_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        "gpu_peak_gb": round((outside_bytes() + torch.cuda.max_memory_reserved()) / 1e9, 2),
        "host_rss_gb": round(psutil.Process().memory_info().rss / 1e9, 1),
        "took_s": round(time.perf_counter() - began_s, 1),
    }
    if engine is not None:
        if mode.startswith("nvme"):
            found["swap"] = engine.swap_stats()
        if options.checksum:
            torch.set_num_threads(len(os.sched_getaffinity(0)))  # for hashes: torchrun leaves one
            found["checksum"] = checksum(engine.full_parameters(rank0_only=True))  # others': of nothing
        ratio = engine.offload_ratio
        engine.close()
        if ratio is not None:
            found["offload_ratio"] = ratio
        if ratio is not None and parts and not mode.startswith("nvme"):
            found["roofline_ms"] = round(roofline(parts, ratio), 1)
            found["of_roofline"] = round(found["roofline_ms"] / found["window_ms"], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", choices=list(WIDTHS), default="7b")
    parser.add_argument("--num-layers", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup-steps", type=int, default=2)
    parser.add_argument("--nvme-path", default=tempfile.gettempdir())
    parser.add_argument("--device-memory-gib", type=float)
    parser.add_argument("--checksum", action="store_true")
    parser.add_argument("modes", nargs="+", metavar="MODE")
    options = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if options.checksum:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    torch.manual_seed(1 + dist.get_rank())
    ids = torch.randint(0, 32000, (options.batch_size, options.seq_length), device="cuda")
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    parts: dict[str, Any] = {}
    checksums: set[str] = set()
    has_failed = False
    for mode in options.modes:
        try:
            found = measure(mode, options, batch, parts)
            if mode == "limits":
                parts = found
            if "checksum" in found:
                checksums.add(found["checksum"])
        except Exception as error:
            found = {"mode": mode, "error": f"{type(error).__name__}: {error}"}
            has_failed = True
        if dist.get_rank() == 0:
            print(json.dumps(found | {"gpus": dist.get_world_size()}), flush=True)
    dist.destroy_process_group()
    if options.checksum and (has_failed or len(checksums) > 1):
        raise SystemExit("a mode failed, or modes ended with different parameters: see their lines")


if __name__ == "__main__":
    main()

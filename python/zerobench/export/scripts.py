"""A row as the configuration of zerobench's engine, as calls of FSDP2, and as a launch line."""

from __future__ import annotations

import shlex
from typing import Any

from zerobench.errors import DataError
from zerobench.export.document import Document, json_text
from zerobench.export.settings import strategy_settings, zero_stage
from zerobench.results.schema import Results, Row
from zerobench.strategies.catalogue import OURS, Tool, tool_of

_OF_A_RUN = ("timeout_s", "rendezvous", "rank", "world_size", "local_rank", "local_world_size", "cpus")
_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}


def zerobench(_: Results, row: Row) -> Document:
    """Return a file for ``zerobench.initialize(model, config=FILE)``."""
    from zerobench.strategies.zero import engine_config

    values = engine_config(strategy_settings(row), stage=zero_stage(row))
    for key in _OF_A_RUN:
        values.pop(key, None)
    if row.settings.precision != "fp16":
        values.pop("loss_scale", None)
    notes = (
        []
        if row.strategy in OURS
        else [f"row {row.name} was measured with {row.strategy}, not with zerobench"]
    )
    return Document(text=json_text(values), notes=notes)


def fsdp2(_: Results, row: Row) -> Document:
    """Return Python code that shards a model as the row does."""
    settings = row.settings
    if settings.offload in ("nvme", "nvme_full"):
        raise DataError(f"row {row.name} swaps to NVMe, which FSDP2 cannot: name another row")
    stage = zero_stage(row)
    if stage < 2:
        raise DataError(
            f"row {row.name} is of stage {stage}; FSDP2 shards gradients too: export it --to torchrun"
        )
    options, names = {"reshard_after_forward": str(stage == 3)}, ["fully_shard"]
    if settings.precision != "fp32":
        options["mp_policy"] = f"MixedPrecisionPolicy(param_dtype={_DTYPES[settings.precision]})"
        names.append("MixedPrecisionPolicy")
    if settings.offload != "none":
        options["offload_policy"] = "CPUOffloadPolicy()"
        names.append("CPUOffloadPolicy")
    lines = "".join(f'    "{name}": {value},\n' for name, value in options.items())
    optimizer = settings.optimizer
    clip = (
        ""
        if settings.clip is None
        else f"# Before each step:\n# torch.nn.utils.clip_grad_norm_(model.parameters(), {settings.clip})\n"
    )
    text = (
        f"import torch\nfrom torch.distributed.fsdp import {', '.join(sorted(names))}\n\n"
        f"options = {{\n{lines}}}\n"
        "for block in blocks:  # the model's repeated layers\n"
        "    fully_shard(block, **options)\n"
        "fully_shard(model, **options)\n"
        "optimizer = torch.optim.AdamW(\n"
        f"    model.parameters(), lr={optimizer['lr']}, betas=({optimizer['beta1']}, {optimizer['beta2']}),\n"
        f"    eps={optimizer['eps']}, weight_decay={optimizer['weight_decay']}, fused=True,\n"
        f")\n{clip}"
    )
    notes = ["blocks and model are names of your script"]
    if tool_of(row.strategy) not in (Tool.FSDP1, Tool.FSDP2):
        notes.append(f"row {row.name} was measured with {row.strategy}, not with FSDP2")
    return Document(text=text, notes=notes)


def torchrun(results: Results, row: Row) -> Document:
    """Return the line that starts a script on as many ranks, with the threads that the row had."""
    settings = row.settings
    here = len(results.machine.get("gpus", [])) if settings.device == "cuda" else settings.world_size
    words: list[Any] = ["torchrun"]
    if here and settings.world_size > here:
        words += [f"--nnodes={-(-settings.world_size // here)}", f"--nproc-per-node={here}"]
        words += ["--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29500"]
    else:
        words += ["--standalone", f"--nproc-per-node={settings.world_size}"]
    threads = f"OMP_NUM_THREADS={settings.threads_per_rank} " if settings.threads_per_rank else ""
    return Document(text=f"{threads}{shlex.join(words)} train.py\n")

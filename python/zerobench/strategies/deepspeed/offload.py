"""DeepSpeed's ZeRO-Offload, ZeRO-Infinity, Twin-Flow (ratio) and SuperOffload: what they are given, and cannot do.
Written against 0.19.8."""

from __future__ import annotations

from typing import Any

from zerobench.strategies.base import NVME_OFFLOADS, StrategySettings
from zerobench.strategies.requirements import Tools, abandoned_build, missing_compiler, missing_library

_SUB_GROUPS = 20  # where DeepSpeed places or updates sub-groups one by one, so that a ratio is met within 5 %
_MIN_SUB_GROUP_NUMEL, _MAX_SUB_GROUP_NUMEL = 1_000_000, 400_000_000
_SWAPPED_SUB_GROUP_NUMEL = 200_000_000
_SWAP_BUFFERS = 8  # parameters, gradients and two moments of the sub-group in work and of the next one
_PARAMETER_BUFFERS = 16  # each of the largest parameter: those in use, and those read ahead
_AIO = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 4,
    "single_submit": False,
    "overlap_events": True,
}


def unplaced(settings: StrategySettings, *, stage: int, super_offload: bool, tools: Tools) -> str | None:
    """Return why DeepSpeed cannot place or update its state as asked."""
    offload = settings.offload
    if super_offload:
        if offload != "cpu_optimizer":
            return "SuperOffload is a way to keep optimizer state on the host: use --offload cpu_optimizer"
        if settings.precision == "fp16":
            return "SuperOffload updates during backward, before gradients are unscaled: use bf16 or fp32"
    elif settings.optimizer_in_backward:
        return "of DeepSpeed only SuperOffload updates during backward: use deepspeed3_super without --clip"
    if offload == "none":
        return None
    if stage == 0:
        return "DeepSpeed offloads at stages 1 to 3: use deepspeed1, deepspeed2 or deepspeed3"
    if stage != 3:
        if offload == "cpu_full":
            return (
                f"stage {stage} keeps whole parameters on the GPU: use deepspeed3, or --offload cpu_optimizer"
            )
        if offload in NVME_OFFLOADS:
            return "DeepSpeed swaps to NVMe at stage 3 only: use deepspeed3"
        if settings.offload_ratio is not None:
            return "DeepSpeed's ratio is for stage 3 only: use deepspeed3, or remove --offload-ratio"
    if settings.offload_ratio == "auto":
        return "DeepSpeed chooses no ratio by itself: give --offload-ratio a number"
    if offload in NVME_OFFLOADS:
        if settings.host_memory_bytes is not None:
            return "DeepSpeed keeps what it swaps on NVMe whatever the host has: remove --host-memory-gib"
        if settings.offload_ratio is not None:
            return "DeepSpeed's ratio splits between GPU and host: use --offload cpu_optimizer with it"
        if len(settings.nvme_paths) != 1:
            return "DeepSpeed swaps to one folder: give one --nvme-path"
        what = "DeepSpeed's swapping"
        lacking = missing_library("aio", what, install="libaio-dev", tools=tools)
        if reason := lacking or abandoned_build(what, "async_io", tools=tools):
            return reason
    what = "DeepSpeed's CPU Adam"
    return missing_compiler(what, tools=tools) or abandoned_build(what, "cpu_adam", tools=tools)


def offload_options(
    settings: StrategySettings,
    *,
    parameter_count: int,
    largest_numel: int,
    super_offload: bool,
    swap_folder: str | None,
) -> dict[str, Any]:
    """Return what is added to DeepSpeed's configuration; empty if nothing is offloaded. ``largest_numel``: of one
    parameter."""
    if settings.offload == "none":
        return {}
    optimizer: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"offload_optimizer": optimizer}
    options: dict[str, Any] = {"zero_optimization": zero}
    numel = parameter_count // settings.world_size
    if settings.offload_ratio is not None:
        optimizer["ratio"] = settings.offload_ratio
    if super_offload:
        optimizer["super_offload"] = True
    if settings.offload_ratio is not None or super_offload:
        zero["sub_group_size"] = min(max(numel // _SUB_GROUPS, _MIN_SUB_GROUP_NUMEL), _MAX_SUB_GROUP_NUMEL)
    if settings.offload == "cpu_full":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if settings.offload in NVME_OFFLOADS:
        optimizer |= {
            "device": "nvme",
            "nvme_path": swap_folder,
            "buffer_count": _SWAP_BUFFERS,
            "pipeline_read": True,
            "pipeline_write": False,  # fails an assertion in 0.19.8
        }
        zero["sub_group_size"] = _SWAPPED_SUB_GROUP_NUMEL
        options["aio"] = dict(_AIO)
    if settings.offload == "nvme_full":
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": swap_folder,
            "pin_memory": True,
            "buffer_count": _PARAMETER_BUFFERS,
            "buffer_size": -(-largest_numel // settings.world_size),
            "max_in_cpu": 0,  # 1e9 without it
        }
    return options

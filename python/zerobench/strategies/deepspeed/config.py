"""DeepSpeed's configuration: communication overlapped, timers off, buckets sized for the model, a file over it all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zerobench.errors import ConfigError
from zerobench.strategies.base import LossScaleSettings, OptimizerSettings, StrategySettings
from zerobench.strategies.deepspeed.auto_values import without_auto
from zerobench.strategies.deepspeed.offload import offload_options
from zerobench.strategies.merging import merge

_NEVER = 10**9  # steps between lines of progress
# The optimizer of a file is read into the settings; the global batch is the product of the other two and the ranks.
_DECIDED = ("optimizer", "train_batch_size")
MIN_BUCKET_NUMEL, MAX_BUCKET_NUMEL = 5_000_000, 500_000_000


def bucket_numel(parameter_count: int) -> int:
    """A quarter of the model: DeepSpeed's own 5e8 is one bucket for a small model, which then reduces only after
    backward. Never more than that, and never so little that latency rules."""
    return min(max(parameter_count // 4, MIN_BUCKET_NUMEL), MAX_BUCKET_NUMEL)


def deepspeed_config(
    settings: StrategySettings,
    *,
    stage: int,
    parameter_count: int,
    largest_numel: int = 0,
    leaf_classes: Sequence[str] = (),
    deepcompile: bool = False,
    super_offload: bool = False,
    swap_folder: str | None = None,
) -> dict[str, Any]:
    """DeepSpeed's configuration: the settings, with ``settings.options`` (a DeepSpeed file) over them.
    ``largest_numel``, of one parameter, sizes what parameters are swapped through. Modules of ``leaf_classes`` are
    gathered as one."""
    bucket = bucket_numel(parameter_count)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "gradient_accumulation_steps": settings.grad_accum,
        "gradient_clipping": settings.clip or 0.0,
        "steps_per_print": _NEVER,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
        "bf16": {"enabled": settings.precision == "bf16"},
        "fp16": {"enabled": settings.precision == "fp16", **loss_scaling(settings.loss_scale)},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        "compile": {"deepcompile": deepcompile},
    }
    if not fuses_with_torch(settings, stage=stage):
        config["optimizer"] = {"type": "AdamW", "params": adamw_parameters(settings.optimizer)}
    if settings.precision == "bf16":
        config["bf16"]["check_grad_overflow"] = False  # no other row waits to look for NaN before its step
    if (
        stage in (1, 2)
        and settings.offload == "none"
        and settings.clip is None
        and not settings.deterministic
    ):
        config["zero_optimization"]["compute_grad_norm"] = False  # nobody asks for it in a timed step
    if stage == 3 and settings.compile != "none":
        # Its autograd function for linear layers adds the bias in place, which torch 2.11 compiles without gradients:
        # every layer in front of a compiled linear one with a bias would get zeros. DeepCompile takes it out, too.
        config["zero_optimization"]["memory_efficient_linear"] = False
    if leaf_classes:
        config["zero_optimization"]["leaf_module"] = {"classes": list(leaf_classes)}
    offload = offload_options(
        settings,
        parameter_count=parameter_count,
        largest_numel=largest_numel,
        super_offload=super_offload,
        swap_folder=swap_folder,
    )
    config = merge(config, offload)
    found = checked(merge(config, without_auto(settings.options, drop=_DECIDED)), config)
    for section in ("offload_optimizer", "offload_param"):  # a file's folder holds ours
        if swap_folder is not None and "nvme_path" in found["zero_optimization"].get(section, {}):
            found["zero_optimization"][section]["nvme_path"] = swap_folder
    return found


def fuses_with_torch(settings: StrategySettings, *, stage: int) -> bool:
    """Return whether torch's fused AdamW is used, which needs no compiler. DeepSpeed's stage 0 flattens its masters,
    and fuses over them, only for its own optimizer. Offloaded masters are updated by DeepSpeed's own optimizer on the
    CPU."""
    return settings.offload == "none" and (stage > 0 or settings.precision == "fp32")


def loss_scaling(asked: LossScaleSettings) -> dict[str, Any]:
    """Raises ConfigError for what DeepSpeed cannot say: it doubles, halves, and starts from a power of two."""
    power = math.log2(asked.initial_scale)
    if (asked.growth_factor, asked.backoff_factor) != (2.0, 0.5) or not power.is_integer():
        raise ConfigError(
            f"DeepSpeed's loss scale doubles, halves and starts from a power of two, and {asked} was asked for: remove "
            "DeepSpeed's strategies"
        )
    return {
        "initial_scale_power": int(power),
        "loss_scale_window": asked.growth_interval_steps,
        "hysteresis": 1,
    }


def adamw_parameters(optimizer: OptimizerSettings) -> dict[str, Any]:
    return {
        "lr": optimizer.lr,
        "betas": [optimizer.beta1, optimizer.beta2],
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
    }


def checked(config: dict[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Raise where a file contradicts what the row is named and compared by."""
    for path in (
        ("train_micro_batch_size_per_gpu",),
        ("gradient_accumulation_steps",),
        ("zero_optimization", "stage"),
        ("compile", "deepcompile"),
        ("bf16", "enabled"),
        ("fp16", "enabled"),
    ):
        found, expected = config, ours
        for key in path:
            found, expected = found[key], expected[key]
        if found != expected:
            raise ConfigError(
                f"the DeepSpeed configuration has {'.'.join(path)} {found} and this row runs {expected}: remove it "
                "or make them equal"
            )
    return config

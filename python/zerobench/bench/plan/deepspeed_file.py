"""Rows from DeepSpeed's configuration files. "auto" leaves a setting to the options, as a file without it does."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from zerobench.engine.config import DEEPSPEED_MARKS, read_json
from zerobench.errors import ConfigError
from zerobench.models.config import first_problem
from zerobench.results.schema import Settings
from zerobench.strategies.catalogue import of_deepspeed_file
from zerobench.strategies.deepspeed.auto_values import without_auto


class _Keys(BaseModel):
    """The keys that decide a row; all others are DeepSpeed's to judge."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Half(_Keys):
    enabled: bool | None = None


class _Offload(_Keys):
    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    ratio: float = Field(1.0, ge=0, le=1)
    super_offload: bool = False


class _Zero(_Keys):
    stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: _Offload | None = None
    offload_param: _Offload | None = None

    @field_validator("stage", mode="before")
    @classmethod
    def _true_is_no_stage(cls, stage: Any) -> Any:
        """A choice of numbers takes it for 1, also a strict one."""
        if isinstance(stage, bool):
            raise ValueError("should be 0, 1, 2 or 3")
        return stage


class _Hyperparameters(_Keys):
    lr: float = Field(0.0, ge=0)
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field([], min_length=2, max_length=2)
    eps: float = Field(0.0, ge=0)
    weight_decay: float = Field(0.0, ge=0)  # DeepSpeed's default, not ours
    adam_w_mode: bool = True
    amsgrad: Literal[False] = False  # the reference's AdamW has neither
    bias_correction: Literal[True] = True


class _Optimizer(_Keys):
    type: str = "AdamW"
    params: _Hyperparameters = _Hyperparameters()


class _Compile(_Keys):
    deepcompile: bool = False


class _File(_Keys):
    train_batch_size: int | None = None
    train_micro_batch_size_per_gpu: int | None = Field(None, gt=0)
    gradient_accumulation_steps: int | None = Field(None, gt=0)
    gradient_clipping: float | None = Field(None, ge=0)
    bf16: _Half | None = None
    fp16: _Half | None = None
    zero_optimization: _Zero = _Zero()
    optimizer: _Optimizer | None = None
    compile: _Compile = _Compile()


# What DeepSpeed still reads under a name that it had, and what that is now.
_FORMER_NAMES = {
    ("bfloat16",): "bf16",
    ("zero_optimization", "cpu_offload"): "offload_optimizer",
    ("zero_optimization", "cpu_offload_param"): "offload_param",
}


def read(path: Path) -> dict[str, Any] | None:
    """The file's contents where they are DeepSpeed's; None for what is left to zerobench's own reader."""
    values = read_json(path)
    return values if isinstance(values, dict) and any(mark in values for mark in DEEPSPEED_MARKS) else None


def row(
    path: Path, values: Mapping[str, Any], *, optimizer: Mapping[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(strategy, settings that the file decides, its own keys). ``optimizer`` holds the comparison's defaults."""
    if "scheduler" in values:
        raise ConfigError(f"{path}: rows train at a constant rate: remove scheduler")
    for name, now in _FORMER_NAMES.items():
        if _has(values, name):
            raise ConfigError(f"{path}: {'.'.join(name)} is a former name: give {now} instead")
    try:
        file = _File.model_validate(without_auto(values, keep=("stage",)))  # no option gives a stage
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_problem(error)}") from None
    except RecursionError:  # what json reads may still be deeper than what is made of it
        raise ConfigError(f"{path} is nested too deeply") from None
    if file.bf16 and file.fp16 and file.bf16.enabled and file.fp16.enabled:
        raise ConfigError(f"{path}: bf16 and fp16 are both enabled: enable one of them")
    decided: dict[str, Any] = {"config_file": str(path), **_precision(values)}
    for setting, value in (
        ("batch_size", file.train_micro_batch_size_per_gpu),
        ("grad_accum", file.gradient_accumulation_steps),
    ):
        if value is not None:
            decided[setting] = value
    if file.gradient_clipping is not None:
        decided["clip"] = file.gradient_clipping or None  # 0 is off
    if file.train_batch_size is not None and "batch_size" not in decided:
        raise ConfigError(
            f"{path}: train_batch_size depends on the number of ranks: give train_micro_batch_size_per_gpu instead"
        )
    decided |= _placement(path, file.zero_optimization)
    if file.optimizer is not None:
        decided["optimizer"] = {**optimizer, **_hyperparameters(path, file.optimizer)}
    return _strategy(path, file), decided, dict(values)


def check_global_batch(path: Path, values: Mapping[str, Any], settings: Settings) -> None:
    """ConfigError where the file's train_batch_size is not what a row of it trains in a step."""
    asked = values.get("train_batch_size")
    trained = settings.batch_size * settings.grad_accum * settings.world_size
    if asked not in (None, "auto", trained):
        raise ConfigError(
            f"{path}: train_batch_size is {asked} and a row trains {settings.batch_size} sequences a micro-batch x "
            f"{settings.grad_accum} (gradient_accumulation_steps) x {settings.world_size} ranks = {trained}: remove "
            "it, or make them equal"
        )


def _has(values: Mapping[str, Any], name: tuple[str, ...]) -> bool:
    """Return whether a nested key is set to something other than false."""
    found: Any = values
    for key in name:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found not in (None, False)


def _precision(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the precision that is switched on; fp32 if one is switched off and neither is left open ("auto")."""
    sections = [values.get(name) for name in ("bf16", "fp16")]
    bf16, fp16 = (section.get("enabled") if isinstance(section, Mapping) else section for section in sections)
    if bf16 is True or fp16 is True:
        return {"precision": "bf16" if bf16 is True else "fp16"}
    return {"precision": "fp32"} if False in (bf16, fp16) and "auto" not in (bf16, fp16) else {}


def _strategy(path: Path, file: _File) -> str:
    zero = file.zero_optimization
    if not file.compile.deepcompile:
        super_offload = zero.offload_optimizer is not None and zero.offload_optimizer.super_offload
        return of_deepspeed_file("super_offload" if super_offload else "plain", stage=zero.stage)
    if zero.stage != 3:
        raise ConfigError(f"{path}: compile.deepcompile is compared at zero_optimization.stage 3 only")
    return of_deepspeed_file("deepcompile", stage=zero.stage)


def _placement(path: Path, zero: _Zero) -> dict[str, Any]:
    """Return where the file puts state; leave out what the file does not set, which the options decide."""
    if not {"offload_optimizer", "offload_param"} & zero.model_fields_set:
        return {}
    optimizer, parameters = zero.offload_optimizer or _Offload(), zero.offload_param or _Offload()
    decided: dict[str, Any] = {"offload": "none"}
    if "nvme" in (optimizer.device, parameters.device):
        if optimizer.device != "nvme":
            raise ConfigError(
                f"{path}: parameters on NVMe are compared with the optimizer's state there too: give offload_optimizer "
                "the device nvme, or offload_param the device cpu"
            )
        decided["offload"] = "nvme_full" if parameters.device == "nvme" else "nvme"
        given = [part.nvme_path for part in (optimizer, parameters) if part.nvme_path]
        if given:  # of one folder, however it is written, one
            decided["nvme_paths"] = sorted({os.path.abspath(path): path for path in given}.values())
    elif parameters.device != "none":
        decided["offload"] = "cpu_full"
    elif optimizer.device != "none":
        decided["offload"] = "cpu_optimizer"
    if "ratio" in optimizer.model_fields_set:
        decided["offload_ratio"] = optimizer.ratio if optimizer.ratio < 1.0 else None
    return decided


def _hyperparameters(path: Path, optimizer: _Optimizer) -> dict[str, Any]:
    """Return the hyperparameters that the reference must use too. Raise ConfigError for those that it cannot use."""
    if optimizer.type.lower() not in ("adam", "adamw") or not optimizer.params.adam_w_mode:
        raise ConfigError(
            f"{path}: the reference that rows are verified against runs AdamW, not {optimizer.type}"
        )
    if "lr" in optimizer.params.model_fields_set and optimizer.params.lr == 0:
        raise ConfigError(f"{path}: optimizer.params.lr 0 trains nothing: use a value above zero")
    values = optimizer.params.model_dump(include={"lr", "eps"}, exclude_unset=True)
    if optimizer.params.betas:
        values["beta1"], values["beta2"] = optimizer.params.betas
    return {**values, "weight_decay": optimizer.params.weight_decay}

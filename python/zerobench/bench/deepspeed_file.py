"""Rows from DeepSpeed's configuration files. "auto" leaves a setting to the options, as a file without it does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerobench.errors import ConfigError

_MARKS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")


def read(path: Path) -> dict[str, Any] | None:
    """The file's contents where they are DeepSpeed's; None for what is left to zerobench's own reader."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # that reader says what is wrong
    return values if isinstance(values, dict) and any(mark in values for mark in _MARKS) else None


def row(
    path: Path, values: Mapping[str, Any], *, optimizer: Mapping[str, Any]
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(strategy, settings that the file decides, its own keys). ``optimizer`` holds the comparison's defaults."""
    if "scheduler" in values:
        raise ConfigError(f"{path}: rows train at a constant rate: leave scheduler out")
    decided: dict[str, Any] = {"config_file": str(path)}
    if _given(values, "bf16") or _given(values, "fp16"):
        enabled = [name for name in ("bf16", "fp16") if _given(_section(values, name), "enabled")]
        decided["precision"] = enabled[0] if enabled else "fp32"
    for key, setting in (
        ("train_micro_batch_size_per_gpu", "batch_size"),
        ("gradient_accumulation_steps", "grad_accum"),
        ("gradient_clipping", "clip"),
    ):
        if _given(values, key):
            decided[setting] = values[key]
    if _given(values, "train_batch_size") and "batch_size" not in decided:
        raise ConfigError(
            f"{path}: train_batch_size depends on the number of ranks: give train_micro_batch_size_per_gpu instead"
        )
    decided |= _placement(values)
    if "optimizer" in values:
        decided["optimizer"] = {**optimizer, **_hyperparameters(path, _section(values, "optimizer"))}
    return _strategy(path, values), decided, dict(values)


def _strategy(path: Path, values: Mapping[str, Any]) -> str:
    stage = _section(values, "zero_optimization").get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"{path}: zero_optimization.stage is {stage!r}: use 0, 1, 2 or 3")
    if not _section(values, "compile").get("deepcompile", False):
        return (
            "deepspeed3_super" if _offload(values, "optimizer").get("super_offload") else f"deepspeed{stage}"
        )
    if stage != 3:
        raise ConfigError(f"{path}: compile.deepcompile is compared at zero_optimization.stage 3 only")
    return "deepcompile3_both"  # DeepSpeed's own choice of passes


def _placement(values: Mapping[str, Any]) -> dict[str, Any]:
    """Where the file puts state; a file that says nothing of it leaves that to the options."""
    if not {"offload_optimizer", "offload_param"} & _section(values, "zero_optimization").keys():
        return {}
    optimizer, parameters = _offload(values, "optimizer"), _offload(values, "param")
    devices = optimizer.get("device", "none"), parameters.get("device", "none")
    decided: dict[str, Any] = {"offload": "none", "offload_ratio": None, "nvme_paths": []}
    if "nvme" in devices:
        paths = {str(part["nvme_path"]) for part in (optimizer, parameters) if part.get("nvme_path")}
        decided |= {"offload": "nvme", "nvme_paths": sorted(paths)}
    elif devices[1] != "none":
        decided["offload"] = "cpu_full"
    elif devices[0] != "none":
        decided["offload"] = "cpu_optimizer"
    if optimizer.get("ratio", 1.0) < 1.0:
        decided["offload_ratio"] = optimizer["ratio"]
    if optimizer.get("super_offload"):
        decided["optimizer_in_backward"] = not values.get("gradient_clipping")
    return decided


def _offload(values: Mapping[str, Any], what: str) -> Mapping[str, Any]:
    return _section(_section(values, "zero_optimization"), f"offload_{what}")


def _hyperparameters(path: Path, section: Mapping[str, Any]) -> dict[str, Any]:
    """Those that the reference must use too."""
    kind = str(section.get("type", "AdamW")).lower()
    given = {key: value for key, value in _section(section, "params").items() if value != "auto"}
    if kind not in ("adam", "adamw") or not given.get("adam_w_mode", True):
        raise ConfigError(
            f"{path}: the reference that rows are verified against runs AdamW, not {section.get('type')}"
        )
    values: dict[str, Any] = {key: given[key] for key in ("lr", "eps") if key in given}
    if "betas" in given:
        values["beta1"], values["beta2"] = given["betas"]
    return {**values, "weight_decay": given.get("weight_decay", 0.0)}  # DeepSpeed's default, not ours


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = values.get(name)
    return section if isinstance(section, Mapping) else {}


def _given(values: Mapping[str, Any], key: str) -> bool:
    return values.get(key) not in (None, "auto", False, 0, 0.0)

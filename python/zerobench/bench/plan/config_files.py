"""Rows from configuration files, zerobench's and DeepSpeed's: what a file sets is that row's, what it leaves open the
options decide."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerobench.bench.plan import deepspeed_file
from zerobench.bench.plan.options import COMMUNICATORS
from zerobench.engine import config as configuration
from zerobench.errors import ConfigError
from zerobench.strategies.catalogue import ours_at

_FROM_THE_LAUNCHER = ("rank", "world_size", "local_rank", "local_world_size", "rendezvous", "cpus")
_PRECISION_OF_DTYPE: dict[str, str] = {
    dtype: precision for precision, dtype in configuration.DTYPE_OF_PRECISION.items()
}


def read_row(
    path: Path, *, optimizer: Mapping[str, Any], device: str
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(strategy, settings that the file decides, its own keys). ``optimizer`` holds the comparison's defaults,
    ``device`` is where it runs."""
    values = deepspeed_file.read(path)
    if values is not None:
        return deepspeed_file.row(path, values, optimizer=optimizer)
    config = configuration.load(path)
    own = config.model_dump(mode="json", exclude_unset=True)
    for key in _FROM_THE_LAUNCHER:
        if key in own:
            raise ConfigError(f"{path}: {key} is decided by the comparison: remove it")
    check_device(path, config, device)
    decided: dict[str, Any] = {"config_file": str(path)}
    if {"precision", "param_dtype"} & own.keys():
        decided["precision"] = _PRECISION_OF_DTYPE[config.effective_dtypes()["param"]]
    if "gradient_accumulation_steps" in own:
        decided["grad_accum"] = config.gradient_accumulation_steps
    if "gradient_clipping" in own:
        decided["clip"] = config.gradient_clipping
    if "optimizer" in own:
        decided["optimizer"] = {**optimizer, **hyperparameters(path, config, own["optimizer"])}
    return ours_at(config.stage), decided | placement(own), own


def check_device(path: Path, config: configuration.Config, device: str) -> None:
    if config.device not in ("auto", device):
        raise ConfigError(
            f"{path}: device {config.device} differs from the comparison's device, {device}: remove it and choose "
            "with --device"
        )
    choices = COMMUNICATORS[device]
    if config.communicator not in choices:
        raise ConfigError(
            f"{path}: communicator {config.communicator} does not run on {device}: use one of {', '.join(choices)}"
        )


def placement(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the file puts state and when it is updated; leave out what the file does not set, which the options
    decide."""
    decided: dict[str, Any] = {}
    if "optimizer_in_backward" in own:
        decided["optimizer_in_backward"] = own["optimizer_in_backward"]
    if "offload_optimizer" not in own:
        return decided
    section = own["offload_optimizer"]
    if section is None:
        return {**decided, "offload": "none"}
    on_nvme = section.get("device") == "nvme"
    nvme = "nvme_full" if (own.get("offload_param") or {}).get("device") == "nvme" else "nvme"
    decided["offload"] = nvme if on_nvme else "cpu_full" if own.get("offload_param") else "cpu_optimizer"
    if "ratio" in section:
        decided["offload_ratio"] = section["ratio"]
    if on_nvme:
        decided["nvme_paths"] = section["nvme_path"]
    return decided


def hyperparameters(path: Path, config: configuration.Config, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters that the reference must use too. Raise ConfigError for those that it cannot use."""
    if config.optimizer.type != "adamw":
        raise ConfigError(
            f"{path}: the reference that rows are verified against runs adamw, not {config.optimizer.type}"
        )
    if config.optimizer.lr == 0:
        raise ConfigError(f"{path}: optimizer.lr 0 trains nothing: use a value above zero")
    values = {key: own[key] for key in ("lr", "eps", "weight_decay") if key in own}
    if "betas" in own:
        values["beta1"], values["beta2"] = own["betas"]
    return values

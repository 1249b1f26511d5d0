"""Configuration files of planned rows, which ``compare --config`` reads. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zerobench.bench.plan.configuration import Configuration, Plan
from zerobench.bench.plan.names import rerun_command
from zerobench.results.settings import Settings
from zerobench.strategies.base import NVME_OFFLOADS
from zerobench.strategies.catalogue import CATALOGUE, OURS


def write_row_files(plan: Plan, folder: Path) -> list[str]:
    """Write a file for each row of zerobench and DeepSpeed into ``folder`` (made if missing); return a command for each
    that runs it, and a sentence on the rows that have no file. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, without = [], []
    for configuration in plan.configurations:
        config = config_of(configuration)
        if config is None or configuration.refused:
            without.append(configuration.name)
            continue
        path = folder / f"{configuration.name}.json"
        path.write_text(f"{json.dumps(config, indent=2)}\n", encoding="utf-8")
        settings = configuration.settings.model_copy(update={"config_file": str(path)})
        lines.append(rerun_command(configuration.model_copy(update={"settings": settings}), plan.options))
    if without:
        lines.append(
            f"{', '.join(without)}: these rows have no file, since only zerobench and DeepSpeed read such files."
        )
    return lines


def config_of(configuration: Configuration) -> dict[str, Any] | None:
    """Return the contents of a row's configuration file, or None where its strategy reads none."""
    if configuration.strategy in OURS:
        return _ours(configuration)
    facts = CATALOGUE.get(configuration.strategy)
    if facts is None or facts.deepspeed_file != "plain":
        return None
    settings = configuration.settings
    return {
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "gradient_accumulation_steps": settings.grad_accum,
        "gradient_clipping": settings.clip or 0.0,
        "bf16": {"enabled": settings.precision == "bf16"},
        "fp16": {"enabled": settings.precision == "fp16"},
        "zero_optimization": {"stage": configuration.stage, **_offload(settings, of_deepspeed=True)},
    }


def _ours(configuration: Configuration) -> dict[str, Any]:
    settings = configuration.settings
    config: dict[str, Any] = {
        **configuration.options,
        "stage": configuration.stage,
        "precision": settings.precision,
        "gradient_accumulation_steps": settings.grad_accum,
    }
    if settings.clip is not None:
        config["gradient_clipping"] = settings.clip
    if settings.optimizer_in_backward:
        config["optimizer_in_backward"] = True
    placed = _offload(settings, of_deepspeed=False)
    if placed and configuration.options.get("offload_optimizer"):
        placed["offload_optimizer"] |= configuration.options["offload_optimizer"]
    return {**config, **placed}


def _offload(settings: Settings, *, of_deepspeed: bool) -> dict[str, Any]:
    """Return the sections that say where state lives."""
    if settings.offload == "none":
        return {}
    on_nvme = settings.offload in NVME_OFFLOADS
    optimizer: dict[str, Any] = {"device": "nvme" if on_nvme else "cpu"}
    if on_nvme:
        optimizer["nvme_path"] = settings.nvme_paths[0] if of_deepspeed else settings.nvme_paths
    if settings.offload_ratio is not None:
        optimizer["ratio"] = settings.offload_ratio
    sections = {"offload_optimizer": optimizer}
    if settings.offload in ("cpu_full", "nvme_full"):
        parameters: dict[str, Any] = {"device": optimizer["device"]}
        if on_nvme and of_deepspeed:
            parameters["nvme_path"] = settings.nvme_paths[0]
        sections["offload_param"] = parameters
    return sections

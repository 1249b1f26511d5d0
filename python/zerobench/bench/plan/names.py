"""What rows are called, and the command that runs one alone. Imports no torch."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobench import models
from zerobench.models.hf_config import overridable
from zerobench.results.schema import Settings
from zerobench.strategies.base import OptimizerSettings
from zerobench.strategies.catalogue import OURS, short_name

if TYPE_CHECKING:
    from zerobench.bench.plan.options import CompareOptions
    from zerobench.bench.plan.plan import Configuration, Draft


def unique_names(drafts: Sequence[Draft]) -> list[str]:
    """Such as zs0_fp32_ranks2_bs4_sl64; what else differs between rows, or is not the default, follows."""
    several_models = len({json.dumps(settings.model_config_resolved) for _, settings, _ in drafts}) > 1
    names = [
        base_name(strategy, settings, extra, several_models=several_models)
        for strategy, settings, extra in drafts
    ]
    taken: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        taken[name if name not in taken else next(n for n in numbered if n not in {*names, *taken})] = None
    return list(taken)


def base_name(strategy: str, settings: Settings, extra: dict[str, Any], *, several_models: bool) -> str:
    parts = [
        short_name(strategy),
        settings.precision,
        f"{'gpus' if settings.device == 'cuda' else 'ranks'}{settings.world_size}",
        f"bs{settings.batch_size}",
        f"sl{settings.seq_length}",
    ]
    if settings.grad_accum != 1:
        parts.append(f"ga{settings.grad_accum}")
    if settings.clip is not None:
        parts.append(f"clip{settings.clip:g}")
    if settings.checkpointing:
        parts.append("ckpt")
    if settings.compile != "none":
        parts.append(f"compile-{settings.compile}")
    parts += placement_parts(settings)
    if several_models:
        config = settings.model_config_resolved
        model = re.sub(r"[^\w.-]", "-", settings.model.rpartition("/")[2])
        parts += [model, f"l{config['num_layers']}", f"h{config['hidden_size']}"]
    if settings.config_file is None and "communicator" in extra:
        parts.append(extra["communicator"])
    if settings.config_file is not None:
        parts.append(re.sub(r"[^\w.-]", "-", Path(settings.config_file).stem))
    return "_".join(parts)


def placement_parts(settings: Settings) -> list[str]:
    parts = []
    if settings.offload != "none":
        parts.append(f"offload-{settings.offload}")
    if settings.offload_ratio is not None:
        parts.append(f"ratio{number(settings.offload_ratio)}")
    if settings.optimizer_in_backward:
        parts.append("inbackward")
    return parts


def number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def exact(value: float | str) -> str:
    """The shortest text that gives the value back."""
    return value if isinstance(value, str) else repr(value).removesuffix(".0")


def rerun_command(configuration: Configuration, options: CompareOptions) -> str:
    """The command that runs this row alone."""
    settings = configuration.settings
    words = [sys.executable, "-m", "zerobench", "compare", "--device", settings.device]
    words += ["--model", settings.model]
    for key, value in own_fields(settings.model, configuration.model).items():
        words += ["--model-option", f"{key}={json.dumps(value)}"]
    if settings.config_file is not None:
        words += ["--config", settings.config_file]
    else:
        words += ["--strategies", configuration.strategy]
    words += ["--precision", settings.precision, "--batch-size", str(settings.batch_size)]
    words += ["--seq-length", str(settings.seq_length), "--grad-accum", str(settings.grad_accum)]
    words += ["--world-size", str(settings.world_size)]
    if settings.clip is not None:
        words += ["--clip", exact(settings.clip)]
    if settings.checkpointing:
        words += ["--checkpointing"]
    if settings.compile != "none":
        words += ["--compile", settings.compile]
    words += placement_words(settings)
    if configuration.strategy in OURS and "communicator" in configuration.options:
        words += ["--communicator", configuration.options["communicator"]]
    if io_engine := (configuration.options.get("offload_optimizer") or {}).get("io_engine"):
        words += ["--io-engine", io_engine]
    if settings.tf32:
        words += ["--tf32"]
    if options.verify_layers is not None:
        words += ["--verify-layers", str(options.verify_layers)]
    words += ["--num-steps", str(settings.num_steps), "--warmup-steps", str(settings.warmup_steps)]
    if settings.repeats != 1:
        words += ["--repeats", str(settings.repeats)]
    words += ["--data", settings.data, "--seed", str(settings.seed), "--timeout", exact(options.timeout_s)]
    if (learning_rate := settings.optimizer["lr"]) != OptimizerSettings.lr:
        words += ["--lr", exact(learning_rate)]
    if options.rank_memory_gib is not None:
        words += ["--rank-memory-gib", exact(options.rank_memory_gib)]
    return shlex.join(words)


def placement_words(settings: Settings) -> list[str]:
    words = []
    if settings.offload != "none":
        words += ["--offload", settings.offload]
    if settings.offload_ratio is not None:
        words += ["--offload-ratio", exact(settings.offload_ratio)]
    if settings.nvme_paths:
        words += ["--nvme-path", *settings.nvme_paths]
    if settings.host_memory_gib is not None:
        words += ["--host-memory-gib", exact(settings.host_memory_gib)]
    if settings.optimizer_in_backward:
        words += ["--optimizer-in-backward", "on"]
    if settings.device_memory_gib is not None:
        words += ["--device-memory-gib", exact(settings.device_memory_gib)]
    if settings.bind != "none":
        words += ["--bind", settings.bind]
    return words


def own_fields(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """What of a model's configuration was not as its name has it, and may be said."""
    resolved = models.find(name)
    known = overridable(resolved.architecture) if isinstance(resolved, models.HFConfig) else config.keys()
    defaults = resolved.model_dump()
    return {key: value for key, value in config.items() if key in known and value != defaults[key]}

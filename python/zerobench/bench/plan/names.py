"""Names of rows, and the command that runs a row alone. Imports no torch."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobench import models
from zerobench.bench.plan.find import KEYS as FIND_KEYS
from zerobench.models.hf_config import overridable
from zerobench.results.setting_values import shown, typed
from zerobench.results.settings import OPTIONS, SETTINGS, Settings, Takes, flag_of, named_settings
from zerobench.strategies.catalogue import OURS, short_name

if TYPE_CHECKING:
    from zerobench.bench.plan.configuration import Configuration, Draft
    from zerobench.bench.plan.options import CompareOptions


def unique_names(drafts: Sequence[Draft], *, find: str | None = None) -> list[str]:
    """Such as zs0_fp32_ranks2_bs4_sl64; what else differs between rows, or is not the default, follows. ``find``: the
    setting that is searched, whose value names leave open."""
    several_models = len({json.dumps(settings.model_config_resolved) for _, settings, _ in drafts}) > 1
    names = [
        base_name(strategy, settings, extra, several_models=several_models, find=find)
        for strategy, settings, extra in drafts
    ]
    taken: dict[str, None] = {}
    for name in names:
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        taken[name if name not in taken else next(n for n in numbered if n not in {*names, *taken})] = None
    return list(taken)


def base_name(
    strategy: str, settings: Settings, extra: dict[str, Any], *, several_models: bool, find: str | None = None
) -> str:
    parts = [short_name(strategy), *setting_parts(settings, find=find)]
    if several_models:
        config = settings.model_config_resolved
        model = re.sub(r"[^\w.-]", "-", settings.model.rpartition("/")[2])
        parts += [model] if "place" in config or find == "layers" else [model, f"l{config['num_layers']}"]
        parts += [f"h{config['hidden_size']}"] if config.get("hidden_size") else []
    if settings.config_file is None and "communicator" in extra:
        parts.append(extra["communicator"])
    if settings.config_file is not None:
        parts.append(re.sub(r"[^\w.-]", "-", Path(settings.config_file).stem))
    if find is not None:
        parts.append(f"largest-{find}")
    return "_".join(parts)


def setting_parts(settings: Settings, *, find: str | None = None) -> list[str]:
    """Return what a row's name says of its settings: those that names always have, and those that are not off. Not of
    the one that is searched."""
    ranks = "gpus" if settings.device == "cuda" else "ranks"
    values = {key: getattr(settings, key) for key in named_settings()}
    return [
        (SETTINGS[key].suffix or "").format(value=shown(value), ranks=ranks)
        for key, value in values.items()
        if value != SETTINGS[key].off and (find is None or key != FIND_KEYS[find])
    ]


def rerun_command(configuration: Configuration, options: CompareOptions) -> str:
    """Return the command that runs this row alone."""
    words = [sys.executable, "-m", "zerobench", "compare"]
    values = rerun_values(configuration, options)
    for key, option in OPTIONS.items():
        value, flag = values.get(key), flag_of(key)
        if option.convert is dict:
            for pair in (value or {}).items():
                words += [flag, f"{pair[0]}={json.dumps(pair[1])}"]
        elif option.takes is Takes.SWITCH:
            words += [flag] if value else []
        elif option.takes is Takes.REPEATED:
            words += [flag, *value] if value else []
        elif value is not None and (key not in SETTINGS or SETTINGS[key].leads or value != SETTINGS[key].off):
            words += [flag, typed(value)]
    return shlex.join(words)


def rerun_values(configuration: Configuration, options: CompareOptions) -> dict[str, Any]:
    """Return the values of the options that give this row alone; None and what is missing is left out."""
    settings, own = configuration.settings, configuration.options
    is_ours = configuration.strategy in OURS
    learning_rate = settings.optimizer["lr"]
    values = {key: getattr(settings if key in SETTINGS else options, key) for key in OPTIONS}
    return {
        **values,
        "model_option": own_fields(settings.model, configuration.model),
        **{key: None for key, option in OPTIONS.items() if option.is_of_model or option.is_of_comparison},
        "config": [] if settings.config_file is None else [settings.config_file],
        "strategies": configuration.strategy if settings.config_file is None else None,
        "communicator": own.get("communicator") if is_ours else None,
        "io_engine": (own.get("offload_optimizer") or {}).get("io_engine"),
        "network_how": None if settings.network == SETTINGS["network"].off else options.network_how,
        "lr": None if learning_rate == OPTIONS["lr"].default else learning_rate,
        # Accumulation tells it, but where the row was refused because of it.
        "global_batch": options.global_batch if configuration.refused else None,
        "grad_accum": None if configuration.refused and options.global_batch else settings.grad_accum,
    }


def own_fields(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a model's configuration that differ from what its name stands for, if they may be given."""
    resolved = models.find(name)
    defaults = resolved.model_dump()
    known: Iterable[str] = config
    if isinstance(resolved, models.HFConfig):
        known = overridable(resolved.architecture)
    elif isinstance(resolved, models.FolderConfig):
        config, defaults = ({**values, **values["published"]} for values in (config, defaults))
        known = [*resolved.published, "dropout", "attention", "weights"]
    elif isinstance(resolved, models.PlaceConfig):
        known = ("dropout",)
    return {key: value for key, value in config.items() if key in known and value != defaults.get(key)}

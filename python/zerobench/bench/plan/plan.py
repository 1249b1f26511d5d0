"""From options to configurations: the grid of strategies and settings, checked before any work. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerobench import data, models, strategies
from zerobench.bench.plan import deepspeed_file
from zerobench.bench.plan.config_files import read_row
from zerobench.bench.plan.configuration import Configuration, Draft, Plan
from zerobench.bench.plan.find import check_find
from zerobench.bench.plan.global_batch import (
    accumulation,
    check_any_accepted,
    check_global_batch,
    why_refused,
)
from zerobench.bench.plan.names import unique_names
from zerobench.bench.plan.networks import Networks
from zerobench.bench.plan.options import OWN_ATTENTION, CompareOptions, check_folders, check_options
from zerobench.bench.plan.reach import check_reach
from zerobench.bench.protocol.tolerances import VERIFY_STEPS
from zerobench.errors import ConfigError, did_you_mean
from zerobench.host.machine import cpus_usable
from zerobench.results.settings import SETTINGS, Settings, axes, flag_of
from zerobench.strategies import pipelining
from zerobench.strategies.base import NVME_OFFLOADS, OptimizerSettings
from zerobench.strategies.catalogue import FLOOR, OURS, REFERENCE


def make_plan(
    options: CompareOptions,
    *,
    further: Sequence[CompareOptions] = (),
    given_world_size: int | None = None,
) -> Plan:
    """Every configuration of the grid, or a ConfigError about the first option that cannot be.

    ``further``: options of grids whose rows join, which differ in what rows record alone. ``given_world_size``:
    torchrun or srun started that many ranks, and all rows but single's use them."""
    drafts: list[Draft] = []
    for each in (options, *further):
        own = checked_drafts(each, given_world_size=given_world_size)
        drafts += [draft for draft in own if draft not in drafts]
    # Those of the options are known to be good.
    of_files = {
        settings.config_file: settings.nvme_paths for _, settings, _ in drafts if settings.config_file
    }
    for file, paths in of_files.items():
        check_folders(f"{file}: nvme_path", [Path(path) for path in paths or ()])
    check_data(options, [settings for _, settings, _ in drafts])
    networks = Networks(options, is_given=given_world_size is not None)
    configurations = [
        Configuration(
            name=name,
            strategy=strategy,
            stage=strategies.facts(strategy).stage,
            settings=settings,
            options=extra,
            network_how=networks.how(strategy, settings),
            refused=why_refused(settings, options.global_batch) or networks.why_refused(strategy, settings),
        )
        for name, (strategy, settings, extra) in zip(
            unique_names(drafts, find=options.find), drafts, strict=True
        )
    ]
    check_any_accepted(configurations)
    check_baseline(options, configurations)
    warnings = [*warnings_about(configurations, options), *networks.warnings()]
    return Plan(configurations=configurations, options=options, warnings=warnings)


def checked_drafts(options: CompareOptions, *, given_world_size: int | None) -> list[Draft]:
    """Return the drafts of one grid. Raises ConfigError about the first option that cannot be."""
    check_options(options, given_world_size=given_world_size)
    check_global_batch(options)
    drafts = from_files(options) if options.config else grid(options)
    if not drafts:
        raise ConfigError("nothing to compare: name at least one strategy")
    check_reach(options, drafts)
    check_find(options, drafts)
    return drafts


def grid(options: CompareOptions, *, decided: Mapping[str, Any] | None = None) -> list[Draft]:
    """Return a draft for every combination of the options that span the grid, strategies innermost, so that rows to
    compare stand and run together. ``decided``: settings that a file sets."""
    drafts: list[Draft] = []
    names = axes()
    for values in itertools.product(*(getattr(options, key) for key in names)):
        chosen = dict(zip(names, values, strict=True))
        strategy = chosen["strategies"]
        settings = resolve_settings(options, strategy, chosen, decided or {})
        extra = {}
        if chosen["communicator"] != "auto" and strategy in OURS:
            extra["communicator"] = chosen["communicator"]
        draft: Draft = (strategy, settings, with_io_engine(options, strategy, settings, extra))
        if draft not in drafts:  # what runs alone is the same row at every world size
            drafts.append(draft)
    return drafts


def with_io_engine(
    options: CompareOptions, strategy: str, settings: Settings, extra: dict[str, Any]
) -> dict[str, Any]:
    """Return ``extra`` with --io-engine for rows that swap; what the row's own file sets takes precedence."""
    if options.io_engine is None or strategy not in OURS or settings.offload not in NVME_OFFLOADS:
        return extra
    own = extra.get("offload_optimizer") or {}
    return {**extra, "offload_optimizer": {"io_engine": options.io_engine, **own}}


def ranks_on_cores(options: CompareOptions, world_size: int) -> int:
    """Return how many ranks of a row share rank 0's cores."""
    return min(world_size, options.core_ranks or world_size)


def ranks_of(strategy: str, world_size: int) -> int:
    """The reference runs alone."""
    return 1 if strategy == REFERENCE else world_size


def compile_of(strategy: str, mode: str) -> str:
    """Return "whole" for a compiler of whole models, such as DeepCompile, whatever the other rows compile."""
    return "whole" if strategies.facts(strategy).compiles_whole else mode


def placement(options: CompareOptions, strategy: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return where state lives and when it is updated. The reference and the floor are compared with rows of every
    placement and have one placement themselves. SuperOffload has no setting for this: it updates during backward unless
    it clips."""
    offload, in_backward = chosen["offload"], chosen["optimizer_in_backward"]
    if strategy in (REFERENCE, FLOOR):
        offload, in_backward = "none", False
    if strategies.facts(strategy).in_backward_unless_clipped:
        in_backward = chosen["clip"] is None
    offloaded = offload != "none"
    return {
        "offload": offload,
        "offload_ratio": chosen["offload_ratio"] if offloaded else None,
        "nvme_paths": [str(Path(path).absolute()) for path in chosen["nvme_paths"]]
        if offload in NVME_OFFLOADS
        else [],
        "host_memory_gib": options.host_memory_gib if offloaded else None,
        "optimizer_in_backward": in_backward,
    }


def pipeline_of(strategy: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of pipelines, None for rows that are none. The micro-batches are the other rows' unless
    asked for."""
    if not strategies.facts(strategy).pipelines:
        return dict.fromkeys(pipelining.SETTINGS)
    asked = {key: chosen[key] for key in pipelining.SETTINGS}
    if asked["micro_batches"] is None:
        asked["micro_batches"] = asked["pipeline_stages"] * chosen["grad_accum"]
    return asked


def resolve_model(options: CompareOptions, name: str, sizes: dict[str, int | None]) -> models.ModelConfig:
    """The model with everything that the command line says about it."""
    own_options = {**sizes, "dropout": options.dropout, "attention": options.attention}
    for field in options.model_option:
        if own_options.get(field) is not None:
            option = f"--{field.replace('_', '-')}"
            raise ConfigError(f"{option} and --model-option {field} set the same value: give one of them")
    chosen = {**own_options, **options.model_option}
    if name in models.preset_names() and chosen["attention"] is not None:
        if chosen["attention"] != OWN_ATTENTION:
            raise ConfigError(
                f"--attention {chosen['attention']}: model {name!r} computes attention by {OWN_ATTENTION} only: "
                "remove it, or choose a model that transformers builds, such as hf:gpt2"
            )
        chosen["attention"] = None
    return models.resolve(name, chosen)


def from_files(options: CompareOptions) -> list[Draft]:
    """A row a file at every point of the grid that the file leaves open."""
    drafts: list[Draft] = []
    for path in options.config:
        strategy, decided, own = read_row(
            path, optimizer=asdict(OptimizerSettings(lr=options.lr)), device=options.device
        )
        for _, settings, chosen in grid(options.with_strategy(strategy), decided=decided):
            if strategy not in OURS:
                deepspeed_file.check_global_batch(path, own, settings)
            extra = with_io_engine(options, strategy, settings, {**chosen, **own})
            draft: Draft = (strategy, settings, extra)
            if draft not in drafts:
                drafts.append(draft)
    return drafts


def resolve_settings(
    options: CompareOptions, strategy: str, chosen: Mapping[str, Any], decided: Mapping[str, Any]
) -> Settings:
    """Return the settings of one row. ``chosen``: its point of the grid, ``decided``: what a file sets instead."""
    sizes = {key: chosen[key] for key in ("num_layers", "hidden_size")}
    model = resolve_model(options, chosen["model"], sizes)
    asked = {
        key: chosen.get(key, getattr(options, key))
        for key, setting in SETTINGS.items()
        if setting.option is not None and setting.is_as_asked
    }
    point = {
        **asked,
        "world_size": ranks_of(strategy, chosen["world_size"]),
        "compile": compile_of(strategy, chosen["compile"]),
        "optimizer": asdict(OptimizerSettings(lr=options.lr)),
        **{key: chosen[key] for key in ("offload", "offload_ratio", "optimizer_in_backward")},
        "nvme_paths": options.nvme_paths,
        **{key: chosen[key] for key in pipelining.SETTINGS},
        **decided,
    }
    point |= accumulation(options.global_batch, point=point, decided=decided)
    point["seq_length"] = model.seq_length_of(point["seq_length"])
    model.check_seq_length(point["seq_length"])
    model = models.examine(model, seq_length=point["seq_length"], checkpointing=point["checkpointing"])
    return Settings(
        **point | placement(options, strategy, point) | pipeline_of(strategy, point),
        model=model.name,
        model_config_resolved=model.model_dump(),
        parameter_count=models.parameter_count(model),
        attention=attention_of(model),
        dropout=model.dropout,
        tf32=tf32_of(options, point["precision"]),
        verify_steps=VERIFY_STEPS,
        threads_per_rank=max(1, cpus_usable() // ranks_on_cores(options, point["world_size"])),
    )


def attention_of(model: models.ModelConfig) -> str | None:
    """Return how the model computes attention, or None where that is its own function's affair."""
    if isinstance(model, models.PlaceConfig):
        return None
    return getattr(model, "attention", OWN_ATTENTION)


def tf32_of(options: CompareOptions, precision: str) -> bool | None:
    """None where it is no question."""
    return options.tf32 if options.device == "cuda" and precision == "fp32" else None


def check_data(options: CompareOptions, settings: Sequence[Settings]) -> None:
    """Open the data once for each shape that will be asked of it."""
    shapes = {(s.seq_length, s.model_config_resolved["vocab_size"]) for s in settings}
    for key in ("text_field", "tokens"):
        if not any(vocab_size for _, vocab_size in shapes) and getattr(options, key) is not None:
            raise ConfigError(f"{flag_of(key)} has no effect: no model here takes tokens. Remove the option.")
    for seq_length, vocab_size in sorted(shape for shape in shapes if shape[1] is not None):
        data.open_data(
            options.data,
            seed=options.seed,
            seq_length=seq_length,
            vocab_size=vocab_size,
            text_field=options.text_field,
            tokens=options.tokens,
        )


def check_baseline(options: CompareOptions, configurations: Sequence[Configuration]) -> None:
    known = [*dict.fromkeys(c.strategy for c in configurations), *(c.name for c in configurations)]
    if options.baseline is not None and options.baseline not in known:
        hint = did_you_mean(options.baseline, known)
        raise ConfigError(
            f"--baseline {options.baseline!r} is not a row of this comparison: {hint}rows: {', '.join(known)}"
        )


def warnings_about(configurations: Sequence[Configuration], options: CompareOptions) -> list[str]:
    warnings = []
    largest = max(ranks_on_cores(options, one.settings.world_size) for one in configurations)
    cpus = cpus_usable()
    if largest > cpus:
        warnings.append(
            f"{largest} ranks share {cpus} CPU core{'s' if cpus != 1 else ''}: "
            "step times show the sharing, not the strategies"
        )
    return warnings

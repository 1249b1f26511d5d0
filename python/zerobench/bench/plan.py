"""From options to configurations: the grid of strategies and settings, checked before any work. Imports no torch."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from zerobench import data, models, strategies
from zerobench.bench.configs import read_row
from zerobench.bench.machine import cpus_usable
from zerobench.bench.result import Settings
from zerobench.bench.tolerances import TOLERANCES, VERIFY_STEPS
from zerobench.errors import ConfigError
from zerobench.strategies.base import OptimizerSettings

DEFAULT_STRATEGIES = ("single", "zero0", "zero1", "zero2", "zero3", "ddp", "fsdp2")
OURS = ("zero0", "zero1", "zero2", "zero3")


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What the command line asks for. Lists span the grid."""

    models: Sequence[str] = ("tiny",)
    num_layers: Sequence[int | None] = (None,)
    hidden_sizes: Sequence[int | None] = (None,)
    model_options: dict[str, Any] = field(default_factory=dict)  # further fields of ModelConfig
    strategies: Sequence[str] = DEFAULT_STRATEGIES
    world_sizes: Sequence[int] = (2,)
    batch_sizes: Sequence[int] = (4,)
    seq_lengths: Sequence[int] = (128,)
    grad_accums: Sequence[int] = (1,)
    precisions: Sequence[str] = ("fp32",)
    clips: Sequence[float | None] = (None,)
    checkpointing: bool = False
    num_steps: int = 20
    warmup_steps: int = 5
    repeats: int = 1
    data: str = "stdlib"
    seed: int = 0
    timeout_s: float = 300.0
    rank_memory_gib: float | None = None
    baseline: str | None = None
    config_files: Sequence[Path] = ()
    learning_rate: float = OptimizerSettings.lr


class Configuration(BaseModel):
    """One row to be: a strategy at resolved settings."""

    model_config = ConfigDict(frozen=True)

    name: str
    strategy: str
    stage: int | None
    settings: Settings
    options: dict[str, Any] = {}  # a zerobench configuration, from a file

    @property
    def model(self) -> dict[str, Any]:
        return self.settings.model_config_resolved

    @property
    def micro_batch_num(self) -> int:
        """Micro-batches in a step, over all ranks."""
        return self.settings.world_size * self.settings.grad_accum

    def reference_group(self) -> str:
        """Configurations with the same text train the same global batches to the same parameters."""
        kept = self.settings.model_dump(
            include={"precision", "batch_size", "seq_length", "clip", "data", "seed", "optimizer"}
        )
        return _digest({**kept, "model": self.model, "micro_batch_num": self.micro_batch_num})

    def checksum_group(self) -> str | None:
        """Configurations with the same text must end with equal parameters, bit for bit (DESIGN, placement)."""
        if self.strategy not in OURS or self.settings.grad_accum != 1:
            return None
        return _digest(
            {
                "reference": self.reference_group(),
                "world_size": self.settings.world_size,
                "checkpointing": self.settings.checkpointing,
            }
        )


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Plan:
    configurations: list[Configuration]
    options: CompareOptions
    warnings: list[str]


def make_plan(options: CompareOptions, *, given_world_size: int | None = None) -> Plan:
    """Every configuration of the grid, or a ConfigError about the first option that cannot be.

    ``given_world_size``: torchrun or srun started that many ranks, and all rows but single's use them."""
    check_options(options, given_world_size=given_world_size)
    drafts = from_files(options) if options.config_files else grid(options)
    if not drafts:
        raise ConfigError("nothing to compare: name at least one strategy")
    check_data(options, [settings for _, settings, _ in drafts])
    configurations = [
        Configuration(
            name=name, strategy=strategy, stage=stage_of(strategy), settings=settings, options=extra
        )
        for name, (strategy, settings, extra) in zip(unique_names(drafts), drafts, strict=True)
    ]
    check_baseline(options, configurations)
    return Plan(configurations=configurations, options=options, warnings=warnings_about(configurations))


Draft = tuple[str, Settings, dict[str, Any]]


def check_options(options: CompareOptions, *, given_world_size: int | None) -> None:
    positive = {
        "--batch-size": options.batch_sizes,
        "--seq-length": options.seq_lengths,
        "--grad-accum": options.grad_accums,
        "--world-size": options.world_sizes,
        "--num-steps": [options.num_steps],
        "--repeats": [options.repeats],
        "--timeout": [options.timeout_s],
        "--clip": [clip for clip in options.clips if clip is not None],
        "--lr": [options.learning_rate],
    }
    if options.rank_memory_gib is not None:
        positive["--rank-memory-gib"] = [options.rank_memory_gib]
    for option, values in positive.items():
        for value in values:
            if not value > 0:
                raise ConfigError(f"{option} {value:g} is impossible: use a value above zero")
    if options.warmup_steps < 0:
        raise ConfigError(f"--warmup-steps {options.warmup_steps} is impossible: use zero or more")
    for name in options.strategies:
        strategies.check(name)
        if ":" in name:
            strategies.get(
                name
            )  # a place of one's own is wrong more often than a name; costs the import of torch
    for precision in options.precisions:
        if precision not in TOLERANCES:
            raise ConfigError(f"unknown precision {precision!r}: use one of {', '.join(TOLERANCES)}")
    if given_world_size is not None and list(options.world_sizes) != [given_world_size]:
        raise ConfigError(
            f"--world-size {','.join(map(str, options.world_sizes))} differs from the {given_world_size} ranks that "
            "torchrun or srun started: leave it out"
        )


def grid(options: CompareOptions) -> list[Draft]:
    """Settings in the order of the options, strategies innermost, so that rows to compare stand and run together."""
    drafts: list[Draft] = []
    axes = (
        options.models, options.num_layers, options.hidden_sizes, options.precisions, options.seq_lengths,
        options.batch_sizes, options.grad_accums, options.clips, options.world_sizes, options.strategies,
    )  # fmt: skip
    for model, layers, hidden, precision, seq, batch, accum, clip, world_size, strategy in itertools.product(
        *axes
    ):
        config = models.resolve(model, {"num_layers": layers, "hidden_size": hidden, **options.model_options})
        settings = resolve_settings(
            options,
            config,
            world_size=1 if strategy == "single" else world_size,
            precision=precision,
            seq_length=seq,
            batch_size=batch,
            grad_accum=accum,
            clip=clip,
        )
        draft: Draft = (strategy, settings, {})
        if draft not in drafts:  # single is the same row at every world size
            drafts.append(draft)
    return drafts


def from_files(options: CompareOptions) -> list[Draft]:
    """A row a file at every point of the grid that the file leaves open."""
    drafts: list[Draft] = []
    for path in options.config_files:
        strategy, decided, own = read_row(path, optimizer=asdict(OptimizerSettings(lr=options.learning_rate)))
        for _, settings, _ in grid(replace(options, strategies=[strategy])):
            draft: Draft = (strategy, settings.model_copy(update=decided), own)
            if draft not in drafts:
                drafts.append(draft)
    return drafts


def resolve_settings(options: CompareOptions, config: models.ModelConfig, **chosen: Any) -> Settings:
    config.check_seq_length(chosen["seq_length"])
    return Settings(
        model=config.name,
        model_config_resolved=config.model_dump(),
        parameter_count=models.parameter_count(config),
        checkpointing=chosen.pop("checkpointing", options.checkpointing),
        num_steps=options.num_steps,
        warmup_steps=options.warmup_steps,
        repeats=options.repeats,
        verify_steps=VERIFY_STEPS,
        seed=options.seed,
        data=options.data,
        threads_per_rank=max(1, cpus_usable() // chosen["world_size"]),
        optimizer=chosen.pop("optimizer", asdict(OptimizerSettings(lr=options.learning_rate))),
        **chosen,
    )


def check_data(options: CompareOptions, settings: Sequence[Settings]) -> None:
    """Open the data once for each shape that will be asked of it."""
    for seq_length, vocab_size in sorted(
        {(s.seq_length, s.model_config_resolved["vocab_size"]) for s in settings}
    ):
        data.open_data(options.data, seed=options.seed, seq_length=seq_length, vocab_size=vocab_size)


def check_baseline(options: CompareOptions, configurations: Sequence[Configuration]) -> None:
    known = [*dict.fromkeys(c.strategy for c in configurations), *(c.name for c in configurations)]
    if options.baseline is not None and options.baseline not in known:
        near = difflib.get_close_matches(options.baseline, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"--baseline {options.baseline!r} is no row of this comparison: {hint}rows: {', '.join(known)}"
        )


def stage_of(strategy: str) -> int | None:
    if strategy in OURS:
        return int(strategy.removeprefix("zero"))
    return 3 if strategy == "fsdp2" else None


def unique_names(drafts: Sequence[Draft]) -> list[str]:
    """Such as zs0_fp32_ranks2_bs4_sl64; what else differs between rows, or is not the default, follows."""
    several_models = len({json.dumps(settings.model_config_resolved) for _, settings, _ in drafts}) > 1
    names = [base_name(strategy, settings, several_models=several_models) for strategy, settings, _ in drafts]
    counts: dict[str, int] = {}
    for index, name in enumerate(names):
        counts[name] = counts.get(name, 0) + 1
        if counts[name] > 1:
            names[index] = f"{name}_{counts[name]}"
    return names


def base_name(strategy: str, settings: Settings, *, several_models: bool) -> str:
    parts = [
        short_name(strategy),
        settings.precision,
        f"ranks{settings.world_size}",
        f"bs{settings.batch_size}",
        f"sl{settings.seq_length}",
    ]
    if settings.grad_accum != 1:
        parts.append(f"ga{settings.grad_accum}")
    if settings.clip is not None:
        parts.append(f"clip{settings.clip:g}")
    if settings.checkpointing:
        parts.append("ckpt")
    if several_models:
        config = settings.model_config_resolved
        parts += [settings.model, f"l{config['num_layers']}", f"h{config['hidden_size']}"]
    if settings.config_file is not None:
        parts.append(re.sub(r"[^\w.-]", "-", Path(settings.config_file).stem))
    return "_".join(parts)


def short_name(strategy: str) -> str:
    """zero2 is zs2; a strategy of one's own goes by its class."""
    if strategy in OURS:
        return f"zs{strategy.removeprefix('zero')}"
    return strategy.rpartition(":")[2].lower()


def warnings_about(configurations: Sequence[Configuration]) -> list[str]:
    largest = max(configuration.settings.world_size for configuration in configurations)
    cpus = cpus_usable()
    if largest > cpus:
        return [
            f"{largest} ranks share {cpus} CPU core{'s' if cpus != 1 else ''}: "
            "step times show the sharing, not the strategies"
        ]
    return []


def rerun_command(configuration: Configuration, options: CompareOptions) -> str:
    """The command that runs this row alone."""
    settings, config = configuration.settings, configuration.model
    words = [sys.executable, "-m", "zerobench", "compare", "--model", settings.model]
    defaults = models.resolve(settings.model).model_dump()
    for key, value in config.items():
        if value != defaults[key]:
            words += ["--model-option", f"{key}={json.dumps(value)}"]
    if settings.config_file is not None:
        words += ["--config", settings.config_file]
    else:
        words += ["--strategies", configuration.strategy]
    words += ["--precision", settings.precision, "--batch-size", str(settings.batch_size)]
    words += ["--seq-length", str(settings.seq_length), "--grad-accum", str(settings.grad_accum)]
    words += ["--world-size", str(settings.world_size)]
    if settings.clip is not None:
        words += ["--clip", f"{settings.clip:g}"]
    if settings.checkpointing:
        words += ["--checkpointing"]
    words += ["--num-steps", str(settings.num_steps), "--warmup-steps", str(settings.warmup_steps)]
    words += ["--data", settings.data, "--seed", str(settings.seed), "--timeout", f"{options.timeout_s:g}"]
    if options.learning_rate != OptimizerSettings.lr:
        words += ["--lr", f"{options.learning_rate:g}"]
    if options.rank_memory_gib is not None:
        words += ["--rank-memory-gib", f"{options.rank_memory_gib:g}"]
    return shlex.join(words)

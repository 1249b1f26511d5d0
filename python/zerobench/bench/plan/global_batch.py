"""Accumulation that follows from ``--global-batch``, the batch of a rank and the ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zerobench.errors import ConfigError
from zerobench.results.settings import Settings

if TYPE_CHECKING:
    from zerobench.bench.plan.configuration import Configuration
    from zerobench.bench.plan.options import CompareOptions


def check_global_batch(options: CompareOptions) -> None:
    """Raise ConfigError where accumulation is given twice."""
    if options.global_batch is None:
        return
    if "--grad-accum" in options.given or tuple(options.grad_accum) != (1,):
        raise ConfigError(
            "--global-batch decides how many micro-batches each row accumulates: remove --grad-accum"
        )


def accumulation(
    global_batch: int | None, *, point: Mapping[str, Any], decided: Mapping[str, Any]
) -> dict[str, int]:
    """Return the accumulation of a row at ``point``, or nothing where the options or a file (``decided``) set it."""
    if global_batch is None or "grad_accum" in decided:
        return {}
    micro_batch = point["batch_size"] * point["world_size"]
    return {"grad_accum": max(1, global_batch // micro_batch)}


def why_refused(settings: Settings, global_batch: int | None) -> str | None:
    """Return why a row cannot train so many sequences in a step, or None where it does."""
    micro_batch = settings.batch_size * settings.world_size
    if global_batch is None or micro_batch * settings.grad_accum == global_batch:
        return None
    if settings.config_file is not None and global_batch % micro_batch == 0:
        return (
            f"{settings.config_file} accumulates {settings.grad_accum} micro-batches, which makes "
            f"{micro_batch * settings.grad_accum} sequences a step instead of --global-batch {global_batch}: remove "
            "gradient_accumulation_steps from the file"
        )
    ranks = f"{settings.world_size} rank{'s' if settings.world_size != 1 else ''}"
    return (
        f"--global-batch {global_batch} is not a multiple of {micro_batch}, the sequences of a micro-batch "
        f"({settings.batch_size} on each of {ranks}): use a multiple, or another --batch-size"
    )


def check_any_accepted(configurations: Sequence[Configuration]) -> None:
    """Raise ConfigError where no row can have the global batch, with the reason of a row on most ranks: a reference
    on one rank says little of the others."""
    if all(configuration.refused for configuration in configurations):
        widest = max(configurations, key=lambda configuration: configuration.settings.world_size)
        raise ConfigError(f"no row can run: {widest.refused}")

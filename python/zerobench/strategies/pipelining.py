"""Arithmetic of pipelines: schedules, micro-batches, the bubble by the formula, and where layers are cut. Imports no
torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerobench.strategies.base import StrategySettings

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Schedules, each with how many parts of the model a rank holds."""


SETTINGS = ("pipeline_stages", "pipeline_schedule", "micro_batches")
"""The settings that only pipelines have."""


def sequences_of(stages: int, batch_size: int, grad_accum: int) -> int:
    """Return how many sequences one pipeline trains on in a step: those that its ranks would without it."""
    return stages * batch_size * grad_accum


def why_impossible(settings: StrategySettings) -> str | None:
    """Return why these settings make no pipeline, or None."""
    stages, micro_batches = settings.pipeline_stages, settings.micro_batches
    if settings.compile == "whole":
        return "pipeline cuts the model into stages, so it cannot be compiled whole: use --compile block"
    if stages is None or micro_batches is None or settings.pipeline_schedule not in CHUNKS:
        return f"pipeline has no stages, micro-batches or schedule: schedules are {', '.join(CHUNKS)}"
    if stages < 2:
        return f"--pipeline-stages {stages} is not a pipeline: use 2 or more"
    if settings.world_size % stages:
        return (
            f"{settings.world_size} ranks do not divide into pipelines of {stages} stages: use a --world-size that is "
            "a multiple of --pipeline-stages"
        )
    sequences = sequences_of(stages, settings.batch_size, settings.grad_accum)
    if sequences % micro_batches:
        return (
            f"the {sequences} sequences of a pipeline's step ({stages} stages x batch size {settings.batch_size} x "
            f"{settings.grad_accum} accumulated) do not divide into --micro-batches {micro_batches}: use a divisor"
        )
    if micro_batches < stages:
        return f"--micro-batches {micro_batches} do not fill {stages} stages: use {stages} or more"
    if settings.pipeline_schedule == "interleaved" and micro_batches % (micro_batches // stages):
        return (
            f"the interleaved schedule runs {micro_batches} micro-batches in {micro_batches // stages} rounds, which "
            f"do not divide them: use a multiple of {stages}"
        )
    return None


def bubble_share(schedule: str, *, stages: int, micro_batches: int) -> float:
    """Return the idle share of a schedule whose stages all take the same time and whose messages take none.

    A rank works for ``micro_batches`` slots and waits for ``stages - 1``; with several chunks a rank, each slot of the
    wait is that many times shorter."""
    wait = (stages - 1) / CHUNKS[schedule]
    return wait / (micro_batches + wait)


def cut_layers(layer_num: int, part_num: int, *, head_layers: float) -> list[range]:
    """Return the layers of each part, so that the slowest part is as fast as can be. ``head_layers``: the work of the
    head, which the last part does besides, in layers. At least one layer goes to each part."""
    last = min(
        range(1, layer_num - part_num + 2),
        key=lambda layers: max(layers + head_layers, -(-(layer_num - layers) // (part_num - 1))),
    )
    rest, parts, begin = layer_num - last, [], 0
    for part in range(part_num - 1):
        size = rest // (part_num - 1) + (part < rest % (part_num - 1))
        parts.append(range(begin, begin + size))
        begin += size
    return [*parts, range(begin, layer_num)]

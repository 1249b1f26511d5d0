"""The memory that state on NVMe moves through, as the engine takes it, and what of it the kernel charges as locked."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_samples import SMALL

import zerobench
from zerobench import models
from zerobench.bench.plan.configuration import Configuration
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.bench.swap.frames import CHUNK_NUMEL, Frames, Swapping
from zerobench.bench.swap.plan import locked_bytes, pool_of, swap_of
from zerobench.host.io_settings import IoChoice

MIB = 1 << 20


def row(folder: Path, **options: Any) -> Configuration:
    values = {
        **SMALL, "model": ("tiny",), "num_layers": (4,), "strategies": ("zero3",), "world_size": (1,),
        "precision": ("bf16",), "nvme_paths": (folder,),
    }  # fmt: skip
    return make_plan(CompareOptions(**{**values, **options})).configurations[0]


@pytest.mark.parametrize(
    ("hidden", "offload", "memory_gib", "own"),
    [
        (64, "nvme", None, {}),
        (64, "nvme_full", None, {}),
        (256, "nvme_full", None, {}),
        (256, "nvme", None, {"chunk_numel": 1 << 16, "io_depth": 4}),
        (256, "nvme", 0.04, {"chunk_numel": 1 << 16, "io_depth": 4}),
        (256, "nvme_full", None, {"chunk_numel": 1 << 16, "io_depth": 4}),
        (256, "nvme_full", 0.045, {"chunk_numel": 1 << 16, "io_depth": 4}),
        (256, "nvme_full", 0.07, {"chunk_numel": 1 << 16, "io_depth": 4}),
        (256, "nvme", 0.03, {"io_depth": 4}),
        (256, "nvme", 0.04, {"io_depth": 4, "io_block_bytes": 1 << 16}),
        (256, "nvme_full", 0.04, {"io_depth": 4}),
        (256, "nvme_full", 0.07, {"io_depth": 2}),
    ],
)
def test_frames_are_those_that_the_engine_takes(tmp_path, hidden, offload, memory_gib, own) -> None:
    """Told by the size of the pool, in which only sizes of shards, rounded to lines, are about."""
    configuration = row(tmp_path, hidden_size=(hidden,), offload=(offload,), host_memory_gib=memory_gib)
    configuration.options["offload_optimizer"] = own
    settings_file = tmp_path / "io.json"  # nothing is tuned
    pool = pool_of(configuration, settings_file=settings_file)
    swap = swap_of(configuration, settings_file=settings_file)
    section = {"device": "nvme", "nvme_path": str(tmp_path), "io_engine": "threads", **own}
    if memory_gib is not None:
        section["host_memory_bytes"] = round(memory_gib * (1 << 30))
    engine = zerobench.initialize(
        model=models.build(models.from_dict(configuration.model), seed=1),
        config={
            "stage": 3,
            "precision": "bf16",
            "world_size": 1,
            "rendezvous": uuid.uuid4().hex,
            "optimizer": {"type": "adamw", "lr": 0.1},
            "offload_optimizer": section,
            **({"offload_param": {"device": "nvme"}} if offload == "nvme_full" else {}),
        },
    )
    taken, held = engine.offload_pinned()["requested_bytes"], engine.memory_bytes()
    chunk_numel = engine.offload_chunk_numel
    engine.close()
    slack_bytes = 8192 * len(pool.frames) + 64 * 16
    assert pool.bytes == pytest.approx(taken, abs=slack_bytes)
    assert pool.chunk_numel == chunk_numel
    assert swap is not None
    numel = configuration.settings.parameter_count or 0
    swapped = held.get("nvme") or {}
    assert swap.written_bytes == pytest.approx(
        3 * swapped.get("master", 0) + swapped.get("parameters", 0), abs=0.05 * 12 * numel
    )


def swapping(
    budget_bytes: float | None, *, shards: Sequence[int], path_num: int, pages_parameters: bool
) -> Swapping:
    return Swapping(
        shards=shards,
        io=IoChoice("threads", 1 << 16, 8),
        path_num=path_num,
        element_bytes=2,
        pages_parameters=pages_parameters,
        budget_bytes=budget_bytes,
    )


@given(
    st.lists(st.integers(1, 40_000).map(lambda lines: 64 * lines), min_size=1, max_size=6),
    st.integers(0, 64 * MIB),
    st.integers(1, 3),
    st.booleans(),
)
def test_chunks_are_the_largest_that_fit_and_move_little_more_than_any(
    shards, budget_bytes, path_num, pages_parameters
) -> None:
    of = partial(swapping, shards=shards, path_num=path_num, pages_parameters=pages_parameters)
    assert of(None).chosen_chunk_numel() == CHUNK_NUMEL
    assert of(1 << 40).chosen_chunk_numel() == CHUNK_NUMEL
    rank = of(budget_bytes)
    chosen, least = rank.chosen_chunk_numel(), rank.least_chunk_numel(4096)
    assert chosen % 64 == 0 and least <= chosen <= CHUNK_NUMEL
    sizes = [CHUNK_NUMEL >> power for power in range(17) if CHUNK_NUMEL >> power >= least]
    fitting = {size: rank.moved_bytes(size) for size in sizes if rank.least_bytes(size) <= budget_bytes}
    request = rank.least_chunk_numel(1 << 16)
    whole = {size: moved for size, moved in fitting.items() if size >= request}
    if not whole:
        assert chosen == max(fitting, default=least)
        return
    fitting = whole
    whole_bytes = sum(shards) * (24 + 6 * pages_parameters)
    assert fitting[chosen] <= min(fitting.values()) + whole_bytes / 20
    assert all(
        moved > min(fitting.values()) + whole_bytes / 20 for size, moved in fitting.items() if size > chosen
    )


def test_a_ring_is_charged_for_every_huge_page_that_it_touches() -> None:
    def charged(*spans_mib: float, begin: float = 0, pool: float) -> float:
        frames = [Frames(slot_bytes=round(span * MIB), chunk_num=1, frame_num=1) for span in spans_mib]
        return locked_bytes(frames, begin=round(begin * MIB), pool_bytes=round(pool * MIB)) / MIB

    assert charged(1.5, begin=0.25, pool=1.9) == 1.5  # a pool without huge pages
    assert charged(1.5, begin=0.25, pool=4) == 2
    assert charged(1.5, begin=1, pool=4) == 4
    assert charged(4, pool=6) == 4
    assert charged(4, begin=0.5, pool=6) == 6
    assert charged(1, 0.5, begin=0.25, pool=4) == 2 + 2  # each ring, though of one page
    assert charged(2, begin=1.5, pool=3.75) == 3.5  # from 0, and the pool's end has small pages

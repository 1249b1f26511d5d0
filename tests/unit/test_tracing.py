"""Traces of real steps of one CPU rank, and of recorded GPU events."""

from __future__ import annotations

import tempfile
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from builders import SMALL, make_settings

from zerobench import models
from zerobench.bench.rank.trace_file import clipped
from zerobench.bench.rank.tracing import LaunchUnits, lane_of_record, trace_step
from zerobench.bench.rank.unit_marks import ROOT, UnitMarks
from zerobench.strategies.single import SingleStrategy
from zerobench.strategies.zero import Zero3Strategy

DISK = tempfile.gettempdir()


def traced(kind, **fields):
    """Return the lanes and the units of a step."""
    strategy = kind(make_settings(**fields))
    strategy.build(
        partial(models.build, models.resolve("tiny", SMALL | {"num_layers": 2, "hidden_size": 64}), 0)
    )
    ids = torch.arange(24).reshape(2, 12) % SMALL["vocab_size"]
    spans, step_us = trace_step(strategy, [{"input_ids": ids, "labels": ids}])
    strategy.close()
    found = clipped(spans, step_us)
    return {span.lane for span in found}, {span.unit for span in found}


def test_state_in_files_is_read_and_written() -> None:
    options = {
        "offload_optimizer": {
            "chunk_numel": 1024,
            "io_allow_fallback": True,
            "io_block_bytes": 4096,
            "io_depth": 2,
        }
    }
    lanes, units = traced(
        Zero3Strategy, offload="nvme", nvme_paths=(DISK,), host_memory_bytes=800_000, options=options
    )
    assert {"compute", "CPU Adam", "I/O"} <= lanes
    assert {ROOT, "blocks.0"} <= units


def test_a_strategy_without_lanes_of_its_own_computes_and_updates() -> None:
    lanes, units = traced(SingleStrategy)
    assert lanes == {"compute", "update"}
    assert {ROOT, "blocks.0"} <= units


@pytest.mark.parametrize(
    ("place", "what", "lane"),
    [
        ("disk", "read", "I/O"),
        ("update thread", "adam", "CPU Adam"),
        ("update thread", "wait for files", "waits"),
        ("computing thread", "wait for an update", "waits"),
        ("collectives", "all-gather of parameters", "gather"),
        ("collectives", "reduce-scatter of gradients", "reduce"),
        ("collectives", "norm", "communication"),
    ],
)
def test_what_the_core_records_has_a_lane(place, what, lane) -> None:
    assert lane_of_record(place, what) == lane


def test_kernels_belong_to_the_unit_that_the_host_worked_on_when_it_launched_them() -> None:
    def launch(number: int, at_ns: int) -> SimpleNamespace:
        return SimpleNamespace(
            correlation_id=lambda: number,
            start_ns=lambda: at_ns + 1000,
            device_type=lambda: torch.profiler.DeviceType.CPU,
        )

    marks = UnitMarks()
    marks._marks += [(10, "blocks.0"), (30, "blocks.1")]
    recorded = [
        ("collectives", "all-gather of parameters", "blocks.7", 18, 22),
        ("update thread", "adam", "blocks.9", 33, 39),
    ]
    units = LaunchUnits([launch(1, 15), launch(2, 20), launch(3, 40)], recorded, marks, 1000)
    assert [units.of(number, "compute") for number in (1, 2, 3, 4)] == [
        "blocks.0",
        "blocks.7",
        "blocks.1",
        "",
    ]
    assert units.of(1, "update") == ""
    assert [units.of(number, "host to device") for number in (1, 3)] == ["blocks.0", "blocks.9"]

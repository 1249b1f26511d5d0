"""Traces of GPU steps: lanes by stream, copies counted, units by launch."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

from comparisons import SMALL, compare

from zerobench.bench.rank.trace_file import Trace
from zerobench.trace.account import account_of
from zerobench.trace.find import find_trace

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    result, _ = compare(
        folder, *SMALL, "--world-size", "1", "--num-steps", "5", "--strategies", "zero3,fsdp2",
        "--offload", "none,cpu_optimizer", "--trace",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "out"


def trace_of(folder, strategy: str, offload: str) -> Trace:
    rows = json.loads((folder / "results.json").read_text())["rows"]
    (row,) = [r for r in rows if r["strategy"] == strategy and r["settings"]["offload"] == offload]
    return find_trace(f"{folder}#{row['name']}")


def test_a_sharded_step_computes_and_updates_by_unit(folder) -> None:
    trace = trace_of(folder, "zero3", "none")
    account = account_of(trace)
    assert {"compute", "update"} <= {use.lane for use in account.lanes}
    assert {"root", "blocks.0", "blocks.1"} <= {use.unit for use in account.units}
    assert account.busy_us + account.idle_us == pytest.approx(trace.step_us)


def test_copies_of_offloaded_state_are_lanes_of_their_own(folder) -> None:
    trace = trace_of(folder, "zero3", "cpu_optimizer")
    uses = {use.lane: use for use in account_of(trace).lanes}
    assert {"compute", "host to device", "device to host", "CPU Adam"} <= uses.keys()
    assert uses["device to host"].busy_us > 0
    assert any(span.name.startswith("Memcpy DtoH") for span in trace.spans if span.lane == "device to host")


def test_a_peers_kernels_are_sorted_by_their_names(folder) -> None:
    trace = trace_of(folder, "fsdp2", "none")
    lanes = {use.lane for use in account_of(trace).lanes}
    assert "compute" in lanes
    assert not {"gather", "reduce"} & lanes


def test_the_device_is_busy_no_longer_than_the_step(folder) -> None:
    account = account_of(trace_of(folder, "fsdp2", "none"))
    assert 0 < account.busy_us <= account.step_us

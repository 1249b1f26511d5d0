"""The account of a traced step, its file, and what `zerobench trace` makes of both."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerobench.bench.rank.trace_file import (
    COMPUTE,
    GATHER,
    LANES,
    REDUCE,
    TO_DEVICE,
    TO_HOST,
    UPDATE,
    WAITS,
    Span,
    Trace,
    lane_of_activity,
    limited,
    read_trace,
    trace_events,
    write_trace,
)
from zerobench.errors import DataError
from zerobench.trace.account import HOST, account_of
from zerobench.trace.find import find_trace

STEP_US = 100
FACTS = {"row": "row", "strategy": "zero3", "device": "cpu", "rank": 0}


def spans() -> st.SearchStrategy[list[Span]]:
    times = st.integers(-20, STEP_US + 20)
    span = st.builds(
        lambda lane, unit, ends: Span(lane=lane, name="work", unit=unit, begin=min(ends), end=max(ends)),
        st.sampled_from(LANES),
        st.sampled_from(["", "blocks.0", "blocks.1"]),
        st.tuples(times, times),
    )
    return st.lists(span, max_size=12)


def trace_of(found: list[Span]) -> Trace:
    return Trace(row="row", strategy="zero3", device="cpu", rank=0, step_us=float(STEP_US), spans=found)


def busy_at(found: list[Span], moment: float, lanes: set[str]) -> bool:
    return any(span.lane in lanes and span.begin < moment < span.end for span in found)


def counted(found: list[Span], lanes: set[str], but: set[str] = frozenset()) -> int:
    """Return in how many whole microseconds one of ``lanes`` is busy and none of ``but``."""
    moments = [index + 0.5 for index in range(STEP_US)]
    return sum(busy_at(found, at, lanes) and not busy_at(found, at, set(but)) for at in moments)


@given(spans())
def test_busy_and_idle_are_the_step(found) -> None:
    account = account_of(trace_of(found))
    assert account.busy_us == counted(found, {*LANES} - {WAITS})
    assert account.busy_us + account.idle_us == STEP_US


@given(spans())
def test_lanes_are_busy_and_exposed_as_a_count_of_moments_says(found) -> None:
    for use in account_of(trace_of(found)).lanes:
        assert use.busy_us == counted(found, {use.lane})
        if use.lane != COMPUTE:
            assert use.exposed_us == counted(found, {use.lane}, but={COMPUTE})


@given(spans())
def test_computing_and_waits_are_the_step(found) -> None:
    account = account_of(trace_of(found))
    computing = counted(found, {COMPUTE})
    assert computing + sum(account.waited_us.values()) == STEP_US


@given(spans())
def test_units_of_a_lane_are_busy_within_it(found) -> None:
    account = account_of(trace_of(found))
    lanes = {use.lane: use.busy_us for use in account.lanes}
    assert all(unit.busy_us <= lanes[unit.lane] for unit in account.units)


def test_a_gap_waits_for_the_operations_that_end_it_one_after_the_other() -> None:
    found = [
        Span(lane=COMPUTE, name="forward", begin=0, end=10),
        Span(lane=GATHER, name="gather", begin=5, end=30),
        Span(lane=REDUCE, name="reduce", begin=30, end=38),
        Span(lane=COMPUTE, name="backward", begin=40, end=100),
        Span(lane=TO_HOST, name="copy", begin=20, end=60),  # computing did not wait for it
    ]
    assert account_of(trace_of(found)).waited_us == {GATHER: 20, REDUCE: 8, HOST: 2}


@given(spans())
def test_a_file_gives_the_same_account(tmp_path_factory, found) -> None:
    file = tmp_path_factory.getbasetemp() / "trace.json.gz"
    write_trace(file, trace_of(found))
    assert account_of(read_trace(file)).lanes == account_of(trace_of(found)).lanes


@given(spans())
def test_operations_of_a_track_follow_each_other(found) -> None:
    ends: dict[int, float] = {}
    for event in trace_events(trace_of(found)):
        if event["ph"] == "X":
            assert event["ts"] >= ends.get(event["tid"], event["ts"])
            ends[event["tid"]] = event["ts"] + event["dur"]


def test_a_trace_of_too_many_operations_keeps_the_longest_and_says_so() -> None:
    found = [Span(lane=COMPUTE, name="work", begin=0, end=length) for length in (1000, 3000, 2000)]
    kept = limited(trace_of(found), most=2)
    assert [span.end for span in kept.spans] == [3000, 2000]
    assert "3 operations. The file keeps the 2 longest; the others take 1.000 ms" in kept.note


@pytest.mark.parametrize(
    ("name", "stream_lane", "lane"),
    [
        ("void zb::adam_kernel<float>(zb::Run)", REDUCE, UPDATE),
        ("Memcpy HtoD (Pinned -> Device)", None, TO_DEVICE),
        ("Memcpy DtoH (Device -> Pinned)", TO_HOST, TO_HOST),
        ("ncclDevKernel_AllGather_RING_LL", GATHER, GATHER),
        ("ncclDevKernel_AllGather_RING_LL", None, "communication"),
        ("void zb::pack_kernel(zb::Items)", GATHER, GATHER),
        ("ampere_sgemm_128x64_tn", None, COMPUTE),
    ],
)
def test_an_activity_belongs_to_the_lane_of_its_stream_or_else_its_name(name, stream_lane, lane) -> None:
    assert lane_of_activity(name, stream_lane) == lane


def packed(document: object) -> bytes:
    return gzip.compress(json.dumps(document).encode())


@pytest.mark.parametrize(
    "content",
    [
        b"text",
        packed([])[:-6],
        packed([]),
        packed({"traceEvents": []}),
        packed({"otherData": {"zerobench_trace": 1}, "traceEvents": [{"ph": "X", "cat": "other"}]}),
        packed({"otherData": {"zerobench_trace": 1, **FACTS, "step_us": 0}, "traceEvents": []}),
        packed({"otherData": {"zerobench_trace": 1, **FACTS, "step_us": "1"}, "traceEvents": []}),
        gzip.compress(b"[" * 100_000),
    ],
    ids=["text", "cut", "a list", "no facts", "a lane", "no time", "a time in words", "too deep"],
)
def test_another_file_is_no_trace(tmp_path, content) -> None:
    file = tmp_path / "trace.json.gz"
    file.write_bytes(content)
    with pytest.raises(DataError, match="is not a trace of zerobench"):
        read_trace(file)


def test_a_trace_of_a_newer_zerobench_is_refused(tmp_path) -> None:
    file = tmp_path / "trace.json.gz"
    file.write_bytes(packed({"otherData": {"zerobench_trace": 99}}))
    with pytest.raises(DataError, match=r"has a newer format than this zerobench reads: upgrade zerobench$"):
        read_trace(file)


def test_a_row_is_found_in_its_results(tmp_path) -> None:
    for row in ("a", "b"):
        (tmp_path / "traces").mkdir(exist_ok=True)
        write_trace(tmp_path / "traces" / f"{row}.json.gz", trace_of([]))
    assert find_trace(f"{tmp_path}#b").row == "row"
    with pytest.raises(DataError, match=r"several rows have traces: name one, as in .*#a; the rows are a, b"):
        find_trace(str(tmp_path))


def test_results_without_traces_name_the_option(tmp_path) -> None:
    with pytest.raises(DataError, match="holds no traces: run `zerobench compare --trace`"):
        find_trace(f"{tmp_path}#row")

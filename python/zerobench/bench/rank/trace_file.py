"""The trace of one step as a file that Perfetto and chrome://tracing open, and that `zerobench trace` reads. Imports no
torch."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zerobench.bench.rank.intervals import is_communication, is_transfer, is_update
from zerobench.errors import DataError
from zerobench.results.files import write_atomically

COMPUTE, GATHER, REDUCE, UPDATE, COMMUNICATION = "compute", "gather", "reduce", "update", "communication"
TO_DEVICE, TO_HOST = "host to device", "device to host"
CPU_ADAM, IO, WAITS = "CPU Adam", "I/O", "waits"
LANES = (COMPUTE, GATHER, REDUCE, UPDATE, COMMUNICATION, TO_DEVICE, TO_HOST, CPU_ADAM, IO, WAITS)
"""Lanes in the order of the picture. ``waits`` shows threads that are blocked: it never counts as busy."""

MOST_SPANS = 200_000  # in a file: about 5 MB
_NAME_LENGTH = 80
_MOST_BYTES = 256 << 20  # of JSON that is read
_FORMAT = 1
SUFFIX = ".json.gz"
_TRACKS = 1000  # thread numbers of one lane


@dataclass(frozen=True, kw_only=True)
class Span:
    """An operation. Times are microseconds since the step began."""

    lane: str
    name: str
    begin: float
    end: float
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One step of one rank."""

    row: str
    strategy: str
    device: str
    rank: int
    step_us: float
    spans: Sequence[Span] = field(default_factory=list)
    note: str = ""


def trace_path(folder: Path, row: str) -> Path:
    return folder / f"{row}{SUFFIX}"


def lane_of_activity(name: str, stream_lane: str | None) -> str:
    """Return the lane of a kernel or a copy. ``stream_lane``: the lane of the engine that owns its stream, or None."""
    if is_update(name):
        return UPDATE
    if is_transfer(name):
        return TO_DEVICE if "HtoD" in name else TO_HOST
    if stream_lane is not None:
        return stream_lane
    return COMMUNICATION if is_communication(name) else COMPUTE


def clipped(spans: Iterable[Span], end: float) -> list[Span]:
    """Return what of the spans lies within the step, which lasts from 0 to ``end``."""
    inside = (replace(s, begin=max(s.begin, 0.0), end=min(s.end, end)) for s in spans)
    return [span for span in inside if span.end > span.begin]


def limited(trace: Trace, most: int = MOST_SPANS) -> Trace:
    """Return the trace with at most ``most`` spans, the longest, and a note of what is left out."""
    if len(trace.spans) <= most:
        return trace
    ordered = sorted(trace.spans, key=lambda span: span.begin - span.end)
    dropped_us = sum(span.end - span.begin for span in ordered[most:])
    note = (
        f"The step has {len(ordered)} operations. The file keeps the {most} longest; the others take "
        f"{dropped_us / 1e3:.3f} ms together."
    )
    return replace(trace, spans=ordered[:most], note=note)


def write_trace(path: Path, trace: Trace) -> None:
    """Write the trace as gzipped JSON, the whole file or none."""
    trace = limited(trace)
    facts = {name: getattr(trace, name) for name in ("row", "strategy", "device", "rank", "step_us", "note")}
    document = {
        "traceEvents": trace_events(trace),
        "displayTimeUnit": "ms",
        "otherData": {"zerobench_trace": _FORMAT, **facts},
    }
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0))


def trace_events(trace: Trace) -> list[dict[str, Any]]:
    """Return names of the lanes, then the operations in the order of their begin. Operations of one lane that overlap
    get tracks of their own, since viewers nest what overlaps on a track."""
    free_at: dict[str, list[float]] = {}
    events: list[dict[str, Any]] = []
    for span in sorted(trace.spans, key=lambda span: (span.begin, -span.end)):
        ends = free_at.setdefault(span.lane, [])
        track = next((index for index, end in enumerate(ends) if end <= span.begin), len(ends))
        ends[track:] = [span.end, *ends[track + 1 :]]
        event = {
            "ph": "X",
            "name": span.name[:_NAME_LENGTH],
            "cat": span.lane,
            "pid": trace.rank,
            "tid": LANES.index(span.lane) * _TRACKS + track,
            "ts": round(span.begin, 3),
            "dur": round(round(span.end, 3) - round(span.begin, 3), 3),
        }
        events.append(event | ({"args": {"unit": span.unit}} if span.unit else {}))
    return [*_names(trace, {lane: len(ends) for lane, ends in free_at.items()}), *events]


def _names(trace: Trace, track_nums: dict[str, int]) -> list[dict[str, Any]]:
    process = {"ph": "M", "pid": trace.rank, "name": "process_name"}
    events = [process | {"args": {"name": f"{trace.row}, rank {trace.rank}"}}]
    for lane in sorted(track_nums, key=LANES.index):
        for track in range(track_nums[lane]):
            number = LANES.index(lane) * _TRACKS + track
            thread = {"ph": "M", "pid": trace.rank, "tid": number}
            name = lane if track == 0 else f"{lane} ({track + 1})"
            events.append(thread | {"name": "thread_name", "args": {"name": name}})
            events.append(thread | {"name": "thread_sort_index", "args": {"sort_index": number}})
    return events


def read_trace(path: Path) -> Trace:
    """Return the trace in a file that `compare --trace` wrote. Raises DataError for any other file."""
    try:
        with gzip.open(path) as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it holds more than {_MOST_BYTES >> 20} MiB")
        document = json.loads(content)
        facts = document["otherData"]
        if facts.pop("zerobench_trace") > _FORMAT:
            raise DataError(f"{path} has a newer format than this zerobench reads: upgrade zerobench")
        spans = [
            Span(
                lane=LANES[LANES.index(event["cat"])],
                name=str(event["name"]),
                begin=float(event["ts"]),
                end=float(event["ts"]) + float(event["dur"]),
                unit=str(event.get("args", {}).get("unit", "")),
            )
            for event in document["traceEvents"]
            if event["ph"] == "X"
        ]
        trace = Trace(spans=spans, **facts)
        if not 0 < trace.step_us < float("inf"):
            raise ValueError(f"its step takes {trace.step_us} microseconds")
        return trace
    except DataError:  # which is a ValueError, too
        raise
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist: `zerobench compare --trace` writes traces into RESULTS/traces"
        ) from None
    except (
        *(OSError, EOFError, zlib.error, RecursionError),
        *(ValueError, KeyError, TypeError, AttributeError),
    ) as error:
        raise DataError(
            f"{path} is not a trace of zerobench ({error}): give a .json.gz of `compare --trace`"
        ) from None

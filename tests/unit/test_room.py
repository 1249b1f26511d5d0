"""Which rows are alive together: what they used alone must fit into devices, the host and disks."""

from __future__ import annotations

import shutil
from collections import namedtuple

import pytest
from report_samples import sample

from zerobench.bench.room import Room, device_need_bytes, host_need_bytes
from zerobench.results.schema import Row
from zerobench.results.sizes import GIB


def row(name: str, **figures) -> Row:
    """Return a row of two ranks that used little where nothing is given."""
    found = sample().rows[3].model_copy(deep=True)
    assert found.settings.world_size == 2
    found.name, found.memory_bytes = name, {}
    known = {"peak_device_bytes": GIB, "torch_reserved_peak_bytes": None, "outside_torch_bytes": None}
    for key, value in {**known, "peak_host_bytes": GIB, **figures}.items():
        setattr(found, key, value)
    return found


def names(rows: list[Row]) -> list[str]:
    return [row.name for row in rows]


def test_each_rank_of_a_row_takes_memory_of_the_host() -> None:
    assert host_need_bytes(row("a", peak_host_bytes=3 * GIB)) == 6 * GIB


def test_a_rank_whose_peak_is_unknown_counts_with_what_it_held() -> None:
    unknown = row("a", peak_host_bytes=None, peak_device_bytes=5 * GIB)
    assert host_need_bytes(unknown) == 2 * 6 * GIB
    unknown.settings.device, unknown.memory_bytes = "cuda", {"host": {"optimizer_state": 2 * GIB}}
    assert host_need_bytes(unknown) == 2 * 3 * GIB


def test_a_device_holds_what_the_allocator_keeps_and_what_lies_outside_of_it() -> None:
    found = row("a", torch_reserved_peak_bytes=8 * GIB, outside_torch_bytes=GIB)
    assert 9 * GIB < device_need_bytes(found) < 10 * GIB
    found.device_used_peak_bytes = 20 * GIB
    assert device_need_bytes(found) == 20 * GIB


@pytest.mark.parametrize(("host_gib", "seated"), [(100, "abc"), (9, "ac"), (5, "c"), (1, "")])
def test_rows_join_while_the_host_holds_them_the_smallest_first(host_gib, seated) -> None:
    rows = [row("a", peak_host_bytes=2 * GIB), row("b", peak_host_bytes=5 * GIB), row("c")]
    room = Room(device_bytes=None, host_bytes=host_gib * GIB)
    assert "".join(names(room.seats(rows))) == seated


def test_rows_join_while_the_first_gpu_holds_them() -> None:
    rows = [row(name, device_used_peak_bytes=gib * GIB) for name, gib in (("a", 40), ("b", 30), ("c", 60))]
    assert names(Room(device_bytes=80 * GIB, host_bytes=100 * GIB).seats(rows)) == ["a", "b"]


def test_rows_join_while_their_files_fit_on_the_disk(monkeypatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10 * GIB))
    rows = [
        row(name, memory_bytes={"nvme": {"optimizer_state": gib * GIB}}) for name, gib in (("a", 2), ("b", 4))
    ]
    for one in rows:
        one.settings.nvme_paths = ["/disk"]
    room = Room(device_bytes=None, host_bytes=100 * GIB)
    assert len(room.seats(rows[:1])) == 1 and len(room.seats(rows)) == 1

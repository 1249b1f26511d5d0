"""Notes on the disks that state is swapped to."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from plan_samples import SMALL

from zerobench import _native
from zerobench.bench import disk_notes
from zerobench.bench.plan.configuration import Configuration
from zerobench.bench.plan.names import rerun_command
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.bench.swap import plan as swap_plan
from zerobench.errors import ConfigError, Error
from zerobench.host.disks import Disks, probe
from zerobench.host.io_settings import IoChoice, IoSettings, Rates, io_choice, write_settings
from zerobench.host.storage import disk_of, gpu_direct_storage_text, lockable_bytes

IO = IoChoice("io_uring", 1 << 20, 8)


def rates(both: float) -> Rates:
    return Rates(read_bytes_per_s=both, write_bytes_per_s=both, both_bytes_per_s=both)


@pytest.fixture
def settings_file(tmp_path) -> Path:
    """Return the path of a settings file that does not exist yet."""
    return tmp_path / "config" / "io.json"


@pytest.fixture
def warnings(settings_file) -> Callable[..., list[str]]:
    """Warnings of rows where each folder is a disk of its own, which a probe is not expected to measure."""

    def warnings(rows: list[Configuration], *, measure=unexpected, disk_of=str, **options) -> list[str]:
        found = Disks(settings_file=settings_file, disk_of=disk_of, measure=measure)
        return disk_notes.disk_warnings(rows, disks=found, **options)

    return warnings


def unexpected(paths: Sequence[str], io: IoChoice) -> Rates:
    pytest.fail(f"{paths} were probed")


def swapping(*paths: Path, **options) -> list[Configuration]:
    values = {**SMALL, "model": ("gpt2-xl",), "strategies": ("zero3",), "offload": ("none", "nvme")}
    return make_plan(CompareOptions(**{**values, "nvme_paths": paths, **options})).configurations


def test_a_slow_disk_is_a_warning_tuned_or_not(tmp_path, settings_file, warnings) -> None:
    found = {"slow": 1e9, "fast": 8e9, "unknown": None}
    for name, both in found.items():
        (tmp_path / name).mkdir()
        if both is not None:
            tuned = IoSettings(
                engine="threads", block_bytes=1 << 20, depth=8, tuned="2026", **rates(both).model_dump()
            )
            write_settings(tmp_path / name, tuned, file=settings_file)
    probed = []
    rows = swapping(*(tmp_path / name for name in found), strategies=("zero3", "fsdp2", "zero0"))
    slow, unknown = warnings(rows, measure=lambda paths, io: (probed.append(paths), rates(2e9))[1])
    assert probed == [[str(tmp_path / "unknown")]]
    count = rows[0].settings.parameter_count or 0
    for text, name, both in ((slow, "slow", 1e9), (unknown, "unknown", 2e9)):
        assert text.startswith(str(tmp_path / name)), text
        assert text.endswith(f"of a step take about {24 * count / 3 / both:.2g} s")


def test_a_fast_disk_is_a_warning_where_the_gpu_is_faster(tmp_path, warnings) -> None:
    rows = swapping(tmp_path)
    on_fast = partial(warnings, rows, measure=lambda paths, io: rates(20e9))
    assert on_fast() == on_fast(gpu_name="a GPU of the future") == []
    (text,) = on_fast(gpu_name="NVIDIA H200")
    settings = rows[0].settings
    tokens = settings.batch_size * settings.seq_length
    compute_s = (
        3 * 2 * (settings.parameter_count or 0) * tokens / (0.5 * 66.9e12)
    )  # attention and lookups apart
    told = float(text.rpartition(": ")[2].removesuffix(" s)"))
    assert told == pytest.approx(compute_s, rel=0.1)


def test_a_row_swaps_what_its_memory_does_not_hold(tmp_path, settings_file) -> None:
    swap_of = partial(swap_plan.swap_of, settings_file=settings_file)

    def moved(**options) -> tuple[float, float]:
        found = swap_of(swapping(tmp_path, **options)[-1])
        assert found is not None
        return found.read_bytes, found.written_bytes

    count = swapping(tmp_path)[0].settings.parameter_count or 0
    assert moved() == pytest.approx((12 * count, 12 * count))
    assert moved(offload_ratio=(0.5,)) == pytest.approx((6 * count, 6 * count))
    assert moved(offload_ratio=(0.001,)) == (0, 0)  # the frames hold it
    assert moved(host_memory_gib=64.0) == (0, 0)
    assert 0 < moved(host_memory_gib=15.0)[0] < 12 * count
    assert moved(offload=("nvme_full",)) == pytest.approx((20 * count, 16 * count))  # fp32
    (row,) = swapping(tmp_path, offload=("nvme",), world_size=(4,))
    of_half = swap_of(row, host_ranks=2)
    assert of_half is not None and of_half.read_bytes == pytest.approx(6 * count)
    assert swap_of(swapping(tmp_path, offload_ratio=("auto",))[-1]) is None


def test_what_moves_nothing_needs_no_probe_and_no_warning(tmp_path, warnings) -> None:
    assert warnings(swapping(tmp_path, host_memory_gib=64.0)) == []
    assert warnings(swapping(offload=("none",))) == []
    cannot = ("zero0", "fsdp2", "deepspeed2", "deepspeed3")  # on CPU ranks
    assert warnings(swapping(tmp_path, strategies=cannot, offload=("nvme",))) == []
    assert warnings(swapping(tmp_path, strategies=("zero1",), offload=("nvme_full",))) == []


def test_folders_on_one_disk_are_told_and_count_once(tmp_path, warnings) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    probed = []
    rows = swapping(tmp_path / "a", tmp_path / "b")
    one, slow = warnings(
        rows, disk_of=disk_of, measure=lambda paths, io: (probed.append(paths), rates(1e9))[1]
    )
    both = f"{tmp_path / 'a'} and {tmp_path / 'b'}"
    assert one.startswith(f"{both} are on one disk")
    count = rows[0].settings.parameter_count or 0
    assert slow.startswith(both) and f"take about {24 * count / 1e9:.2g} s" in slow
    assert len(probed) == 1


def test_a_probe_takes_what_room_there_is_or_says_that_there_is_none(tmp_path) -> None:
    found = probe([str(tmp_path)], IO, seconds=0.1, rank_num=4, free_bytes=lambda path: 40 << 20)
    assert min(found.read_bytes_per_s, found.write_bytes_per_s, found.both_bytes_per_s) > 0
    assert os.listdir(tmp_path) == []
    with pytest.raises(Error, match="no room for a file of 1 MiB a rank"):
        probe([str(tmp_path)], IO, rank_num=4, free_bytes=lambda path: 1 << 20)


def test_what_was_tuned_is_told_with_what_it_is(tmp_path, settings_file) -> None:
    tuned_notes = partial(disk_notes.tuned_notes, settings_file=settings_file)
    assert tuned_notes(swapping(tmp_path)) == []
    tuned = IoSettings(
        engine="threads", block_bytes=4 << 20, depth=4, tuned="2026", **rates(9e9).model_dump()
    )
    write_settings(tmp_path, tuned, file=settings_file)
    (note,) = tuned_notes(swapping(tmp_path, strategies=("zero2", "zero3")))
    assert note.startswith(f"{tmp_path}: state is swapped with threads, blocks of 4096 KiB, depth 4, tuned")
    assert note.endswith(f"(settings of {settings_file})")
    (note,) = tuned_notes(swapping(tmp_path, io_engine="io_uring"))
    assert "with io_uring, blocks of 4096 KiB, depth 4, tuned" in note
    assert tuned_notes(swapping(offload=("none",))) == []
    own = {"io_engine": "threads", "io_block_bytes": 1 << 20, "io_depth": 8}
    assert io_choice([tmp_path], own, settings_file=settings_file) == IoChoice("threads", 1 << 20, 8)


def test_rows_whose_ring_may_not_lock_its_memory_are_known_before_they_start(tmp_path, settings_file) -> None:
    def reasons(rows: list[Configuration], *, lockable_bytes: float = 8 << 20) -> list[str | None]:
        given = {"lockable_bytes": lockable_bytes, "settings_file": settings_file}
        return [disk_notes.why_not_lockable(row, **given) for row in rows]

    *others, reason = reasons(swapping(tmp_path))
    assert others == [None]
    assert re.search(
        r"MEMLOCK leaves 8, \d+ too few: .*ulimit -l.*--io-engine threads: not started$", reason or ""
    )
    threads = swapping(tmp_path, io_engine="threads")
    assert reasons(threads) == [None, None]
    assert "--io-engine threads" in rerun_command(threads[-1], CompareOptions())
    file = tmp_path / "row.json"
    section = {"device": "nvme", "nvme_path": str(tmp_path)}
    for own, refused in ({}, True), ({"io_engine": "threads"}, False), ({"io_allow_fallback": True}, False):
        file.write_text(json.dumps({"stage": 2, "offload_optimizer": {**section, **own}}))
        options = {"nvme_paths": (), "offload": ("none",), "config": (file,)}
        (reason,) = reasons(swapping(**options))
        assert (reason is not None) == refused
        (row,) = swapping(**options, io_engine="threads")
        assert row.options["offload_optimizer"]["io_engine"] == "threads"
        assert reasons([row]) == [None]
    assert reasons(swapping(tmp_path), lockable_bytes=math.inf) == [None, None]


def test_an_engine_needs_rows_that_swap(tmp_path) -> None:
    with pytest.raises(ConfigError, match="--io-engine configures state on NVMe"):
        swapping(offload=("none",), io_engine="threads")
    with pytest.raises(ConfigError, match="unknown --io-engine 'uring': use one of io_uring, threads"):
        swapping(tmp_path, io_engine="uring")


def test_what_may_be_locked_is_as_the_core_says() -> None:
    core = _native.load()
    unlimited = core.lockable_bytes() > 1 << 62
    assert lockable_bytes() == (math.inf if unlimited else core.lockable_bytes())


def test_gpu_direct_storage_is_said_to_be_of_no_use_where_it_is_there_too(tmp_path) -> None:
    (tmp_path / "version").touch()
    said = partial(gpu_direct_storage_text, nvidia_fs=tmp_path / "version")
    reason = "not used: state swaps through host memory, where the CPU updates it"
    assert said(has_library=True) == f"driver and library present; {reason}"
    assert said(has_library=False) == f"not available: the cuFile library is not installed; {reason}"
    without_driver = gpu_direct_storage_text(nvidia_fs=tmp_path / "none", has_library=True)
    assert without_driver == f"not available: the nvidia-fs driver is not loaded; {reason}"

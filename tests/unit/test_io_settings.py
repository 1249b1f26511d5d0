"""The settings that a path was tuned to: kept whole, found from below, refused when they make no sense."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pwd
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from rich.console import Console

from zerobench.errors import ConfigError
from zerobench.host.io_settings import (
    IoSettings,
    Rates,
    default_file,
    read_settings,
    settings_for,
    slow_path_warning,
    write_settings,
)
from zerobench.host.storage import device_facts, device_line, file_system
from zerobench.micro import io_disk
from zerobench.micro.io_disk import IoSetting
from zerobench.micro.io_tune import MOST_IN_FLIGHT_BYTES, candidates_for, choose, search


def settings(depth: int = 8, both: float = 6e9) -> IoSettings:
    return IoSettings(
        engine="threads",
        block_bytes=1 << 20,
        depth=depth,
        read_bytes_per_s=3e9,
        write_bytes_per_s=2e9,
        both_bytes_per_s=both,
        tuned="2026-01-01T00:00:00+00:00",
    )


def test_a_prediction_takes_what_moves_together_and_alone() -> None:
    rates = Rates(read_bytes_per_s=4e9, write_bytes_per_s=2e9, both_bytes_per_s=5e9)
    assert rates.predict_s(read_bytes=10e9, written_bytes=10e9) == pytest.approx(4.0)
    assert rates.predict_s(read_bytes=14e9, written_bytes=10e9) == pytest.approx(5.0)
    assert rates.predict_s(read_bytes=10e9, written_bytes=14e9) == pytest.approx(6.0)
    with pytest.raises(ValueError, match="greater than 0"):
        Rates(read_bytes_per_s=0, write_bytes_per_s=2e9, both_bytes_per_s=5e9)


def test_settings_are_found_from_the_folders_below(tmp_path: Path) -> None:
    file = tmp_path / "new" / "io.json"
    disk, inner = tmp_path / "disk", tmp_path / "disk/a/b"
    inner.mkdir(parents=True)
    assert settings_for(inner, file=file) is None
    write_settings(disk, settings(depth=8), file=file)
    write_settings(tmp_path / "disk/a", settings(depth=16), file=file)
    found = settings_for(inner, file=file)
    assert found is not None and found.depth == 16
    found = settings_for(disk, file=file)
    assert found is not None and found.depth == 8
    assert settings_for(tmp_path, file=file) is None
    assert [path.name for path in file.parent.iterdir()] == ["io.json"]  # and no partial file


def test_the_default_file_follows_the_environment(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "own")}
    assert default_file(environ) == tmp_path / "own/zerobench/io.json"
    # To be ignored, as the specification says.
    assert default_file(environ | {"XDG_CONFIG_HOME": "relative"}) == tmp_path / ".config/zerobench/io.json"
    account = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert default_file({}) == account / ".config/zerobench/io.json"


def test_a_user_without_a_home_is_told_what_to_set() -> None:
    nobody = 4_000_000_000  # as in a container that is run as any number
    with pytest.raises(ConfigError, match="no home folder: set HOME or XDG_CONFIG_HOME"):
        default_file({}, user_id=nobody)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"paths": {"/x": {"engine": "threads"}}}',
        '{"schema_version": 2}',
        '{"other": 1}',
        "[" * 100_000,
        json.dumps({"paths": {"/x": {**settings().model_dump(), "engine": "foo"}}}),
        *(
            json.dumps({"paths": {"/x": {**settings().model_dump(), key: value}}})
            for key, value in (
                ("depth", 0),
                ("depth", 1025),
                ("block_bytes", 0),
                ("block_bytes", 4097),
                ("read_bytes_per_s", 0.0),
                ("write_bytes_per_s", -1.0),
                ("both_bytes_per_s", 0.0),
                ("other", 1),
            )
        ),
    ],
)
def test_a_file_of_nonsense_is_refused_with_its_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "io.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"io\.json.*tune io"):
        read_settings(file)


def test_a_folder_is_no_file_of_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\(Is a directory\): settings need a file") as refused:
        read_settings(tmp_path)
    assert "remove" not in str(refused.value)


def test_another_disk_has_settings_of_its_own(tmp_path: Path) -> None:
    file, mounted = tmp_path / "io.json", tmp_path / "mounted"
    mounted.mkdir()
    write_settings(tmp_path, settings(), file=file)
    assert settings_for(mounted / "new", file=file) is not None

    def disk_of(path: Path) -> str:
        assert path.exists()
        return "another" if path == mounted else "one"

    on_two_disks = partial(settings_for, file=file, disk_of=disk_of)
    assert on_two_disks(mounted) is None
    assert on_two_disks(mounted / "new" / "folder") is None
    assert on_two_disks(tmp_path / "new") is not None


def test_a_file_keeps_its_mode_and_a_link_stays_one(tmp_path: Path) -> None:
    new, real, linked = (tmp_path / name for name in ("new.json", "real.json", "linked.json"))
    mask = os.umask(0o027)
    try:
        write_settings(tmp_path, settings(), file=new)
    finally:
        os.umask(mask)
    assert new.stat().st_mode & 0o777 == 0o640
    real.write_text("{}")
    real.chmod(0o664)
    linked.symlink_to(real)
    write_settings(tmp_path, settings(), file=linked)
    assert linked.is_symlink() and real.stat().st_mode & 0o777 == 0o664
    assert read_settings(real).paths.keys() == {str(tmp_path.resolve())}


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"/proc/nowhere/io\.json.*--settings"):
        write_settings(tmp_path, settings(), file=Path("/proc/nowhere/io.json"))


def _write_many(file: str, folder: str) -> None:
    for index in range(30):
        write_settings(Path(folder) / f"{index}", settings(), file=Path(file))


def test_two_writers_lose_nothing(tmp_path: Path) -> None:
    file = tmp_path / "io.json"
    context = multiprocessing.get_context("spawn")
    writers = [
        context.Process(target=_write_many, args=(str(file), str(tmp_path / name))) for name in ("a", "b")
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert len(read_settings(file).paths) == 60


def _write_often(file: str, folder: str) -> None:
    for depth in range(1, 60):
        write_settings(Path(folder), settings(depth=depth), file=Path(file))


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    file = tmp_path / "io.json"
    write_settings(tmp_path, settings(), file=file)
    writer = multiprocessing.get_context("spawn").Process(
        target=_write_often, args=(str(file), str(tmp_path))
    )
    writer.start()
    while writer.is_alive():
        assert json.loads(file.read_text())["paths"]
    writer.join()
    assert writer.exitcode == 0


def test_a_slow_path_is_worth_a_warning_with_the_time_it_takes(tmp_path: Path) -> None:
    moved = {"read_bytes": 18e9, "written_bytes": 15e9}
    assert slow_path_warning(tmp_path, settings(both=5e9), **moved) is None
    text = slow_path_warning(tmp_path, settings(both=2e9), **moved)
    assert (
        text is not None and text.startswith(f"{tmp_path}: ") and text.endswith("of a step take about 16 s")
    )
    assert "at 2.00 GB/s, which is below 5 GB/s" in text


def test_transfers_that_take_longer_than_compute_are_worth_a_warning_on_any_path(tmp_path: Path) -> None:
    rates = settings(both=10e9)  # 3 GB/s of reads alone
    moved = {"read_bytes": 13e9, "written_bytes": 10e9}
    assert slow_path_warning(tmp_path, rates, **moved, compute_s=3.1) is None
    text = slow_path_warning(tmp_path, rates, **moved, compute_s=2.9)
    assert text is not None and "below" not in text
    assert text.endswith("take about 3 s (forward and backward at half of the GPU's peak: 2.9 s)")


def speed(setting: IoSetting) -> float:
    """A disk that likes 16 requests of 1 MiB."""
    return 1e9 / (1 + abs(setting.depth - 16) / 16 + abs(setting.block_bytes / (1 << 20) - 1))


def test_candidates_begin_with_likely_ones_and_are_bounded() -> None:
    found = candidates_for(["io_uring", "threads"])
    assert len(found) == len(set(found))
    assert all(each.block_bytes * each.depth <= MOST_IN_FLIGHT_BYTES for each in found)
    assert {each.block_bytes * each.depth for each in found[:10]} == {16 << 20}
    assert {each.engine for each in found} == {"io_uring", "threads"}


def test_the_search_finds_the_fastest_and_measures_finalists_again() -> None:
    calls = count()
    best, rates = search(candidates_for(["threads"]), speed, lambda: (next(calls) < 60 for _ in range(80)))
    assert (best.depth, best.block_bytes) == (16, 1 << 20)
    assert len(rates) == len(candidates_for(["threads"]))
    assert sorted(len(values) for values in rates.values())[-4:] > [1, 1, 1, 1]


def test_a_search_without_time_still_chooses_something() -> None:
    best, rates = search(candidates_for(["threads"]), speed, lambda: iter([False]))
    assert list(rates) == [best]


def test_of_equals_the_smallest_in_memory_is_taken() -> None:
    small = IoSetting(engine="threads", block_bytes=1 << 20, depth=4)
    large = IoSetting(engine="threads", block_bytes=1 << 20, depth=64)
    assert choose({large: [1.0, 1.01], small: [0.99, 1.0]}) == small
    assert choose({large: [1.0, 1.1], small: [0.9, 0.95]}) == large


def test_a_path_is_described_by_its_file_system(tmp_path: Path) -> None:
    assert file_system(Path("/proc")) == "proc"
    facts = device_facts(tmp_path)
    assert facts["file_system"] != "unknown"
    assert str(tmp_path) in device_line(facts)


def test_benchmarks_of_files_go_on_without_io_uring_and_say_why() -> None:
    notes = Console(record=True, file=io.StringIO(), width=200)
    usable = partial(io_disk.usable, lockable=8 << 20)
    both = [IoSetting(engine=engine, block_bytes=1 << 20, depth=8) for engine in ("io_uring", "threads")]
    assert usable(both, 16 << 20, notes) == both[1:]
    assert "threads only: io_uring" in notes.export_text()
    with pytest.raises(ConfigError, match=r"MEMLOCK leaves 8.*--engines threads"):
        usable(both[:1], 16 << 20, notes)
    assert usable(both[1:], 16 << 20, notes) == both[1:]

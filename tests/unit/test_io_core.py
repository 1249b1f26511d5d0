"""The bindings of csrc/io: what the benchmarks call, on real files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zerobench import _native
from zerobench.host.storage import io_uring_text

pytest.importorskip("torch")
MIB = 1 << 20


@pytest.fixture(scope="module")
def core():
    return _native.load()


def engines(core) -> list[str]:
    return ["threads"] if core.io_uring_refusal() else ["io_uring", "threads"]


def test_every_mode_moves_the_bytes_it_reports(core, tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    for engine in engines(core):
        files = core.IoBench(directories=[str(folder) for folder in folders], chunk_bytes=MIB, chunk_num=12)
        assert [Path(path).parent for path in files.paths] == folders
        files.open(engine=engine, block_bytes=65536, depth=4, frame_num=4)
        with pytest.raises(Exception, match="fill the files"):
            files.run("read", chunk_num=3)
        assert [files.fill(chunk_num=5) for _ in range(3)] == [7, 2, 0]
        for mode, least, most in (("read", 20, 28), ("write", 24, 24), ("both", 44, 52)):
            seconds, moved = files.run(mode, chunk_num=24)
            assert seconds > 0
            # Up to four chunks were read ahead before, and as many will be read ahead at the end.
            assert least * MIB <= moved <= most * MIB
            seconds, moved = files.run_raw(engine, mode=mode, block_bytes=262144, depth=4, chunk_num=6)
            assert seconds > 0 and moved == 6 * MIB * (2 if mode == "both" else 1)
        files.close()
        del files
        assert [len(list(folder.iterdir())) for folder in folders] == [0, 0]


def test_passes_go_round_the_files_whatever_was_opened_between(core, tmp_path: Path) -> None:
    for engine in engines(core):
        files = core.IoBench(directories=[str(tmp_path)], chunk_bytes=MIB, chunk_num=24)
        files.open(engine=engine, block_bytes=65536, depth=4, frame_num=4)
        files.fill(chunk_num=24)
        os.truncate(files.paths[0], 12 * MIB)  # of the later half there is nothing to read
        with pytest.raises(OSError, match="the file ends there"):
            for _ in range(4):
                files.open(engine=engine, block_bytes=65536, depth=4, frame_num=4)
                files.run("read", chunk_num=6)
        del files


def test_info_says_of_io_uring_what_the_core_says(core) -> None:
    assert (io_uring_text() == "usable") == (core.io_uring_refusal() is None)


def test_wrong_arguments_are_value_errors(core, tmp_path: Path) -> None:
    files = core.IoBench(directories=[str(tmp_path)], chunk_bytes=MIB, chunk_num=4)
    with pytest.raises(ValueError, match="aio"):
        files.open(engine="aio", block_bytes=4096, depth=1, frame_num=2)
    with pytest.raises(ValueError, match="nothing would be swapped"):
        files.open(engine="threads", block_bytes=4096, depth=1, frame_num=4)
    with pytest.raises(ValueError, match="sideways"):
        files.run_raw("threads", mode="sideways", block_bytes=4096, depth=1, chunk_num=1)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        core.IoBench(directories=[str(tmp_path / "nowhere")], chunk_bytes=MIB, chunk_num=1)
    with pytest.raises(OSError, match="not enough space"):
        core.IoBench(directories=[str(tmp_path)], chunk_bytes=1 << 40, chunk_num=1 << 10)


_VICTIM = """
import sys
from zerobench import _native
from zerobench.host.storage import io_uring_text
files = _native.load().IoBench(directories=[sys.argv[1]], chunk_bytes=1 << 20, chunk_num=32)
files.open(engine="threads", block_bytes=65536, depth=4, frame_num=4)
files.fill(chunk_num=48)
print("running", flush=True)
while True:
    files.run("both", chunk_num=8)
"""


def test_files_of_a_killed_process_go_with_the_next_start(core, tmp_path: Path) -> None:
    victim = subprocess.Popen(
        [sys.executable, "-c", _VICTIM, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert victim.stdout is not None and victim.stdout.readline() == "running\n"
        assert core.remove_stale_swap_files(str(tmp_path)) == 0, "a file in use was removed"
        (left,) = tmp_path.iterdir()
        assert f".pid{victim.pid}." in left.name
    finally:
        os.kill(victim.pid, signal.SIGKILL)
        victim.communicate()
    assert len(list(tmp_path.iterdir())) == 1
    deadline = time.monotonic() + 10
    while core.remove_stale_swap_files(str(tmp_path)) == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []

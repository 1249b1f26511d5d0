"""The disk, or what a rank may take, fails one rank alone: every rank ends with the reason, and no file stays."""

from __future__ import annotations

import errno
import os
import resource
import signal
import time
from pathlib import Path

import disks
import pytest
import ranks
import torch
import zoo

import zerobench
from zerobench import errors

CASE = zoo.CASES["bf16"]
TIMEOUT_S = 5.0
# What a loaded machine may take on top: processes wait for CPUs.
GRACE_S = 20.0
FAULTY = 1  # the rank
SMALL_BYTES = 32 << 10


def start(rank: ranks.Rank, path: str, model: torch.nn.Module | None = None, **offload):
    return zerobench.initialize(
        model or zoo.make(CASE),
        config=rank.config(
            stage=2,
            precision="bf16",
            timeout_s=TIMEOUT_S,
            offload_optimizer=zoo.SWAP | {"nvme_path": path} | offload,
        ),
    )


def ending(error: Exception, began: float, *folders: str) -> dict:
    return {
        "type": type(error).__name__,
        "text": str(error),
        "errno": getattr(error, "errno", None),
        "after_s": time.monotonic() - began,
        "left": [name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)],
    }


def start_on_a_bad_disk(rank: ranks.Rank, folder: str, fault: str) -> dict | str:
    """Return the error of each rank's start, or a text if the fault cannot be made on this machine."""
    offload: dict = {}
    model = None
    if fault == "memory":  # whose state takes far more than what is made before it
        model, offload = torch.nn.Linear(4096, 2048), {"chunk_numel": 4 << 20}
    path = f"{folder}/{rank.rank}"
    os.makedirs(path, exist_ok=True)
    if rank.rank == FAULTY:
        if fault == "full":
            refused = disks.mount_small(path, SMALL_BYTES)
            if refused:
                return refused
        elif fault == "file limit":
            disks.limit(resource.RLIMIT_FSIZE, SMALL_BYTES)
        elif fault == "missing":
            path += "/nowhere"
        elif fault == "not writable":
            os.chmod(path, 0o500)
            if os.geteuid() == 0:
                disks.give_up_capabilities(*disks.OVERRIDES)
        elif fault == "budget":
            offload["host_memory_bytes"] = 1000
        elif fault == "locked memory":
            offload["lock_memory"] = True
            if os.geteuid() == 0:
                disks.give_up_capabilities(disks.IPC_LOCK)
            disks.limit(resource.RLIMIT_MEMLOCK, 4096)
        elif fault == "memory":
            disks.limit(resource.RLIMIT_DATA, disks.private_bytes() + (16 << 20))
    began = time.monotonic()
    try:
        engine = start(rank, path, model, **offload)
    except (OSError, errors.Error) as error:
        return ending(error, began, path)
    engine.close()
    raise AssertionError("the rank began")


AT_START = {
    "full": (errno.ENOSPC, ["{path}", "are needed", "too little", "free some or give another path"]),
    "file limit": (errno.EFBIG, ["{path}", "ulimit -f"]),
    "missing": (errno.ENOENT, ["{path}/nowhere", "a directory that exists and is writable"]),
    "not writable": (errno.EACCES, ["{path}", "a directory that exists and is writable"]),
    "budget": (None, ["the budget allows 1000 bytes", "--host-memory-gib"]),
    "locked memory": (None, ["RLIMIT_MEMLOCK leaves", "are missing", "ulimit -l"]),
    "memory": (None, ["optimizer state and gradients on the host", "cannot be mapped", "`ulimit -d`"]),
}


def check(outcomes: list[dict | str], number: int | None, words: list[str], path: str) -> None:
    """One rank raised its own error, the others were told of it in its words."""
    for outcome in outcomes:
        if isinstance(outcome, str):
            pytest.skip(outcome)
    for rank, outcome in enumerate(outcomes):
        for word in words:
            assert word.format(path=path) in outcome["text"], outcome
        assert outcome["after_s"] < TIMEOUT_S + GRACE_S
        assert outcome["left"] == [], outcome
        if rank == FAULTY:
            assert outcome["errno"] == number, outcome
            assert outcome["type"] != "CommunicationError"
        else:
            assert outcome["type"] == "CommunicationError"
            assert f"rank {FAULTY}" in outcome["text"]


@pytest.mark.parametrize("fault", list(AT_START))
def test_one_rank_cannot_begin(tmp_path: Path, fault: str):
    number, words = AT_START[fault]
    outcomes = ranks.run(start_on_a_bad_disk, str(tmp_path), fault, world_size=3)
    check(outcomes, number, words, f"{tmp_path}/{FAULTY}")


def train_until_the_disk_fails(rank: ranks.Rank, folder: str, fault: str) -> dict | str:
    path = f"{folder}/{rank.rank}"
    os.makedirs(path, exist_ok=True)
    if rank.rank == FAULTY and fault == "full":
        refused = disks.mount_small(path, 1 << 20)
        if refused:
            return refused
    engine = start(rank, path, io_checksums=fault == "corrupted")
    began = time.monotonic()
    try:
        for step in range(20):
            zoo.run_plan(engine, CASE, step, rank.rank, [])
            if step == 2:
                # No write is under way behind it, which would mend a file that was cut.
                engine.full_optimizer_state("exp_avg")
            if step == 2 and rank.rank == FAULTY:
                spoil(path, fault)
                began = time.monotonic()
    except (OSError, errors.Error) as error:
        again = ""
        try:
            zoo.run_plan(engine, CASE, 0, rank.rank, [])
        except (OSError, errors.Error) as repeated:
            again = str(repeated)
        engine.close()
        if fault == "full" and rank.rank == FAULTY:
            os.unlink(f"{path}/filler")
        return ending(error, began, path) | {"again": again}
    raise AssertionError("nothing ended the training")


def spoil(path: str, fault: str) -> None:
    file = disks.swap_file(path, FAULTY)
    if fault == "full":
        disks.take_away(path, FAULTY)
    elif fault == "file limit":
        disks.limit(resource.RLIMIT_FSIZE, 4096)
    elif fault == "cut":
        os.truncate(file, 0)
    else:
        with file.open("r+b") as opened:
            opened.write(os.urandom(file.stat().st_size))


IN_A_SWAP = {
    "full": (errno.ENOSPC, ["write of ", "{path}/zerobench-swap.", "free space, or give another path"]),
    "file limit": (errno.EFBIG, ["write of ", "{path}/zerobench-swap.", "ulimit -f"]),
    "cut": (errno.EIO, ["read of ", "{path}/zerobench-swap.", "the file ends there"]),
    "corrupted": (errno.EBADMSG, ["{path}/zerobench-swap.", "differs from what was written"]),
}


@pytest.mark.parametrize("fault", list(IN_A_SWAP))
def test_one_ranks_disk_fails_in_a_swap(tmp_path: Path, fault: str):
    number, words = IN_A_SWAP[fault]
    outcomes = ranks.run(train_until_the_disk_fails, str(tmp_path), fault, world_size=3)
    check(outcomes, number, words, f"{tmp_path}/{FAULTY}")
    for outcome in outcomes:
        assert outcome["again"] == outcome["text"]  # later calls raise the same


def swap_without_end(rank: ranks.Rank, path: str, marks: str) -> dict:
    engine = start(rank, path)
    step = 0
    while True:
        try:
            zoo.run_plan(engine, CASE, step, rank.rank, [])
        except errors.CommunicationError as error:
            engine.close()
            return {"text": str(error)}
        step += 1
        if step == 3:
            (Path(marks) / str(rank.rank)).touch()


def train_a_step(rank: ranks.Rank, path: str) -> list[str]:
    engine = start(rank, path)
    zoo.run_plan(engine, CASE, 0, rank.rank, [])
    there = os.listdir(path)
    engine.full_parameters()  # a file may go when all have looked
    engine.close()
    return there


@pytest.mark.parametrize("killed", [(FAULTY,), (0, 1)])
def test_a_rank_is_killed_in_a_swap_and_its_file_goes_with_the_next_start(tmp_path: Path, killed):
    disk, marks = tmp_path / "disk", tmp_path / "marks"
    disk.mkdir()
    marks.mkdir()
    with ranks.Group(swap_without_end, str(disk), str(marks)) as group:
        deadline = time.monotonic() + 60
        while len(list(marks.iterdir())) < 2:
            assert time.monotonic() < deadline, "the ranks did not begin to train"
            time.sleep(0.02)
        stale = {disks.swap_file(str(disk), rank).name for rank in killed}
        for rank in killed:
            group.kill(rank, signal.SIGKILL)
        group.wait(timeout_s=TIMEOUT_S + GRACE_S)
        for rank in {0, 1} - set(killed):
            assert f"rank {FAULTY}" in group.outcomes[rank].value["text"]
    assert {path.name for path in disk.iterdir()} == stale  # the others have removed their own
    for there in ranks.run(train_a_step, str(disk)):
        assert len(there) == 2 and not stale & set(there)
    assert list(disk.iterdir()) == []

"""A rank that falls away while others train, on CPU ranks (tests/dist) and on GPUs (tests/gpu) alike."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ranks
import small_models
import zoo

import zerobench
from zerobench import errors

CASE = zoo.Case(small_models.Chain, steps=6)
VICTIM = 1  # of three ranks
TIMEOUT_S = 120.0
SOON_S = 2.0
ON_HOST = {"device": "cpu", "chunk_numel": 128}


class Planted(Exception):
    """Return the error of the rank at fault."""


def start(rank: ranks.Rank, *, device: str = "cpu", **config: Any) -> Any:
    settings = rank.config(timeout_s=TIMEOUT_S, **(zoo.optimizer_config(CASE) | config))
    return zerobench.initialize(zoo.make(CASE).to(device), config=settings)


def train(engine: Any, rank: ranks.Rank, *, done: int, steps: int, device: str = "cpu") -> None:
    for step in range(done, steps):
        zoo.run_plan(engine, CASE, step, rank.rank, [], device)


def raise_planted(*_: Any) -> None:
    raise Planted("planted")


def plant(engine: Any, where: str, fault: Callable[..., Any]) -> Callable[[], None]:
    """Let the next step of this rank come to ``fault`` there; return what takes it away again."""
    if where == "forward":
        return engine.module.blocks[1].register_forward_pre_hook(fault).remove
    if where == "backward":
        return engine.module.blocks[1].up.weight.register_hook(fault).remove
    engine.optimizer.hyperparameters = fault
    return lambda: delattr(engine.optimizer, "hyperparameters")


def end_process(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    ctypes.pythonapi.Py_Exit(1)  # as a script's process ends, which those of multiprocessing do not


def await_file(path: Path) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.01)


def note_time(folder: str, name: object) -> None:
    (Path(folder) / "being written").write_text(str(time.monotonic()))
    (Path(folder) / "being written").rename(Path(folder) / f"{name} fell")


def heard(engine: Any, rank: ranks.Rank, folder: str, name: object, device: str = "cpu") -> dict[str, Any]:
    """Return the error of a rank that trains on, and the seconds from the fault to it."""
    try:
        train(engine, rank, done=2, steps=50, device=device)
    except errors.CommunicationError as error:
        now = time.monotonic()
        (Path(folder) / f"{name} {rank.rank}").touch()
        fell = float((Path(folder) / f"{name} fell").read_text())
        return {"error": str(error), "rank": error.rank, "after_s": now - fell}
    raise AssertionError("went on without the other rank")

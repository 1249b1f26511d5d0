"""State of each rank as the launcher tracks it while a job runs. Imports no torch."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerobench.bench.protocol.job import Progress, RankError, Report, Skipped, Turn

ProgressCallback = Callable[[int, Progress], None]
TurnCallback = Callable[[int, Turn], None]


@dataclass(kw_only=True)
class RankState:
    """State of one rank while its job runs."""

    rank: int
    pid: int
    pipe: int  # a socket: the rank's messages, and orders to it
    buffer: bytes = b""
    progress: Progress | None = None
    last_sign_s: float = field(default_factory=time.monotonic)
    report: Report | None = None
    skipped: Skipped | None = None
    error: RankError | None = None
    error_s: float = math.inf
    exit_code: int | None = None
    exit_signal: int | None = None
    exit_s: float = math.inf  # time.time()
    open: bool = True

    @property
    def exited(self) -> bool:
        return self.exit_code is not None or self.exit_signal is not None

    @property
    def ended(self) -> bool:
        return self.exited and not self.open

    @property
    def spoke(self) -> bool:
        return self.report is not None or self.skipped is not None or self.error is not None

    @property
    def failed(self) -> bool:
        return self.error is not None or (self.ended and not self.spoke)


def read_pipe(
    state: RankState, on_progress: ProgressCallback | None, on_turn: TurnCallback | None = None
) -> bool:
    """Take in what a rank wrote; False at the end of its pipe."""
    try:
        chunk = os.read(state.pipe, 1 << 16)
    except BlockingIOError:
        return True
    except ConnectionResetError:  # it ended before it read an order
        chunk = b""
    if not chunk:
        state.open = False
        return False
    *lines, state.buffer = (state.buffer + chunk).split(b"\n")
    for line in lines:
        take_message(state, json.loads(line), on_progress, on_turn)
    return True


def take_message(
    state: RankState,
    message: dict[str, Any],
    on_progress: ProgressCallback | None,
    on_turn: TurnCallback | None,
) -> None:
    kind, body = message["kind"], message["body"]
    if kind == "progress":
        state.last_sign_s = time.monotonic()
        state.progress = Progress.model_validate(body)
        if on_progress is not None:
            on_progress(state.rank, state.progress)
    elif kind == "turn":
        state.last_sign_s = time.monotonic()
        if on_turn is not None:
            on_turn(state.rank, Turn.model_validate(body))
    elif kind == "report":
        state.report = Report.model_validate(body)
    elif kind == "skipped":
        state.skipped = Skipped.model_validate(body)
    else:
        state.error, state.error_s = RankError.model_validate(body), time.monotonic()


def last_sign_s(ranks: Mapping[int, RankState]) -> float:
    return max(state.last_sign_s for state in ranks.values())


def where(pid: int, stack_file: Path) -> str:
    """The innermost Python function of a rank that was sent SIGUSR1 (faulthandler wrote its stack)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        state = ""
    if state in ("T", "t"):
        return "a stop (SIGSTOP)"
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', stack_file.read_text(errors="replace"))
    if frame is None:
        return "code that runs no Python"
    return f"{frame[3]} ({Path(frame[1]).name}:{frame[2]})"

"""How a job ended, in a status and one line, judged from what its ranks said and how they ended. Imports no torch."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zerobench.bench.launch.ranks import RankState
from zerobench.bench.protocol.job import Report
from zerobench.results.sizes import GIB


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended: every rank's report, or one line that says why not."""

    status: Literal["ok", "oom", "failed", "skipped"]
    reports: dict[int, Report] = field(default_factory=dict)
    error: str | None = None
    oom_tier: Literal["device", "host"] | None = None  # whose memory ran out
    secondary: bool = False  # failed only because other ranks did
    # time.time() of the first failure, which on several hosts tells cause from effect.
    failed_at_s: float = math.inf


def raised_at_s(state: RankState) -> float:
    return state.error.at_s if state.error is not None else math.inf


def failed_at_s(state: RankState) -> float:
    """When a rank raised or ended without a word, as time.time()."""
    return raised_at_s(state) if state.spoke else state.exit_s


def judge(
    ranks: list[RankState],
    *,
    stalled: Mapping[int, str],
    timeout_s: float,
    was_oom_killed: bool,
    rank_memory_bytes: int | None = None,
) -> Outcome:
    """The outcome and its one line. What ended a rank from outside counts before what its peers said about it. Under
    ``rank_memory_bytes`` (--rank-memory-gib) some libraries end their process where they get no memory."""
    reports = {state.rank: state.report for state in ranks if state.report is not None}
    if len(reports) == len(ranks):
        return Outcome(status="ok", reports=reports)
    skipped = [state.skipped for state in ranks if state.skipped is not None]
    if len(skipped) == len(ranks):
        return Outcome(status="skipped", error=skipped[0].reason)
    errors = sorted((state for state in ranks if state.error is not None), key=raised_at_s)
    memory = [state for state in errors if state.error is not None and state.error.out_of_memory]
    if memory and memory[0].error is not None:
        return Outcome(status="oom", error=_error_line(memory[0]), oom_tier=memory[0].error.out_of_memory)
    killed = [state for state in ranks if state.exit_signal is not None and not state.spoke]
    if killed and was_oom_killed and any(state.exit_signal == signal.SIGKILL for state in killed):
        line = f"{_who(killed)} killed by the kernel's out-of-memory killer (the host's count of such kills rose)"
        return Outcome(status="oom", error=f"{line}: {_when(killed[0])}", oom_tier="host")
    if killed:
        name = signal.Signals(killed[0].exit_signal or 0).name
        hint = _want_of_memory(rank_memory_bytes) if killed[0].exit_signal == signal.SIGABRT else ""
        return Outcome(status="failed", error=f"{_who(killed)} killed by {name}: {_when(killed[0])}{hint}")
    if stalled:
        places = ", ".join(f"rank {rank} in {place}" for rank, place in sorted(stalled.items()))
        line = f"no progress for {timeout_s:g} s (--timeout): {places}"
        return Outcome(status="failed", error=line + (f"; {_error_line(errors[0])}" if errors else ""))
    own = [state for state in errors if state.error is not None and not state.error.communication]
    if own or errors:
        return Outcome(status="failed", error=_error_line((own or errors)[0]), secondary=not own)
    ended = [state for state in ranks if state.exited and not state.spoke]
    if ended:
        return Outcome(
            status="failed",
            error=f"rank {ended[0].rank} ended with exit code {ended[0].exit_code} and no report"
            f"{_want_of_memory(rank_memory_bytes)}",
        )
    silent = [state for state in ranks if not state.spoke]
    return Outcome(
        status="failed", error=f"{_who(silent)} stopped after ranks elsewhere failed", secondary=True
    )


def _who(states: Iterable[RankState]) -> str:
    numbers = [str(state.rank) for state in states]
    return f"rank {numbers[0]} was" if len(numbers) == 1 else f"ranks {', '.join(numbers)} were"


def _when(state: RankState) -> str:
    if state.progress is None:
        return "before its first step"
    return f"after step {state.progress.step} of {state.progress.phase}"


def _want_of_memory(rank_memory_bytes: int | None) -> str:
    if rank_memory_bytes is None:
        return ""
    return f"; the {rank_memory_bytes / GIB:.3g} GiB that --rank-memory-gib allows a rank may be too little"


def _error_line(state: RankState) -> str:
    assert state.error is not None
    return f"rank {state.rank}: {state.error.type}: {state.error.message}"


def oom_kill_num() -> int:
    """How many processes the kernel's out-of-memory killer has killed on this host so far."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0

"""SIGTERM, which schedulers and `kill` send, and SIGHUP of a terminal that closes end a command as Ctrl-C does."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

_ended_by = signal.SIGINT


def interrupt_on_signals() -> None:
    """Once: while the command ends, further ones are ignored. What is ignored already (nohup) stays so."""

    def interrupt(signum: int, _: Any) -> None:
        global _ended_by
        _ended_by = signal.Signals(signum)
        for each in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:
            signal.signal(each, interrupt)


def ignore_further() -> None:
    """A second Ctrl-C shall not cost what the first one left to be written and shown."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Hold back signals that arrive within, and raise the first at the end unless an error ends the block first."""
    came: list[int] = []
    kept = {
        each: signal.signal(each, lambda signum, _: came.append(signum))
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(each) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
    if came:
        signal.raise_signal(came[0])


def exit_code() -> int:
    """Return the exit code of an interrupted command, 128 plus the signal as in shells: 130 after Ctrl-C, 143 after
    SIGTERM, 129 after SIGHUP."""
    return 128 + _ended_by

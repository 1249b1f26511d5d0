"""SIGTERM, which schedulers and `kill` send, ends a command as Ctrl-C does."""

from __future__ import annotations

import signal
from typing import Any


def interrupt_on_sigterm() -> None:
    """Once: while the command ends, further ones are ignored."""

    def interrupt(signum: int, _: Any) -> None:
        signal.signal(signum, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def exit_code() -> int:
    """Of an interrupted command, 128 and the signal as shells have it: 143 after SIGTERM, 130 after Ctrl-C."""
    terminated = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    return 128 + (signal.SIGTERM if terminated else signal.SIGINT)

"""Tell the other ranks when this one stops taking part: an exception leaves a call, or the process ends.

What is told takes effect only where a rank waits for this one (csrc/comm/communicator.h, stop).
"""

from __future__ import annotations

import atexit
import functools
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from zerobench.errors import CommunicationError

if TYPE_CHECKING:
    from zerobench._core import Engine as CoreEngine

_Call = TypeVar("_Call", bound=Callable[..., Any])
_MOST_LETTERS = 150
_cores: weakref.WeakSet[CoreEngine] = weakref.WeakSet()


def told_to_peers(call: _Call) -> _Call:
    """Return the engine's method ``call``, which tells the peers of an exception that leaves it."""

    @functools.wraps(call)
    def told(engine: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(engine, *args, **kwargs)
        except CommunicationError:
            raise  # it is everybody's
        except BaseException as error:
            engine._core.stop(f"raised {_text_of(error)}")
            raise

    return cast(_Call, told)


def tell_peers_of_the_end(core: CoreEngine) -> None:
    """Have the peers told when the interpreter begins to end, which may take it long, and ``core`` is still there."""
    _cores.add(core)


@atexit.register
def _tell_peers() -> None:
    error = getattr(sys, "last_value", None)  # what ends this process, if an exception does
    why = "is ending its process" + ("" if error is None else f" after {_text_of(error)}")
    for core in list(_cores):
        core.stop(why, for_good=True)


def _text_of(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__} ({lines[0][:_MOST_LETTERS]})" if lines else type(error).__name__

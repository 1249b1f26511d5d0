"""The error for a loss that two engines have a part in, raised by the engine whose backward runs."""

from __future__ import annotations

import re

from zerobench.errors import StateError

# How the core of the other engine begins: autograd passes on the text of an error, not its type or what raised it.
_REFUSALS = {
    "parameter": re.compile("a gradient of '(.+?)' arrived outside"),
    "unit": re.compile("backward reached unit '(.*?)' outside"),
}


def error_of_another_engine(error: BaseException) -> StateError | None:
    """Return the error to raise where ``error``, raised in an engine's own backward, is another engine's refusal."""
    found = ((kind, pattern.search(str(error))) for kind, pattern in _REFUSALS.items())
    place = next((f"{kind} '{match[1]}'" for kind, match in found if match), None)
    if place is None:
        return None
    return StateError(
        f"this backward reached {place} of another engine, and each engine takes gradients in its own backward only. "
        "To train both models by this loss (two towers, actor and critic), make one engine for both: give "
        "zerobench.initialize a module that holds both models and calls them in its forward. To train one model "
        "through the other (a generator through its discriminator), call requires_grad_(False) on the other before "
        "its forward and requires_grad_(True) after this backward; the other's engine needs stage 0, 1 or 2."
    )

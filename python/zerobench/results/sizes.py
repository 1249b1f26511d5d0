"""How sizes, counts and lists are written. Imports nothing of zerobench."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def memory_unit(values: Iterable[int | None]) -> tuple[str, int]:
    """One unit for a whole table or plot."""
    largest = max((value for value in values if value is not None), default=0)
    if largest >= 8 * GIB:
        return "GiB", GIB
    return ("MiB", MIB) if largest >= MIB or largest == 0 else ("KiB", KIB)


def bytes_text(value: int) -> str:
    unit, unit_bytes = memory_unit([value])
    return f"{value / unit_bytes:,.1f} {unit}"


def count_text(value: int) -> str:
    """A parameter count: 912,384 as 0.91 M."""
    for size, word in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.5 * size:
            return f"{value / size:.3g} {word}"
    return str(value)


def ms_text(value: float) -> str:
    return f"{value:.0f} ms" if value >= 1000 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def duration_text(seconds: float) -> str:
    """Return such as "8 s", "3 min" or "2 h 5 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, rest = divmod(minutes, 60)
    return f"{minutes} min" if not hours else f"{hours} h {rest} min" if rest else f"{hours} h"


def rate_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def range_text(values: Sequence[float], form: str = "") -> str:
    """Return such as "2 to 5", the smallest and the largest value by a format, or one where both read the same."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def join_words(words: Sequence[str]) -> str:
    """Such as "a, b and c"; with semicolons between words that hold commas, as labels of rows may."""
    between = "; " if any(", " in word for word in words) else ", "
    return words[0] if len(words) == 1 else f"{between.join(words[:-1])} and {words[-1]}"

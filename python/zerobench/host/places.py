"""Places of ranks among those of their host, or of their machine. docs/reference/training.md, "Ranks", defines both.
Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Place = tuple[int, int]
"""Index of a rank among those of one place, and their number."""


def place_among(
    rank: int, names: Sequence[Any], told: Sequence[Sequence[int] | None], *, is_part: bool = False
) -> Place:
    """Return the place of ``rank`` among the ranks of its name: as its launcher numbered it where these numbers fit,
    else by rank. Each rank that calls this with the same ``names`` and ``told`` gets a place of its own.

    ``names`` of hosts or machines and ``told`` numbers of launchers are by rank. With ``is_part``, launchers started
    other ranks as well: their numbers then leave places free.
    """
    here = [other for other, name in enumerate(names) if name == names[rank]]
    of_launcher = [place for other in here if (place := told[other])]
    sizes = {size for _, size in of_launcher}
    fit = len({index for index, _ in of_launcher}) == len(here) and len(sizes) == 1
    if fit and (is_part or sizes == {len(here)}):
        index, size = of_launcher[here.index(rank)]
        return index, size
    return here.index(rank), len(here)

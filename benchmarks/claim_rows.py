"""Measured rows of the committed results, and pairs of them that differ in one thing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from zerobench.results.files import read_results
from zerobench.results.rows import by_workload, is_ranked
from zerobench.results.schema import Row
from zerobench.results.settings import Changes, settings_that_change
from zerobench.results.sizes import GIB, MIB
from zerobench.results.stats import median

ROOT = Path(__file__).parents[1]
GPU_BYTES = {"h200": 139.8 * GIB, "h100": 79.6 * GIB}
"""Memory of a GPU, by its name in the name of a page."""
FAMILY = re.compile(r"(zero|deepspeed|mfsdp)([0-3])")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row that was measured."""

    source: str
    group: object
    """Rows of one group differ in strategy and tier alone."""
    family: str
    stage: int
    offload: str
    ranks: int
    on_gpu: bool
    ms: float
    peak_bytes: float | None = None
    device_bytes: float | None = None

    @property
    def name(self) -> str:
        tier = "" if self.offload == "none" else f", {self.offload}"
        return f"{self.family}{self.stage}{tier}"


Pair = tuple[Measured, Measured]
"""A row and the one that is held against it."""


def measured_rows(root: Path = ROOT) -> list[Measured]:
    """Return the rows of all results that are committed."""
    folder = root / "benchmarks"
    pages = [row for path in sorted(folder.glob("*.md")) for row in page_rows(path, root)]
    files = [row for path in sorted(folder.rglob("results.json")) for row in file_rows(path, root)]
    return pages + files


def file_rows(path: Path, root: Path) -> Iterator[Measured]:
    """Yield the rows of a result file that may be ranked."""
    keys = settings_that_change(Changes.FLOOR | Changes.STEP)
    for at, rows in enumerate(by_workload(read_results(path).rows)):
        for row in filter(is_ranked, rows):
            family = FAMILY.fullmatch(row.strategy)
            if family is not None and row.step_time_ms is not None:
                source = path.relative_to(root).as_posix()
                point = tuple(getattr(row.settings, key) for key in keys)
                yield Measured(
                    source=source,
                    group=(source, at, point),
                    family=family[1],
                    stage=int(family[2]),
                    offload=row.settings.offload,
                    ranks=row.settings.world_size,
                    on_gpu=row.settings.device == "cuda",
                    ms=row.step_time_ms.median,
                    peak_bytes=row.peak_device_bytes,
                    device_bytes=_device_bytes(row),
                )


def _device_bytes(row: Row) -> float | None:
    if not row.peak_device_bytes or not row.peak_device_pct:
        return None
    return 100.0 * row.peak_device_bytes / row.peak_device_pct


def page_rows(path: Path, root: Path) -> Iterator[Measured]:
    """Yield the rows of a page's tables. Its name tells the GPU and, after an x, how many there are."""
    kind = re.search(r"_(h\d+)(?:x(\d+))?$", path.stem)
    if kind is None or kind[1] not in GPU_BYTES:
        return
    for number, table in enumerate(tables(path.read_text(encoding="utf-8"))):
        for cells in table[1:]:
            for found in each_of(dict(zip(table[0], cells, strict=False))):
                family = FAMILY.fullmatch(cell_of(found, "row", "mode"))
                ms = number_in(cell_of(found, "step ms", "ms a step"))
                if family is not None and ms is not None:
                    yield Measured(
                        source=path.relative_to(root).as_posix(),
                        group=(path.name, number, cell_of(found, "precision")),
                        family=family[1],
                        stage=int(family[2]),
                        offload=cell_of(found, "offload") or "none",
                        ranks=int(kind[2] or 1),
                        on_gpu=True,
                        ms=ms,
                        peak_bytes=_peak_bytes(found),
                        device_bytes=GPU_BYTES[kind[1]],
                    )


def _peak_bytes(cells: dict[str, str]) -> float | None:
    for head, unit in (("peak GiB", GIB), ("peak MiB", MIB)):
        value = number_in(cell_of(cells, head))
        if value is not None:
            return value * unit
    return None


def each_of(cells: dict[str, str]) -> list[dict[str, str]]:
    """Return the rows that one line gives with slashes between, as in "zero0 / zero1"."""
    parts = zip_longest(*(cell.split(" / ") for cell in cells.values()), fillvalue="")
    return [dict(zip(cells, each, strict=True)) for each in parts]


def tables(text: str) -> list[list[list[str]]]:
    """Return the tables of a page: the cells of the head, then those of each row."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not inside:
            found.append([cells])
        elif not set("".join(cells)) <= set("-: "):
            found[-1].append(cells)
        inside = True
    return found


def cell_of(cells: dict[str, str], *heads: str) -> str:
    """Return the first cell whose head begins with one of these words; empty if there is none."""
    return next((cell for head, cell in cells.items() if head.startswith(heads)), "")


def number_in(cell: str) -> float | None:
    """Return the number before an error, the median of several with commas, or None."""
    texts = re.split(r"[±;]", cell)[0].split(",")
    if not all(re.fullmatch(r"\s*\d+(\.\d+)?\s*", text) for text in texts):
        return None
    return median([float(text) for text in texts])


def stages(lower: int, higher: int, *, one_rank: bool = False) -> Callable[[Sequence[Measured]], list[Pair]]:
    """Return a function that pairs rows of the higher stage with those of the lower one, both without offload."""

    def find(rows: Sequence[Measured]) -> list[Pair]:
        kept = [row for row in rows if row.offload == "none" and (row.ranks == 1) is one_rank]
        return _pairs(kept, lambda row: row.stage == higher, lambda row: row.stage == lower)

    return find


def tier(offload: str) -> Callable[[Sequence[Measured]], list[Pair]]:
    """Return a function that pairs rows with an offload with the same ones without."""

    def find(rows: Sequence[Measured]) -> list[Pair]:
        pairs = _pairs(rows, lambda row: row.offload == offload, lambda row: row.offload == "none")
        return [(row, other) for row, other in pairs if row.stage == other.stage]

    return find


def little_used(share: float) -> Callable[[Sequence[Measured]], list[Pair]]:
    """Return a function that pairs the faster of stages 0 and 1 with the faster of stages 2 and 3, where the first
    takes at most this share of its device."""

    def find(rows: Sequence[Measured]) -> list[Pair]:
        found = []
        for group in _groups(row for row in rows if row.offload == "none" and row.ranks > 1):
            low = min((row for row in group if row.stage < 2), key=lambda row: row.ms, default=None)
            high = min((row for row in group if row.stage >= 2), key=lambda row: row.ms, default=None)
            if (
                low
                and high
                and low.peak_bytes
                and low.device_bytes
                and low.peak_bytes <= share * low.device_bytes
            ):
                found.append((low, high))
        return found

    return find


def nothing(rows: Sequence[Measured]) -> list[Pair]:
    """Return no pairs: no committed row can tell."""
    return []


def _groups(rows: Iterable[Measured]) -> list[list[Measured]]:
    found: dict[object, list[Measured]] = {}
    for row in rows:
        found.setdefault((row.group, row.family), []).append(row)
    return list(found.values())


def _pairs(
    rows: Iterable[Measured], is_one: Callable[[Measured], bool], is_other: Callable[[Measured], bool]
) -> list[Pair]:
    return [
        (row, other)
        for group in _groups(rows)
        for row in filter(is_one, group)
        for other in list(filter(is_other, group))
    ]


def slower_pct(row: Measured, other: Measured) -> float | None:
    return 100.0 * (row.ms / other.ms - 1.0)


def times(row: Measured, other: Measured) -> float | None:
    return row.ms / other.ms


def freed_pct(row: Measured, other: Measured) -> float | None:
    if row.peak_bytes is None or other.peak_bytes is None:
        return None
    return 100.0 * (1.0 - row.peak_bytes / other.peak_bytes)

"""Result files: read with their version checked, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zerobench.errors import DataError, Error
from zerobench.results.rows import by_workload, fastest
from zerobench.results.schema import SCHEMA_VERSION, Results, Row
from zerobench.results.stats import FEWEST_SAMPLES

AnyPath = str | os.PathLike[str]

MOST_DIGITS = 40  # of a whole number in a result file
MOST_LEVELS = 64  # that values of a result file are nested in each other


def read_results(path: AnyPath) -> Results:
    """The parsed results.json, given itself or its folder. Raises DataError for what is no result file, or one of a
    newer version."""
    file = Path(path)
    if file.is_dir():
        file = file / "results.json"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{file} does not exist: give a results.json or the folder that holds one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}") from None
    try:
        content = json.loads(text, parse_int=_bounded_int)
        _expect_shallow(content)
    except (ValueError, RecursionError) as error:  # numbers of too many digits, nested too deeply
        raise DataError(
            f"{file} is not a zerobench result file: {error}. Give a whole results.json that zerobench compare wrote"
        ) from None
    _expect_known_version(file, content)
    try:
        results = Results.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise DataError(f"{file} is not a zerobench result file: {place}: {first['msg']}") from None
    _drop_unfounded(results)
    return results


def _bounded_int(digits: str) -> int:
    """Return the number, which must be one that arithmetic with floats can take."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits, and at most {MOST_DIGITS} are allowed")
    return int(digits)


def _expect_shallow(content: Any) -> None:
    """Raise ValueError for content that is nested deeper than any result file, which pydantic cannot write again."""
    level = [content]
    for _ in range(MOST_LEVELS):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise ValueError(f"it is nested deeper than {MOST_LEVELS} levels")


def _drop_unfounded(results: Results) -> None:
    """Errors and outliers that older versions told from too few samples."""
    for rows in by_workload(results.rows):
        best = fastest(rows)
        for row in rows:
            if _has_few_samples(row) or (best is not None and _has_few_samples(best)):
                row.relative_uncertainty = None
            if row.step_time_ms is not None and _has_few_samples(row):
                row.step_time_ms.outliers = []


def _has_few_samples(row: Row) -> bool:
    return row.step_time_ms is not None and len(row.step_time_ms.samples) < FEWEST_SAMPLES


def _expect_known_version(file: Path, content: Any) -> None:
    """Before anything else is judged: what a newer version holds may look wrong to this one."""
    version = content.get("schema_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise DataError(
            f"{file} has schema_version {version} and this zerobench reads up to {SCHEMA_VERSION}: upgrade zerobench"
        )


def replace_file(target: Path, write: Callable[[Path], object]) -> None:
    """The whole new file or the old one; nothing is left beside it when writing fails."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        write(partial)
        partial.replace(target)
    except BaseException:  # Ctrl-C, too
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


class OutputError(Error):
    """Results cannot be written; the message names the file and the reason."""


def cannot_be_written(path: Path, error: OSError) -> OutputError:
    cure = "free space or give another --output-dir; what was complete before stays as it was"
    if isinstance(error, FileNotFoundError):
        cure = "its folder was removed; keep it until the comparison ends"
    return OutputError(f"{path} cannot be written ({error.strerror or error}): {cure}")


def write_atomically(path: Path, content: bytes, *, sync: Callable[[int], object] = os.fsync) -> None:
    """The whole new file or the whole old one, also after a crash of the machine: ``sync`` is called before the file
    has its name, and again once it has."""

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            sync(file.fileno())

    replace_file(path, write)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        sync(folder)
    finally:
        os.close(folder)

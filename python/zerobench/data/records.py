"""Text in a field of records: JSON lines and Parquet, as the hub's datasets come."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerobench.errors import DataError

DEFAULT_FIELD = "text"
_JSON_LINES = (".jsonl", ".ndjson")
_PARQUET = (".parquet",)
SUFFIXES = (*_JSON_LINES, *_PARQUET)


def is_kind_of(path: Path) -> bool:
    """Return whether the file's name is one of a file of records."""
    return path.suffix.lower() in SUFFIXES


def read(path: Path, field: str | None, *, limit_bytes: int) -> bytearray:
    """Return the texts of ``field`` (None: "text"), a newline after each. Raises DataError for a file that is none of
    its kind, has no such field, or holds more than ``limit_bytes``, and where the package that reads it is missing."""
    asked = DEFAULT_FIELD if field is None else field
    texts = _of_json_lines if path.suffix.lower() in _JSON_LINES else _of_parquet
    joined = bytearray()
    for text in texts(path, asked):
        joined += text.encode("utf-8", errors="replace")
        joined += b"\n"
        if len(joined) > limit_bytes:
            raise DataError(
                f"{path}: holds more than {limit_bytes / (1 << 30):g} GiB of text in {asked!r}, which every rank would "
                "read: write it to a text file (which is mapped, not read), or give --data a part of it"
            )
    if not joined:
        raise DataError(
            f"{path}: holds no text in {asked!r}: give --data another file, or name another field"
        )
    return joined


def _of_json_lines(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{path}: line {number} is not JSON ({error}): give one object a line, or rename the "
                    "file if it is text"
                ) from None
            if not isinstance(record, dict):
                raise DataError(f"{path}: line {number} is not a JSON object: give one object a line")
            yield _text(path, f"line {number}", record, field)


def _of_parquet(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path}: reading Parquet needs pyarrow: pip install pyarrow") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise _lacks(path, "it", field, names)
            for batch in file.iter_batches(columns=[field]):
                for value in batch.column(0).to_pylist():
                    yield _text(path, "a row", {field: value}, field)
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path}: cannot be read as Parquet ({' '.join(str(error).split())}): give a whole file"
        ) from None


def _text(path: Path, where: str, record: dict[str, Any], field: str) -> str:
    if field not in record:
        raise _lacks(path, where, field, list(record))
    value = record[field]
    if not isinstance(value, str):
        raise DataError(
            f"{path}: {where} has a {type(value).__name__} in {field!r}, not text: name a field with text as "
            "--text-field"
        )
    return value


def _lacks(path: Path, where: str, field: str, names: list[str]) -> DataError:
    return DataError(
        f"{path}: {where} has no field {field!r}: name one of its fields as --text-field ({', '.join(names)})"
    )

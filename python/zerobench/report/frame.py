"""Rows of results as pandas frames and as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from pydantic import BaseModel

from zerobench.errors import DataError
from zerobench.report.phases import phases_change_pct, phases_pct
from zerobench.results.files import AnyPath, read_results, replace_file
from zerobench.results.schema import Results, Row

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]


def flat_row(row: Row) -> dict[str, Any]:
    """One level of dotted keys in the order of the schema; lists stay lists, values that are not there stay None."""
    flat: dict[str, Any] = {}
    _flatten_model(row, type(row), "", flat)
    return flat


def flat_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """All rows, each with what the report derives from it and its baseline."""
    flats = []
    for row in rows:
        flat = flat_row(row)
        _flatten_value(phases_pct(row), "phases_pct", flat)
        _flatten_value(phases_change_pct(row, rows), "phases_change_pct", flat)
        flats.append(flat)
    return flats


def _flatten_model(model: BaseModel | None, kind: type[BaseModel], prefix: str, flat: dict[str, Any]) -> None:
    """A nested model that is null gives its fields as null, so that a column exists whether or not a row has it."""
    for name, field in kind.model_fields.items():
        value = getattr(model, name) if model is not None else None
        nested = _model_of(field.annotation)
        if nested is not None:
            _flatten_model(value, nested, f"{prefix}{name}.", flat)
        elif value is not None or not _is_dict(field.annotation):
            _flatten_value(value, f"{prefix}{name}", flat)
    for name, value in ((model.model_extra if model is not None else None) or {}).items():
        _flatten_value(value, f"{prefix}{name}", flat)


def _flatten_value(value: Any, key: str, flat: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _flatten_value(item, f"{key}.{name}", flat)
    else:
        flat[key] = value


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if get_origin(annotation) is list:
        return None
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _list_columns(kind: type[BaseModel], prefix: str = "") -> set[str]:
    """Return the names of the columns of lists of all rows, also of rows in which they are null."""
    found: set[str] = set()
    for name, field in kind.model_fields.items():
        nested = _model_of(field.annotation)
        if nested is not None:
            found |= _list_columns(nested, f"{prefix}{name}.")
        elif any(get_origin(one) is list for one in (field.annotation, *get_args(field.annotation))):
            found.add(f"{prefix}{name}")
    return found


def _is_dict(annotation: Any) -> bool:
    return any(get_origin(kind) is dict for kind in (annotation, *get_args(annotation)))


def is_numeric_column(name: str) -> bool:
    """Return whether a row of this version can have a number in the column."""
    kind: type[BaseModel] = Row
    parts = name.split(".")
    for place, part in enumerate(parts, 1):
        if part not in kind.model_fields:
            return False
        annotation = kind.model_fields[part].annotation
        nested = _model_of(annotation)
        if nested is None:
            is_last = place == len(parts)
            return not is_last if _is_dict(annotation) else is_last and _is_number(annotation)
        kind = nested
    return False


def _is_number(annotation: Any) -> bool:
    """Return whether an annotation such as ``float | None`` takes a number."""
    if get_origin(annotation) is list:
        return False
    kinds = (get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in get_args(annotation))
    return any(kind in (int, float) for kind in (annotation, *kinds))


def load(path: AnyPath | Iterable[AnyPath], *more: AnyPath) -> pandas.DataFrame:
    """The rows of one or several results as a flat frame; a path is a results.json or its folder.

    Columns are dotted (``step_time_ms.median``, ``settings.batch_size``, ``memory_bytes.device.parameters``); raw
    samples stay lists. Several paths add a ``source`` column. ``frame.attrs["results"]`` holds each file's machine,
    versions, command and created. Raises DataError for what is no result file of this version or an older one."""
    import pandas

    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    paths += more
    if not paths:
        raise DataError("load needs at least one results.json or folder")
    records: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    for item in paths:
        results = read_results(item)
        about[str(item)] = results.model_dump(exclude={"rows"})
        source = {"source": str(item)} if len(paths) > 1 else {}
        records += [{**source, **flat} for flat in flat_rows(results.rows)]
    columns = list(dict.fromkeys(key for record in records for key in record))
    if not records:
        columns = _columns_without_rows()
    frame = pandas.DataFrame({column: [record.get(column) for record in records] for column in columns})
    frame.attrs["results"] = about
    return frame


def _columns_without_rows() -> list[str]:
    """Return the columns that every row has."""
    flat: dict[str, Any] = {}
    _flatten_model(None, Row, "", flat)
    return list(flat)


def write_csv(results: Results, path: AnyPath) -> None:
    """The summary of every row: the frame's columns without raw lists. An empty cell is a value that is not there. The
    file is replaced as a whole. Raises OSError."""
    flats = flat_rows(results.rows)
    raw = _list_columns(Row) | {
        key for flat in flats for key, value in flat.items() if isinstance(value, list)
    }
    columns = list(dict.fromkeys(key for flat in flats for key in flat)) or _columns_without_rows()
    buffer = io.StringIO()
    writer = csv.DictWriter(
        buffer, [key for key in columns if key not in raw], extrasaction="ignore", restval=""
    )
    writer.writeheader()
    writer.writerows(flats)
    replace_file(
        Path(path), lambda partial: partial.write_text(buffer.getvalue(), encoding="utf-8", newline="")
    )

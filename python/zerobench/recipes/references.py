"""Published figures, each with its source and a verdict on whether the arithmetic holds. Imports no torch.

They are in ``references.csv``, a line a figure. A prediction is never scored against a figure that cannot be right.
"""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FiniteFloat, ValidationError

from zerobench.errors import DataError


def _none_if_empty(text: object) -> object:
    return None if text == "" else text


OptionalText = Annotated[str | None, BeforeValidator(_none_if_empty)]
OptionalInt = Annotated[int | None, BeforeValidator(_none_if_empty)]
OptionalFloat = Annotated[FiniteFloat | None, BeforeValidator(_none_if_empty)]

Consistency = Literal["yes", "partly", "no", "unchecked"]
"""Whether the arithmetic of a figure holds. ``partly``: a part of the study is not explained, or a text of it
contradicts its figure. ``unchecked``: nothing tells."""


class Reference(BaseModel):
    """One published figure. None: the source does not state it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    study: str
    id: str
    """Identifier of the measured row, which its figures share."""
    model: OptionalText
    strategy: OptionalText
    stage: OptionalInt
    precision: OptionalText
    batch: OptionalInt
    """Sequences, as the source counts them: of a rank and micro-batch where it says so."""
    seq: OptionalInt
    device: OptionalText
    figure: str
    value: OptionalFloat
    """None where the source gives words only, such as "out of memory"; the note has them."""
    unit: str
    source: str
    consistent: Consistency
    note: str


def read_references() -> list[Reference]:
    """Return all published figures in the order of the file. Raises DataError for a line that does not parse."""
    text = files("zerobench.recipes").joinpath("references.csv").read_text(encoding="utf-8")
    return parse_references(text)


def parse_references(text: str) -> list[Reference]:
    """Return the figures of a file with the columns of ``references.csv``. Raises DataError that names the line."""
    found = []
    reader = csv.DictReader(text.splitlines(), strict=True)
    for record in reader:
        try:
            found.append(Reference.model_validate(record))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise DataError(
                f"references.csv, line {reader.line_num}: {place}: {first['msg']}. Correct that line."
            ) from None
    return found

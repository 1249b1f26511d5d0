"""Options that several commands share. Imports no torch."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON document, its verdict first.", show_default=False)
]

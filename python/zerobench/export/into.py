"""Change an existing JSON file in place: its order, its indentation and keys of its own stay. Imports no torch."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerobench.errors import DataError
from zerobench.results.files import write_atomically
from zerobench.strategies.merging import merge

_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//|/\*|#')


def change_file(path: Path, values: Mapping[str, Any]) -> list[str]:
    """Set ``values`` in the JSON file and return the lines of the change (a unified diff). The old file is kept next to
    it with ``.bak`` behind its name. Raises DataError for a file that is no JSON, or has comments."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}): give an existing JSON file as --into") from None
    expect_no_comment(path, text)
    try:
        present = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}): mend it, or write a new file with --output") from None
    if not isinstance(present, dict):
        raise DataError(f"{path} holds no JSON object: give a configuration file")
    changed = merge(present, values)
    new = json.dumps(changed, indent=indentation(text), ensure_ascii=False) + (
        "\n" if text.endswith("\n") else ""
    )
    lines = list(difflib.unified_diff(text.splitlines(), new.splitlines(), str(path), str(path), lineterm=""))
    if changed != present:
        write_atomically(path.with_name(path.name + ".bak"), text.encode())
        write_atomically(path, new.encode())
    return lines if changed != present else []


def indentation(text: str) -> str | None:
    """Return what the first indented line begins with; None where the file is one line."""
    found = re.search(r"\n([ \t]+)\S", text)
    return found[1] if found else None


def expect_no_comment(path: Path, text: str) -> None:
    """Rewriting the file would lose its comments."""
    for found in _STRING_OR_COMMENT.finditer(text):
        if not found[0].startswith('"'):
            line = text.count("\n", 0, found.start()) + 1
            raise DataError(
                f"{path} has a comment in line {line}, which JSON does not allow and a change would lose: remove the "
                "comment, or write a new file with --output"
            )

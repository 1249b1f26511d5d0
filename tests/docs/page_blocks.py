"""The blocks of a page, and running them as a reader does: from top to bottom, in one folder."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"[Ss]ave this as `([\w.]+)`")


@dataclass(frozen=True)
class Block:
    """A block of code, with the file that the sentence before it asks to save it as."""

    language: str
    code: str
    file: str | None


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page that a reader runs or saves. Blocks of `text` and `console` show something else."""
    text = page.read_text(encoding="utf-8")
    found = []
    end = 0
    for match in _BLOCK.finditer(text):
        names = _FILE.findall(text[end : match.start()].strip().rpartition("\n\n")[2])
        end = match.end()
        if match[1] in ("bash", "python"):
            found.append(Block(match[1], match[2], names[-1] if names else None))
    return found


def run_page(page: Path, folder: Path, environment: dict[str, str]) -> str:
    """Run a page's blocks in order, in one shell with `folder` as its working folder. Return what they print."""
    script = ["set -euo pipefail"]
    for block in blocks(page):
        if block.language == "python":
            assert block.file is not None, "a Python block of this page needs a file to save it as"
            (folder / block.file).write_text(block.code)
        else:
            script.append(block.code)
    ran = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    return ran.stdout

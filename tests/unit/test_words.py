"""Pages and docstrings read at once: short paragraphs and cells, and docstrings that begin with what they describe.

The limits count what is left from before. They only fall: lower one when you have mended some of what it counts.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LONGEST_LINE = 400
LONGEST_PARAGRAPH = 625  # five lines
LONGEST_CELL = 200
FRAGMENTS = ("Of", "What", "Where", "By", "Those", "That", "Whether")
PUBLIC = (
    "__init__.py",
    "errors.py",
    "engine/engine.py",
    "engine/window.py",
    "engine/facts.py",
    "engine/gathering.py",
    "engine/state.py",
    "engine/optimizer.py",
)

LONG_PARAGRAPHS = 0
FRAGMENTS_IN_PUBLIC = 0
FRAGMENTS_ELSEWHERE = 0
FRAGMENTS_IN_TESTS = 0


def prose(text: str) -> str:
    """Return the page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and list items of a page, each as one line."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. ))", prose(text)):
        if not block.lstrip().startswith(("|", "#")):
            yield " ".join(block.split())


def cells(text: str) -> Iterator[str]:
    """Yield the cells of a page's tables."""
    for line in prose(text).splitlines():
        if line.startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", line))


def fragments(files: list[Path]) -> list[str]:
    """Return where docstrings begin with a word that makes a fragment of the sentence."""
    return [
        f"{file.name}:{getattr(node, 'lineno', 1)}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (ast.get_docstring(node) or "-").split()[0].rstrip(",") in FRAGMENTS
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_no_long_line_and_no_long_cell(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = [line for line in prose(text).splitlines() if not line.startswith("|")]
    assert not [line for line in lines if len(line) > LONGEST_LINE]
    assert not [cell for cell in cells(text) if len(cell) > LONGEST_CELL]


def test_paragraphs_of_more_than_five_lines_become_fewer() -> None:
    found = [
        f"{page.name}: {paragraph[:60]}"
        for page in PAGES
        for paragraph in paragraphs(page.read_text(encoding="utf-8"))
        if len(paragraph) > LONGEST_PARAGRAPH
    ]
    assert len(found) <= LONG_PARAGRAPHS, found


def test_docstrings_that_begin_as_fragments_become_fewer() -> None:
    package = ROOT / "python" / "zerobench"
    public = [package / name for name in PUBLIC]
    others = [file for file in package.rglob("*.py") if file not in public]
    assert len(fragments(public)) <= FRAGMENTS_IN_PUBLIC, fragments(public)
    assert len(fragments(others)) <= FRAGMENTS_ELSEWHERE, fragments(others)
    tests = fragments(list((ROOT / "tests").rglob("*.py")))
    assert len(tests) <= FRAGMENTS_IN_TESTS, tests


def test_readme_is_short_and_its_table_fits_a_screen() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert table is not None
    assert len(text.splitlines()) <= 120
    assert len(table[1].splitlines()) <= 12 and max(map(len, table[1].splitlines())) <= 100

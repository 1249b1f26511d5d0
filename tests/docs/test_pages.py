"""Pages that are written from code are current, and the others name what the code has."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

import command_line
import pages
import pytest

from zerobench import errors

SAMPLE = Path(__file__).parents[1] / "unit" / "golden" / "results_sample.json"


@pytest.mark.parametrize(
    "write",
    [command_line.page, pages.engine_page, pages.support_page, pages.decisions_page, pages.results_pages],
)
def test_a_generated_page_is_current(write) -> None:
    written = write()
    names = {
        "page": "reference/command-line.md",
        "engine_page": "reference/engine.md",
        "support_page": "reference/support.md",
    }
    if isinstance(written, str):
        written = {pages.DOCS / names.get(write.__name__, "decisions/index.md"): written}
    for path, text in written.items():
        assert path.read_text(encoding="utf-8") == text, "run python tools/pages.py"


def test_every_error_stands_in_the_table() -> None:
    text = (pages.DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    defined = {
        name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)
    }
    assert named == defined


def test_words_of_the_glossary_are_sorted_and_explained_once() -> None:
    text = (pages.DOCS / "reference" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)[2:]
    assert 20 <= len(words) <= 40
    assert words == sorted(set(words), key=str.lower)


def test_decisions_have_numbers_without_gaps() -> None:
    numbers = [int(page.name[:4]) for page in sorted((pages.DOCS / "decisions").glob("[0-9]*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_result_file_becomes_a_page_with_its_command_machine_and_table(tmp_path: Path) -> None:
    folder = tmp_path / "cpu" / "small"
    folder.mkdir(parents=True)
    shutil.copy(SAMPLE, folder / "results.json")
    written = pages.results_pages(tmp_path)
    page = written[pages.DOCS / "results" / "cpu-small.md"]
    assert "zerobench compare --precision bf16" in page and "tokens" in page
    assert max(map(len, page.splitlines())) <= 120
    assert "[cpu-small](cpu-small.md)" in written[pages.DOCS / "results" / "index.md"]
    assert "Synthetic CPU" in written[pages.DOCS / "results" / "index.md"]

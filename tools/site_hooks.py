"""Hooks of MkDocs: order the pages by section, and show links that leave docs/ as paths in code font."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

SECTIONS = {
    "start": "Start",
    "how-to": "How to",
    "reference": "Reference",
    "explain": "Explanation",
    "decisions": "Decisions",
    "results": "Results",
}
FIRST = ("install.md", "first-comparison.md", "first-training-loop.md")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Return the configuration with a navigation of all pages, so that a new page needs no entry of its own."""
    docs = Path(config["docs_dir"])
    config["nav"] = [{"zerobench": "index.md"}]
    for folder, title in SECTIONS.items():
        pages = sorted((docs / folder).glob("*.md"), key=lambda page: (_place(page.name), page.name))
        if pages:
            config["nav"].append({title: [page.relative_to(docs).as_posix() for page in pages]})
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page with links out of docs/ as their text and path. The repository has more files than the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def shown(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder, link[2]))
        if target.startswith("docs/"):
            return link[0]
        text = link[1].strip("`")
        return f"`{target}`" if target.endswith(text) else f"{text} (`{target}`)"

    return LINK.sub(shown, markdown)


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)

"""The site shows links out of docs/ as paths, and orders pages by section."""

from __future__ import annotations

from types import SimpleNamespace

import pages
import pytest
import site_hooks


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[base.py](../../python/zerobench/base.py)", "`python/zerobench/base.py`"),
        ("[two ranks](../../benchmarks/two.md#grid)", "two ranks (`benchmarks/two.md`)"),
        ("[`run.sh`](../../tests/gpu/run.sh)", "`tests/gpu/run.sh`"),
        ("[metrics](metrics.md#time)", "[metrics](metrics.md#time)"),
        ("[stages](../explain/stages.md)", "[stages](../explain/stages.md)"),
        ("[here](#time)", "[here](#time)"),
        ("[torch](https://pytorch.org)", "[torch](https://pytorch.org)"),
        ("![chart](../images/chart.png)", "![chart](../images/chart.png)"),
    ],
)
def test_only_links_out_of_docs_change(link: str, shown: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="reference/comparing.md"))
    assert site_hooks.on_page_markdown(f"See {link}.", page=page) == f"See {shown}."


def test_every_page_is_in_the_navigation_and_start_comes_first() -> None:
    nav = site_hooks.on_config({"docs_dir": str(pages.DOCS)})["nav"]
    listed = [page for section in nav[1:] for pages_of in section.values() for page in pages_of]
    assert sorted(["index.md", *listed]) == sorted(
        page.relative_to(pages.DOCS).as_posix() for page in pages.DOCS.rglob("*.md")
    )
    assert nav[1] == {
        "Start": ["start/install.md", "start/first-comparison.md", "start/first-training-loop.md"]
    }

"""The page in a browser: Debian's Chromium, driven by playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import screenshots
from page_samples import forty, hostile, scaled
from report_samples import SAMPLE, grid, mixed

from zerobench.page.write import page_text
from zerobench.results.schema import Results

CHROMIUM = shutil.which("chromium")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None and "CI" not in os.environ,
        reason="no chromium: install Debian's package chromium",
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM, "CI installs Debian's package chromium"
    with sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


class Visit:
    """A page that is drawn, and all that the browser said of it."""

    def __init__(self, browser: Any, folder: Path, results: Results, **options: Any) -> None:
        file = folder / "page.html"
        file.write_text(page_text([("a folder", results)]), encoding="utf-8")
        self.said: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(**options)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_function("document.documentElement.dataset.drawn", timeout=60_000)

    def column(self, at: int) -> list[str]:
        """Texts of the cells that are shown."""
        rows = self.page.locator("table.sortable tbody tr:visible")
        return [row.locator("th, td").nth(at).inner_text() for row in rows.all()]


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Iterator[Any]:
    visits: list[Visit] = []

    def begin(results: Results, **options: Any) -> Visit:
        visits.append(Visit(browser, tmp_path, results, **options))
        return visits[-1]

    yield begin
    for one in visits:
        one.page.close()
        assert one.said == []


@pytest.mark.parametrize("make", [scaled, forty])
def test_charts_are_drawn_without_errors_or_requests(visit: Any, make: Any) -> None:
    found = visit(make())
    assert [url.rsplit("/", 1)[-1] for url in found.requests] == ["page.html"]
    charts = found.page.locator(".chart").all()
    assert len(charts) > 5
    assert all(chart.locator("svg .mark-group").count() for chart in charts)


def test_nothing_of_a_hostile_file_runs(visit: Any, tmp_path: Path) -> None:
    found = visit(hostile(tmp_path))
    assert found.page.evaluate("window.hacked") is None
    assert len(found.requests) == 1
    assert found.page.locator("main script, img").count() == 0


def test_a_press_on_a_head_sorts_and_a_second_one_turns_it_round(visit: Any) -> None:
    found = visit(mixed())
    head = found.page.get_by_role("button", name="step ms ± MAD")
    head.focus()
    head.press("Enter")
    ascending = found.column(2)
    head.press("Enter")
    descending = found.column(2)
    times = [float(text.split()[0]) for text in ascending if text != "-"]
    assert times == sorted(times) and len(times) == 3
    assert ascending[3:] == descending[3:] == ["-"] * 4  # without a number: at the end, both ways
    assert descending[:3] == ascending[2::-1]


def test_the_sorted_column_is_told_to_screen_readers(visit: Any) -> None:
    found = visit(mixed())
    found.page.get_by_role("button", name="status").click()
    sorted_by = found.page.locator("th[aria-sort=ascending]").all_inner_texts()
    assert [text.strip() for text in sorted_by] == ["status"]
    assert found.page.locator("th[aria-sort=none]").count() > 3


def test_the_filter_keeps_rows_with_every_word(visit: Any) -> None:
    found = visit(mixed())
    found.page.get_by_label("Filter rows").fill("ZERO ok")
    assert found.column(0) == ["zero0", "zero3"]
    assert found.page.locator("output").inner_text() == "2 of 7 rows shown"


def test_a_row_leads_to_its_settings(visit: Any) -> None:
    found = visit(mixed())
    found.page.get_by_role("link", name="zero3").click()
    opened = found.page.locator("details.row[open]")
    opened.first.wait_for()  # the browser opens it after the click has returned
    assert opened.count() == 1 and "zero3" in opened.inner_text()


def test_samples_of_another_row_can_be_chosen(visit: Any) -> None:
    found = visit(mixed())
    chart = found.page.locator("figure", has_text="Samples of one row").locator("svg")
    before = chart.inner_html()
    found.page.get_by_label("Row whose samples").select_option("zero3")
    found.page.wait_for_function(
        "([svg, before]) => svg.innerHTML !== before", arg=[chart.element_handle(), before]
    )


def test_every_control_and_chart_has_a_name(visit: Any) -> None:
    found = visit(scaled())
    unnamed = found.page.evaluate(
        """[...document.querySelectorAll('input, select, button, svg, summary, a, [role=region]')].filter((one) =>
          !(one.labels?.length || one.ariaLabel ||
            (one.tagName !== 'SELECT' && one.textContent.trim()) || one.getAttribute('aria-labelledby') ||
            one.closest('[aria-label]'))).map((one) => one.outerHTML.slice(0, 200))"""
    )
    assert unnamed == []


def test_the_first_stop_of_the_keyboard_skips_to_the_results(visit: Any) -> None:
    found = visit(mixed())
    found.page.keyboard.press("Tab")
    found.page.keyboard.press("Enter")
    assert found.page.evaluate("document.activeElement.id") == "main"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_contrasts_with_what_it_stands_on(visit: Any, scheme: str) -> None:
    found = visit(mixed(), color_scheme=scheme)
    colours = found.page.evaluate(
        """() => {
          const style = getComputedStyle(document.documentElement);
          return Object.fromEntries(['paper', 'panel', 'mark', 'ink', 'muted', 'link']
            .map((name) => [name, style.getPropertyValue('--' + name).trim()]));
        }"""
    )
    for text in ("ink", "muted", "link"):
        for ground in ("paper", "panel", "mark"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)


def contrast(one: str, other: str) -> float:
    """The ratio that WCAG 2 defines."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_a_phone_scrolls_in_one_direction(visit: Any) -> None:
    found = visit(grid(), viewport={"width": 390, "height": 844})
    assert found.page.evaluate("document.documentElement.scrollWidth") == 390


def test_print_is_light_and_shows_the_whole_table(visit: Any) -> None:
    found = visit(grid(), color_scheme="dark")
    found.page.emulate_media(media="print")
    background = "getComputedStyle(document.body).backgroundColor"
    assert found.page.evaluate(background) == "rgb(255, 255, 255)"
    assert found.page.locator("nav").is_hidden()
    assert found.page.locator("table.sortable tbody tr:visible").count() == len(grid().rows)


def test_pictures_for_the_docs_are_small(browser: Any, tmp_path: Path) -> None:
    paths = screenshots.take(browser, SAMPLE, tmp_path)
    assert [path.name for path in paths] == ["report_desktop.png", "report_phone.png"]
    assert all(path.stat().st_size <= screenshots.LARGEST_BYTES for path in paths)

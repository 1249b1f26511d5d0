"""The page of result files, read as text."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from page_samples import HOSTILE, forty, hostile, scaled
from report_samples import SAMPLE, gpus, grid, mixed, sample

from zerobench.cli.report import report
from zerobench.errors import ConfigError, DataError
from zerobench.page.grid_charts import grid_charts, scaling_charts
from zerobench.page.row_charts import course_charts, row_charts
from zerobench.page.write import data_block, page_text
from zerobench.report import advise
from zerobench.report.columns import table_columns
from zerobench.results.files import read_results
from zerobench.results.schema import Results

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow  # the first page of a process bundles the charting library


class Outline(HTMLParser):
    """Page as a browser parses it: elements, their attributes, and text outside scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self._inside = tag

    def handle_data(self, data: str) -> None:
        if self._inside not in {"script", "style"}:
            self.text += data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)


def outline(results: Results) -> Outline:
    return Outline(page_text([("a folder", results)]))


def test_advice_comes_before_machine_and_table() -> None:
    page = outline(mixed()).text
    places = [page.index(text) for text in (advise(mixed())[0], "Machine and versions", "Filter rows")]
    assert places == sorted(places)


def test_every_column_with_a_cell_is_in_the_table() -> None:
    results = gpus()
    titles = [column.title for column in table_columns(results.rows) if not column.empty()]
    heads = [
        tag for tag, attributes in outline(results).elements if tag == "th" and "aria-sort" in attributes
    ]
    assert len(heads) == len(titles)


def test_each_row_shows_its_settings_and_its_command() -> None:
    results = sample()
    page = outline(results).text
    assert all(row.rerun and row.rerun in page for row in results.rows)
    assert page.count("model_config_resolved.num_layers") == len(results.rows)


def test_a_figure_that_only_newer_files_have_is_shown() -> None:
    content = json.loads(SAMPLE.read_text(encoding="utf-8"))
    content["rows"][0]["invented_figure"] = 4711.5
    page = outline(Results.model_validate(content)).text
    assert "invented_figure" in page and "4711.5" in page


@pytest.mark.parametrize(
    ("charts", "titles"),
    [
        (row_charts, ["Step time by phase", "Memory by category: device memory", "Speed against memory"]),
        (
            course_charts,
            [
                "Loss curves",
                "Samples by run",
                "Samples of one row",
                "Power",
                "Energy of a step",
                "Tokens by energy",
            ],
        ),
    ],
)
def test_charts_of_what_was_measured(charts: Any, titles: list[str]) -> None:
    assert [chart.title for chart in charts(gpus().rows)] == titles


def test_a_chart_for_each_setting_that_the_grid_varies() -> None:
    titles = [chart.title for chart in grid_charts(grid().rows)]
    assert titles == [
        "Tokens/s by precision",
        "Peak memory by precision",
        "Tokens/s by batch",
        "Peak memory by batch",
    ]


def test_scaling_is_in_percent_of_the_fewest_ranks() -> None:
    (chart,) = scaling_charts(scaled().rows)
    zero3 = [value["value"] for value in chart.values if value["series"] == "zero3"]
    assert zero3 == pytest.approx([100.0, 100.0])  # as long a step with twice the ranks


def test_only_rows_that_no_other_beats_are_on_the_front() -> None:
    (chart,) = [chart for chart in row_charts(mixed().rows) if chart.title == "Speed against memory"]
    assert {value["row"]: value["front"] for value in chart.values} == {
        "single": "on the front",
        "zero0": "on the front",
        "zero3": "other dtypes, not ranked",
    }


def test_long_series_are_thinned() -> None:
    results = sample()
    results.rows[0].loss = [1.0] * 100_000
    (chart,) = [chart for chart in course_charts(results.rows[:1]) if chart.title == "Loss curves"]
    assert 100 <= len(chart.values) <= 200


def test_results_without_rows_have_a_page() -> None:
    results = sample()
    results.rows = []
    assert "Nothing to recommend" in outline(results).text


def test_several_files_stand_one_after_another() -> None:
    page = Outline(page_text([("first folder", sample()), ("second folder", grid())]))
    assert page.count("article") == 2 and page.text.index("first folder") < page.text.index("second folder")
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_forty_rows_take_at_most_six_megabytes() -> None:
    results = forty()
    assert len(results.rows) == 40
    assert len(page_text([("forty", results)]).encode()) <= 6e6


SHIPPED = sorted((ROOT / "benchmarks").rglob("results.json"))


def test_results_are_shipped() -> None:
    assert SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_every_shipped_result_has_a_page(path: Path) -> None:
    results = read_results(path)
    page = outline(results)
    assert advise(results)[0] in page.text
    assert all(row.rerun in page.text for row in results.rows if row.rerun)


def test_the_policy_allows_what_the_page_holds_alone() -> None:
    page = page_text([("a folder", sample())])
    policy = next(
        attributes["content"] or ""
        for tag, attributes in Outline(page).elements
        if attributes.get("http-equiv")
    )
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert not re.search(r"https?://", policy)


def test_hostile_strings_add_no_element(tmp_path: Path) -> None:
    """Values of a result file are text: the page has as many scripts and images as that of harmless results."""
    page = outline(hostile(tmp_path))
    assert (page.count("script"), page.count("img")) == (3, 0)
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert HOSTILE in page.text  # shown as it stands in the file


def test_hostile_strings_reach_no_specification_but_as_values(tmp_path: Path) -> None:
    rows = hostile(tmp_path).rows
    expressions = [
        step["filter"]
        for chart in [*row_charts(rows), *grid_charts(rows), *course_charts(rows)]
        for step in chart.spec.get("transform", [])
    ]
    assert expressions == ["datum.row === picked"]


def test_data_stay_inside_their_script_element() -> None:
    text = data_block({"a": "</script><!--&"})
    assert "<" not in text and json.loads(text) == {"a": "</script><!--&"}


@pytest.mark.parametrize("value", [1e308, 1e-308, 0.0])
def test_extreme_numbers_have_a_page(value: float) -> None:
    content = json.loads(SAMPLE.read_text(encoding="utf-8"))
    for row in content["rows"][::2]:
        row.update(
            tokens_per_s=value, energy_per_step_j=value, tokens_per_j=value, peak_device_bytes=int(value)
        )
        row["phases_ms"]["forward"] = value
        row["loss"][0] = value
        if value:
            row["step_time_ms"]["median"] = value
    assert "energy_per_step_j" in outline(Results.model_validate(content)).text


def test_infinite_figures_are_left_out_of_charts() -> None:
    content = json.loads(SAMPLE.read_text(encoding="utf-8"))
    content["rows"][0]["loss"][3] = float("nan")
    content["rows"][1]["phases_ms"]["forward"] = float("inf")
    content["rows"][2]["energy_per_step_j"] = float("inf")
    page_text([("a folder", Results.model_validate(content))])  # data_block() raises for one


def test_the_page_stands_next_to_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(SAMPLE, tmp_path / "results.json")
    report([tmp_path])
    page = tmp_path / "report.html"
    assert capsys.readouterr().out.strip() == str(page)
    assert f'<h1 id="s1-title">{tmp_path.name}</h1>' in page.read_text(encoding="utf-8")


def test_the_path_of_the_page_can_be_read_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report([SAMPLE], output=tmp_path / "page.html", as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["verdict", "page", "bytes"]
    assert Path(document["page"]).stat().st_size == document["bytes"]


def test_a_result_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    shutil.copy(SAMPLE, path)
    with pytest.raises(ConfigError, match=r"must end in \.html"):
        report([path], output=path)
    assert path.read_bytes() == SAMPLE.read_bytes()


def test_a_page_that_cannot_be_written_names_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        report([SAMPLE], output=tmp_path / "no such folder" / "page.html")


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[: len(text) // 2], "is not a zerobench result file"),
        (lambda text: text.replace('"gpus": []', f'"gpus": {deep(100)}'), "nested deeper than 64 levels"),
        (
            lambda text: text.replace('"gpus": []', f'"gpus": {deep(100_000)}'),
            "is not a zerobench result file",
        ),
        (lambda text: text.replace('"gpus": []', f'"gpus": {"9" * 400}'), "a number has 400 digits"),
        (lambda text: text.replace('"schema_version": 1', '"schema_version": 99'), "upgrade zerobench"),
        (
            lambda text: text.replace('"rows"', '"lines"').replace('"machine"', '"host"'),
            "machine: Field required",
        ),
    ],
    ids=["truncated", "nested", "nested too deep to parse", "huge number", "newer", "not a result file"],
)
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, change: Any, message: str) -> None:
    text = SAMPLE.read_text(encoding="utf-8")
    path = tmp_path / "results.json"
    path.write_text(change(text), encoding="utf-8")
    assert path.read_text(encoding="utf-8") != text
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read_results(path)
    assert str(path) in str(caught.value)


def test_a_file_without_newer_fields_has_a_page() -> None:
    """As older versions wrote them: optional fields were not there."""
    content = json.loads(SAMPLE.read_text(encoding="utf-8"))
    for row in content["rows"]:
        for name in ("rerun", "sampled", "phases_ms", "memory_bytes", "loss", "log"):
            row.pop(name, None)
    assert "Settings and commands" in outline(Results.model_validate(content)).text

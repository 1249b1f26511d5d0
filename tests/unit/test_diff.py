"""`zerobench diff`: rows that match, what is written, exit codes, and files that mean no good."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from diff_samples import GOLDEN_DIFFS, QUIET, changed_pair, difference, measured_results
from page_samples import HOSTILE, hostile
from report_samples import GOLDEN, SAMPLE, gpus, sample
from typer.testing import CliRunner, Result

from zerobench.cli.exit_codes import ExitCode
from zerobench.cli.main import app
from zerobench.diff.match import match_rows
from zerobench.diff.show import as_document, json_text, markdown_text, table_text
from zerobench.errors import ConfigError, DataError
from zerobench.results.schema import Results, Row


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diff", *map(str, arguments)])


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Results], Path]:
    """Write results into a new folder."""

    def write_results(results: Results) -> Path:
        folder = tmp_path / f"results{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "results.json").write_text(results.model_dump_json())
        return folder

    return write_results


def row_of(results: Results, strategy: str) -> Row:
    return next(row for row in results.rows if row.strategy == strategy)


# Matching


def test_rows_match_whatever_their_order_and_names() -> None:
    old, new = sample(), sample()
    new.rows.reverse()
    for row in new.rows:
        row.name += "_renamed"
    matched = match_rows(old.rows, new.rows)
    assert [pair.old.strategy for pair in matched.pairs] == [row.strategy for row in new.rows]
    assert not matched.vanished and not matched.appeared


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_steps", 99), ("warmup_steps", 99), ("repeats", 3), ("rounds", 15), ("verify_steps", 1),
        ("config_file", "a.json"), ("threads_per_rank", 64), ("communicator", "c10d"),
    ],
)  # fmt: skip
def test_how_a_row_is_measured_does_not_keep_it_apart(key: str, value: object) -> None:
    old, new = sample(), sample()
    for row in new.rows:
        setattr(row.settings, key, value)
    assert len(match_rows(old.rows, new.rows).pairs) == len(old.rows)


@pytest.mark.parametrize(
    ("key", "value"),
    [("batch_size", 99), ("compile", "block"), ("clip", None), ("seed", 1), ("optimizer", {"lr": 1.0})],
)
def test_what_is_trained_and_how_fast_keeps_rows_apart(key: str, value: object) -> None:
    old, new = sample(), sample()
    for row in new.rows:
        setattr(row.settings, key, value)
    matched = match_rows(old.rows, new.rows)
    assert not matched.pairs and len(matched.vanished) == len(matched.appeared) == len(old.rows)


def test_folders_for_swapped_state_may_have_other_names() -> None:
    old, new, more = (sample().rows[:1] for _ in range(3))
    for rows, paths in ((old, ["/a"]), (new, ["/b"]), (more, ["/a", "/b"])):
        rows[0].settings.nvme_paths = paths
    assert match_rows(old, new).pairs and not match_rows(old, more).pairs


def test_a_row_matches_the_one_with_its_communicator() -> None:
    old = [row_of(sample(), "zero1") for _ in range(2)]
    old[0].settings.communicator = "c10d"
    pairs = match_rows(old, old[::-1]).pairs
    assert [pair.old is pair.new for pair in pairs] == [True, True]


def test_a_row_that_did_not_run_matches_though_it_has_no_communicator() -> None:
    old, new = sample(), sample()
    row = row_of(new, "zero1")
    row.status, row.step_time_ms, row.settings.communicator = "failed", None, None
    found = difference(old, new)
    assert [(change.row.name, change.old) for change in found.status_changes] == [(row.name, "ok")]
    assert not found.run_changes


def test_files_without_a_common_row_are_refused() -> None:
    new = sample()
    for row in new.rows:
        row.settings.seed = 1
    with pytest.raises(DataError, match="have no row in common"):
        difference(sample(), new)


# What is written


@pytest.mark.parametrize("name", GOLDEN_DIFFS)
def test_the_text_is_the_golden_one(name: str) -> None:
    text = GOLDEN_DIFFS[name](difference(*changed_pair()))
    assert text == (GOLDEN / name).read_text(encoding="utf-8")


def test_json_begins_with_the_verdict_and_holds_every_row() -> None:
    found = difference(*changed_pair())
    document = json.loads(json_text(found))
    assert next(iter(document)) == "verdict" and document["is_regression"]
    assert document["status_changes"][0]["new"] == "oom"
    assert {one["other_settings"] for one in document["appeared"]} == {"batch 8 -> 16", None}
    rows = {row["row"]: row for row in document["metrics"][0]["rows"]}
    slow = rows["zs0_bf16_ranks2_bs8_sl128"]
    assert (slow["verdict"], slow["is_regression"]) == ("slower", True)
    assert slow["low"] < slow["ratio"] < slow["high"]


def test_the_first_line_says_what_cannot_be_told() -> None:
    text = table_text(difference(sample(), sample()))
    assert text.startswith("no regression above 5 % found; step_time_ms.median: 7 of 7 rows cannot tell\n")


def test_other_machines_are_told_and_other_loads_are_not() -> None:
    old, new = sample(), sample()
    new.machine["details"] = {"load_average": [9.0]}
    assert "differs" not in table_text(difference(old, new))
    new.machine["details"]["host"] = "b"
    text = table_text(difference(old, new))
    assert (
        "differs: details.host nothing -> b\n" in text
        and "warning: the files are of different machines" in text
    )


def test_many_facts_are_counted() -> None:
    old, new = sample(), sample()
    new.versions |= {f"package{index}": "1" for index in range(20)}
    assert "differs: 12 more facts" in table_text(difference(old, new))


@pytest.mark.parametrize(("slower", "is_told"), [(1.1, True), (1.0, False)])
def test_rows_that_all_moved_the_same_way_are_told(slower: float, is_told: bool) -> None:
    old = measured_results(1, machine=QUIET)
    new = measured_results(2, machine=QUIET, slower=lambda _: slower)
    assert ("All 20 rows moved the same way" in table_text(difference(old, new))) == is_told


# Exit codes


def test_the_exit_code_is_0_where_nothing_is_worse(write) -> None:  # type: ignore[no-untyped-def]
    result = invoke(write(sample()), SAMPLE)
    assert result.exit_code == 0 and "no regression above 5 % found" in result.stdout


@pytest.mark.parametrize("output_format", ["table", "markdown", "json"])
def test_the_exit_code_is_3_after_a_regression(write, output_format: str) -> None:  # type: ignore[no-untyped-def]
    old, new = changed_pair()
    result = invoke(write(old), write(new), "--format", output_format)
    assert result.exit_code == ExitCode.REGRESSION and "regression: 1 row broke" in result.stdout


def test_a_change_below_the_limit_is_told_and_no_regression(write) -> None:  # type: ignore[no-untyped-def]
    new = sample()
    for row in new.rows:
        assert row.peak_device_bytes
        row.peak_device_bytes = int(1.08 * row.peak_device_bytes)
    paths = write(sample()), write(new)
    result = invoke(*paths, "--fail-above", "10%", "--metric", "peak_device_bytes")
    assert result.exit_code == 0 and ": 7 worse" in result.stdout
    assert invoke(*paths, "--metric", "peak_device_bytes").exit_code == ExitCode.REGRESSION


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("ok", "wrong", 3),
        ("ok", "skipped", 3),
        ("failed", "ok", 0),
        ("oom", "failed", 0),
        ("skipped", "oom", 0),
    ],
)
def test_a_row_breaks_that_was_ok(write, before, after, code) -> None:  # type: ignore[no-untyped-def]
    old, new = sample(), sample()
    row_of(old, "zero1").status, row_of(new, "zero1").status = before, after
    result = invoke(write(old), write(new))
    assert result.exit_code == code and f"{before} -> {after}" in result.stdout


def test_no_row_left_that_is_ok_is_a_regression_and_no_error(write) -> None:  # type: ignore[no-untyped-def]
    new = sample()
    for row in new.rows:
        row.status, row.step_time_ms = "failed", None
    result = invoke(SAMPLE, write(new), "--metric", "tokens_per_s")
    assert result.exit_code == ExitCode.REGRESSION and "7 rows broke" in result.stdout


def test_any_numeric_column_can_be_named(write) -> None:  # type: ignore[no-untyped-def]
    path = write(gpus())
    columns = ["energy_per_step_j", "mfu.pct", "phases_ms.forward", "phases_pct.forward", "deviation.update"]
    result = invoke(path, path, *(word for column in columns for word in ("--metric", column)))
    assert result.exit_code == 0
    assert all(re.search(rf"^{re.escape(column)}\b.*cannot tell", result.stdout, re.M) for column in columns)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (["--metric", "tokens_per_sec"], ConfigError, "Did you mean tokens_per_s"),
        (["--metric", "strategy"], ConfigError, "is not a numeric column"),
        (["--fail-above", "5"], ConfigError, "--fail-above 5 is not valid: use a share between 0 and 1"),
        (["--fail-above", "x%"], ConfigError, "such as 5% or 0.05"),
    ],
)
def test_what_cannot_be_used_is_named(arguments, error, said) -> None:  # type: ignore[no-untyped-def]
    result = invoke(SAMPLE, SAMPLE, *arguments)
    assert isinstance(result.exception, error) and said in str(result.exception)


# Hostile files


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not a zerobench result file"),
        (SAMPLE.read_text(encoding="utf-8")[:5000], "is not a zerobench result file"),
        ('{"schema_version": 99}', "upgrade zerobench"),
        ("[" * 100_000, "is not a zerobench result file"),
        ('{"rows": ' + "[" * 70 + "]" * 70 + "}", "nested deeper than 64 levels"),
        ('{"rows": [{"name": 1}]}', "is not a zerobench result file"),
    ],
    ids=["empty", "truncated", "newer", "deep", "nested", "other"],
)
@pytest.mark.parametrize("is_new", [False, True])
def test_a_file_that_is_no_result_file_is_refused(tmp_path, content, said, is_new) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "results.json"
    path.write_text(content)
    result = invoke(*((SAMPLE, path) if is_new else (path, SAMPLE)))
    assert isinstance(result.exception, DataError)
    assert said in str(result.exception) and str(path) in str(result.exception)


def test_a_file_of_an_older_version_is_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    content = json.loads(SAMPLE.read_text(encoding="utf-8"))
    for row in content["rows"]:
        for key in ("samples_per_s", "relative", "validation_loss", "memory_bytes", "rerun"):
            del row[key]
        for key in ("offload", "compile", "checkpointing", "communicator", "config_file"):
            del row["settings"][key]
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content))
    assert "7 same within noise" in invoke(path, SAMPLE).stdout


def hostile_pair(folder: Path) -> tuple[Results, Results]:
    """Return results with script in every text, and the same with changes that show most texts."""
    old, new = hostile(folder), hostile(folder)
    new.rows[0].status, new.rows[0].error = "failed", HOSTILE
    new.rows[1].settings.batch_size = 64
    new.versions["torch"] += HOSTILE
    for row in new.rows[2:]:
        row.settings.communicator = HOSTILE
    return old, new


def test_markdown_shows_script_as_text(tmp_path) -> None:  # type: ignore[no-untyped-def]
    old, new = hostile_pair(tmp_path)
    new.rows[2].name = "@all ![x](http://x.invalid/) | a | `b` www.x.invalid"
    text = markdown_text(difference(old, new))
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, _: tags.append(tag)  # type: ignore[method-assign]
    parser.feed(text)
    assert set(tags) == {"details", "summary"}
    assert "@all" not in text and "](" not in text and "http:" not in text and "www." not in text
    assert all(line.count("|") == 8 for line in text.splitlines() if line.startswith("|"))


def test_the_terminal_gets_markup_as_it_is_and_no_escape_codes(tmp_path) -> None:  # type: ignore[no-untyped-def]
    old, new = hostile_pair(tmp_path)
    new.rows[2].name = "[red]zero2[/red] \x1b[2J\r\n" + "x" * 10_000
    text = table_text(difference(old, new))
    assert "[red]zero2[/red]" in text and not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert max(map(len, text.splitlines())) < 1000


def test_json_of_hostile_files_is_json(tmp_path) -> None:  # type: ignore[no-untyped-def]
    old, new = hostile_pair(tmp_path)
    assert json.loads(json_text(difference(old, new)))["status_changes"][0]["error"] == HOSTILE


def test_huge_and_infinite_figures_give_no_ratio(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "results.json"
    content = json.loads(SAMPLE.read_text(encoding="utf-8"))
    for row, value in zip(content["rows"], (1e308, 1e-308, 10**39, 0, 5, 6, 7), strict=True):
        row["step_time_ms"] |= {"median": value or 1, "samples": [value] * 20}
        row["peak_device_bytes"] = 10**39
        row["validation_loss"] = "VALUE"
    text = json.dumps(content)
    for value in ("1e999", "-1e999", "NaN", "1e308"):
        text = text.replace('"VALUE"', value, 1)
    path.write_text(text.replace('"VALUE"', "0"))
    columns = (
        "--metric",
        "validation_loss",
        "--metric",
        "step_time_ms.median",
        "--metric",
        "peak_device_bytes",
    )
    for output_format in ("table", "markdown", "json"):
        for pair in ((path, SAMPLE), (SAMPLE, path), (path, path)):
            result = invoke(*pair, *columns, "--format", output_format)
            assert result.exit_code in (0, ExitCode.REGRESSION), result.exception


def test_many_equal_rows_match_in_their_order() -> None:
    rows = [row_of(sample(), "zero1")] * 3000
    matched = match_rows(rows, rows[:2999])
    assert len(matched.pairs) == 2999 and len(matched.vanished) == 1


def test_the_document_has_no_more_than_the_results_have() -> None:
    found = as_document(difference(sample(), sample()))
    assert [table["metric"] for table in found["metrics"]] == ["step_time_ms.median", "peak_device_bytes"]
    nothing = sample()
    for row in nothing.rows:
        row.peak_device_bytes = None
    assert [table.metric.column for table in difference(nothing, nothing).tables] == ["step_time_ms.median"]

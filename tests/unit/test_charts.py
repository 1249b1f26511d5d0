"""Charts of columns over settings, and loss curves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib.image
import pytest
from report_samples import grid, sample

from zerobench.cli.results import chart
from zerobench.errors import ConfigError
from zerobench.report.charts import chart_figure, line_looks, write_charts
from zerobench.report.drawing import draw
from zerobench.report.frame import is_numeric_column
from zerobench.report.losses import largest_deviation, write_loss_charts
from zerobench.report.series import Chart, charts_of, spread_of
from zerobench.results.merging import Merged
from zerobench.results.schema import Results, Row

pytestmark = pytest.mark.slow  # draws


def merged(results: Results) -> list[Merged]:
    return [Merged(results, ["out"])]


def charts(
    results: Results, metric: str = "tokens_per_s", *, x: str = "batch", by: str = "strategy"
) -> list[Chart]:
    return charts_of(merged(results), metric=metric, x=x, by=by)


def row_of(results: Results, strategy: str) -> Row:
    return next(row for row in results.rows if row.strategy == strategy)


def varied(change: Callable[[Row, int], None], num: int = 3) -> Results:
    """The sample's rows several times, each time changed."""
    results = sample()
    results.rows = []
    for index in range(num):
        for row in sample().rows:
            row.name = f"{row.name}_{index}"
            change(row, index)
            results.rows.append(row)
    return results


def test_each_combination_of_other_settings_has_a_chart() -> None:
    found = charts(grid())
    assert [each.fixed for each in found] == [{"precision": "fp32"}, {"precision": "bf16"}]
    assert [each.x_values for each in found] == [[8, 16], [8, 16]]
    assert [line.label for line in found[0].lines] == [row.strategy for row in sample().rows]


def test_points_are_the_column_of_ok_rows() -> None:
    results = grid()
    expected = {(row.strategy, row.settings.batch_size): row.tokens_per_s for row in results.rows[14:]}
    (_, bf16) = charts(results)
    drawn = {(line.label, point.x): point.y for line in bf16.lines for point in line.points}
    assert drawn == expected


def test_a_row_that_is_not_ok_has_no_point() -> None:
    results = grid()
    wrong = results.rows[0]
    wrong.status = "wrong"
    (line,) = [line for line in charts(results)[0].lines if line.label == wrong.strategy]
    assert [point.x for point in line.points] == [16]
    assert not line.out_of_memory


def test_a_row_out_of_memory_is_marked_where_it_would_stand() -> None:
    results = grid()
    lost = results.rows[7]  # single, fp32, batch 16
    lost.status, lost.step_time_ms, lost.tokens_per_s, lost.settings.communicator = "oom", None, None, None
    found = charts(results)
    assert len(found) == 2 and found[0].lines[0].out_of_memory == [16]
    figure = chart_figure(found[0], line_looks(found))
    assert "out of memory" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_lines_may_tell_another_setting_apart() -> None:
    found = charts(grid(), by="precision")
    assert [each.fixed for each in found] == [{"strategy": row.strategy} for row in sample().rows]
    assert [line.label for line in found[0].lines] == ["fp32", "bf16"]


def test_a_setting_that_follows_x_is_named_on_the_axis() -> None:
    def hold_the_product(row: Row, index: int) -> None:
        row.settings.batch_size, row.settings.grad_accum = 2**index, 4 // 2**index

    found = charts(varied(hold_the_product))
    assert len(found) == 1 and found[0].following == ["grad_accum"]
    axes = chart_figure(found[0], line_looks(found)).axes[0]
    assert axes.get_xlabel() == "batch (accum changes with it)"


def test_models_are_ordered_by_parameters_and_need_no_chart_for_each_of_their_fields() -> None:
    def larger_first(row: Row, index: int) -> None:
        row.settings.model, row.settings.parameter_count = "abc"[index], 100 - index
        row.settings.model_config_resolved["hidden_size"] = 100 - index

    (found,) = charts(varied(larger_first), x="model")
    assert found.x_values == ["c", "b", "a"]


def test_layers_are_those_of_the_model() -> None:
    def fewer_layers(row: Row, index: int) -> None:
        row.settings.model_config_resolved["num_layers"] = 8 // 2**index
        row.settings.parameter_count = 1000 // 2**index

    (found,) = charts(varied(fewer_layers), x="layers")
    assert found.x_values == [2, 4, 8] and not found.fixed


def test_offloads_are_ordered_by_what_leaves_the_device() -> None:
    def offload(row: Row, index: int) -> None:
        row.settings.offload = ("nvme", "none", "cpu_full")[index]

    (found,) = charts(varied(offload), x="offload")
    assert found.x_values == ["none", "cpu_full", "nvme"]


def test_networks_are_ordered_from_the_fastest_on() -> None:
    def network(row: Row, index: int) -> None:
        row.settings = row.settings.model_copy(update={"network": ("1gbit", "native", "10gbit:1ms")[index]})

    (found,) = charts(varied(network), x="network")
    assert found.x_values == ["native", "10gbit:1ms", "1gbit"]


@pytest.mark.parametrize("x", ["batch", "seq", "accum", "world_size", "model", "layers", "offload"])
def test_every_axis_can_be_drawn_of_rows_that_share_its_value(tmp_path: Path, x: str) -> None:
    paths = write_charts(merged(sample()), tmp_path, metric="tokens_per_s", x=x, by="strategy")
    assert [path.name for path in paths] == [f"tokens_per_s_by_{x}.png", f"tokens_per_s_by_{x}.svg"]


@pytest.mark.parametrize(
    "metric",
    ["step_time_ms.median", "peak_device_bytes", "deviation.update", "memory_change_pct", "relative"],
)
def test_charts_are_images_with_labelled_axes(tmp_path: Path, metric: str) -> None:
    results = grid()
    paths = write_charts(merged(results), tmp_path, metric=metric, x="batch", by="strategy")
    assert [path.suffix for path in paths] == [".png", ".svg"] * 2
    for path in paths:
        if path.suffix == ".png":
            image = matplotlib.image.imread(path)
            assert image.shape[1] >= 1000 and image[..., :3].mean() > 0.6 and image[..., :3].std() > 0.02
        else:
            assert path.read_text().lstrip().startswith("<?xml") and "</svg>" in path.read_text()
    found = charts(results, metric)
    axes = chart_figure(found[0], line_looks(found)).axes[0]
    assert axes.get_xlabel() == "batch" and axes.get_ylabel().startswith(metric)


def test_bytes_are_drawn_in_the_unit_of_the_axis() -> None:
    results = grid()
    found = charts(results, "peak_device_bytes")
    axes = chart_figure(found[0], line_looks(found)).axes[0]
    assert axes.get_ylabel() == "peak_device_bytes, MiB"
    first = results.rows[0].peak_device_bytes
    assert first and axes.lines[0].get_ydata()[0] == pytest.approx(first / 2**20)  # type: ignore[index]


def test_whiskers_are_as_long_as_the_row_tells() -> None:
    row = row_of(sample(), "zero1")
    time = row.step_time_ms
    assert time is not None and row.tokens_per_s is not None and row.relative_uncertainty is not None
    spread = spread_of(row, "step_time_ms.median")
    assert spread == (time.median - time.mad, time.median + time.mad, "MAD")
    spread = spread_of(row, "tokens_per_s")
    assert spread is not None and spread.word == "MAD of the step times"
    assert spread.low == pytest.approx(row.tokens_per_s * time.median / (time.median + time.mad))
    spread = spread_of(row, "relative")
    assert spread is not None and row.relative is not None and spread.word == "standard error"
    assert spread.high == pytest.approx(row.relative + row.relative_uncertainty)
    assert spread_of(row, "peak_device_bytes") is None
    time.samples = time.samples[:1]
    assert spread_of(row, "tokens_per_s") is None


def test_the_axis_says_what_whiskers_are() -> None:
    found = charts(grid(), "step_time_ms.median")
    axes = chart_figure(found[0], line_looks(found)).axes[0]
    assert axes.get_ylabel() == "step_time_ms.median (whiskers: MAD)"
    found = charts(grid(), "deviation.update")
    assert chart_figure(found[0], line_looks(found)).axes[0].get_ylabel() == "deviation.update"


def test_an_unknown_column_is_answered_with_close_ones_and_all() -> None:
    with pytest.raises(ConfigError) as error:
        charts(grid(), "token_per_s")
    text = str(error.value)
    assert "--metric 'token_per_s' is not a numeric column" in text and "Did you mean tokens_per_s" in text
    assert "phases_ms.forward" in text and "settings." not in text
    for column in ("name", "loss.0", "status", "comparable"):
        with pytest.raises(ConfigError, match="is not a numeric column"):
            charts(grid(), column)


def test_results_without_an_ok_row_have_nothing_to_draw() -> None:
    results = sample()
    for row in results.rows:
        row.status = "failed"
    with pytest.raises(ConfigError, match="no row is ok"):
        charts(results)
    with pytest.raises(ConfigError, match="no ok row has losses"):
        write_loss_charts(merged(results), "nowhere")


@pytest.mark.parametrize(
    ("x", "by", "message"),
    [
        ("size", "strategy", "--x 'size' is unknown: give one of model, world_size, precision"),
        ("batch", "colour", "--by 'colour' is unknown: give one of strategy, model"),
        ("batch", "batch", "--x and --by are both batch: give two different settings"),
    ],
)
def test_axes_that_cannot_be_are_refused(x: str, by: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        charts(grid(), x=x, by=by)


def test_results_of_other_machines_have_lines_of_their_own() -> None:
    both = [Merged(grid(), ["a"]), Merged(grid(), ["b", "c"])]
    found = charts_of(both, metric="tokens_per_s", x="batch", by="strategy")
    labels = [line.label for line in found[0].lines]
    assert len(labels) == 2 * len(sample().rows) and labels[0] == "single (a)"
    assert "single (b and 1 more)" in labels
    looks = line_looks(found)
    assert looks["single (a)"]["color"] == looks["single (b and 1 more)"]["color"]
    assert looks["single (a)"]["linestyle"] != looks["single (b and 1 more)"]["linestyle"]


def test_the_largest_deviation_of_losses_is_from_the_reference() -> None:
    results = sample()
    reference, row, other = row_of(results, "single"), row_of(results, "zero1"), row_of(results, "zero2")
    reference.loss, row.loss, other.loss = [4.0, 2.0, 1.0], [4.0, 2.1, 1.0], [4.0, 2.0, 1.01]
    found = largest_deviation([row, reference, other])
    assert found is not None and found.reference is reference and found.row is row
    assert found.step == 2 and found.share == pytest.approx(0.05)
    assert largest_deviation([row]) is None


def test_loss_curves_of_a_workload_are_one_chart_that_states_the_deviation(tmp_path: Path) -> None:
    results = sample()
    paths, sentences = write_loss_charts(merged(results), tmp_path)
    assert [path.name for path in paths] == ["loss.png", "loss.svg"]
    (sentence,) = sentences
    assert "Largest deviation from a reference that saw the same tokens" in sentence
    assert " from zero0 at step " in sentence  # single trains on one rank, so on other tokens
    assert len(write_loss_charts(merged(grid()), tmp_path / "two")[0]) == 4


def test_losses_of_the_precisions_of_a_strategy_are_one_chart(tmp_path: Path) -> None:
    results = grid()
    for row in results.rows:
        row.loss = [4.0, 2.0 if row.settings.precision == "fp32" else 2.1]
    paths, sentences = draw(merged(results), tmp_path, metric="loss", x=None, by="precision")
    assert len(paths) == 2 * len(sentences) == 2 * len(results.rows) / 2  # PNG and SVG, of two precisions
    assert "loss_by_precision_zero0-batch-8.png" in {path.name for path in paths}
    (sentence,) = [text for text in sentences if text.startswith("zero0, batch 8: ")]
    assert sentence.endswith(": 5 %, zero0, bf16 from zero0, fp32 at step 2.")


@pytest.mark.parametrize("metric", ["phases", "memory"])
def test_what_a_row_consists_of_is_drawn_for_each_machine(metric: str, tmp_path: Path) -> None:
    both = [Merged(sample(), ["a"]), Merged(sample(), ["b"])]
    paths, _ = draw(both, tmp_path, metric=metric, x=None, by=None)
    assert [path.name for path in paths] == [
        f"{metric}{number}.{kind}" for number in ("", "_2") for kind in ("png", "svg")
    ]
    results = sample()
    results.rows = []
    with pytest.raises(ConfigError, match=f"no ok row has {metric}"):
        draw(merged(results), tmp_path, metric=metric, x=None, by=None)


@pytest.mark.parametrize(
    ("column", "is_numeric"),
    [
        ("tokens_per_s", True),
        ("step_time_ms.median", True),
        ("step_time_ms", False),
        ("step_time_ms.samples", False),
        ("relative", True),
        ("phases_ms.forward", True),
        ("phases_ms", False),
        ("memory_bytes.device.parameters", True),
        ("settings.batch_size", True),
        ("peak_device_bytes", True),
        ("peak_device_bytes.x", False),
        ("comparable", False),
        ("status", False),
        ("loss", False),
        ("token_per_s", False),
    ],
)
def test_numeric_columns_are_known_without_results(column: str, is_numeric: bool) -> None:
    assert is_numeric_column(column) == is_numeric


def test_the_command_draws_beside_the_first_results(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "results.json").write_text(grid().model_dump_json())
    chart([tmp_path], x="batch")
    shown = capsys.readouterr().out.split()
    assert str(tmp_path / "charts" / "tokens_per_s_by_batch_precision-bf16.svg") in shown
    chart([tmp_path / "results.json"], metric="loss", output=tmp_path / "losses")
    assert (tmp_path / "losses" / "loss_fp32.png").is_file()
    for metric, axis in (
        ("loss", {"x": "batch"}),
        ("memory", {"x": "batch"}),
        ("phases", {"by": "strategy"}),
    ):
        with pytest.raises(ConfigError, match=f"--{next(iter(axis))} has no effect with --metric {metric}"):
            chart([tmp_path], metric=metric, **axis)
    with pytest.raises(
        ConfigError, match="--by 'batch' is unknown with --metric loss: give strategy or prec"
    ):
        chart([tmp_path], metric="loss", by="batch")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot receive charts .* --output"):
        chart([tmp_path], output=tmp_path / "file")

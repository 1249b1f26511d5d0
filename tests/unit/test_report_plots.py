"""The plots."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib.image
import pytest
from report_samples import gpus, grid, mixed, sample

from zerobench.report import write_plots


@pytest.mark.parametrize("make", [sample, mixed, grid])
def test_plots_are_images(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    paths = write_plots(make(), tmp_path / "plots")
    assert [path.name for path in paths] == ["step_time.png", "memory.png", "speed_memory.png"]
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {path.name for path in paths}
    for path in paths:
        image = matplotlib.image.imread(path)
        assert image.shape[1] >= 1000 and image[..., :3].mean() > 0.6  # light background
        assert image[..., :3].std() > 0.02  # something is drawn


def test_a_name_is_no_formula(tmp_path: Path) -> None:
    results = sample()
    for row in results.rows:
        row.settings.model = "m/[v2] $a_{$"
    assert len(write_plots(results, tmp_path)) == 3  # in the subtitle
    for row in sample().rows:
        row.settings.model, row.name = "$b_{$", f"{row.name}_b"
        results.rows.append(row)
    assert len(write_plots(results, tmp_path)) == 3  # in every label


def test_plots_of_one_row_and_of_none(tmp_path: Path) -> None:
    results = sample()
    results.rows = results.rows[2:3]
    assert len(write_plots(results, tmp_path)) == 3
    results.rows[0].status = "failed"
    assert write_plots(results, tmp_path / "nothing") == []
    assert not (tmp_path / "nothing").exists()
    results.rows = []
    assert write_plots(results, tmp_path / "nothing") == []


def test_bars_end_at_the_median_and_the_peak() -> None:
    from zerobench.report.plots import memory_figure, step_time_figure

    results = mixed()
    figure = step_time_figure(results)
    assert figure is not None
    widths = [0.0] * len(results.rows)
    for patch in figure.axes[0].patches:
        widths[round(patch.get_y() + patch.get_height() / 2)] += patch.get_width()
    expected = [
        row.step_time_ms.median if row.status == "ok" and row.step_time_ms else 0.0 for row in results.rows
    ]
    assert widths == pytest.approx(expected)
    ok = [row.step_time_ms for row in results.rows if row.status == "ok" and row.step_time_ms]
    whiskers = [
        bars.get_children()[-1].get_segments()[0][:, 0] for bars in figure.axes[0].containers[-len(ok) :]
    ]
    assert [tuple(ends) for ends in whiskers] == [
        pytest.approx((time.median - time.mad, time.median + time.mad)) for time in ok
    ]

    figure = memory_figure(results)
    assert figure is not None
    ends = [0.0] * len(results.rows)
    for patch in figure.axes[0].patches:
        index = round(patch.get_y() + patch.get_height() / 2)
        ends[index] = max(ends[index], patch.get_x() + patch.get_width())
    peaks = [(row.peak_device_bytes or 0) / 2**20 if row.status == "ok" else 0.0 for row in results.rows]
    assert ends == pytest.approx(peaks)


def test_what_is_too_small_to_be_seen_is_not_in_the_legend() -> None:
    from zerobench.report.plots import memory_figure

    results = sample()
    for staging_bytes, is_named in ((176, False), (1 << 20, True)):
        for row in results.rows:
            row.peak_device_bytes = 12 << 20
            row.memory_bytes = {"device": {"parameters": 1 << 20, "staging": staging_bytes}}
        figure = memory_figure(results)
        assert figure is not None
        assert ("staging" in [text.get_text() for text in figure.legends[0].get_texts()]) is is_named


def test_a_subtitle_names_all_numbers_of_ranks() -> None:
    from zerobench.report.style import subtitle

    results = sample()
    assert {row.settings.world_size for row in results.rows} == {1, 2}
    assert ", 1 and 2 ranks, " in subtitle(results.rows)


@pytest.mark.parametrize(
    ("device", "phases_ms", "expected"),
    [
        # What is too much comes off host bound, then off exposed communication, then off all that is left.
        ("cuda", (40, 60, 30, 20), (40, 60, 20, 0)),
        ("cuda", (40, 60, 10, 30), (40, 60, 10, 10)),
        ("cuda", (100, 140, 5, 5), (50, 70, 0, 0)),
        ("cuda", (20, 20, 10, 10), (40, 40, 20, 20)),
        ("cpu", (40, 60, 100, 40), (20, 30, 50, 20)),
    ],
)
def test_a_profiler_that_delays_the_host_makes_waits_longer(device, phases_ms, expected) -> None:  # type: ignore[no-untyped-def]
    from zerobench.report.plots import step_time_figure

    results = sample()
    results.rows = results.rows[2:3]
    row = results.rows[0]
    assert row.step_time_ms is not None
    names = ("forward", "backward", "exposed_communication", "host_bound")
    row.settings.device = device
    row.step_time_ms.median = 120.0
    row.phases_ms = dict(zip(names, map(float, phases_ms), strict=True))
    figure = step_time_figure(results)
    assert figure is not None
    drawn = [patch.get_width() for patch in figure.axes[0].patches]
    assert drawn == pytest.approx([width for width in expected if width])


def test_no_two_labels_overlap() -> None:
    from zerobench.report.scatter import speed_memory_figure

    figure = speed_memory_figure(grid())
    assert figure is not None
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for axes in figure.axes:
        boxes = [text.get_window_extent(renderer) for text in axes.texts if text.get_text()]
        assert len(boxes) > 5
        for index, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[index + 1 :])


def test_labels_without_a_place_are_counted_where_nothing_lies() -> None:
    from zerobench.report.scatter import speed_memory_figure

    results = grid()
    for row in list(results.rows):
        for index in range(4):
            more = row.model_copy(deep=True)
            more.name = more.strategy = f"{row.strategy}_with_a_long_name_{index}"
            assert more.step_time_ms is not None and more.peak_device_bytes
            more.step_time_ms.median *= 1 + index / 100
            more.peak_device_bytes += index * 1000
            results.rows.append(more)
    figure = speed_memory_figure(results)
    assert figure is not None
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for axes in figure.axes:
        texts = [text for text in axes.texts if text.get_text()]
        (note,) = [text for text in texts if "omitted for space" in text.get_text()]
        shown = [text for text in texts if text.get_transform() == axes.transData]
        boxes = [text.get_window_extent(renderer) for text in texts]
        for index, box in enumerate(boxes):
            assert not any(box.overlaps(other) for other in boxes[index + 1 :])
        points = [axes.transData.transform(at) for drawn in axes.collections for at in drawn.get_offsets()]
        assert note.get_text().startswith(f"{len(points) - len(shown)} labels omitted")
        assert not any(note.get_window_extent(renderer).contains(*point) for point in points)


def test_the_legend_has_what_any_panel_has() -> None:
    from zerobench.report.scatter import speed_memory_figure

    results = grid()
    last = results.rows[-1]
    last.comparable = False
    assert results.rows[0].settings.precision != last.settings.precision
    figure = speed_memory_figure(results)
    assert figure is not None
    assert "other dtypes or a busy machine, not ranked" in [
        text.get_text() for text in figure.legends[0].get_texts()
    ]


def test_pareto_front() -> None:
    from zerobench.report.scatter import Point, pareto_front

    points = [
        Point("small", 1.0, 10.0, True),
        Point("beaten", 2.0, 9.0, True),
        Point("fast", 3.0, 20.0, True),
        Point("same memory, slower", 3.0, 19.0, True),
        Point("as fast, more memory", 4.0, 20.0, True),
        Point("and in the alphabet before fast", 3.0, 18.0, True),
        Point("other dtypes", 0.5, 30.0, False),
    ]
    assert [point.label for point in pareto_front(points)] == ["small", "fast"]


def test_the_floor_is_no_point_of_speed_against_memory() -> None:
    from zerobench.report.scatter import speed_memory_figure

    figure = speed_memory_figure(gpus())
    assert figure is not None
    drawn = sum(len(points.get_offsets()) for points in figure.axes[0].collections)
    assert drawn == sum(row.status == "ok" for row in gpus().rows) - 1


def test_a_peak_of_the_very_first_step_is_no_point_of_speed_against_memory() -> None:
    from zerobench.report.scatter import speed_memory_figure

    results = sample()
    for row in results.rows[1:]:
        row.settings.warmup_steps, row.settings.num_steps = 0, 1
    figure = speed_memory_figure(results)
    assert figure is not None
    assert sum(len(points.get_offsets()) for points in figure.axes[0].collections) == 1


def test_a_tick_marks_a_peak_below_the_sum_of_its_categories() -> None:
    from zerobench.report.plots import memory_figure

    results = sample()
    figure = memory_figure(results)
    assert figure is not None and not figure.axes[0].lines
    row = results.rows[2]
    assert row.memory_bytes is not None
    row.peak_device_bytes = sum(row.memory_bytes["device"].values()) - (1 << 20)
    figure = memory_figure(results)
    assert figure is not None
    (tick,) = figure.axes[0].lines
    assert set(tick.get_xdata()) == {row.peak_device_bytes / 2**20}
    assert tick.get_ydata().mean() == pytest.approx(2)  # type: ignore[union-attr]
    assert "peak" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_rows_with_long_labels_are_told_apart() -> None:
    from zerobench.report.plots import step_time_figure
    from zerobench.report.scatter import speed_memory_figure
    from zerobench.report.style import shortened

    assert shortened(["short", "a long one", "a long other"], limit=8) == [
        "short",
        "a long\none",
        "a long\nother",
    ]
    assert shortened(["short", "a long one"], limit=8) == ["short", "a long …"]
    results = sample()
    results.rows = []
    for offload in ("none", "cpu_optimizer", "cpu_full"):
        for in_backward in (False, True):
            for batch_size in (8, 16):
                for row in sample().rows[3:5]:
                    row.name += f"_{offload}_{in_backward}_{batch_size}"
                    settings = {
                        "offload": offload,
                        "optimizer_in_backward": in_backward,
                        "batch_size": batch_size,
                    }
                    row.settings = row.settings.model_copy(update=settings)
                    results.rows.append(row)
    figure = step_time_figure(results)
    assert figure is not None
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(set(labels)) == len(results.rows) == 24
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    figure.draw_without_rendering()
    boxes = [label.get_window_extent(renderer) for label in figure.axes[0].get_yticklabels()]
    assert not any(box.overlaps(other) for box, other in pairwise(boxes))
    figure = speed_memory_figure(results)
    assert figure is not None
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert len(set(texts)) == len(texts)

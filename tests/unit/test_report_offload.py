"""Report of offloaded rows: tables, practicality, advice, plots.

Run this file as a program to write its golden table anew after a wanted change, then read the difference."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_window
from report_samples import GOLDEN, sample

from zerobench.bench.assess import transfers_of
from zerobench.bench.protocol.job import WindowTransfers
from zerobench.bench.rank.intervals import part_for_files
from zerobench.bench.rank.transfers import by_direction, file_limits, link_limits, of_window
from zerobench.host.io_settings import Rates
from zerobench.report import advise, finish_rows, summarise, table_text
from zerobench.report import plots as plots_module
from zerobench.report.columns import table_columns
from zerobench.results.schema import Results, Row, Transfers
from zerobench.strategies.base import Transfers as Counted

TABLE = GOLDEN / "table_offload_170.txt"
WIDE = GOLDEN / "table_offload_300.txt"
WIDTH = 170


def offloaded() -> Results:
    """zero2 and zero3 with everything on the device, with their state on the host, and on NVMe."""
    results = sample()
    plain = [row for row in results.rows if row.strategy in ("zero2", "zero3", "ddp")]
    for row in plain:
        row.settings.device = "cuda"
    results.rows = [
        *plain,
        *(moved(row, "cpu_optimizer", 1.6) for row in plain[:2]),
        moved(plain[1], "nvme", 9.0),
    ]
    refused = plain[2].model_copy(deep=True)
    refused.name, refused.settings.offload = "ddp_cpu", "cpu_optimizer"
    refused.status, refused.error, refused.step_time_ms = (
        "skipped",
        "ddp keeps all of its state on its device",
        None,
    )
    results.rows.append(refused)
    finish_rows(results)
    return results


def moved(row: Row, offload: str, slower: float) -> Row:
    row = row.model_copy(deep=True)
    assert row.step_time_ms is not None and row.memory_bytes is not None and row.peak_device_bytes is not None
    row.settings.offload = offload
    row.settings.nvme_paths = ["/disk"] if offload == "nvme" else []
    row.name = f"{row.name}_offload-{offload}"
    row.step_time_ms = summarise([slower * sample for sample in row.step_time_ms.samples])
    row.tokens_per_s = (row.tokens_per_s or 0) / slower
    device = row.memory_bytes["device"]
    gone = {key: device.pop(key) for key in ("master", "exp_avg", "exp_avg_sq")}
    tier = "nvme" if offload == "nvme" else "host"
    row.memory_bytes = {
        "device": device,
        tier: gone,
        **({"host": {"staging": 4 << 20}} if tier == "nvme" else {}),
    }
    row.peak_device_bytes -= sum(gone.values())
    written = sum(gone.values()) if tier == "nvme" else None
    row.transfers = Transfers(
        to_host_bytes=30 << 20,
        to_device_bytes=20 << 20,
        nvme_read_bytes=written,
        nvme_written_bytes=written,
        pinned_bytes=40 << 20,
        pinned_requested_bytes=40_000_000,
        offload_ratio=1.0,
    )
    row.transfers.achieved_gb_s = {"to_host": 12.0, "to_device": 9.0}
    row.transfers.limit_gb_s = {"to_host": 48.0, "to_device": 30.0, "both_ways": 40.0}
    if written:
        row.transfers.achieved_gb_s |= {"nvme_read": 1.2, "nvme_write": 1.2}
        row.transfers.limit_gb_s |= {"nvme_read": 5.0, "nvme_write": 4.0, "nvme_both": 3.0}
    row.peak_host_bytes = 900 << 20
    row.phases_ms = {
        **(row.phases_ms or {}),
        "exposed_offload": 12.0,
        **({"exposed_io": 80.0} if written else {}),
    }
    return row


def by_point(results: Results) -> dict[tuple[str, str], Row]:
    return {(row.strategy, row.settings.offload): row for row in results.rows}


def test_golden_tables() -> None:
    wide = table_text(offloaded(), width=300)
    assert wide == WIDE.read_text(encoding="utf-8")
    text = table_text(offloaded(), width=WIDTH)
    assert text == TABLE.read_text(encoding="utf-8")


def test_practicality_is_against_the_same_row_with_all_on_the_device() -> None:
    rows = by_point(offloaded())
    assert rows["zero2", "cpu_optimizer"].offload_practicality == pytest.approx(1 / 1.6)
    assert rows["zero3", "nvme"].offload_practicality == pytest.approx(1 / 9)
    assert rows["zero3", "none"].offload_practicality is None
    assert rows["ddp", "cpu_optimizer"].offload_practicality is None
    other = offloaded()
    for row in other.rows:
        if row.settings.offload == "none":
            row.settings.clip = 0.5
    finish_rows(other)
    assert all(row.offload_practicality is None for row in other.rows)


def four_ways() -> dict[tuple[str, bool, str | None], Row]:
    """zero3 on the device and offloaded, over two communicators, updated in and after backward; in an order in which
    the first plain row is the twin of none."""
    row = next(row for row in sample().rows if row.strategy == "zero3")
    rows = {}
    for offload, slower in (("none", 1.0), ("cpu_optimizer", 3.0)):
        for in_backward, factor in ((False, 1.0), (True, 0.8)):
            for communicator, cost in (("shm", 1.0), ("c10d", 1.5)):
                one = moved(row, offload, slower * factor * cost)
                one.settings.optimizer_in_backward, one.settings.communicator = in_backward, communicator
                one.name = f"{offload}_{in_backward}_{communicator}"
                assert one.peak_device_bytes
                one.peak_device_bytes += (0 if in_backward else 1 << 20) + (
                    20 << 20 if offload == "none" else 0
                )
                rows[offload, in_backward, communicator] = one
    return rows


def test_offloaded_rows_are_held_against_their_own_twins() -> None:
    rows = four_ways()
    results = sample()
    results.rows = list(rows.values())
    finish_rows(results)
    offloaded_rows = [row for (offload, *_), row in rows.items() if offload != "none"]
    assert [row.offload_practicality for row in offloaded_rows] == pytest.approx([1 / 3] * 4)
    assert "for 3.0 times the latter's step time" in " ".join(advise(results))
    # Without a row that is updated at the same time, one that is not will do; one over another communicator never.
    twin = rows["none", True, "shm"]
    twin.status = "oom"
    finish_rows(results)
    assert rows["cpu_optimizer", True, "shm"].offload_practicality == pytest.approx(1 / 3 / 0.8)
    for in_backward in (False, True):
        rows["none", in_backward, "shm"].status = "failed"
    finish_rows(results)
    assert rows["cpu_optimizer", True, "shm"].offload_practicality is None
    finish_rows(results, baseline="zero3")
    assert rows["none", False, "c10d"].speedup == 1.0 and rows["none", True, "c10d"].speedup == 1.0


def test_what_did_not_fit_with_another_batch_says_nothing_of_this_one() -> None:
    results = offloaded()
    for row in results.rows:
        if row.settings.offload == "none":
            row.status, row.step_time_ms = "oom", None
            row.settings.batch_size *= 2
    finish_rows(results)
    assert "without offload does not" not in " ".join(advise(results))


def test_rows_on_nvme_that_stay_off_the_disk_are_named() -> None:
    results = offloaded()
    row = by_point(results)["zero3", "nvme"]
    assert row.transfers is not None
    told = "zero3, offload nvme read and wrote nothing on NVMe in measured steps"
    assert told not in table_text(results, width=WIDTH)
    row.transfers.nvme_read_bytes = row.transfers.nvme_written_bytes = 0
    assert told in table_text(results, width=WIDTH)
    for read, written in ((0, 1), (1, 0)):
        row.transfers.nvme_read_bytes, row.transfers.nvme_written_bytes = read, written
        assert told not in table_text(results, width=WIDTH)


def test_speedup_is_against_a_baseline_placed_alike_where_there_is_one() -> None:
    results = offloaded()
    finish_rows(results, baseline="zero2")
    rows = by_point(results)
    assert rows["zero3", "cpu_optimizer"].baseline == rows["zero2", "cpu_optimizer"].name
    assert rows["zero3", "nvme"].baseline == rows["zero2", "none"].name


def test_advice_says_what_offload_buys_and_costs() -> None:
    text = " ".join(advise(offloaded()))
    assert (
        "zero3, offload cpu_optimizer peaks at 14.2 MiB, 27 % below zero3, offload none, for 1.6 times"
        in text
    )
    alone = offloaded()
    for row in alone.rows:
        if row.settings.offload == "none":
            row.status, row.step_time_ms = "oom", None
    finish_rows(alone)
    assert "where zero3 without offload does not" in " ".join(advise(alone))


def test_only_memory_that_ran_out_is_said_not_to_fit() -> None:
    results = offloaded()
    plain = [row for row in results.rows if row.settings.offload == "none"]
    for row in plain:
        row.status, row.step_time_ms = "oom", None
    failed = next(row for row in plain if row.strategy == "zero3").model_copy(deep=True)
    failed.name, failed.status, failed.settings.optimizer_in_backward = "failed", "failed", True
    results.rows.append(failed)
    finish_rows(results)
    assert "without offload does not" not in " ".join(advise(results))


def test_nothing_is_said_against_a_plain_row_that_is_not_ranked() -> None:
    results = offloaded()
    by_point(results)["zero3", "none"].comparable = False
    finish_rows(results)
    assert "zero3, offload cpu_optimizer peaks" not in " ".join(advise(results))


def test_the_share_that_left_the_device_is_shown_and_not_the_one_asked_for() -> None:
    results = offloaded()
    by_kind = by_point(results)
    for row, asked, found in (
        (by_kind["zero2", "cpu_optimizer"], 0.5, 0.53125),
        (by_kind["zero3", "cpu_optimizer"], "auto", 0.25),
    ):
        assert row.transfers is not None
        row.settings.offload_ratio, row.transfers.offload_ratio = asked, found  # type: ignore[assignment]
    column = next(one for one in table_columns(results.rows) if one.title == "off device")
    assert set(column.cells) == {"-", "0.531", "0.25 (auto)"}


def test_memory_is_drawn_by_tier() -> None:
    figure = plots_module.memory_figure(offloaded())
    assert figure is not None
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert [label.split(",")[0] for label in labels[:3]] == ["device memory", "host memory", "NVMe"]


def test_counters_become_figures_of_one_step() -> None:
    counted = Counted(to_host_bytes=400, nvme_written_bytes=8, pinned_bytes=7)
    found = of_window(counted, step_num=4)
    assert found is not None
    assert (found.to_host_bytes, found.to_device_bytes, found.nvme_written_bytes) == (100, None, 2)
    assert (found.pinned_bytes, found.limit_gb_s) == (7, {})
    assert of_window(None, step_num=4) is None


def test_a_row_moves_what_its_busiest_rank_moves() -> None:
    ranks = [
        WindowTransfers(to_host_bytes=4_000_000_000, limit_gb_s={"to_host": 50.0, "nvme_read": 3.0}),
        WindowTransfers(to_host_bytes=2_000_000_000, limit_gb_s={"to_host": 40.0}, limit_note="no room"),
    ]
    row = transfers_of([make_window(transfers=each) for each in ranks], step_s=2.0)
    assert row is not None
    assert row.to_host_bytes == 4_000_000_000 and row.to_device_bytes is None
    assert row.achieved_gb_s == {"to_host": 2.0}
    assert row.limit_gb_s == {"to_host": 40.0}  # of the slowest; no limit that only some know
    assert row.limit_note == "no room"
    assert transfers_of([make_window(transfers=None)], step_s=1.0) is None


def test_cpu_ranks_have_no_link_and_rows_without_files_no_disk() -> None:
    import torch

    assert link_limits(torch.device("cpu")) == {}
    assert file_limits([], options={}, rank_num=1) == {}


def test_files_are_measured_as_they_would_be_used(tmp_path: Path) -> None:
    limits = file_limits([str(tmp_path), str(tmp_path)], options={}, rank_num=2)
    assert set(limits) == {"nvme_read", "nvme_write", "nvme_both"}
    assert all(limit > 0 for limit in limits.values())
    assert list(tmp_path.iterdir()) == []


def test_limits_of_files_are_by_direction_and_in_units_of_ten_to_the_ninth() -> None:
    rates = Rates(read_bytes_per_s=3e9, write_bytes_per_s=2e9, both_bytes_per_s=4e9)
    assert by_direction(rates) == {"nvme_read": 3.0, "nvme_write": 2.0, "nvme_both": 4.0}


def test_waits_for_files_are_a_part_of_those_for_state() -> None:
    found = part_for_files({"forward": 5.0, "exposed_offload": 3.0}, 2.0)
    assert found == {"forward": 5.0, "exposed_offload": 1.0, "exposed_io": 2.0}
    assert part_for_files({"exposed_offload": 3.0}, 4.0) == {"exposed_offload": 0.0, "exposed_io": 3.0}
    assert part_for_files({"forward": 5.0}, None) == {"forward": 5.0}


if __name__ == "__main__":
    Path(TABLE).write_text(table_text(offloaded(), width=WIDTH), encoding="utf-8")
    Path(WIDE).write_text(table_text(offloaded(), width=300), encoding="utf-8")

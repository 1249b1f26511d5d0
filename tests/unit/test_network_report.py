"""The report of a network: facts of rows, sentences on what bounds them, and the command that prints both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from network_samples import by_the_model, moved, over_network, results_of
from typer.testing import CliRunner

from zerobench.cli import main as cli
from zerobench.errors import ConfigError
from zerobench.report.network_bounds import bottleneck, break_even_text
from zerobench.report.network_facts import (
    bytes_by_collective,
    collectives_of,
    effective_bandwidth,
    network_share,
    step_parts,
)
from zerobench.report.network_model import costs_of
from zerobench.report.network_predictions import cases
from zerobench.report.network_report import network_report, report_lines
from zerobench.results.files import read_results
from zerobench.results.schema import Row

REDUCED = [moved("backward", "all_reduce", mb=40, ms=20)]
PHASES = {"forward": 20.0, "backward": 40.0, "optimizer": 20.0, "exposed_communication": 20.0}


def bound_of(row: Row):
    costs = costs_of([row])
    assert costs is not None
    return bottleneck(row, costs)


def test_bytes_are_added_up_by_collective() -> None:
    parts = [
        moved("forward", "all_gather", mb=3),
        moved("backward", "all_gather", mb=3),
        moved("backward", "reduce_scatter", mb=5),
    ]
    row = over_network("zero3", "native", ms=100, collectives=parts)
    assert bytes_by_collective(row) == {"all_gather": 6_000_000, "reduce_scatter": 5_000_000}


def test_rows_without_phases_of_collectives_have_those_of_the_step() -> None:
    row = over_network("zero3", "native", ms=100, collectives=REDUCED)
    row.collectives, row.communication_by_collective = None, {"all_gather": 8, "broadcast": 0}
    (only,) = collectives_of(row)
    assert (only.phase, only.name, only.bytes, only.calls) == ("step", "all_gather", 8, None)


def test_effective_bandwidth_is_bytes_over_the_time_in_the_collective() -> None:
    assert effective_bandwidth(moved("backward", "all_reduce", mb=40, ms=20)) == pytest.approx(2e9)
    assert effective_bandwidth(moved("backward", "all_reduce", mb=40)) is None


def test_the_share_of_the_network_is_that_of_the_profile() -> None:
    row = over_network("zero1", "native", ms=200, collectives=REDUCED, phases=PHASES)
    assert network_share(row) == pytest.approx(0.2)
    assert step_parts(row) == pytest.approx((160, 40, 0, 0))


def test_without_the_phase_the_share_is_unknown() -> None:
    row = over_network("zero1", "native", ms=200, collectives=REDUCED, phases={"forward": 1.0})
    assert network_share(row) is None


def test_the_bubble_of_a_pipeline_is_not_the_network() -> None:
    row = over_network("zero1", "native", ms=200, collectives=REDUCED, phases=PHASES)
    row.bubble_formula_pct = 15.0
    assert network_share(row) == pytest.approx(0.05)


def test_a_row_is_bound_by_compute() -> None:
    found = bound_of(over_network("zero1", "native", ms=100, collectives=REDUCED, phases=PHASES))
    assert found is not None and found.bound == "compute"
    assert found.sentence == (
        "zero1 is bound by compute: 80 % of its step, most of it backward. A faster network would shorten the "
        "step by at most 20 %; use a faster device or --compile."
    )


def test_a_row_is_bound_by_bandwidth() -> None:
    phases = {**PHASES, "exposed_communication": 320.0}
    found = bound_of(over_network("zero1", "1gbit", ms=400, collectives=REDUCED, phases=phases))
    assert found is not None and found.bound == "bandwidth"
    assert found.sentence == (
        "zero1 at 1gbit is bound by bandwidth: 80 % of its step waits for 38.1 MiB a step, most of it all_reduce. "
        "Twice the bandwidth, or half the bytes, would take 167.3 ms off its 400.0 ms."
    )


def test_waiting_for_slower_ranks_is_not_taken_for_the_wire() -> None:
    parts = [moved("backward", "all_reduce", mb=0.1)]
    phases = {**PHASES, "exposed_communication": 320.0}
    rows = [
        over_network("zero1", network, ms=400, collectives=parts, phases=phases)
        for network in ("native", "1gbit")
    ]
    costs = costs_of(rows)
    assert costs is not None
    found = bottleneck(rows[1], replace(costs, overlap_ms=10.0))
    assert found is not None and found.sentence.endswith(
        "waiting for slower ranks, so a faster network does not help."
    )


def test_a_row_is_bound_by_latency() -> None:
    phases = {**PHASES, "exposed_communication": 320.0}
    parts = [moved("backward", "all_reduce", mb=1, calls=100)]
    found = bound_of(over_network("zero1", "1gbit:1ms", ms=400, collectives=parts, phases=phases))
    assert found is not None and found.bound == "latency"
    assert found.sentence.startswith(
        "zero1 at 1gbit:1ms is bound by latency: 80 % of its step waits for 200 messages that follow one another, "
    )


def test_small_messages_over_an_unknown_network_wait_for_latency() -> None:
    phases = {**PHASES, "exposed_communication": 320.0}
    for mb, bound in ((1, "latency"), (40, "bandwidth")):
        parts = [moved("backward", "all_reduce", mb=mb, calls=100)]
        found = bound_of(over_network("zero1", "native", ms=400, collectives=parts, phases=phases))
        assert found is not None and found.bound == bound


@pytest.mark.parametrize(("phase", "said"), [("host_bound", "waits for work"), ("exposed_io", "offloaded")])
def test_a_row_is_bound_by_its_host(phase: str, said: str) -> None:
    found = bound_of(
        over_network("zero1", "native", ms=100, collectives=REDUCED, phases={**PHASES, phase: 200.0})
    )
    assert found is not None and found.bound == "host" and said in found.sentence


def two_strategies() -> list[Row]:
    """ddp computes for 100 ms and sends 40 MB; zero1 for 130 ms and sends 10."""
    networks = ["native", "2.5gbit", "1gbit"]
    facts = {"native": 0.0, "overlap": 0.0}
    return [
        *by_the_model("ddp", networks, compute=100.0, collectives=REDUCED, rounds=8, **facts),
        *by_the_model(
            "zero1",
            networks,
            compute=130.0,
            collectives=[moved("backward", "reduce_scatter", mb=10)],
            rounds=4,
            **facts,
        ),
    ]


def test_break_even_is_told_by_bandwidth() -> None:
    ddp, zero1 = cases(two_strategies())
    assert break_even_text(zero1, ddp) == "zero1 against ddp: slower above 8 Gbit/s, faster below 8 Gbit/s."


def test_networks_that_nobody_has_are_not_told() -> None:
    networks = ["native", "2.5gbit", "1gbit"]
    ddp, *_ = cases(two_strategies())
    parts = [moved("backward", "reduce_scatter", mb=39.999)]
    rows = by_the_model(
        "zero2", networks, compute=130.0, native=0.0, overlap=0.0, collectives=parts, rounds=4
    )
    (zero2,) = cases(rows)  # equal where 1 kB takes 30 ms: 0.27 Mbit/s
    assert break_even_text(zero2, ddp) == "zero2 against ddp: slower at every bandwidth."


def test_the_report_holds_rows_strategies_and_the_error() -> None:
    found = network_report(results_of(*two_strategies()))
    assert len(found["rows"]) == 6 and json.dumps(found)
    ddp, zero1 = found["strategies"]
    assert ddp["break_even"] is None
    assert zero1["break_even_bytes_per_s"] == pytest.approx([1e9])
    assert found["model_error"] == {"median": pytest.approx(0), "worst": pytest.approx(0), "points": 4}
    at_1gbit = [one for one in ddp["predictions"] if one["network"] == "1gbit"]
    assert [one["hosts"] for one in at_1gbit] == [2, 4, 8, 16, 64]
    assert at_1gbit[0]["measured_ms"] == pytest.approx(at_1gbit[0]["predicted_ms"])


def test_the_lines_tell_bytes_bounds_break_even_and_predictions() -> None:
    lines = report_lines(network_report(results_of(*two_strategies())))
    assert "  ddp_1gbit: 1gbit, 77 % of the step in the network" in lines
    assert "    backward   all_reduce      38.1 MiB in 4 calls, 16 Gbit/s" in lines
    assert any(line.startswith("  ddp at 1gbit is bound by bandwidth") for line in lines)
    assert any(line.split()[:5] == ["ddp", "at", "1gbit", "434.6", "(434.6)"] for line in lines)
    assert lines[-1] == (
        "The model's error on 4 measured points, each predicted without itself: median 0 %, worst 0 %."
    )


def test_lines_of_several_models_say_which() -> None:
    rows = [*two_strategies(), *[row.model_copy(deep=True) for row in two_strategies()]]
    for row in rows[6:]:
        row.settings, row.name = row.settings.model_copy(update={"model": "gpt2"}), f"{row.name}_gpt2"
    lines = report_lines(network_report(results_of(*rows)))
    assert any("ddp, tiny at 1gbit" in line for line in lines)
    assert any("ddp, gpt2 at 1gbit" in line for line in lines)
    assert "  gpt2: zero1 against ddp: slower above 8 Gbit/s, faster below 8 Gbit/s." in lines


def test_without_a_known_network_nothing_is_predicted() -> None:
    lines = report_lines(
        network_report(
            results_of(over_network("zero1", "native", ms=100, collectives=REDUCED, phases=PHASES))
        )
    )
    assert lines[-1].startswith("No step time is predicted")


def test_without_rows_on_several_ranks_there_is_no_network() -> None:
    row = over_network("zero1", "native", ms=100, collectives=[], world_size=1)
    assert report_lines(network_report(results_of(row))) == [
        "no row on two ranks or more is ok, so there is no network to report"
    ]


def write(folder: Path) -> None:
    text = results_of(*two_strategies()).model_dump_json()
    (folder / "results.json").write_text(text, encoding="utf-8")


def run(*arguments: str) -> str:
    return CliRunner().invoke(cli.app, ["network", *arguments], catch_exceptions=False).output


def test_the_command_prints_lines_or_json(tmp_path) -> None:
    write(tmp_path)
    assert "where strategies break even" in run(str(tmp_path))
    found = json.loads(run(str(tmp_path), "--json", "--hosts", "2,4", "--at", "100mbit"))
    assert {one["hosts"] for one in found["strategies"][0]["predictions"]} == {2, 4}
    assert {one["network"] for one in found["strategies"][0]["predictions"]} == {
        "2.5gbit",
        "1gbit",
        "100mbit",
    }


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("--hosts", "1", "whole numbers from 2"), ("--at", "fast", "is not a network")],
)
def test_the_command_says_what_is_wrong(option: str, value: str, said: str, tmp_path) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError, match=said):
        run(str(tmp_path), option, value)


def test_a_result_file_keeps_collectives(tmp_path) -> None:
    write(tmp_path)
    row = read_results(tmp_path).rows[0]
    assert row.collectives == REDUCED

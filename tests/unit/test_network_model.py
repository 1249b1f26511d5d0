"""The model of step times over networks, on rows that follow it, and where two strategies take equal time."""

from __future__ import annotations

import pytest
from network_samples import MB, by_the_model, moved, over_network

from zerobench.host.network import Link, parse_network
from zerobench.report.network_facts import rounds
from zerobench.report.network_model import Costs, Moved, costs_of
from zerobench.report.network_predictions import break_even, cases, errors, predictions

NETWORKS = ["native", "10gbit", "2.5gbit", "1gbit:0.5ms", "0.9gbit"]


def ddp_rows(networks=NETWORKS, **changed):
    """Two ranks reduce 40 MB in four buckets: two messages each, one after the other."""
    facts = {"compute": 200.0, "native": 5.0, "overlap": 30.0, "rounds": 8.0, **changed}
    return by_the_model("ddp", networks, collectives=[moved("backward", "all_reduce", mb=40)], **facts)


def costs(*, compute=100.0, native=0.0, overlap=0.0, mb=40.0, name="all_reduce", calls=1, hosts=2, stages=1):
    return Costs(
        compute_ms=compute,
        native_ms=native,
        overlap_ms=overlap,
        hosts=hosts,
        moved=(Moved(name=name, full_bytes=mb * MB, calls=calls),),
        stages=stages,
    )


def test_the_model_finds_the_costs_of_rows_that_follow_it() -> None:
    found = costs_of(ddp_rows())
    assert found is not None
    assert (found.compute_ms, found.native_ms) == pytest.approx((200, 5))
    assert found.overlap_ms == pytest.approx(30)
    assert (found.bytes, found.rounds) == (40 * MB, 8)


def test_rows_that_follow_the_model_are_predicted_exactly_without_themselves() -> None:
    (case,) = cases(ddp_rows())
    found = predictions(case, hosts=[])
    assert [one.network for one in found] == NETWORKS[1:]
    assert all(one.predicted_ms == pytest.approx(one.measured_ms) for one in found)
    assert errors(found) == pytest.approx((0, 0), abs=1e-9)


def test_a_single_slow_row_is_predicted_without_overlap() -> None:
    (case,) = cases(ddp_rows(["native", "1gbit"]))
    (found,) = predictions(case, hosts=[])
    assert found.measured_ms == pytest.approx(found.predicted_ms)
    assert found.unseen_ms == pytest.approx(found.measured_ms + 30)


def test_compute_is_the_median_over_rows() -> None:
    rows = ddp_rows(["native", "2.5gbit", "1gbit"])
    disturbed = ddp_rows(["native"], compute=260.0)  # while another program ran
    found = costs_of([*disturbed, *rows[1:]])
    assert found is not None and found.compute_ms == pytest.approx(200)


def test_without_a_native_row_its_time_lessens_the_overlap() -> None:
    found = costs_of(ddp_rows(["2.5gbit", "1gbit", "0.9gbit"]))
    assert found is not None
    assert (found.compute_ms, found.native_ms) == (pytest.approx(200), 0)
    assert found.overlap_ms == pytest.approx(
        30 - 5
    )  # less the native time, which these rows do not tell apart


def test_a_hidden_network_says_nothing_of_the_overlap() -> None:
    rows = ddp_rows(
        ["native", "10gbit", "1gbit"], overlap=100.0
    )  # 33 ms on the wire at 10 Gbit/s, all hidden
    found = costs_of(rows)
    assert found is not None and found.overlap_ms == pytest.approx(100)


def test_a_network_that_costs_more_than_its_bytes_has_no_overlap() -> None:
    rows = ddp_rows(["native"])
    rows.append(over_network("ddp", "1gbit", ms=900.0, collectives=rows[0].collectives or []))
    found = costs_of(rows)
    assert found is not None and found.overlap_ms == 0


def test_bytes_of_a_ring_stay_about_constant_with_more_hosts() -> None:
    sent = [costs(mb=40).on_hosts(hosts).bytes / MB for hosts in (2, 4, 8, 64)]
    assert sent == pytest.approx([40, 60, 70, 78.75])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("all_gather", 7), ("reduce_scatter", 7), ("all_reduce", 14), ("point_to_point", 1), ("exchange", 7)],
)
def test_messages_that_follow_one_another(name: str, expected: int) -> None:
    assert rounds(name, 8) == expected


def test_latency_counts_for_every_message() -> None:
    link = Link(bits_per_s=1e12, latency_s=1e-3)
    found = costs(mb=0, calls=5)
    assert [found.on_hosts(hosts).step_ms(link) - 100 for hosts in (2, 8)] == pytest.approx([10, 70])


def test_a_reduce_scatter_of_cpu_ranks_costs_as_much_as_an_all_reduce() -> None:
    parts = [moved("backward", "reduce_scatter", mb=10), moved("optimizer", "all_gather", mb=10)]
    for device, mb, messages in (("cuda", 20, 8), ("cpu", 30, 12)):
        found = costs_of([over_network("zero1", "native", ms=100, collectives=parts, device=device)])
        assert found is not None
        assert (found.bytes, found.rounds) == (mb * MB, messages)


def pipeline_rows(**settings):
    """A stage sends 10 MB of activations forward in four messages; tied weights are reduced at the end."""
    parts = [moved("forward", "point_to_point", mb=10), moved("optimizer", "all_reduce", mb=2, calls=1)]
    facts = {"compute": 150.0, "native": 10.0, "overlap": 0.0, "rounds": 6.0}
    stages = {"pipeline_stages": 2, "pipeline_schedule": "1f1b", "micro_batches": 4}
    return by_the_model("ddp", ["native", "1gbit"], collectives=parts, **facts, **stages, **settings)


def test_a_pipeline_reduces_between_replicas_once_there_are_several() -> None:
    (case,) = cases(pipeline_rows(parameter_count=50 * MB))
    assert case.costs.bytes == pytest.approx(12 * MB)
    gradients = 50 * MB  # of a stage's 25 million parameters in bf16
    assert case.costs.on_hosts(4).bytes == pytest.approx(12 * MB + gradients)
    assert case.costs.on_hosts(16).bytes == pytest.approx(12 * MB + gradients * 2 * 7 / 8)


def test_a_pipeline_runs_on_whole_pipelines_of_hosts() -> None:
    (case,) = cases(pipeline_rows())
    assert [one.hosts for one in predictions(case, hosts=[2, 3, 4])] == [2, 4]


def test_the_bubble_is_no_network_time() -> None:
    (row, _) = pipeline_rows()
    row.bubble_formula_pct = 5.0  # of 160 ms
    found = costs_of([row])
    assert found is not None
    assert (found.compute_ms, found.native_ms) == pytest.approx((158, 2))


def test_the_native_network_is_measured_and_not_predicted() -> None:
    (case,) = cases(ddp_rows(["native"]))
    assert predictions(case) == []
    found = predictions(case, hosts=[2, 4], networks=["1gbit"])
    assert [(one.hosts, one.measured_ms) for one in found] == [(2, None), (4, None)]


def test_rows_on_more_hosts_stand_beside_their_prediction() -> None:
    rows = [*ddp_rows(["native", "1gbit"]), *ddp_rows(["1gbit"], world_size=4)]
    (case,) = cases(rows)
    measured = {one.hosts: one.measured_ms for one in predictions(case)}
    assert measured[4] is not None and measured[8] is None


def test_rows_that_differ_in_anything_else_are_cases_of_their_own() -> None:
    rows = [*ddp_rows(["native"]), *ddp_rows(["native"], batch_size=3)]
    assert len(cases(rows)) == 2


def test_break_even_is_exact() -> None:
    # 100 + 40 MB / B against 130 + 10 MB / B: equal where 30 MB take 30 ms.
    found = break_even(costs(compute=100, mb=40), costs(compute=130, mb=10))
    assert found == pytest.approx([1e9])


def test_break_even_lies_where_both_networks_show() -> None:
    # Hidden below 40 ms on the wire and below 60: 100 + 40 MB / B - 40 equals 110 + 20 MB / B - 60 at no bandwidth
    # where both show, and 110 where only the first does: 40 MB in 50 ms.
    first, second = costs(compute=100, overlap=40, mb=40), costs(compute=110, overlap=60, mb=20)
    assert break_even(first, second) == pytest.approx([40 * MB / 0.050])


def test_strategies_can_break_even_twice() -> None:
    # The first is faster on a fast network, slower once its bytes show, and faster again once the other's do.
    first, second = costs(compute=100, mb=40), costs(compute=120, overlap=100, mb=100)
    found = break_even(first, second)
    assert found == pytest.approx([40 * MB / 0.020, 60 * MB / 0.080])
    for bandwidth in found:
        link = Link(bits_per_s=8 * bandwidth * 1514 / 1448, latency_s=0)
        assert first.step_ms(link) == pytest.approx(second.step_ms(link))


def test_a_strategy_that_costs_more_everywhere_never_breaks_even() -> None:
    assert break_even(costs(compute=100, mb=40), costs(compute=120, mb=80)) == []


def test_equal_strategies_break_even_nowhere() -> None:
    assert break_even(costs(), costs()) == []


def test_a_link_carries_less_data_than_its_frames() -> None:
    link = parse_network("1gbit", source="test")
    assert link is not None and link.data_bytes_per_s == pytest.approx(119.55e6, rel=1e-3)

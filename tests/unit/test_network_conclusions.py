"""Sentences on strategies over networks, and a published study next to our rows."""

from __future__ import annotations

import pytest
from network_samples import by_the_model, moved, over_network, results_of

from zerobench.recipes import slow_network_study as study
from zerobench.recipes.network_conclusions import network_break_even, network_error, network_winners
from zerobench.results.schema import Row

REDUCED = [moved("backward", "all_reduce", mb=40)]


def two_strategies(networks=("native", "2.5gbit", "1gbit"), **settings) -> list[Row]:
    """ddp computes for 100 ms and sends 40 MB; zero1 for 130 ms and sends 10."""
    facts = {"native": 0.0, "overlap": 0.0, **settings}
    less = [moved("backward", "reduce_scatter", mb=10)]
    return [
        *by_the_model("ddp", list(networks), compute=100.0, collectives=REDUCED, rounds=8, **facts),
        *by_the_model("zero1", list(networks), compute=130.0, collectives=less, rounds=4, **facts),
    ]


def test_the_fastest_strategy_is_told_by_network() -> None:
    assert network_winners(results_of(*two_strategies(["native", "1gbit"]))) == [
        "tiny at native: ddp is the fastest; zero1 0.77.",
        "tiny at 1gbit: zero1 is the fastest with 2.03 times the speed of ddp; ddp 1.00.",
    ]


def test_without_ddp_the_fastest_is_told_alone() -> None:
    rows = [
        over_network(name, "native", ms=ms, collectives=REDUCED) for name, ms in (("zero1", 9), ("zero2", 8))
    ]
    assert network_winners(results_of(*rows)) == ["tiny at native: zero2 is the fastest of 2."]


def test_break_even_needs_a_slow_network() -> None:
    assert network_break_even(results_of(*two_strategies(["native"]))) == []
    assert network_break_even(results_of(*two_strategies())) == [
        "tiny: zero1 against ddp: slower above 8 Gbit/s, faster below 8 Gbit/s."
    ]


def test_the_error_of_the_model_is_told() -> None:
    assert network_error(results_of(*two_strategies(["native"]))) == []
    (text,) = network_error(results_of(*two_strategies()))
    assert "off by 0 % in the median and 0 % at worst" in text


def test_the_study_has_five_strategies_on_two_models() -> None:
    found = study.study_rows()
    assert len(found) == 10
    assert {row.strategy for row in found} == {"ddp", "pipeline", "zero1", "zero2", "zero3"}
    assert next(row.speedup for row in found if (row.model, row.strategy) == ("gpt-64m", "pipeline")) == 1.23


@pytest.mark.parametrize(
    ("model", "strategy", "published_s"),
    [
        ("gpt-64m", "ddp", 1.211),
        ("gpt-64m", "zero1", 1.769),
        ("gpt-64m", "zero2", 2.861),
        ("gpt-512m", "zero1", 10.041),
        ("gpt-512m", "zero2", 28.358),
    ],
)
def test_messages_over_the_link_explain_the_times_of_the_study(
    model: str, strategy: str, published_s: float
) -> None:
    assert study.explained_s(model, strategy) == pytest.approx(published_s, rel=0.07)


def test_rows_stand_below_those_of_the_study() -> None:
    lines = study.slow_network_rows(results_of(*two_strategies(["native", "1gbit"], model="gpt-64m")))
    assert lines[0] == (
        "gpt-64m ddp, Megatron-DeepSpeed on two nodes with a slow network: peak 1.48 GB, 1.211 s, 6.60 samples/s, 1.00 "
        "times ddp, backward 95 %"
    )
    assert (
        lines[1].startswith("  here at native: peak ")
        and "0.100 s" in lines[1]
        and "1.00 times ddp" in lines[1]
    )
    assert len(lines) == 6 and "2.03 times ddp" in lines[5]


def test_rows_of_other_models_have_none_of_the_study() -> None:
    assert study.slow_network_rows(results_of(*two_strategies())) == []


def test_claims_are_checked_over_the_network_nearest_to_that_of_the_study() -> None:
    claims = study.slow_network_claims(results_of(*two_strategies(model="gpt-64m")))
    (zero1,) = [text for text in claims if text.startswith("The study: zero1 has")]
    assert zero1 == (
        "The study: zero1 has 0.68 times ddp on gpt-64m and 0.70 times ddp on gpt-512m. At 1gbit corrected on gpt-64m "
        "with 2.03."
    )


def test_a_claim_that_our_rows_repeat_is_confirmed() -> None:
    claims = study.slow_network_claims(results_of(*two_strategies(["native"], model="gpt-512m")))
    assert any("At native confirmed on gpt-512m with 0.77." in text for text in claims)


def test_claims_on_models_that_were_not_measured_say_so() -> None:
    claims = study.slow_network_claims(results_of(*two_strategies()))
    assert sum("its models were not measured" in text.lower() for text in claims) == 5


def test_two_times_of_zero2_tell_that_every_micro_batch_all_reduces() -> None:
    claims = study.slow_network_claims(results_of(*two_strategies()))
    assert any("(2.84 s against 2.86 and 28.39 s against 28.36)" in text for text in claims)


def test_nothing_is_claimed_without_rows() -> None:
    assert study.slow_network_claims(results_of()) == []

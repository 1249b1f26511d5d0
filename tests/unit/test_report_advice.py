"""The sentences of advice."""

from __future__ import annotations

from report_samples import grid, mixed, sample

from zerobench.report import (
    advise,
    finish_rows,
    summarise,
)


def test_advice_on_the_sample() -> None:
    fastest, memory, basis = advise(sample())
    assert (
        fastest.startswith("zero2 and zero1 tie as the fastest of 7 correct rows")
        and "below the noise" in fastest
    )
    assert memory.startswith("Within 10 % of the fastest, zero3 needs the least memory: 19.5 MiB peak")
    assert (
        "7 rows" in basis and "0.934 M parameters" in basis and "2 ranks" in basis and "20 measured" in basis
    )


def test_advice_names_one_where_the_difference_is_clear() -> None:
    results = sample()
    results.rows[4].step_time_ms = summarise([60.0, 60.5, 59.5, 60.2, 59.8])
    finish_rows(results)
    assert advise(results)[0].startswith("zero3 is the fastest of 7 correct rows: 34,133 tokens/s")
    assert (
        advise(results)[1] == "No row within 10 % of zero3 needs notably less memory than its 19.5 MiB peak."
    )


def test_advice_never_names_wrong_or_incomparable_rows() -> None:
    results = mixed()
    for row in results.rows:
        if row.strategy in ("zero1", "zero3"):
            row.step_time_ms, row.peak_device_bytes = summarise([1.0] * 5), 1000
    finish_rows(results)
    text = " ".join(advise(results))
    assert "zero0 is the fastest of 2 correct rows" in text
    assert "zero1" not in text and "zero3" not in text


def test_advice_says_when_sharding_buys_nothing() -> None:
    results = sample()
    for row in results.rows:
        row.peak_device_bytes = 1_000_000_000 + (row.peak_device_bytes or 0)
    finish_rows(results)
    assert any(text.startswith("Sharding buys little memory here") for text in advise(results))
    assert not any("Sharding buys" in text for text in advise(sample()))


def test_advice_says_when_ranks_buy_nothing() -> None:
    results = sample()
    results.rows[0].step_time_ms = summarise([50.0, 50.5, 49.5])
    finish_rows(results)
    assert any(
        text.startswith("More ranks buy no speed here: single on one rank") for text in advise(results)
    )


def test_advice_on_one_rank() -> None:
    results = sample()
    for row in results.rows:
        row.settings.world_size = 1
    finish_rows(results)
    assert any("nothing to shard" in text for text in advise(results))


def test_advice_by_workload() -> None:
    fp32, bf16 = advise(grid())
    assert fp32.startswith("fp32: zero2, batch 16 and zero1, batch 16 tie") and bf16.startswith("bf16: ")

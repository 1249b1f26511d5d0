"""The sentences of advice."""

from __future__ import annotations

from report_samples import gpus, grid, mixed, sample

from zerobench.report import (
    advise,
    finish_rows,
    summarise,
    table_text,
)
from zerobench.results.schema import Results
from zerobench.results.sizes import join_words, ms_text


def test_advice_on_the_sample() -> None:
    fastest, memory, bottleneck, basis = advise(sample())
    assert (
        fastest.startswith("zero2 and zero1 tie as the fastest of 7 correct rows")
        and "below the noise" in fastest
    )
    assert memory.startswith("Within 10 % of the fastest, zero3 needs the least memory: 19.5 MiB peak")
    assert bottleneck.startswith("Compute is the bottleneck of zero2: 92 % of the step.")
    assert (
        "7 rows, 1 run each" in basis
        and "0.934 M parameters" in basis
        and "2 ranks" in basis
        and "20 measured" in basis
    )


def chosen(**figures: tuple[float, int]) -> Results:
    """Rows of these strategies, given a step time in ms and a peak in MiB, with one percent of MAD."""
    results = sample()
    results.rows = [row for row in results.rows if row.strategy in figures]
    for row in results.rows:
        median_ms, peak_mib = figures[row.strategy]
        row.step_time_ms = summarise([median_ms * (1 + 0.01 * sign) for sign in (0, 1, -1, 3, -3) * 8])
        row.peak_device_bytes = peak_mib << 20
    finish_rows(results)
    return results


def test_advice_says_what_less_memory_costs() -> None:
    assert advise(chosen(zero1=(100.0, 800), zero3=(108.0, 200)))[1] == (
        "Within 10 % of the fastest, zero3 needs the least memory: 200.0 MiB peak, 75 % below zero1, for 8 % more time."
    )
    assert advise(chosen(zero1=(100.0, 800), zero3=(104.0, 200)))[1].endswith("for 4 % more time.")
    assert advise(chosen(zero1=(100.0, 800), zero3=(100.2, 200)))[1].endswith(
        "at the same speed within noise."
    )
    assert advise(chosen(zero1=(100.0, 800), zero3=(112.0, 200)))[1].startswith(
        "No row within 10 % of zero1 needs"
    )


def test_sharding_is_held_against_the_smallest_replicated_row() -> None:
    figures = {"ddp": (100.0, 1000), "zero0": (101.0, 800), "zero3": (102.0, 790)}
    assert any(
        "zero3 peaks at 790.0 MiB, zero0 at 800.0" in text for text in advise(chosen(**figures))
    )  # and not at ddp's 1000
    figures["zero3"] = (102.0, 750)
    assert not any("Sharding saves" in text for text in advise(chosen(**figures)))


def test_the_basis_has_all_batches_and_the_median_spread() -> None:
    results = chosen(ddp=(100.0, 800), zero1=(100.0, 800))
    results.rows[0].settings.batch_size = 4
    finish_rows(results)
    basis = advise(results)[-1]
    assert "batch 4 and 8 x sequence 128" in basis
    assert basis.endswith("40 measured steps a row, MAD 1.0 % of the median.")


def test_one_row_without_noise_leaves_the_order_open() -> None:
    results = chosen(ddp=(120.0, 800), zero1=(100.0, 800), zero3=(110.0, 800))
    assert results.rows[0].step_time_ms is not None
    assert " is the fastest of 3 correct rows" in advise(results)[0]
    results.rows[0].step_time_ms = summarise([120.0])
    finish_rows(results)
    assert "took the least time of 3 correct rows" in advise(results)[0]


def test_step_times_are_written_in_ms() -> None:
    assert [ms_text(value) for value in (1234.4, 999.94, 10.0, 9.876)] == [
        "1234 ms", "999.9 ms", "10.0 ms", "9.88 ms",
    ]  # fmt: skip


def test_slow_rates_have_a_decimal_as_in_the_table() -> None:
    results = chosen(zero1=(400_000.0, 800), zero3=(500_000.0, 800))
    assert "zero1 is the fastest of 2 correct rows: 5.1 tokens/s (" in advise(results)[0]
    results = chosen(zero1=(100_000.0, 800), zero3=(100_400.0, 800))
    assert "tie as the fastest of 2 correct rows, 20.4 to 20.5 tokens/s" in advise(results)[0]


def test_advice_names_one_where_the_difference_is_clear() -> None:
    results = sample()
    results.rows[4].step_time_ms = summarise([60.0, 60.5, 59.5, 60.2, 59.8, 60.0])
    finish_rows(results)
    assert advise(results)[0].startswith("zero3 is the fastest of 7 correct rows: 34,133 tokens/s")
    assert (
        advise(results)[1] == "No row within 10 % of zero3 needs notably less memory than its 19.5 MiB peak."
    )


def test_peaks_of_the_very_first_step_are_not_compared() -> None:
    """Some strategies only make their moments at its end."""
    results = sample()
    for row in results.rows:
        row.settings.warmup_steps, row.settings.num_steps = 0, 1
    finish_rows(results)
    assert all(row.memory_change_pct is row.tokens_per_s_per_peak_gb is None for row in results.rows)
    assert any(row.speedup for row in results.rows)
    assert not any("memory" in text or "peak" in text for text in advise(results))
    assert "of the first step alone" in table_text(results)
    for row in results.rows:
        row.settings.num_steps = 2
    finish_rows(results)
    assert any(row.memory_change_pct for row in results.rows)
    assert "of the first step alone" not in table_text(results)


def noisy(*medians_ms: float, spread: float) -> list[str]:
    results = sample()
    results.rows = results.rows[1:][: len(medians_ms)]
    for row, median_ms in zip(results.rows, medians_ms, strict=True):
        samples = [median_ms * (1 + spread * sign) for sign in (0, 1, -1, 1, -1, 0, 1, -1)]
        row.step_time_ms = summarise(samples)
    finish_rows(results)
    return advise(results)


def test_a_row_many_times_slower_never_ties() -> None:
    """With errors as large as the ratio, one minus the inverse ratio is below two of them however slow a row is."""
    assert noisy(100.0, 13_300.0, spread=0.6)[0].startswith("zero0 is the fastest of 2 correct rows")
    assert noisy(100.0, 13_300.0, spread=0.01)[0].startswith("zero0 is the fastest of 2 correct rows")


def test_advice_says_what_is_too_noisy_to_rank() -> None:
    first, *others = noisy(100.0, 150.0, 13_300.0, spread=0.6)
    assert first == (
        "Too noisy to rank: zero0 and zero1 may each be the fastest of 3 correct rows, 13,653 to 20,480 tokens/s with "
        "errors of up to 56 %. Measure more steps (--num-steps), on a quieter machine."
    )
    assert not any("Within 10 %" in text or "No row within" in text for text in others)
    assert noisy(100.0, 101.0, spread=0.02)[0].startswith("zero0 and zero1 tie as the fastest of 2 correct")


def test_few_steps_that_lie_close_by_chance_settle_nothing() -> None:
    """MAD of the fastest is 0.05 % and every other row is 1 % slower, as in 22 of 100 pairs of equal rows."""
    results = sample()
    for row in results.rows[1:]:
        row.step_time_ms = summarise([101.0, 101.05, 103.0])
    assert results.rows[3].strategy == "zero2"
    results.rows[3].step_time_ms = summarise([100.0, 100.05, 98.0])
    finish_rows(results)
    assert all(row.relative_uncertainty is None for row in results.rows[1:])
    advice = advise(results)
    assert advice[0] == (
        "zero2 took the least time of 7 correct rows, 20,480 tokens/s (100.0 ms a step), but 3 measured steps "
        "tell too little about the noise to call it the fastest. Measure 6 or more (--num-steps)."
    )
    assert not any(
        word in text
        for text in advice
        for word in ("tie", "is the fastest", "within noise", "Within 10 %", "No row")
    )
    assert advice[-1].endswith("3 to 20 measured steps a row, MAD 1.0 % of the median.")  # of the row with 20


def test_one_step_shows_no_noise() -> None:
    results = sample()
    for row in results.rows:
        assert row.step_time_ms is not None
        row.step_time_ms = summarise(row.step_time_ms.samples[:1])
    finish_rows(results)
    first, *_, basis = advise(results)
    assert " took the least time of 7 correct rows, " in first and "--num-steps" in first
    assert basis.endswith("1 measured step a row.")
    assert " ± " not in table_text(results, width=200).replace("ms ± MAD", "")


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
    said = next(text for text in advise(results) if text.startswith("Sharding saves little memory here"))
    assert "Most of it is not sharded" in said
    assert not any("Sharding saves" in text for text in advise(sample()))


def unlike(**settings: object) -> Results:
    """zero3 needs more than ddp, for which something else was chosen."""
    results = chosen(ddp=(100.0, 400), zero3=(110.0, 500))
    for name, value in settings.items():
        setattr(results.rows[1].settings, name, value)
    finish_rows(results)
    return results


def test_sharding_is_held_against_rows_of_the_same_batch_and_placement_alone() -> None:
    assert any("Sharding saves little" in text for text in advise(unlike()))
    for settings in ({"batch_size": 32}, {"grad_accum": 2}, {"checkpointing": True}, {"offload": "cpu_full"}):
        assert not any("Sharding saves" in text for text in advise(unlike(**settings)))


def test_sharding_buys_memory_where_it_does_at_one_batch_or_a_replicated_row_does_not_fit() -> None:
    results = unlike()
    for batch_size, peaks_mib in ((16, {"ddp": 400, "zero3": 395}), (32, {"ddp": 800, "zero3": 500})):
        for row in unlike().rows:
            row.settings.batch_size, row.peak_device_bytes = batch_size, peaks_mib[row.strategy] << 20
            row.name += f"_bs{batch_size}"
            results.rows.append(row)
    finish_rows(results)
    assert not any("Sharding saves" in text for text in advise(results))
    del results.rows[4:]
    finish_rows(results)
    assert any(
        "zero3, batch 16 peaks at 395.0 MiB, ddp, batch 16 at 400.0" in text for text in advise(results)
    )
    next(row for row in results.rows[2:] if row.strategy == "ddp").status = "oom"
    finish_rows(results)
    assert not any("Sharding saves" in text for text in advise(results))


def test_deepspeeds_stage_0_is_held_against_sharded_rows() -> None:
    def said(**figures: tuple[float, int]) -> str:
        results = chosen(**figures)
        for row in results.rows:
            row.strategy = row.strategy.replace("zero0", "deepspeed0")
        finish_rows(results)
        return " ".join(advise(results))

    assert "zero3 peaks at 500.0 MiB, deepspeed0 at 400.0" in said(zero0=(100.0, 400), zero3=(110.0, 500))
    assert "Sharding saves" not in said(ddp=(100.0, 400), zero0=(110.0, 500))


def test_advice_knows_not_whether_a_strategy_of_ones_own_shards() -> None:
    results = sample()
    for row in results.rows:
        row.peak_device_bytes = 1_000_000_000 + (row.peak_device_bytes or 0)
        row.strategy = "ddp" if row.strategy in ("ddp", "zero0") else f"mine:{row.strategy.title()}"
    finish_rows(results)
    assert not any("Sharding saves" in text for text in advise(results))


def test_advice_says_when_ranks_buy_nothing() -> None:
    results = sample()
    single = results.rows[0]
    least_ms = min(
        row.step_time_ms.median for row in results.rows if row.step_time_ms and row.settings.world_size > 1
    )

    def is_said(samples: list[float]) -> bool:
        single.step_time_ms = summarise(samples)
        finish_rows(results)
        return any(
            text.startswith("More ranks add no speed here: single on one rank") for text in advise(results)
        )

    assert is_said([50.0, 50.5, 49.5] * 2)
    assert not is_said([50.0, 50.5, 49.5])
    # One rank has half of the tokens in a step.
    assert is_said([least_ms * 0.45 * (1 + 0.01 * sign) for sign in (0, 1, -1) * 6])
    assert not is_said([least_ms * 0.45 * (1 + 0.3 * sign) for sign in (0, 1, -1) * 6])
    assert not is_said([least_ms * 0.55 * (1 + 0.01 * sign) for sign in (0, 1, -1) * 6])


def test_advice_on_one_rank() -> None:
    results = sample()
    for row in results.rows:
        row.settings.world_size = 1
    finish_rows(results)
    assert any("nothing to shard" in text for text in advise(results))


def test_rows_of_several_ranks_that_failed_are_no_rows_of_one() -> None:
    results = sample()
    for row in results.rows[1:]:
        row.settings.world_size = 1
    results.rows[0].settings.world_size, results.rows[0].status = 2, "failed"
    finish_rows(results)
    assert not any("nothing to shard" in text for text in advise(results))


def test_one_rank_is_not_held_against_rows_of_less_work_alone() -> None:
    """ddp ran out of memory at the batch of single."""
    results = chosen(single=(40.0, 400), ddp=(100.0, 400))
    ddp = results.rows[1]
    assert any("More ranks add no speed" in text for text in advise(results))
    ddp.settings.batch_size //= 4
    finish_rows(results)
    assert not any("More ranks" in text for text in advise(results))


def test_a_small_difference_is_not_none() -> None:
    results = chosen(zero1=(100.0, 800), zero3=(100.3, 200))
    for row in results.rows:
        assert row.step_time_ms is not None
        middle = row.step_time_ms.median
        row.step_time_ms = summarise([middle * (1 + 1e-5 * sign) for sign in (0, 1, -1) * 8])
    finish_rows(results)
    assert advise(results)[1].endswith("75 % below zero1, for less than 1 % more time.")


def test_advice_by_workload() -> None:
    fp32, bf16 = advise(grid())
    assert fp32.startswith("fp32: zero2, batch 16 and zero1, batch 16 tie") and bf16.startswith("bf16: ")


def test_advice_says_when_the_power_cap_sets_the_pace() -> None:
    results = gpus()
    assert advise(results)[-3] == (
        "All 3 rows within 10 % of the fastest ran at the GPUs' power cap (in 89 % of the samples, 612 W a GPU, "
        "12.61 to 13.11 tokens a joule): there, the energy of a step sets its time. Rows that move or compute "
        "less are faster, and communication costs time even where it overlaps with compute."
    )
    by_strategy = {row.strategy: row for row in results.rows}
    sampled = by_strategy["zero0"].sampled
    assert sampled is not None
    # Energy and watts are no condition, the cap of each fast row is.
    for row in results.rows:
        row.tokens_per_j = None
        assert row.sampled is not None
        row.sampled.power_w = None
    assert "power cap (in 89 % of the samples): there" in advise(results)[-3]
    for share in (40.0, None):
        sampled.power_cap_pct = share
        assert not any("power cap" in sentence for sentence in advise(results))
    by_strategy["zero0"].sampled = None
    assert not any("power cap" in sentence for sentence in advise(results))


def test_advice_names_the_slowest_gpu_where_they_differ_notably() -> None:
    results = gpus()
    floor = results.rows[0]
    assert advise(results)[-2].startswith(
        "The GPU of rank 1 is the slowest of 2: without communication, it takes 3.4 % longer for forward and "
        "backward than the GPU of rank 0."
    )
    steps = floor.step_time_ms
    assert steps is not None
    for samples in (steps.samples[:5], [95.0 * (1 + 0.1 * sign) for sign in (0, 1, -1) * 6]):  # few, noisy
        floor.step_time_ms = summarise(samples)
        assert not any("slowest" in sentence for sentence in advise(results))
    floor.step_time_ms = steps
    for times in ([103.4, 102.0], [100.0], None):
        floor.rank_step_times_ms = times
        assert not any("slowest" in sentence for sentence in advise(results))
    floor.rank_step_times_ms, floor.settings.device = [100.0, 103.4], "cpu"
    assert not any("slowest" in sentence for sentence in advise(results))


def test_advice_on_one_row_at_the_power_cap() -> None:
    results = gpus()
    results.rows = [row for row in results.rows if row.strategy == "zero3"]
    finish_rows(results)
    assert any(sentence.startswith("zero3 ran at the GPUs' power cap") for sentence in advise(results))


def test_advice_tells_models_of_one_name_apart() -> None:
    results = sample()
    results.rows = []
    for num_layers in (2, 4):
        for row in sample().rows:
            row.settings.model_config_resolved["num_layers"] = num_layers
            row.name += f"_l{num_layers}"
            results.rows.append(row)
    finish_rows(results)
    two, four = advise(results)
    assert two.startswith("num layers 2: zero2") and four.startswith("num layers 4: zero2")
    for row in results.rows[:7]:
        row.settings.model = "small"
    assert [text.split(": ")[0] for text in advise(results)] == ["small", "tiny"]


def test_advice_claims_no_saving_of_an_offloaded_row_that_needs_as_much() -> None:
    results = sample()
    kept = next(row for row in results.rows if row.strategy == "zero3")
    assert kept.peak_device_bytes is not None
    moved = kept.model_copy(deep=True)
    moved.name, moved.settings.offload = "zs3_offloaded", "cpu_optimizer"
    results.rows.append(moved)
    for factor, saves in ((0.5, True), (1.0, False), (1.1, False)):
        moved.peak_device_bytes = round(factor * kept.peak_device_bytes)
        finish_rows(results)
        text = next(text for text in advise(results) if text.startswith("zero3, offload cpu_optimizer peaks"))
        assert ("50 % below zero3, offload none, for 1.0 times" in text) is saves
        assert ("offload saves no notable amount of device memory here" in text) is not saves
        assert saves or "below" not in text


def test_labels_with_commas_are_told_apart_in_a_list() -> None:
    assert join_words(["zero0", "zero1", "ddp"]) == "zero0, zero1 and ddp"
    labels = ["zero0, batch 8", "zero1, batch 8", "ddp, batch 8"]
    assert join_words(labels) == "zero0, batch 8; zero1, batch 8 and ddp, batch 8"

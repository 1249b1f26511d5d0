"""The rules of advice: what each says, word for word, and where it says nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from advice_samples import GB, capped, moved, phases, results_of, row
from report_samples import gpus
from test_turn_ratios import passed, two

from zerobench.report import finish_rows, summarise
from zerobench.report.advice.advise import advice_on
from zerobench.report.advice.bottleneck import bottleneck, resource_shares
from zerobench.report.advice.rules import RULES
from zerobench.results.schema import Results


def only() -> Results:
    return results_of(row("zero1", 100.0, 800))


def clear() -> Results:
    return results_of(row("zero1", 100.0, 800), row("zero3", 120.0, 400))


def few() -> Results:
    results = clear()
    results.rows[1].step_time_ms = summarise([120.0])
    finish_rows(results)
    return results


def tied() -> Results:
    return results_of(row("zero1", 100.0, 800), row("zero3", 100.2, 200))


def noisy() -> Results:
    results = results_of(row("zero1", 100.0, 800), row("zero3", 150.0, 400))
    for one, ms in zip(results.rows, (100.0, 150.0), strict=True):
        one.step_time_ms = summarise([ms * (1 + 0.6 * sign) for sign in (0, 1, -1, 1, -1, 0, 1, -1)])
    finish_rows(results)
    return results


def apart() -> Results:
    results, _, _ = two()
    results.rows.append(passed(row("ddp", 30.0, 90), 30.0, 31.0, 29.0))
    finish_rows(results)
    return results


def offloaded(peak_mib: int = 300, kept: str = "ok", **given: object) -> Results:
    results = results_of(
        row("zero3", 100.0, 400, status=kept), row("zero3", 250.0, peak_mib, offload="nvme", **given)
    )
    results.rows[1].settings.nvme_paths = ["/disk"]
    return results


def bound(**given: object) -> Results:
    return results_of(row("zero1", 100.0, 800, **given), row("zero3", 130.0, 400))


def spare() -> Results:
    results = results_of(row("zero1", 100.0, 800), row("zero2", 130.0, 700), row("zero3", 140.0, 400))
    assert [one.verdict for one in results.rows] == ["optimal", "unnecessary", "unnecessary"]
    return results


def slow_link() -> Results:
    waits = phases(exposed_communication=60.0)
    return results_of(row("zero1", 100.0, 800), row("zero3", 210.0, 400, phases_ms=waits))


GOLDEN: dict[str, tuple[Callable[[], Results], str, str]] = {
    "only-row": (
        only,
        "zero1 is the only row that is correct and comparable: 20,480 tokens/s (100.0 ms a step).",
        "",
    ),
    "too-few-samples": (
        few,
        "zero1 took the least time of 2 correct rows, 20,480 tokens/s (100.0 ms a step), but 1 measured step "
        "tells too little about the noise to call it the fastest.",
        "Measure 6 or more (--num-steps).",
    ),
    "fastest": (clear, "zero1 is the fastest of 2 correct rows: 20,480 tokens/s (100.0 ms a step).", ""),
    "too-noisy": (
        noisy,
        "Too noisy to rank: zero1 and zero3 may each be the fastest of 2 correct rows, 13,653 to 20,480 tokens/s with "
        "errors of up to 56 %.",
        "Measure more steps (--num-steps), on a quieter machine.",
    ),
    "tie": (
        tied,
        "zero1 and zero3 tie as the fastest of 2 correct rows, 20,439 to 20,480 tokens/s: their differences are below "
        "the noise.",
        "",
    ),
    "measured-apart": (
        apart,
        "ddp was measured in passes, too few to rank.",
        "Measure more of them (--repeats).",
    ),
    "less-memory": (
        tied,
        "Within 10 % of the fastest, zero3 needs the least memory: 200.0 MiB peak, 75 % below zero1, at the same speed "
        "within noise.",
        "",
    ),
    "no-less-memory": (
        clear,
        "No row within 10 % of zero1 needs notably less memory than its 800.0 MiB peak.",
        "",
    ),
    "only-offload-fits": (
        lambda: offloaded(kept="oom"),
        "zero3, offload nvme fits, with a peak of 300.0 MiB, where zero3 without offload does not.",
        "",
    ),
    "offload-saves": (
        offloaded,
        "zero3, offload nvme peaks at 300.0 MiB, 25 % below zero3, offload none, for 2.5 times the latter's step time.",
        "",
    ),
    "one-rank": (
        lambda: results_of(row("zero3", 100.0, 800, world_size=1)),
        "All rows ran on one rank: there is nothing to shard, so no ZeRO stage can save memory here.",
        "Measure on more ranks (--world-size), or offload.",
    ),
    "little-to-shard": (
        lambda: results_of(row("ddp", 100.0, 800), row("zero3", 110.0, 790)),
        "Sharding saves little memory here: zero3 peaks at 790.0 MiB, ddp at 800.0. Most of it is not sharded, such as "
        "activations.",
        "Recompute activations (--checkpointing) or take a smaller --batch-size.",
    ),
    "memory-to-spare": (
        spare,
        "zero2 and zero3 save memory that is not needed: zero1 is faster and leaves 80 % of its device unused.",
        "Use the free memory for a larger --batch-size or model.",
    ),
    "slow-link": (
        slow_link,
        "Sharding further does not pay on this link: zero3 waits for other ranks in 60 % of its step and takes 2.1 "
        "times the step of zero1.",
        "Shard less where it fits, or exchange less often (--grad-accum).",
    ),
    "ranks-gain-nothing": (
        lambda: results_of(row("zero1", 40.0, 800, world_size=1), row("zero1", 100.0, 800)),
        "More ranks add no speed here: zero1, ranks 1 on one rank processes at least as many tokens/s as zero1, ranks "
        "2 on 2.",
        "Give each rank more work (--batch-size), or its own cores or GPU.",
    ),
    "offload-saves-nothing": (
        lambda: offloaded(400),
        "zero3, offload nvme peaks at 400.0 MiB and takes 2.5 times the step time of zero3, offload none, which peaks "
        "at 400.0 MiB: offload saves no notable amount of device memory here.",
        "",
    ),
    "disk-untouched": (
        lambda: offloaded(transfers=moved()),
        "zero3, offload nvme never touched the disk, since host memory held all state: their step times do not "
        "measure NVMe.",
        "Lower --host-memory-gib to measure the disk, or use --offload cpu_optimizer.",
    ),
    "bound-by-compute": (
        lambda: bound(phases_ms=phases(exposed_communication=10.0)),
        "Compute is the bottleneck of zero1: 90 % of the step.",
        "Compile (--compile block), a lower --precision or a faster device help; a faster link or disk does not.",
    ),
    "bound-by-network": (
        lambda: bound(phases_ms=phases(exposed_communication=30.0, host_bound=26.0)),
        "The network is the bottleneck of zero1: 30 % of the step is waiting for other ranks.",
        "Exchange less often (--grad-accum, a larger --batch-size), take a lower stage, or use a faster link.",
    ),
    "bound-by-pcie": (
        lambda: offloaded(phases_ms=phases(exposed_offload=70.0), transfers=moved(link=7 * GB)),
        "PCIe is the bottleneck of zero3, offload nvme: 70 % of the step is waiting for offloaded state.",
        "Offload a smaller share (--offload-ratio), accumulate (--grad-accum), or check the link (`zerobench doctor`).",
    ),
    "bound-by-host-memory": (
        lambda: offloaded(phases_ms=phases(exposed_offload=70.0), transfers=moved(link=GB)),
        "Host memory is the bottleneck of zero3, offload nvme: 70 % of the step is waiting for updates on the CPU.",
        "Update during backward (--optimizer-in-backward on), offload a smaller share (--offload-ratio), or give each "
        "rank more cores.",
    ),
    "bound-by-disk": (
        lambda: offloaded(phases_ms=phases(exposed_io=40.0, exposed_offload=20.0)),
        "The disk is the bottleneck of zero3, offload nvme: 40 % of the step is waiting for files.",
        "Stripe over more disks (--nvme-path), keep more in host memory (--host-memory-gib), accumulate "
        "(--grad-accum), or tune (`zerobench tune io`).",
    ),
    "bound-by-host": (
        lambda: bound(phases_ms=phases(host_bound=45.0)),
        "Host overhead is the bottleneck of zero1: the device waits for work in 45 % of the step.",
        "Give each launch more work (a larger --batch-size, --compile whole or block), or use faster cores.",
    ),
    "bound-by-power": (
        lambda: results_of(
            row("zero1", 100.0, 800, phases_ms=phases(), sampled=capped(80.0)), row("zero3", 105.0, 400)
        ),
        "Power is the bottleneck of zero1: the GPUs ran at their cap in 80 % of the samples.",
        "Raise the power limit, or move and compute less: compile, a lower --precision.",
    ),
    "power-cap": (
        lambda: bound(sampled=capped(80.0)),
        "zero1 ran at the GPUs' power cap (in 80 % of the samples): there, the energy of a step sets its time. "
        "Rows that move or compute less are faster, and communication costs time even where it overlaps with "
        "compute.",
        "",
    ),
    "slow-gpu": (
        gpus,
        "The GPU of rank 1 is the slowest of 2: without communication, it takes 3.4 % longer for forward and "
        "backward than the GPU of rank 0. Synchronised ranks run at the speed of the slowest.",
        "Check its clocks and cooling (`zerobench doctor`).",
    ),
    "basis": (
        clear,
        "Based on 2 rows, 1 run each: tiny (0.934 M parameters), 2 ranks, bf16, batch 8 x sequence 128; ratios to the "
        "fastest within 0.8 % (95 % intervals); 40 measured steps a row, MAD 1.0 % of the median.",
        "",
    ),
}


def test_every_rule_has_a_golden_case() -> None:
    assert [rule.id for rule in RULES] == list(GOLDEN)


@pytest.mark.parametrize("rule", GOLDEN)
def test_a_rule_says_this_and_no_more(rule: str) -> None:
    make, text, cure = GOLDEN[rule]
    (advice,) = advice_on(make())
    assert [(one.text, one.cure) for one in advice.findings if one.rule == rule] == [(text, cure)]


def test_memory_is_not_said_to_be_spare_where_the_order_is_unclear() -> None:
    results = spare()
    results.rows[0].step_time_ms = summarise(
        [100.0 * (1 + 0.6 * sign) for sign in (0, 1, -1, 1, -1, 0, 1, -1)]
    )
    finish_rows(results)
    (advice,) = advice_on(results)
    assert not any(one.rule == "memory-to-spare" for one in advice.findings)


def test_rows_of_a_smaller_batch_save_no_memory_of_the_best_ones_work() -> None:
    results = results_of(row("zero1", 100.0, 800), row("zero1", 80.0, 400, batch_size=4))
    assert results.rows[1].verdict == "unnecessary"
    (advice,) = advice_on(results)
    assert not any(one.rule == "memory-to-spare" for one in advice.findings)


def test_a_link_is_not_blamed_for_a_row_that_another_of_its_stage_beats() -> None:
    waits = phases(exposed_communication=60.0)
    results = results_of(
        row("zero1", 100.0, 800), row("zero3", 105.0, 400), row("fsdp2", 210.0, 400, stage=3, phases_ms=waits)
    )
    (advice,) = advice_on(results)
    assert not any(one.rule == "slow-link" for one in advice.findings)


def test_a_row_without_phases_has_no_bottleneck() -> None:
    assert bottleneck(row("zero1", 100.0, 800)) is None


def test_shares_of_resources_add_up() -> None:
    found = row(
        "zero3", 100.0, 800, phases_ms=phases(exposed_communication=30.0, host_bound=5.0, exposed_io=2.0)
    )
    shares = resource_shares(found)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares == pytest.approx({"compute": 0.63, "network": 0.3, "host overhead": 0.05, "disk": 0.02})


@pytest.mark.parametrize(("bytes_moved", "resource"), [(600_000_000, "disk"), (10_000_000, "host memory")])
def test_waits_for_state_in_files_are_the_disks_where_it_is_full(bytes_moved: int, resource: str) -> None:
    """A peer's row does not tell waits for files apart: its bytes at the disk's rate do."""
    found = row(
        "deepspeed3", 500.0, 800, offload="nvme", phases_ms=phases(exposed_offload=60.0),
        transfers=moved(disk=bytes_moved),
    )  # fmt: skip
    assert bottleneck(found) == (resource, pytest.approx(0.6))


@pytest.mark.parametrize("share", [24.0, 26.0])
def test_a_wait_is_the_bottleneck_from_a_quarter_of_the_step(share: float) -> None:
    found = bottleneck(row("zero3", 100.0, 800, phases_ms=phases(exposed_communication=share)))
    assert found is not None and found[0] == ("network" if share > 25 else "compute")

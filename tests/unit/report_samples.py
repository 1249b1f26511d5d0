"""Results that the tests of the report begin with.

Run this file as a program to write the golden tables anew after a wanted change, then read the difference.
"""

from __future__ import annotations

from pathlib import Path

from zerobench.report import (
    finish_rows,
    read_results,
    summarise,
    table_text,
)
from zerobench.results.schema import Mfu, Results, Row, Sampled

GOLDEN = Path(__file__).parent / "golden"
SAMPLE = GOLDEN / "results_sample.json"


def sample() -> Results:
    return read_results(SAMPLE)


def mixed() -> Results:
    """Every status, other dtypes, an unequal checksum, phases that are missing, a comparison cut short."""
    results = sample()
    rows = {row.strategy: row for row in results.rows}
    for strategy, status, error in (
        ("zero2", "oom", "rank 1 asked for 12.4 GiB of exp_avg and 7.9 GiB were free"),
        ("ddp", "failed", "rank 1 was killed by signal 9 in step 3"),
        ("fsdp2", "skipped", "fsdp2 needs at least 2 ranks"),
    ):
        replaced = Row(
            name=rows[strategy].name,
            strategy=strategy,
            status=status,  # type: ignore[arg-type]
            error=error,
            settings=rows[strategy].settings,
        )
        results.rows[results.rows.index(rows[strategy])] = replaced
    wrong = rows["zero1"]
    assert wrong.deviation is not None and rows["zero3"].dtypes is not None
    wrong.status, wrong.checksum = "wrong", "f00d"
    wrong.deviation.update = 0.38
    wrong.deviation.verdict = "update deviates by 0.38 (allowed 0.15)"
    rows["zero3"].comparable = False
    rows["zero3"].dtypes.reduce = "float32"
    rows["zero0"].phases_ms = None
    results.complete = False
    results.warnings = ["Another program used 63 % of the processors before the first row."]
    finish_rows(results)
    return results


def grid() -> Results:
    """Two precisions by two batch sizes."""
    results = sample()
    rows = []
    for precision, factor in (("fp32", 2.0), ("bf16", 1.0)):
        for batch_size in (8, 16):
            for row in sample().rows:
                assert row.step_time_ms is not None and row.peak_device_bytes is not None
                row.settings.precision, row.settings.batch_size = precision, batch_size
                row.name = f"{row.strategy}_{precision}_bs{batch_size}"
                scale = factor * (batch_size / 8) ** 0.9
                row.step_time_ms = summarise([scale * x for x in row.step_time_ms.samples])
                row.tokens_per_s = (row.tokens_per_s or 0.0) * batch_size / 8 / scale
                row.peak_device_bytes += (batch_size - 8) * 1_500_000
                rows.append(row)
    results.rows = rows
    finish_rows(results)
    return results


def gpus() -> Results:
    """As on GPUs: a floor, utilisation, energy, compiled graphs, phases with the host's share, memory that ran out."""
    results = sample()
    results.machine = {
        **results.machine,
        "gpus": [{"name": "NVIDIA H200", "power_limit_w": 700.0}] * 4,
        "driver": "580.82.07",
        "cuda": "13.0",
    }
    floor = results.rows[0].model_copy(deep=True)
    floor.name, floor.strategy = "compute_only_bf16_gpus2_bs8_sl512", "compute_only"
    floor.settings.world_size, floor.deviation, floor.checksum = 2, None, None
    floor.rank_step_times_ms = [100.0, 103.4]
    results.rows.insert(0, floor)
    for row in results.rows:
        assert row.step_time_ms is not None and row.phases_ms is not None
        row.settings.device, row.settings.compile, row.settings.attention = "cuda", "block", "sdpa"
        if row is floor:
            row.step_time_ms = summarise([0.8 * x for x in row.step_time_ms.samples])
            row.tokens_per_s = 2 * 1024 / (row.step_time_ms.median / 1e3)
            row.samples_per_s = row.tokens_per_s / 128
        row.compiled_graphs = 24.0
        row.phases_ms = {**row.phases_ms, "host_bound": 1.25}
        row.sampled = Sampled(
            sample_num=9,
            power_w=612.4,
            power_cap_pct=88.9 if row.settings.world_size == 2 else 22.2,
            thermal_limit_pct=33.3 if row.strategy == "ddp" else 0.0,
            other_limit_pct=0.0,
            shared_gpus=[1] if row.strategy == "zero1" else [],
        )
        row.busy = "other processes used GPU 1" if row.strategy == "zero1" else None
        row.device_busy_pct, row.device_utilisation_pct, row.peak_device_pct = 97.6, 99.0, 31.4
        row.energy_per_step_j = 0.6124 * row.settings.world_size * row.step_time_ms.mean
        row.tokens_per_j = 1024 * row.settings.world_size / row.energy_per_step_j
        row.mfu = Mfu(
            pct=41.26,
            tflops_per_gpu=408.2,
            peak_tflops=989.4,
            peak_of="NVIDIA H200, bf16 dense",
            flops_per_token=8e8,
        )
    last = results.rows[-1]
    last.status, last.error, last.oom_tier = "oom", "rank 0: OutOfMemoryError: CUDA out of memory", "device"
    finish_rows(results)
    return results


GOLDEN_TABLES = {
    "table_gpus_400.txt": (gpus, 400),
    "table_gpus_222.txt": (gpus, 222),
    "table_gpus_190.txt": (gpus, 190),
    "table_gpus_100.txt": (gpus, 100),
    "table_sample_80.txt": (sample, 80),
    "table_sample_100.txt": (sample, 100),
    "table_sample_150.txt": (sample, 150),
    "table_mixed_80.txt": (mixed, 80),
    "table_mixed_120.txt": (mixed, 120),
    "table_grid_120.txt": (grid, 120),
}


if __name__ == "__main__":
    for golden_name, (make_results, golden_width) in GOLDEN_TABLES.items():
        (GOLDEN / golden_name).write_text(table_text(make_results(), width=golden_width), encoding="utf-8")

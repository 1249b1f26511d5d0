"""Results that the tests of advice begin with: rows of one workload, given what matters of each."""

from __future__ import annotations

from typing import Any

from report_samples import sample

from zerobench.report import finish_rows, summarise
from zerobench.results.schema import Results, Row, Sampled, Transfers

GB = 10**9


def row(strategy: str, ms: float, peak_mib: int, **given: Any) -> Row:
    """Return a row with 40 samples around ``ms``, 1 % MAD. ``given``: its other figures, else settings."""
    found = next(row for row in sample().rows if row.strategy == "zero1").model_copy(deep=True)
    found.strategy, found.stage = strategy, int(strategy[-1]) if strategy.startswith("zero") else None
    found.step_time_ms = summarise([ms * (1 + 0.01 * sign) for sign in (0, 1, -1, 3, -3) * 8])
    found.peak_device_bytes, found.phases_ms = peak_mib << 20, None
    for name, value in given.items():
        setattr(found if name in Row.model_fields else found.settings, name, value)
    settings = found.settings
    settings.num_steps = 40
    found.name = (
        f"{strategy}_{settings.world_size}_{settings.batch_size}_{settings.grad_accum}_{settings.offload}"
    )
    return found


def results_of(*rows: Row) -> Results:
    """Return the rows compared with each other, on a machine with 8 GiB."""
    results = sample()
    results.rows = list(rows)
    finish_rows(results)
    return results


def phases(**shares: float) -> dict[str, float]:
    """Return the phases of a step of 100 ms; what the shares leave is forward."""
    return {"forward": 100.0 - sum(shares.values()), **shares}


def moved(*, disk: int = 0, link: int = 0) -> Transfers:
    """Return transfers in bytes a step, over a link of 50 GB/s and a disk of 2 GB/s."""
    return Transfers(
        nvme_read_bytes=disk,
        nvme_written_bytes=0,
        to_host_bytes=link,
        to_device_bytes=0,
        limit_gb_s={"both_ways": 50.0, "nvme_both": 2.0},
    )


def capped(percent: float) -> Sampled:
    return Sampled(sample_num=9, power_cap_pct=percent)

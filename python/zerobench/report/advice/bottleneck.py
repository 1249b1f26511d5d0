"""Conditions of advice on what limits a row: the resource that its step waits for longest."""

from __future__ import annotations

import math

from zerobench.report.advice.memory import smallest_offloaded
from zerobench.report.advice.rule import Scene, Words
from zerobench.report.phases import phases_pct
from zerobench.results.rows import GB, NOISE_SIGMAS
from zerobench.results.schema import Row
from zerobench.results.sizes import join_words, range_text
from zerobench.results.stats import median_error
from zerobench.results.verdicts import WORKS_WITHIN
from zerobench.strategies.catalogue import FLOOR

WAIT_SHARE = 0.25
"""A wait is called the bottleneck from this share of the step on; below it, compute is."""
BUSY_SHARE = 0.5
"""Link and disk limit a wait for offloaded state where their transfers alone take at least this share of the step."""
POWER_CAPPED_PCT = 50.0  # of the samples: the cap rather than the work sets the clocks
NOTABLY_SLOWER_GPU_PCT = 2.0
_WAITS = {"exposed_communication": "network", "host_bound": "host overhead", "exposed_io": "disk"}


def resource_shares(row: Row) -> dict[str, float]:
    """Return the share of the profiled step by the resource that it was spent on or waiting for; empty without
    phases."""
    shares: dict[str, float] = {}
    for phase, percent in phases_pct(row).items():
        name = _offload_limit(row) if phase == "exposed_offload" else _WAITS.get(phase, "compute")
        shares[name] = shares.get(name, 0.0) + percent / 100.0
    return shares


def bottleneck(row: Row) -> tuple[str, float] | None:
    """Return the resource that limits a row and its share of the step, or of the samples for power. None where no
    phases were measured."""
    shares = resource_shares(row)
    waits = {name: share for name, share in shares.items() if name != "compute"}
    longest = max(waits, key=lambda name: waits[name], default=None)
    if longest is not None and waits[longest] >= WAIT_SHARE:
        return longest, waits[longest]
    capped_pct = _capped_pct(row)
    if capped_pct is not None and capped_pct >= POWER_CAPPED_PCT:
        return "power", capped_pct / 100.0
    return ("compute", shares["compute"]) if "compute" in shares else None


def _offload_limit(row: Row) -> str:
    """Return what a wait for offloaded state waited for: the disk or the link where its bytes at its own rate fill
    the step, else host memory, where the CPUs update the state."""
    found = row.transfers
    if found is None or row.step_time_ms is None or found.limit_gb_s is None:
        return "host memory"
    limits, step_s = found.limit_gb_s, row.step_time_ms.median / 1e3
    disk_s = _transfer_s(found.nvme_read_bytes, found.nvme_written_bytes, limits.get("nvme_both"))
    if disk_s >= BUSY_SHARE * step_s:
        return "disk"
    link_s = _transfer_s(found.to_host_bytes, found.to_device_bytes, limits.get("both_ways"))
    return "PCIe" if link_s >= BUSY_SHARE * step_s else "host memory"


def _transfer_s(one_way: int | None, other_way: int | None, limit_gb_s: float | None) -> float:
    return ((one_way or 0) + (other_way or 0)) / (limit_gb_s * GB) if limit_gb_s else 0.0


def _capped_pct(row: Row) -> float | None:
    return row.sampled.power_cap_pct if row.sampled is not None else None


def bound_by(resource: str, scene: Scene) -> list[Words]:
    """Find the resource as the bottleneck of the advised row, or of the row with offload that peaks lowest."""
    moved = smallest_offloaded(scene)
    spoken = [scene.advised, *([moved] if moved is not None and moved is not scene.advised else [])]
    found = [(row, limit[1]) for row in spoken if (limit := bottleneck(row)) and limit[0] == resource]
    if not found:
        return []
    shares = [f"{100 * share:.0f} %" for _, share in found]
    return [{"names": join_words([scene.label(row) for row, _ in found]), "share": join_words(shares)}]


def bound_by_power(scene: Scene) -> list[Words]:
    """Find the advised row at its power cap, where not all fast rows are at theirs."""
    return [] if power_sets_the_pace(scene) else bound_by("power", scene)


def power_sets_the_pace(scene: Scene) -> list[Words]:
    fast = [row for row in scene.ranked if row.relative is not None and row.relative <= WORKS_WITHIN]
    shares = [share for row in fast if (share := _capped_pct(row)) is not None]
    if not shares or len(shares) < len(fast) or min(shares) < POWER_CAPPED_PCT:
        return []
    texts = [f"in {range_text(shares, '.0f')} % of the samples"]
    watts = [row.sampled.power_w for row in fast if row.sampled and row.sampled.power_w is not None]
    energies = [row.tokens_per_j for row in fast if row.tokens_per_j is not None]
    if watts:
        texts.append(f"{range_text(watts, '.0f')} W a GPU")
    if energies:
        texts.append(f"{range_text(energies, '.2f')} tokens a joule")
    many = f"All {len(fast)} rows within 10 % of the fastest"
    return [{"who": scene.label(fast[0]) if len(fast) == 1 else many, "figures": ", ".join(texts)}]


def slow_gpu(scene: Scene) -> list[Words]:
    """Find GPUs that do the same work at different speeds with nothing between them."""
    found = []
    for row in scene.rows:
        times = row.rank_step_times_ms or []
        if row.strategy != FLOOR or row.settings.device != "cuda" or row.status != "ok" or len(times) < 2:
            continue
        if row.step_time_ms is None:
            continue
        slowest, fastest_ms = max(times), min(times)
        slower_pct = 100.0 * (slowest / fastest_ms - 1.0)
        if slower_pct >= NOTABLY_SLOWER_GPU_PCT and math.log(slowest / fastest_ms) > _pace_noise(row):
            found.append(
                {
                    "slowest": str(times.index(slowest)),
                    "count": str(len(times)),
                    "slower": f"{slower_pct:.1f} %",
                    "fastest": str(times.index(fastest_ms)),
                }
            )
    return found


def _pace_noise(row: Row) -> float:
    """Return the error of a ratio of two ranks' medians, in logarithms. Of a rank only the median is known, so the
    row's own steps, which are the slowest rank's, stand for the spread of each."""
    assert row.step_time_ms is not None
    error = median_error(
        row.step_time_ms.samples[: row.settings.num_steps]
    )  # ranks' medians are of the first repeat
    return math.inf if error is None else NOISE_SIGMAS * math.sqrt(2.0) * error / row.step_time_ms.median

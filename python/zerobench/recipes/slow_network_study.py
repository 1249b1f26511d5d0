"""A published study of two hosts with a slow network between them: its rows next to ours, and its claims checked.

Its figures are in references.csv. It reports one link; about 0.9 Gbit/s explain most of its times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from zerobench.recipes.network_conclusions import speed_ratio
from zerobench.recipes.references import read_references
from zerobench.report.network_facts import network_of, speed_of
from zerobench.report.network_predictions import cases
from zerobench.report.phases import phases_pct
from zerobench.results.schema import Results, Row

STUDY = "Megatron-DeepSpeed on two nodes with a slow network"
LINK = "0.9gbit"
STRATEGIES = {
    "baseline": "ddp",
    "pipeline 2": "pipeline",
    "ZeRO-1": "zero1",
    "ZeRO-2": "zero2",
    "ZeRO-3": "zero3",
}
_PHASES = ("forward", "backward", "optimizer")


class StudyRow(NamedTuple):
    model: str
    strategy: str
    figures: dict[str, float]

    @property
    def speedup(self) -> float:
        return self.figures["speedup over the baseline"]


def study_rows() -> list[StudyRow]:
    """Return the rows of the study, with our names of strategies."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for each in read_references():
        if each.study == STUDY and each.model and each.strategy and each.value is not None:
            found.setdefault((each.model, STRATEGIES[each.strategy]), {})[each.figure] = each.value
    return [StudyRow(model, strategy, figures) for (model, strategy), figures in found.items()]


def slow_network_rows(results: Results) -> list[str]:
    """Return each row of the study with ours below it, over each network."""
    lines = []
    measured = [row for case in cases(results.rows) for row in case.rows]
    for study in study_rows():
        ours = [
            row for row in measured if (row.settings.model, row.strategy) == (study.model, study.strategy)
        ]
        if ours:
            lines.append(f"{study.model} {study.strategy}, {STUDY}: {_study_text(study)}")
            lines += [f"  here at {network_of(row)}: {_row_text(row, measured)}" for row in ours]
    return lines


def _study_text(study: StudyRow) -> str:
    figures = study.figures
    shares = [
        f"{name} {pct:.0f} %" for name in _PHASES if (pct := figures.get(f"share of {name}")) is not None
    ]
    return ", ".join(
        [
            f"peak {figures['peak GPU memory']:.2f} GB",
            f"{figures['iteration time']:.3f} s",
            f"{figures['throughput']:.2f} samples/s",
            f"{study.speedup:.2f} times ddp",
            *shares,
        ]
    )


def _row_text(row: Row, rows: Sequence[Row]) -> str:
    assert row.step_time_ms is not None
    parts = [f"peak {row.peak_device_bytes / 1e9:.2f} GB"] if row.peak_device_bytes else []
    parts += [f"{row.step_time_ms.median / 1e3:.3f} s", f"{row.samples_per_s or 0.0:.2f} samples/s"]
    ratio = speedup(row, rows)
    parts += [f"{ratio:.2f} times ddp"] if ratio is not None else []
    shares = phases_pct(row)
    return ", ".join([*parts, *(f"{name} {shares[name]:.0f} %" for name in _PHASES if name in shares)])


def speedup(row: Row, rows: Sequence[Row]) -> float | None:
    """Return the row's speed over that of ddp with the same model over the same network, or None without such a row."""
    for other in rows:
        same = other.settings.model == row.settings.model and network_of(other) == network_of(row)
        if other.strategy == "ddp" and same:
            return speed_ratio(row, other)
    return None


def slow_network_claims(results: Results) -> list[str]:
    """Return each claim of the study with a verdict by our rows on its models, over the network nearest to its own."""
    rows = _comparable(results)
    if not rows:
        return []
    return [text for claim in _CLAIMS if (text := claim(rows)) is not None]


def _comparable(results: Results) -> list[Row]:
    """Return rows over the network nearest to that of the study; the machine's own is the last to be."""
    measured = [row for case in cases(results.rows) for row in case.rows]
    names = sorted(
        {network_of(row) for row in measured}, key=lambda name: abs(speed_of(name) - speed_of(LINK))
    )
    return [row for row in measured if network_of(row) == names[0]] if names else []


def _found(strategy: str, rows: Sequence[Row]) -> dict[str, float]:
    """Return speedups of a strategy by model."""
    ratios = {row.settings.model: speedup(row, rows) for row in rows if row.strategy == strategy}
    return {model: ratio for model, ratio in ratios.items() if ratio is not None}


def _of_study(strategy: str, model: str) -> float:
    return next(row.speedup for row in study_rows() if (row.model, row.strategy) == (model, strategy))


def _speed_claim(strategy: str) -> Callable[[Sequence[Row]], str | None]:
    """Return the claim that a strategy is as much faster or slower than ddp as the study says."""

    def claim(rows: Sequence[Row]) -> str | None:
        found = _found(strategy, rows)
        known = [model for model in ("gpt-64m", "gpt-512m") if model in found]
        claimed = " and ".join(
            f"{_of_study(strategy, model):.2f} times ddp on {model}" for model in ("gpt-64m", "gpt-512m")
        )
        if not known:
            return f"The study: {strategy} has {claimed}. Not checked: its models were not measured."
        texts = []
        for model in known:
            agrees = (found[model] > 1) == (_of_study(strategy, model) > 1)
            texts.append(f"{'confirmed' if agrees else 'corrected'} on {model} with {found[model]:.2f}")
        return f"The study: {strategy} has {claimed}. At {network_of(rows[0])} {', '.join(texts)}."

    return claim


def _memory_claim(rows: Sequence[Row]) -> str | None:
    peaks = {
        (row.settings.model, row.strategy): row.peak_device_bytes for row in rows if row.peak_device_bytes
    }
    claimed = (
        "The study: ZeRO-1 takes more memory than ddp on gpt-64m (2.06 against 1.48 GB) and less on gpt-512m (5.38 "
        "against 6.69 GB)."
    )
    texts = []
    for model, is_more in (("gpt-64m", True), ("gpt-512m", False)):
        ours, base = peaks.get((model, "zero1")), peaks.get((model, "ddp"))
        if ours and base:
            verdict = "confirmed" if (ours > base) == is_more else "corrected"
            texts.append(f"{verdict} on {model} with {ours / 1e9:.2f} against {base / 1e9:.2f} GB")
    return f"{claimed} {', '.join(texts).capitalize() or 'Not checked: its models were not measured'}."


PARAMETERS = {"gpt-64m": 63_823_360, "gpt-512m": 354_823_168}
MICRO_BATCHES = {"gpt-64m": 2, "gpt-512m": 4}


def explained_s(model: str, strategy: str) -> float:
    """Return what the messages of a step take over 0.9 Gbit/s with 2-byte gradients on two hosts.

    A gradient is reduced once a step, but in ZeRO-2 once a micro-batch; ZeRO then gathers the parameters."""
    half_s = PARAMETERS[model] * 2 / 2 / (0.9e9 / 8)  # of a pass around a ring of two
    reductions = 2 * (MICRO_BATCHES[model] if strategy == "zero2" else 1)
    return (reductions + (strategy != "ddp")) * half_s


def _micro_batch_claim(rows: Sequence[Row]) -> str | None:
    fits = [
        f"{explained_s(study.model, 'zero2'):.2f} s against {study.figures['iteration time']:.2f}"
        for study in study_rows()
        if study.strategy == "zero2"
    ]
    text = (
        "The study: ZeRO-2 is the slowest. Corrected: partitioned gradients are not the reason; its times fit only if "
        f"every micro-batch all-reduces all gradients over 0.9 Gbit/s ({' and '.join(fits)})."
    )
    moved = {row.strategy: row.communication_bytes for row in rows if row.communication_bytes}
    if {"zero2", "ddp"} <= moved.keys():
        ratio = (moved["zero2"] or 0) / (moved["ddp"] or 1)
        text += f" Here zero2 moves {ratio:.2f} times the bytes of ddp."
    return text


def _backward_claim(rows: Sequence[Row]) -> str | None:
    shares = [
        f"{100 * explained_s(study.model, 'ddp') / study.figures['iteration time']:.0f} % on {study.model}"
        for study in study_rows()
        if study.strategy == "ddp"
    ]
    return (
        "The study: backward is 95 % of a ddp step. Corrected: most of that is not compute; the all-reduce alone "
        f"takes {' and '.join(shares)} of the step over 0.9 Gbit/s."
    )


def _hosts_claim(rows: Sequence[Row]) -> str | None:
    return (
        "The study: traffic of ZeRO-2 and ZeRO-3 grows with the number of hosts. Corrected: a rank sends (n - 1) / n "
        "of the buffer in each pass around a ring, 1.97 times as much on 64 hosts as on 2, and ddp's grows alike."
    )


_CLAIMS: tuple[Callable[[Sequence[Row]], str | None], ...] = (
    *map(_speed_claim, ("pipeline", "zero1", "zero2", "zero3")),
    _memory_claim,
    _micro_batch_claim,
    _backward_claim,
    _hosts_claim,
)

"""The sentences around the table: machine, versions and settings before it, notes after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from zerobench.bench.result import Results, Row

from .rows import (
    DEFAULT_BASELINES,
    FLOOR,
    by_workload,
    checksum_marks,
    dtype_text,
    flat_settings,
    is_known,
    is_ranked,
    ranks_text,
    row_labels,
    setting_text,
    setting_word,
    varying_settings,
)

NOTABLE_LIMIT_PCT = 5.0  # of the samples in which something other than work and power cap set the clocks
DTYPE_ROLES = "param/compute/reduce/master/state"
BELOW_FLOOR = 1.02  # of_compute_only from which a row is said to take less time than its floor
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def memory_unit(values: Iterable[int | None]) -> tuple[str, int]:
    """One unit for a whole table or plot."""
    largest = max((value for value in values if value is not None), default=0)
    if largest >= 8 * GIB:
        return "GiB", GIB
    return ("MiB", MIB) if largest >= MIB or largest == 0 else ("KiB", KIB)


def bytes_text(value: int) -> str:
    unit, unit_bytes = memory_unit([value])
    return f"{value / unit_bytes:,.1f} {unit}"


def count_text(value: int) -> str:
    """A parameter count: 912,384 as 0.91 M."""
    for size, word in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= 0.5 * size:
            return f"{value / size:.3g} {word}"
    return str(value)


def ms_text(value: float) -> str:
    return f"{value:.0f} ms" if value >= 1000 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def join_words(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def header_lines(results: Results) -> list[tuple[str, str]]:
    lines = [("machine", _machine_text(results.machine)), ("versions", _versions_text(results.versions))]
    if results.rows:
        lines += _settings_lines(results.rows)
    return [(title, text) for title, text in lines if text]


_NAMED_FACTS = ("driver", "cuda")  # texts that say nothing without their key


def _machine_text(machine: dict[str, Any]) -> str:
    """Scalars as they come, memory in GiB, lists of devices by name; nested facts stay in the file."""
    parts = []
    for key, value in machine.items():
        if value is None or isinstance(value, dict) or value == [] or value == "":
            continue
        word = key.replace("_", " ")
        if key.endswith("_bytes") and isinstance(value, int):
            parts.append(f"{value / GIB:,.1f} GiB {word[: -len(' bytes')]}")
        elif isinstance(value, list):
            parts.append(_items_text(word, value))
        elif isinstance(value, bool):
            parts.append(f"{word} {'yes' if value else 'no'}")
        elif isinstance(value, int | float):
            parts.append(f"{value:g} {word}")
        else:
            parts.append(f"{word} {value}" if key in _NAMED_FACTS else str(value))
    return " · ".join(parts)


def _items_text(word: str, items: list[Any]) -> str:
    """Names of devices and what limits them, equal ones counted: "gpus 4 x NVIDIA H200 (700 W)"."""
    names = Counter(_device_text(item) if isinstance(item, dict) else str(item) for item in items)
    texts = [name if count == 1 else f"{count} x {name}" for name, count in names.items()]
    return f"{word} {', '.join(texts)}"


def _device_text(device: dict[str, Any]) -> str:
    name, limit_w = str(device.get("name", device)), device.get("power_limit_w")
    return name if limit_w is None else f"{name} ({limit_w:g} W)"


def _versions_text(versions: dict[str, str]) -> str:
    return " · ".join(f"{name} {version}" for name, version in versions.items())


# What the settings line says first, and in which words. Others follow as "word value".
_LEADING = ("model", "precision", "world_size", "batch_size", "seq_length", "grad_accum")
_OFF = {
    "offload": "none",
    "nvme_paths": (),
    "optimizer_in_backward": False,
    "bind": "none",
    "compile": "none",
    "dropout": 0.0,
    "clip": None,
    "checkpointing": False,
    "config_file": None,
    "repeats": 1,
}
_QUIET = ("parameter_count", "model_config_resolved.", "optimizer.", "device")


def _settings_lines(rows: Sequence[Row]) -> list[tuple[str, str]]:
    free, tied = varying_settings(rows)
    flat = flat_settings(rows[0])
    differing = {*free, *tied}
    parts = []
    for key in [*_LEADING, *(key for key in flat if key not in _LEADING)]:
        value = flat.get(key)
        if key in differing or key.startswith(_QUIET) or value is None:
            continue
        if key in _OFF and _OFF[key] == value:
            continue
        parts.append(_setting_part(key, value, rows))
        if key == "precision":
            parts += _dtype_parts(rows)
    lines = [("settings", " · ".join(parts))]
    by_strategy = [
        f"{setting_word(key)} {_by_strategy(key, rows)}" for key in tied if not key.startswith(_QUIET)
    ]
    return [*lines, ("", " · ".join(by_strategy))]


def _dtype_parts(rows: Sequence[Row]) -> list[str]:
    """Of the rows that are compared, where they agree and the precision does not say it all; notes name the others."""
    texts = {dtype_text(row) for row in rows if row.dtypes is not None and row.comparable}
    text = (texts.pop() or "") if len(texts) == 1 else ""
    return [f"dtypes {text} ({DTYPE_ROLES})"] if len(set(text.split("/"))) > 1 else []


def _setting_part(key: str, value: Any, rows: Sequence[Row]) -> str:
    if key == "model":
        counts = {row.settings.parameter_count for row in rows if row.settings.parameter_count is not None}
        weights = {row.settings.model_config_resolved.get("weights") for row in rows}
        told = [f"{count_text(count)} parameters" for count in counts if len(counts) == 1]
        if len(weights) == 1 and (text := weights.pop()) is not None:
            told.append("random weights" if text == "random" else f"weights of {text}")
        return f"{value} ({', '.join(told)})" if told else str(value)
    if key == "precision":
        return str(value)
    if key == "world_size":
        return ranks_text(value, rows[0].settings)
    return f"{setting_word(key)} {setting_text(value)}"


def _by_strategy(key: str, rows: Sequence[Row]) -> str:
    """Such as "1 (single), 2 (others)"."""
    by_value: dict[str, dict[str, None]] = {}
    for row in rows:
        if not is_known(key, row):
            continue
        value = setting_text(flat_settings(row).get(key))
        by_value.setdefault(value, {})[row.strategy] = None
    largest = max(by_value, key=lambda value: len(by_value[value]))
    texts = []
    for value in sorted(by_value, key=lambda value: value == largest):
        others = value == largest and len(by_value[value]) > 2
        texts.append(f"{value} ({'others' if others else ', '.join(by_value[value])})")
    return ", ".join(texts)


def note_lines(results: Results, left_out: Sequence[str]) -> list[tuple[str, str]]:
    """Lines below the table, each with its style: what went wrong first, then how to read the rest."""
    rows, labels = results.rows, row_labels(results.rows)
    notes: list[tuple[str, str]] = []
    for row, label in zip(rows, labels, strict=True):
        if row.status != "ok":
            reason = (
                row.error or (row.deviation.verdict if row.deviation else None) or "no reason was recorded"
            )
            style = "bold red" if row.status == "wrong" else "yellow"
            status = f"{row.status} ({row.oom_tier} memory)" if row.oom_tier else row.status
            notes.append((f"{label}: {status}: {' '.join(reason.split())}", style))
    notes += [(warning, "yellow") for warning in results.warnings]
    read_first = (
        *_shared_notes(rows, labels),
        *_clock_notes(rows, labels),
        *_idle_disk_notes(rows, labels),
        *_skipped_notes(rows, labels),
    )
    notes += [(text, "yellow") for text in read_first]
    notes += [(text, "") for text in _reading_notes(rows, labels, left_out)]
    if left_out:  # titles and units of columns
        notes.append(
            (f"Left out to fit the width: {', '.join(left_out)}; results.csv holds every column.", "dim")
        )
    if not results.complete:
        notes.append(("Incomplete: the comparison is still running or was interrupted.", "yellow"))
    return notes


def _shared_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    by_gpus: dict[str, list[str]] = {}
    for row, label in zip(rows, labels, strict=True):
        if row.sampled is not None and row.sampled.shared_gpus:
            by_gpus.setdefault(join_words([str(gpu) for gpu in row.sampled.shared_gpus]), []).append(label)
    return [f"Another process used GPU {gpus} during {join_words(names)}." for gpus, names in by_gpus.items()]


def _clock_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    """Rows whose times depend on how warm the GPUs were or on how somebody set them."""
    notes = []
    for field, what in (
        ("thermal_limit_pct", "A thermal limit"),
        ("other_limit_pct", "Something other than power and heat (clocks set by hand, the power supply)"),
    ):
        shares = [getattr(row.sampled, field) if row.sampled else None for row in rows]
        names = [
            f"{label} ({share:.0f} % of the samples)"
            for label, share in zip(labels, shares, strict=True)
            if share is not None and share >= NOTABLE_LIMIT_PCT
        ]
        if names:
            notes.append(f"{what} held GPU clocks down during {join_words(names)}.")
    return notes


def _fewer_layers_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    by_layers: dict[str, list[str]] = {}
    for row, label in zip(rows, labels, strict=True):
        if row.deviation is not None and row.deviation.verified_layers is not None:
            of = row.settings.model_config_resolved.get("num_layers", "more")
            by_layers.setdefault(f"{row.deviation.verified_layers} of {of}", []).append(label)
    verified_num = sum(row.deviation is not None for row in rows)
    return [
        f"Verified with {layers} layers: {'all rows' if len(names) == verified_num > 2 else join_words(names)}."
        for layers, names in by_layers.items()
    ]


def _all_experts_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    names = [
        label
        for row, label in zip(rows, labels, strict=True)
        if row.deviation is not None and row.deviation.verified_experts_per_token is not None
    ]
    return [f"Verified with all experts for every token: {join_words(names)}."] if names else []


def _idle_disk_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    names = [
        label
        for row, label in zip(rows, labels, strict=True)
        if row.status == "ok"
        and row.transfers is not None
        and row.transfers.nvme_read_bytes == row.transfers.nvme_written_bytes == 0
    ]
    if not names:
        return []
    return [
        f"{join_words(names)} read and wrote nothing on NVMe in measured steps, since all state fits into the host "
        "memory for it: these times say nothing about the disk."
    ]


def _skipped_notes(rows: Sequence[Row], labels: Sequence[str]) -> list[str]:
    names = [
        f"{label} ({row.skipped_steps})"
        for row, label in zip(rows, labels, strict=True)
        if row.status == "ok" and row.skipped_steps
    ]
    if not names:
        return []
    return [
        f"fp16 overflow skipped updates in measured steps of {join_words(names)}, which are too short by them: give "
        "more --warmup-steps."
    ]


def _checksum_notes(rows: Sequence[Row], *, is_marked: bool) -> list[str]:
    marks = checksum_marks(rows)
    notes = []
    if is_marked and "=" in marks:
        notes.append("= parameters equal bit for bit among the rows marked so.")
    elif "=" in marks and "≠" not in marks:
        notes.append("ZeRO stages with the same settings ended with parameters equal bit for bit.")
    if is_marked and "≠" in marks:  # else wrong rows say it
        notes.append("≠ parameters differ among the rows marked so, which should be equal bit for bit.")
    return notes


def _reading_notes(rows: Sequence[Row], labels: Sequence[str], left_out: Sequence[str]) -> list[str]:
    notes = _checksum_notes(rows, is_marked="update deviation" not in left_out)
    notes += _fewer_layers_notes(rows, labels)
    notes += _all_experts_notes(rows, labels)
    apart = [
        f"{label} ({dtype_text(row) or 'unknown'})"
        for row, label in zip(rows, labels, strict=True)
        if row.status == "ok" and not row.comparable
    ]
    if apart:
        notes.append(f"† other dtypes, so shown but not ranked: {'; '.join(apart)}, as {DTYPE_ROLES}.")
    floors = [row for row in rows if row.strategy == FLOOR and row.status == "ok"]
    if floors:
        together = any(row.settings.world_size > 1 for row in floors)
        where = ", by each rank for itself, as long as the slowest one took" if together else ""
        notes.append(
            f"{FLOOR}: forward and backward without communication or optimizer{where}: the floor, nothing to verify."
        )
        if text := _below_floor_text(rows, labels):
            notes.append(text)
    peaks = {
        f"{row.mfu.peak_tflops:g} TFLOP/s a GPU ({row.mfu.peak_of})"
        for row in rows
        if row.status == "ok" and row.mfu is not None
    }
    if peaks and "MFU %" not in left_out:
        notes.append(f"MFU is against a peak of {join_words(sorted(peaks))}.")
    ranked = [row for row in rows if is_ranked(row)]
    if len(by_workload(ranked)) > 1:
        notes.append("Relative is within rows of one model, sequence length, precision and data.")
    if text := _outlier_text(rows, labels):
        notes.append(text)
    if ranked and not any(row.baseline for row in rows):
        default = " or ".join(DEFAULT_BASELINES)
        notes.append(
            f"No baseline row is ok and comparable (by default {default}): no speedup and no memory change."
        )
    return notes


def _below_floor_text(rows: Sequence[Row], labels: Sequence[str]) -> str:
    """Where hosts are the limit the floor is none: what plain PyTorch does there is in it, and not in every row."""
    faster = [
        label
        for row, label in zip(rows, labels, strict=True)
        if row.status == "ok" and (row.of_compute_only or 0.0) >= BELOW_FLOOR
    ]
    if not faster:
        return ""
    busy = [
        row.device_utilisation_pct
        for row in rows
        if row.strategy == FLOOR and row.status == "ok" and row.device_utilisation_pct is not None
    ]
    when = f" (its GPU was busy {min(busy):.0f} % of the time)" if busy else ""
    return (
        f"{join_words(faster)} took less time than {FLOOR}{when}: where the host is the limit it is no floor, since it "
        "holds what plain PyTorch's forward and backward ask of the host."
    )


def _outlier_text(rows: Sequence[Row], labels: Sequence[str]) -> str:
    flagged = [
        (label, len(row.step_time_ms.outliers), len(row.step_time_ms.samples))
        for row, label in zip(rows, labels, strict=True)
        if row.status == "ok" and row.step_time_ms is not None and row.step_time_ms.outliers
    ]
    if not flagged:
        return ""
    if len(flagged) <= 4:
        text = "; ".join(f"{label}: {outlier_num} of {step_num}" for label, outlier_num, step_num in flagged)
    else:
        worst = max(flagged, key=lambda entry: entry[1])
        text = f"in {len(flagged)} rows, most in {worst[0]}: {worst[1]} of {worst[2]}"
    return f"Outlying steps (kept): {text}. Something else may have run: repeat on a quiet machine."

"""Functions of rows that many modules use: workloads, rates, ranks, labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from zerobench.results.schema import Row
from zerobench.results.settings import SETTINGS, Changes, Settings, settings_that_change
from zerobench.results.stats import Ratio, median_of_ratios, ratio_error
from zerobench.strategies.catalogue import FLOOR

GB = 1e9
NOISE_SIGMAS = 2.0  # medians closer than this many standard errors of their ratio tie
TOO_NOISY = 0.1  # standard error of a ratio, relative, from which a tie says nothing of who is fast

# Settings that make a row another task: rates across them are not ranked against each other.
WORKLOAD_KEYS = settings_that_change(Changes.WORKLOAD)


def flat_settings(row: Row) -> dict[str, Any]:
    """Settings by dotted key, the resolved model configuration included; lists as tuples."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), item)
        else:
            flat[prefix] = tuple(value) if isinstance(value, list) else value

    walk("", row.settings.model_dump())
    return flat


def setting_word(key: str) -> str:
    """Return what tables call a setting, given its dotted key."""
    own_word = SETTINGS[key].word if key in SETTINGS else None
    return own_word or key.rsplit(".", 1)[-1].replace("_", " ")


def workload(row: Row) -> tuple[Any, ...]:
    """Return the key of what is trained: rows are ranked within it. World size, batch and strategy are choices, not
    workload."""
    settings = flat_settings(row)
    model = sorted(
        (key, value) for key, value in settings.items() if key.startswith("model_config_resolved.")
    )
    return (*(settings[key] for key in WORKLOAD_KEYS), *((key, repr(value)) for key, value in model))


def by_workload(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(workload(row), []).append(row)
    return list(groups.values())


def tokens_per_step(row: Row) -> int:
    settings = row.settings
    return settings.world_size * settings.batch_size * settings.seq_length * settings.grad_accum


def step_rate(row: Row) -> float | None:
    """Tokens a second from the median step time."""
    if row.step_time_ms is None or row.step_time_ms.median <= 0:
        return None
    return tokens_per_step(row) / (row.step_time_ms.median / 1e3)


def may_be_ranked(row: Row) -> bool:
    """Return whether the row's times are comparable: the machine was not busy, or it slowed all rows alike since they
    took turns."""
    return row.busy is None or (row.turns is not None and row.turns.how == "in turn")


def is_ranked(row: Row) -> bool:
    """Right, comparable, measured and undisturbed: may be called fastest and be recommended."""
    is_right = row.status == "ok" and row.comparable and row.strategy != FLOOR
    return is_right and step_rate(row) is not None and may_be_ranked(row)


def repeats_text(rows: Sequence[Row]) -> str:
    """Such as "3", or "1 to 2 of 3" where ok rows have fewer than were asked for: a comparison cut short."""
    asked = rows[0].settings.repeats
    done = {run_num(row) for row in rows if row.status == "ok" and row.step_time_ms is not None}
    if done <= {asked}:
        return str(asked)
    least, most = min(done), max(done)
    found = f"{least if least == most else f'{least} to {most}'}"
    return f"{found} (auto)" if asked == "auto" else f"{found} of {asked}"


def run_num(row: Row) -> int:
    """Return in how many runs a measured row was measured, of those that were asked for."""
    assert row.step_time_ms is not None
    if row.turns is not None:
        asked, found = row.settings.repeats, len(row.turns.windows_ms)
        return found if asked == "auto" else min(found, asked)
    if row.runs:  # merged rows have windows for samples, of any number
        return len(row.runs)
    return len(row.step_time_ms.samples) // row.settings.num_steps


def ratio_in_turn(row: Row, other: Row) -> Ratio | None:
    """Return the row's step time over the other's: the median over rounds of the ratio within a round, with its
    interval. None where the two did not take turns with each other."""
    mine, others = row.turns, other.turns
    if mine is None or others is None or row is other:
        return None
    if mine.how != "in turn" or (mine.how, mine.group) != (others.how, others.group):
        return None
    rounds = [
        pair
        for runs in zip(mine.windows_ms, others.windows_ms, strict=False)
        for pair in zip(*runs, strict=False)
    ]
    return median_of_ratios([a for a, _ in rounds], [b for _, b in rounds]) if rounds else None


def saw_all_state(row: Row) -> bool:
    """Return whether the window holds more than the first of all steps. Some strategies only make their moments at the
    end of that step, after its peak, while others have them from the start."""
    return row.settings.warmup_steps + row.settings.num_steps > 1


def has_peak(row: Row) -> bool:
    """One that may be held against others'."""
    return bool(row.peak_device_bytes) and saw_all_state(row)


def fastest(rows: Sequence[Row]) -> Row | None:
    """Return the ranked row with the least time per token; equal ones by name, so that row order does not matter.

    Medians choose first. A row that took turns with the chosen one, and is faster within rounds, takes its place: the
    medians of two rows can rest on different moments of the machine."""
    ranked = [row for row in rows if is_ranked(row)]
    best = min(ranked, key=lambda row: (-(step_rate(row) or 0.0), row.name), default=None)
    earlier: list[Row] = []  # medians of ratios can go in a circle
    while best is not None:
        earlier.append(best)
        faster = [
            (ratio, row.name, row)
            for row in ranked
            if not any(row is one for one in earlier) and (ratio := _pace_ratio(row, best)) < 1
        ]
        if not faster:
            break
        best = min(faster)[2]
    return best


def _pace_ratio(row: Row, other: Row) -> float:
    """Return the row's time per token over the other's within rounds; 1 where they did not take turns."""
    ratio = ratio_in_turn(row, other)
    return 1.0 if ratio is None else ratio.value * tokens_per_step(other) / tokens_per_step(row)


def noise(row: Row) -> float | None:
    """Standard error of the row's ratio to the fastest, relative: that of the ratio's logarithm."""
    if row.relative is None or row.relative_uncertainty is None:
        return None
    return row.relative_uncertainty / row.relative


def ties_with_fastest(row: Row) -> bool:
    """Return whether the measured difference to the fastest row is below the noise: the interval of the ratio contains
    1, or reaches below. Without an interval, compare logarithms, where a factor counts the same up and down: then an
    error as large as the ratio itself does not reach every ratio."""
    if row.relative is None:
        return False
    if row.relative_low is not None:
        return row.relative_low <= 1
    return math.log(row.relative) <= NOISE_SIGMAS * (noise(row) or 0.0)


def exceeds_noise(ratio: float, row: Row, other: Row) -> bool:
    """Return whether a ratio of the two rows' times or rates is further from 1 than the noise of both; False if there
    are too few steps to tell. For rows that took turns, the interval of their times' ratio decides."""
    paired = ratio_in_turn(row, other)
    if paired is not None:
        if paired.low is None or paired.high is None:
            return False
        return abs(math.log(ratio)) > math.log(max(paired.high / paired.value, paired.value / paired.low))
    assert row.step_time_ms is not None and other.step_time_ms is not None
    error = ratio_error(row.step_time_ms.samples, other.step_time_ms.samples)
    if error is None:
        return False
    return abs(math.log(ratio)) > NOISE_SIGMAS * error / (row.step_time_ms.median / other.step_time_ms.median)


def is_known(key: str, row: Row) -> bool:
    """Return whether the row has a value of a setting, rather than lacking the run that would show it."""
    setting = SETTINGS.get(key)
    return setting is None or not setting.known_after_run or row.step_time_ms is not None


def _follows(key: str) -> bool:
    """Return whether other settings decide this one."""
    return key in SETTINGS and SETTINGS[key].follows


def varying_settings(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """Keys whose values differ between rows: (those that one strategy has several values of, those that only differ
    from strategy to strategy). Labels need the first kind only."""
    flats = [flat_settings(row) for row in rows]
    keys = [key for key in dict.fromkeys(key for flat in flats for key in flat) if not _follows(key)]
    free: list[str] = []
    tied: list[str] = []
    for key in keys:
        known = [(row, flat) for row, flat in zip(rows, flats, strict=True) if is_known(key, row)]
        if len({repr(flat.get(key)) for _, flat in known}) < 2:
            continue
        seen: dict[str, set[str]] = {}
        for row, flat in known:
            seen.setdefault(row.strategy, set()).add(repr(flat.get(key)))
        (free if any(len(values) > 1 for values in seen.values()) else tied).append(key)
    if any(key == "model" for key in free):  # a model's name stands for its configuration
        free = [key for key in free if not key.startswith("model_config_resolved.")]
    return free, tied


def ranks_text(world_size: int, settings: Settings) -> str:
    """Such as "2 ranks" or "4 GPUs"."""
    word = "GPU" if settings.device == "cuda" else "rank"
    return f"{world_size} {word}{'s' if world_size != 1 else ''}"


def setting_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " and ".join(map(setting_text, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def row_labels(rows: Sequence[Row]) -> list[str]:
    """Return short texts that tell rows apart: the strategy and what the grid varies, or the names where that is not
    enough. A setting that may follow from others is given only to rows that nothing else tells apart."""
    free, _ = varying_settings(rows)
    later = [key for key in free if key in SETTINGS and SETTINGS[key].may_follow]
    flats = [flat_settings(row) for row in rows]

    def part(key: str, at: int) -> list[str]:
        return [labelled_setting(key, flats[at].get(key))] if is_known(key, rows[at]) else []

    labels = [
        ", ".join([row.strategy, *(text for key in free if key not in later for text in part(key, at))])
        for at, row in enumerate(rows)
    ]
    for key in later:
        alike: dict[str, list[int]] = {}
        for at, label in enumerate(labels):
            alike.setdefault(label, []).append(at)
        for label, places in alike.items():
            texts = [part(key, at) for at in places]
            if any(text != texts[0] for text in texts):
                for at, text in zip(places, texts, strict=True):
                    labels[at] = ", ".join([label, *text])
    return labels if len(set(labels)) == len(labels) else [row.name for row in rows]


def labelled_setting(key: str, value: Any) -> str:
    """Such as "batch 8"; a model or precision speaks for itself."""
    setting, text = SETTINGS.get(key), setting_text(value)
    return text if setting is not None and setting.speaks_for_itself else f"{setting_word(key)} {text}"


def workload_heads(firsts: Sequence[Row]) -> list[str]:
    """Return labels that tell workloads apart, given a row of each, with no more of a model's configuration than that
    takes."""
    flats = [flat_settings(row) for row in firsts]

    def told_apart(*keys: str) -> int:
        return len({tuple(repr(flat.get(key)) for key in keys) for flat in flats})

    keys = [key for key in WORKLOAD_KEYS if told_apart(key) > 1]
    for key in dict.fromkeys(key for flat in flats for key in flat if key.startswith("model_config")):
        if told_apart(*keys, key) > told_apart(*keys):
            keys.append(key)
    return [", ".join(labelled_setting(key, flat.get(key)) for key in keys) for flat in flats]


def checksum_marks(rows: Sequence[Row]) -> list[str]:
    """ "=" where a row's checksum equals those of its whole group, "≠" where they differ, "" where nothing is said."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row.checksum and row.deviation and row.deviation.checksum_group:
            groups.setdefault(row.deviation.checksum_group, []).append(row.checksum)
    marks = []
    for row in rows:
        group = groups.get(row.deviation.checksum_group or "", []) if row.deviation and row.checksum else []
        marks.append("" if len(group) < 2 else "=" if len(set(group)) == 1 else "≠")
    return marks


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}


def dtype_text(row: Row) -> str | None:
    if row.dtypes is None:
        return None
    found = row.dtypes
    param, compute, reduce, master, state = (
        _SHORT.get(dtype, dtype)
        for dtype in (found.param, found.compute, found.reduce, found.master, found.state)
    )
    if found.accumulate not in (None, found.reduce):
        reduce += f"+{_SHORT.get(found.accumulate, found.accumulate)}"
    return f"{param}/{compute}/{reduce}/{master}/{state}"

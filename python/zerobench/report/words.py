"""The sentences before the table: machine, versions and settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from zerobench.results.rows import (
    dtype_text,
    flat_settings,
    is_known,
    ranks_text,
    repeats_text,
    setting_text,
    setting_word,
    varying_settings,
)
from zerobench.results.schema import Results, Row
from zerobench.results.settings import SETTINGS, leading_settings
from zerobench.results.sizes import GIB, count_text, join_words
from zerobench.strategies.catalogue import FLOOR

DTYPE_ROLES = "param/compute/reduce/master/state"


def all_ranks_text(rows: Sequence[Row]) -> str:
    """Such as "1 and 2 ranks"."""
    *fewer, most = sorted({row.settings.world_size for row in rows})
    return join_words([*map(str, fewer), ranks_text(most, rows[0].settings)])


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


def _is_quiet(key: str) -> bool:
    """Return whether the settings line leaves out a setting, given its dotted key."""
    setting = SETTINGS.get(key.partition(".")[0])
    return setting is not None and setting.quiet


def _is_off(key: str, value: Any) -> bool:
    """Return whether the settings line need not mention a setting, given its dotted key."""
    if key not in SETTINGS or SETTINGS[key].leads:
        return False
    off = SETTINGS[key].off
    return bool(value == (tuple(off) if isinstance(off, list) else off))


def _settings_lines(rows: Sequence[Row]) -> list[tuple[str, str]]:
    free, tied = varying_settings(rows)
    # What all rows agree in is known to a row that ran, and perhaps not to one that did not.
    flat = flat_settings(next((row for row in rows if row.step_time_ms is not None), rows[0]))
    differing = {*free, *tied}
    parts = []
    for key in dict.fromkeys([*leading_settings(), *flat]):
        value = flat.get(key)
        if key in differing or _is_quiet(key) or value is None:
            continue
        if _is_off(key, value):
            continue
        parts.append(_setting_part(key, value, rows))
        if key == "precision":
            parts += _dtype_parts(rows)
    lines = [("settings", " · ".join(parts))]
    by_strategy = [f"{setting_word(key)} {_by_strategy(key, rows)}" for key in tied if not _is_quiet(key)]
    return [*lines, ("", " · ".join(by_strategy))]


def _dtype_parts(rows: Sequence[Row]) -> list[str]:
    """Return the dtypes of the rows that are compared, if these agree and the precision does not imply them; notes name
    the others."""
    compared = [row for row in rows if row.comparable and row.strategy != FLOOR]  # the floor keeps no masters
    texts = {dtype_text(row) for row in compared if row.dtypes is not None}
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
    if key == "repeats":
        return f"{setting_word(key)} {repeats_text(rows)}"
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

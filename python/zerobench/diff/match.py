"""Rows of two files that are the same row: equal settings, apart from how often and how long they were measured."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zerobench.results.merging import asked_and_told
from zerobench.results.rows import dtype_text, flat_settings, is_known, setting_text, setting_word
from zerobench.results.schema import Row
from zerobench.results.settings import SETTINGS, Changes

# These neither change what is trained nor how fast, so runs of other lengths still match.
_HOW_MEASURED = tuple(key for key, setting in SETTINGS.items() if setting.changes == Changes.NOTHING)


class Pair(NamedTuple):
    """The same row in either file."""

    old: Row
    new: Row


@dataclass(frozen=True, kw_only=True)
class Matched:
    """Rows of two files."""

    pairs: list[Pair]
    """In the order of the new file."""
    vanished: list[Row]
    appeared: list[Row]


def match_rows(old: Sequence[Row], new: Sequence[Row]) -> Matched:
    """Pair the rows of two files by their settings.

    Settings that only a run tells (communicator, threads) choose between several candidates; they may differ."""
    partners: dict[int, int] = {}
    left_old, left_new = list(range(len(old))), list(range(len(new)))
    for key in (_exact_key, _communicator_key, _asked_key):
        waiting = _indices_by(key, new, left_new)
        for index in left_old:
            others = waiting.get(key(old[index]))
            if others:
                partners[others.popleft()] = index
        taken = set(partners.values())
        left_old = [index for index in left_old if index not in taken]
        left_new = [index for index in left_new if index not in partners]
    return Matched(
        pairs=[Pair(old[partners[index]], new[index]) for index in sorted(partners)],
        vanished=[old[index] for index in left_old],
        appeared=[new[index] for index in left_new],
    )


def _indices_by(
    key: Callable[[Row], str], rows: Sequence[Row], indices: Sequence[int]
) -> dict[str, deque[int]]:
    found: dict[str, deque[int]] = {}
    for index in indices:
        found.setdefault(key(rows[index]), deque()).append(index)
    return found


def _asked_key(row: Row) -> str:
    return _text(_asked(row))


def _communicator_key(row: Row) -> str:
    return _text([_asked(row), row.settings.communicator])


def _exact_key(row: Row) -> str:
    return _text([_asked(row), asked_and_told(row)[1]])


def _asked(row: Row) -> list[Any]:
    """Return what must be equal. Folders for swapped state may have other names, but not another number."""
    asked, _ = asked_and_told(row)
    kept = {key: value for key, value in asked.items() if key not in _HOW_MEASURED}
    kept["nvme_paths"] = len(row.settings.nvme_paths)
    return [row.strategy, kept]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def changed_settings(old: Row, new: Row) -> str:
    """Return such as "batch 8 -> 16", or an empty text where no setting differs that keeps rows apart."""
    before, after = flat_settings(old), flat_settings(new)
    parts = [
        _change_text(setting_word(key), before.get(key), after.get(key))
        for key in dict.fromkeys([*before, *after])
        if _keeps_apart(key) and before.get(key) != after.get(key)
    ]
    if old.strategy != new.strategy:
        parts.insert(0, _change_text("strategy", old.strategy, new.strategy))
    return ", ".join(parts)


def _keeps_apart(key: str) -> bool:
    setting = SETTINGS.get(key)
    return setting is None or (setting.changes != Changes.NOTHING and not setting.known_after_run)


def changed_by_run(pair: Pair) -> str:
    """Return what a run tells and what differs: communicator, threads, dtypes. Empty where nothing does."""
    (_, before), (_, after) = asked_and_told(pair.old), asked_and_told(pair.new)
    parts = [
        _change_text(setting_word(key), before[key], after[key])
        for key in before
        if before[key] != after[key] and is_known(key, pair.old) and is_known(key, pair.new)
    ]
    dtypes = dtype_text(pair.old), dtype_text(pair.new)
    if None not in dtypes and dtypes[0] != dtypes[1]:
        parts.append(_change_text("dtypes", *dtypes))
    return ", ".join(parts)


def _change_text(word: str, old: Any, new: Any) -> str:
    return f"{word} {setting_text(old)} -> {setting_text(new)}"

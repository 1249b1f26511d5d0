"""Rows of an earlier comparison that a grid can go on from. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerobench.bench.output import MEASURED
from zerobench.bench.plan.configuration import Configuration, Plan
from zerobench.bench.plan.find import at_value, value_in
from zerobench.bench.surroundings import Surroundings
from zerobench.errors import ConfigError
from zerobench.results.files import read_results
from zerobench.results.rows import setting_text, setting_word
from zerobench.results.schema import Results, Row
from zerobench.results.settings import SETTINGS
from zerobench.results.sizes import join_words

_MOST_NAMES = 3  # of rows in an error


def earlier_rows(
    folder: Path, plan: Plan, *, host: Surroundings, data_digest: str | None
) -> tuple[Results, dict[int, Row]]:
    """Return the earlier results, with rows as their own runs left them, and the rows of this plan's configurations by
    their index. Raises ConfigError where versions, machine, seed or data differ, or a row was measured another way."""
    earlier = read_measured(folder)
    expect_same(folder, "versions", earlier.versions, host.versions)
    expect_same(folder, "machine", machine_identity(earlier.machine), machine_identity(host.machine))
    if earlier.data_digest != data_digest:
        raise ConfigError(
            f"{folder} was measured with other data (digest {earlier.data_digest}, now {data_digest}): give the same "
            "--data as it was then, or another --output-dir"
        )
    find = plan.options.find
    rows = kept_rows(folder, earlier, plan)
    found = {}
    for index, configuration in enumerate(plan.configurations):
        row = rows.get(configuration.name)
        if row is not None:
            expect_same_settings(folder, searched(configuration, row, find), row)
            found[index] = row
        elif earlier.searching is not None and earlier.searching.name == configuration.name:
            expect_same_settings(folder, configuration, earlier.searching)
    return earlier, found


def kept_rows(folder: Path, earlier: Results, plan: Plan) -> dict[str, Row]:
    """Return the earlier rows by name. A row whose name the plan lacks gets the name of the configuration with its
    settings: in a grid that grew, names say more, such as the model. Raises ConfigError where the plan leaves out a
    row, which would then be lost."""
    by_name = {row.name: row for row in earlier.rows}
    names = {configuration.name for configuration in plan.configurations}
    for row in earlier.rows:
        if row.name in names:
            continue
        for configuration in plan.configurations:
            asked = searched(configuration, row, plan.options.find)
            alike = configuration.strategy == row.strategy and first_difference(asked, row) is None
            if alike and configuration.name not in by_name:
                by_name[configuration.name] = by_name.pop(row.name)
                row.name = configuration.name
                break
    left_out = [name for name in by_name if name not in names]
    if left_out:
        named = left_out[:_MOST_NAMES]
        more = len(left_out) - len(named)
        raise ConfigError(
            f"{folder} has rows that these options do not ask for, and would lose them: "
            f"{join_words([*named, f'{more} more'] if more else named)}. Give the same options as then, with more "
            "values if you like, or another --output-dir"
        )
    return by_name


def searched(configuration: Configuration, row: Row, find: str | None) -> Configuration:
    """Return the configuration at the value that ``--find`` found for the row."""
    if find is None or row.search is None:
        return configuration
    return at_value(configuration, find, value_in(find, row.settings))


def read_measured(folder: Path) -> Results:
    if not (folder / MEASURED).is_file():
        raise ConfigError(
            f"{folder / MEASURED} does not exist, so there is nothing to resume: give the folder of an interrupted "
            "comparison"
        )
    return read_results(folder / MEASURED)


def expect_same(folder: Path, what: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in {**then, **now}:
        if then.get(key) != now.get(key):
            raise ConfigError(
                f"{folder} was measured with other {what} ({key} {then.get(key)}, now {now.get(key)}): its rows cannot "
                "be compared with new ones; give another --output-dir"
            )


def machine_identity(machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a machine's facts makes it another one."""
    details = machine.get("details", {})
    return {
        "host": details.get("host"),
        "cpu": machine.get("cpu"),
        "cores": machine.get("cores"),
        "GPUs": [gpu.get("uuid") for gpu in machine.get("gpus", [])],
    }


def expect_same_settings(folder: Path, configuration: Configuration, row: Row) -> None:
    key = first_difference(configuration, row)
    if key is not None:
        then, now = getattr(row.settings, key), getattr(configuration.settings, key)
        raise ConfigError(
            f"row {row.name} in {folder} was measured with {setting_word(key)} {setting_text(then)}, and now "
            f"it would have {setting_text(now)}: give the same options as then, or another --output-dir"
        )


def first_difference(configuration: Configuration, row: Row) -> str | None:
    """Return the first setting in which a configuration differs from an earlier row, without those that may differ."""
    then, now = row.settings.model_dump(), configuration.settings.model_dump()
    for key, setting in SETTINGS.items():
        is_open = setting.known_after_run or setting.free_on_resume or now[key] == "auto"
        if not is_open and then[key] != now[key]:
            return key
    return None


def is_measured(row: Row, *, repeat: int) -> bool:
    """Return whether a row of an earlier run has this repeat, counted from 0."""
    if row.status != "ok" or row.step_time_ms is None:
        return True
    return len(row.step_time_ms.samples) >= (repeat + 1) * row.settings.num_steps

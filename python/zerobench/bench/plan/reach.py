"""Options that no row follows, because a file decides what they are about or because nothing is that they are about:
whoever gave them would read rows for what they are not. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerobench.errors import ConfigError
from zerobench.results.setting_values import typed
from zerobench.results.settings import OPTIONS, Takes, flag_of
from zerobench.strategies.base import NVME_OFFLOADS
from zerobench.strategies.catalogue import OURS

if TYPE_CHECKING:
    from zerobench.bench.plan.configuration import Draft
    from zerobench.bench.plan.options import CompareOptions


def check_reach(options: CompareOptions, drafts: Sequence[Draft]) -> None:
    """ConfigError about the first value that was given and that no row has, or that swapping has no folder."""
    rows = [settings for _, settings, _ in drafts]
    for row in rows:
        if row.offload in NVME_OFFLOADS and not row.nvme_paths:
            raise ConfigError(
                f"{row.config_file}: state on NVMe needs a folder on the disk to use: add nvme_path, or --nvme-path"
            )
    ours = [own for strategy, _, own in drafts if strategy in OURS]
    used: dict[str, set[Any]] = {
        "lr": {row.optimizer["lr"] for row in rows},
        "communicator": {own.get("communicator", "auto") for own in ours},
        "io_engine": {(own.get("offload_optimizer") or {}).get("io_engine") for own in ours},
        "nvme_paths": {path for row in rows for path in row.nvme_paths},
    }
    for key, option in OPTIONS.items():
        if not option.must_reach:
            continue
        found = used[key] if key in used else {getattr(row, key) for row in rows}
        for value in given_values(key, options):
            value = str(value.absolute()) if isinstance(value, Path) else value
            if value not in found:
                files = "every --config file sets it itself or does not use it"
                reason = files if options.config else "no strategy of this comparison uses it"
                text = "" if option.takes is Takes.SWITCH else f" {typed(value)}"
                raise ConfigError(f"{flag_of(key)}{text} has no effect: {reason}: remove it")


def given_values(key: str, options: CompareOptions) -> Sequence[Any]:
    """Return the values of an option that somebody gave: all where it was named, whatever its default; where it has no
    default, those that are there."""
    option = OPTIONS[key]
    if option.default is None and option.on_cpu is None:
        return [value for value in options.values(key) if value is not False]
    if flag_of(key) not in options.given:
        return ()
    found = getattr(options, key)
    return found if option.takes.is_list else [found]

"""Options that no row follows, because a file decides what they are about or because nothing is that they are about:
whoever gave them would read rows for what they are not. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zerobench.bench.plan.names import exact
from zerobench.errors import ConfigError
from zerobench.strategies.base import NVME_OFFLOADS
from zerobench.strategies.catalogue import OURS

if TYPE_CHECKING:
    from zerobench.bench.plan.options import CompareOptions
    from zerobench.bench.plan.plan import Draft


def check_reach(options: CompareOptions, drafts: Sequence[Draft]) -> None:
    """ConfigError about the first value that was given and that no row has, or that swapping has no folder."""
    rows = [settings for _, settings, _ in drafts]
    for row in rows:
        if row.offload in NVME_OFFLOADS and not row.nvme_paths:
            raise ConfigError(
                f"{row.config_file}: state on NVMe needs a folder on the disk to use: add nvme_path, or --nvme-path"
            )
    ours = [own for strategy, _, own in drafts if strategy in OURS]
    by_name: dict[str, tuple[Sequence[Any], set[Any]]] = {
        "--precision": (options.precisions, {row.precision for row in rows}),
        "--batch-size": (options.batch_sizes, {row.batch_size for row in rows}),
        "--grad-accum": (options.grad_accums, {row.grad_accum for row in rows}),
        "--clip": (options.clips, {row.clip for row in rows}),
        "--lr": ([options.learning_rate], {row.optimizer["lr"] for row in rows}),
        "--offload": (options.offloads, {row.offload for row in rows}),
        "--optimizer-in-backward": (
            options.optimizer_in_backward,
            {row.optimizer_in_backward for row in rows},
        ),
        "--communicator": (options.communicators, {own.get("communicator", "auto") for own in ours}),
    }
    checks = [(name, *by_name[name]) for name in by_name if name in options.given]
    checks += [
        ("--tf32", [True] if options.tf32 else [], {row.tf32 for row in rows}),
        ("--offload-ratio", known(options.offload_ratios), {row.offload_ratio for row in rows}),
        ("--host-memory-gib", known([options.host_memory_gib]), {row.host_memory_gib for row in rows}),
        (
            "--io-engine",
            known([options.io_engine]),
            {(own.get("offload_optimizer") or {}).get("io_engine") for own in ours},
        ),
        (
            "--nvme-path",
            [str(path.absolute()) for path in options.nvme_paths],
            {path for row in rows for path in row.nvme_paths},
        ),
    ]
    for name, values, used in checks:
        for value in values:
            if value not in used:
                files = "the files of --config set it themselves, or have nothing that it is about"
                reason = files if options.config_files else "no strategy here has what it is about"
                given = name if name == "--tf32" else f"{name} {text(value)}"
                raise ConfigError(f"{given} reaches no row: {reason}: leave it out")


def known(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def text(value: Any) -> str:
    """As it is given."""
    if value is None or isinstance(value, bool):
        return {True: "on", False: "off", None: "none"}[value]
    return exact(value)

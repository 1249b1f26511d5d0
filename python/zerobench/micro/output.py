"""Output of micro-benchmarks: tables, and a file that is never overwritten. Imports no torch."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from zerobench.errors import ConfigError, Error
from zerobench.host.consoles import print_document
from zerobench.host.gpus import Gpu
from zerobench.host.machine import machine_facts, typed_command, version_facts
from zerobench.results.files import write_atomically
from zerobench.results.sizes import GIB, KIB, MIB
from zerobench.results.stats import Ratio

SCHEMA_VERSION = 1
_WIDEST = 10_000
_RAW = ("samples", "outliers")  # lists of these names are for JSON alone


@dataclass(kw_only=True)
class TextTable:
    """Cells in sections. The first column reads from the left, figures from the right."""

    title: str
    columns: Sequence[str]
    sections: list[list[Sequence[str]]] = field(default_factory=list)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Every figure is whole, however narrow the terminal; columns without one are left to files."""
        return console.render(self._shown(), options.update(max_width=_WIDEST))

    def _shown(self) -> Table:
        table = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        rows = [cells for section in self.sections for cells in section]
        shown = [
            index for index in range(len(self.columns)) if {cells[index] for cells in rows} - {"", "n/a"}
        ]
        for index in shown:
            widest = max(len(cells[index]) for cells in rows)
            name = self.columns[index]
            lines = [name] if len(name) <= widest else name.split()
            table.add_column("\n".join(lines), justify="left" if index == 0 else "right", no_wrap=True)
        for section in self.sections:
            for cells in section:
                table.add_row(*(cells[index] for index in shown))
            table.add_section()
        return table


@dataclass(kw_only=True)
class MicroReport:
    """All that one micro-benchmark has to say."""

    benchmark: str
    machine: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    tables: list[TextTable]
    notes: str
    gpus: Sequence[Gpu] = ()  # in use

    @property
    def verdict(self) -> str:
        """How many rows were measured and how many of them are wrong, in one line."""
        flags = [[value for key, value in row.items() if key.split("_")[0] == "wrong"] for row in self.rows]
        text = f"{self.benchmark}: {len(self.rows)} row{'s' if len(self.rows) != 1 else ''} measured"
        if not any(flags):
            return text
        wrong_num = sum(any(found) for found in flags)
        return f"{text}, {wrong_num} of them wrong" if wrong_num else f"{text}, all of them right"


class OutputFile:
    """Made before the first measurement, so that a place that cannot be written costs no time, and knows the machine
    as it was then; replaced as a whole at the end. ``facts`` are the machine's, with or without GPUs. ``printed``: the
    results are also printed as one JSON document."""

    def __init__(
        self,
        path: Path | None,
        *,
        facts: Callable[..., dict[str, Any]] = machine_facts,
        printed: bool = False,
    ) -> None:
        self._path = path
        self._facts = facts
        self._printed = printed
        if path is None and not printed:
            return
        self._details = facts()["details"]
        if path is None:
            return
        if path.suffix not in (".json", ".csv", ".md"):
            raise ConfigError(f"--output {path} must end in .json, .csv or .md")
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            raise ConfigError(f"--output {path} exists: give the name of a new file") from None
        except OSError as error:
            raise ConfigError(
                f"--output {path} cannot be written ({error.strerror or error}): name one in a folder to write to"
            ) from None

    def write(self, report: MicroReport) -> None:
        if self._printed:
            print_document(report.verdict, document(report, self._machine(report)))
        if self._path is None:
            return
        if self._path.suffix == ".json":
            text = json_text(report, self._machine(report))
        else:
            text = (csv_text if self._path.suffix == ".csv" else markdown_text)(report)
        try:
            write_atomically(self._path, text.encode())
        except OSError as error:
            raise Error(f"{self._path} cannot be written ({error.strerror or error})") from None

    def _machine(self, report: MicroReport) -> dict[str, Any]:
        """Facts of the machine, with details that change while the benchmark runs, such as the load, as they were."""
        return self._facts(report.gpus) | {"details": self._details}

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the file if it is empty, since nothing was measured."""
        with contextlib.suppress(FileNotFoundError):  # somebody has removed it meanwhile
            if self._path is not None and self._path.stat().st_size == 0:
                self._path.unlink()


def json_text(report: MicroReport, machine: Mapping[str, Any]) -> str:
    return json.dumps(document(report, machine), indent=1) + "\n"


def document(report: MicroReport, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that a JSON file of results holds."""
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark": report.benchmark,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": typed_command(),
        "machine": machine,
        "versions": version_facts(gpus=bool(report.gpus)),
        "settings": report.settings,
        "rows": report.rows,
    }


def csv_text(report: MicroReport) -> str:
    """Scalars and short lists of each row, nested ones under dotted names; raw samples stay in JSON."""
    flat = [dict(flatten(row)) for row in report.rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return buffer.getvalue()


def markdown_text(report: MicroReport) -> str:
    """The tables as the terminal shows them, to paste into a write-up."""
    lines = [f"`{shlex.join(typed_command())}`", "", report.machine, ""]
    for table in report.tables:
        align = [":--", *("--:" for _ in table.columns[1:])]
        rows = [table.columns, align, *(cells for section in table.sections for cells in section)]
        lines += [f"{table.title}:", "", *(f"| {' | '.join(cells)} |" for cells in rows), ""]
    return "\n".join([*lines, f"{report.notes}.", ""])


def flatten(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            pairs += flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple):
            pairs.append((f"{prefix}{name}", value))
        elif name not in _RAW:
            pairs.append((f"{prefix}{name}", ",".join(map(str, value))))
    return pairs


def ratio_json(ratio: Ratio | None) -> dict[str, float | None] | None:
    return None if ratio is None else ratio._asdict()


def ratio_cell(ratio: Ratio | None) -> str:
    if ratio is None:
        return "n/a"
    digits = 1 if ratio.value >= 9.95 else 2
    value = f"{ratio.value:.{digits}f}"
    if ratio.low is None or ratio.high is None:
        return value
    return f"{value} [{ratio.low:.{digits}f}, {ratio.high:.{digits}f}]"


def size_text(size_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return (
                f"{size_bytes / unit:g} {name}"
                if size_bytes % unit == 0
                else f"{size_bytes / unit:.2f} {name}"
            )
    return f"{size_bytes} B"


def print_table(console: Console, table: TextTable) -> None:
    """Print a table; if the terminal is narrower than the table, lines go on below."""
    console.print(table, soft_wrap=True)


def print_comment(console: Console, text: str) -> None:
    """A line that is no data."""
    console.print(f"# {text}", highlight=False, soft_wrap=True)


def new_progress(notes: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=notes,
        transient=True,
        disable=not notes.is_terminal,
    )


def machine_line(gpus: Sequence[Gpu] = ()) -> str:
    """Return the facts that the figures depend on, as one line to print above them. ``gpus``: those in use."""
    facts, versions = machine_facts(), version_facts()
    load = facts["details"]["load_average"][0]
    packages = ", ".join(
        f"{name} {version}" for name, version in versions.items() if name in ("zerobench", "torch")
    )
    devices = "".join(f"{num} x {name}, " for name, num in Counter(gpu.name for gpu in gpus).items())
    return f"{devices}{facts['cpu']}, {facts['cores']} cores, load average {load:.1f}; {packages}"

"""The folder that receives results: made once, written atomically, never overwritten. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import weakref
from datetime import datetime, timezone
from pathlib import Path

from zerobench.errors import ConfigError
from zerobench.report import table_text, write_csv, write_plots
from zerobench.results.files import cannot_be_written, write_atomically
from zerobench.results.schema import Results

MEASURED = "measured.json"
"""Rows as their own runs left them, before they are judged against each other: what --resume goes on from."""

TRACES = "traces"


class OutputFolder:
    """results.json, results.csv, summary.txt, plots/, logs/ and traces/ under one path, locked while this lives."""

    def __init__(self, path: Path | None, *, resumed: bool = False) -> None:
        """Make a new folder, or take one that holds results where ``resumed``."""
        chosen = path if path is not None else Path("results")
        try:
            if path is None:
                chosen = make_default_folder()
            chosen.mkdir(parents=True, exist_ok=True)
            self._lock(chosen)
            if os.path.lexists(chosen / "results.json") and not resumed:
                raise ConfigError(
                    f"{chosen} already holds results: give another --output-dir, "
                    f"or look at them with `zerobench show {chosen}`"
                )
            if not resumed:
                check_new(chosen)
            (chosen / "logs").mkdir(exist_ok=True)
            with tempfile.TemporaryFile(dir=chosen) as probe:
                probe.write(b"\0" * 4096)
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as error:
            raise ConfigError(
                f"{chosen} cannot receive results ({error.strerror or error}): "
                "give a folder to write to as --output-dir"
            ) from None
        self.path = chosen

    def _lock(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY)
        weakref.finalize(self, os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder} receives the results of another comparison that runs: give another --output-dir"
            ) from None
        except OSError:
            pass  # a file system without locks

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def traces(self) -> Path:
        return self.path / TRACES

    def start_log(self, name: str, *, rerun: str) -> Path:
        """A log that begins with the command to run this row alone."""
        path = self.log(name)
        try:
            with path.open("a") as file:
                file.write(f"# rerun: {rerun}\n")
        except OSError as error:
            raise cannot_be_written(path, error) from None
        return path

    def write_results(self, results: Results) -> None:
        self._write_json("results.json", results)

    def write_measured(self, results: Results) -> None:
        self._write_json(MEASURED, results)

    def _write_json(self, name: str, results: Results) -> None:
        path = self.path / name
        try:
            write_atomically(path, results.model_dump_json(indent=1).encode() + b"\n")
        except OSError as error:
            raise cannot_be_written(path, error) from None

    def write_summary(self, results: Results) -> None:
        """The CSV and the table, from the same rows as results.json."""
        path = self.path / "results.csv"
        try:
            write_csv(results, path)
            path = self.path / "summary.txt"
            text = table_text(results, width=160) + "".join(f"{line}\n" for line in results.closing)
            write_atomically(path, text.encode())
        except OSError as error:
            raise cannot_be_written(path, error) from None

    def write_plots(self, results: Results) -> list[Path]:
        path = self.path / "plots"
        try:
            return write_plots(results, path)
        except OSError as error:
            raise cannot_be_written(path, error) from None


def make_default_folder(parent: Path = Path()) -> Path:
    """Make a new results/compare_<time> in ``parent``, with a number when two start within a second."""
    stem = f"compare_{datetime.now(timezone.utc):%Y%m%d_%H%M%S}"
    for suffix in ("", *(f"_{number}" for number in range(2, 100))):
        path = parent / "results" / f"{stem}{suffix}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise ConfigError(f"results/{stem} and its 98 successors exist: give --output-dir")


def check_new(folder: Path) -> None:
    """ConfigError where somebody's files have names of those to be written."""
    for name in ("results.csv", "summary.txt", "samples.jsonl", MEASURED, "plots", "logs", TRACES):
        path = folder / name
        is_empty = name in ("plots", "logs") and path.is_dir() and not any(path.iterdir())
        if os.path.lexists(path) and not is_empty:
            raise ConfigError(
                f"{path} exists and results would overwrite it: give another --output-dir, or move it away"
            )

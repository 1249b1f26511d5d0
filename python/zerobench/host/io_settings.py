"""The settings that `tune io` found for a path, in a file that later runs read. Imports no torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import shutil
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zerobench.errors import ConfigError
from zerobench.host.storage import disk_of as real_disk_of

SCHEMA_VERSION = 1
ENGINES = ("io_uring", "threads")
MOST_DEPTH = 1024
SLOW_BYTES_PER_S = 5e9  # a path below this is worth a warning


class Rates(BaseModel):
    """Rates of a path: reads alone, writes alone, and the sum of both while they run together."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    read_bytes_per_s: float = Field(gt=0)
    write_bytes_per_s: float = Field(gt=0)
    both_bytes_per_s: float = Field(gt=0)

    def predict_s(self, *, read_bytes: float, written_bytes: float) -> float:
        """Return the time to read and write so many bytes: what is read and written together goes at the mixed rate,
        the rest alone."""
        both = min(read_bytes, written_bytes)
        return (
            2 * both / self.both_bytes_per_s
            + (read_bytes - both) / self.read_bytes_per_s
            + (written_bytes - both) / self.write_bytes_per_s
        )


class IoSettings(Rates):
    """How to swap to one path, and what it gave when that was measured."""

    engine: str = Field(pattern=f"^({'|'.join(ENGINES)})$")
    block_bytes: int = Field(gt=0, multiple_of=4096)
    depth: int = Field(gt=0, le=MOST_DEPTH)
    tuned: str

    @property
    def text(self) -> str:
        return io_text(self.engine, self.block_bytes, self.depth)


class SettingsFile(BaseModel):
    """File of I/O settings, by resolved path."""

    model_config = ConfigDict(extra="forbid")

    schema_version: int = SCHEMA_VERSION
    paths: dict[str, IoSettings] = {}


def default_file(environ: Mapping[str, str] = os.environ, *, user_id: int | None = None) -> Path:
    """Return the file in the user's configuration folder, as the XDG base directory specification has it.
    ``user_id``: whose home folder is taken where HOME is not set; this user's by default."""
    base = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(base):
        root = Path(base)
    elif "HOME" in environ:
        root = Path(environ["HOME"] or "/") / ".config"
    else:
        try:
            root = Path(pwd.getpwuid(os.getuid() if user_id is None else user_id).pw_dir) / ".config"
        except KeyError:
            raise ConfigError(
                "settings of disks have no place, since this user has no home folder: set HOME or XDG_CONFIG_HOME"
            ) from None
    return root / "zerobench" / "io.json"


def read_settings(file: Path) -> SettingsFile:
    """Empty where there is no such file."""
    # A device may be read without end. (Path.exists raises where a folder on the way may not be searched.)
    if os.path.exists(file) and not (os.path.isfile(file) or os.path.isdir(file)):
        raise ConfigError(f"{file} is not a file: name a settings file, or a new one to create")
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        return SettingsFile()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror or error}): settings need a file that you may read, here or under "
            "another name"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{file} cannot be read ({error}): remove it and run `zerobench tune io` again"
        ) from None
    try:
        settings = SettingsFile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = "".join(f"{key}: " for key in first["loc"])
        raise ConfigError(
            f"{file}: {where}{first['msg']}; remove it and run `zerobench tune io` again"
        ) from None
    if settings.schema_version != SCHEMA_VERSION:
        raise ConfigError(f"{file} is of another version: remove it and run `zerobench tune io` again")
    return settings


def settings_for(
    path: Path, *, file: Path | None = None, disk_of: Callable[[Path], Hashable] = real_disk_of
) -> IoSettings | None:
    """Return the settings of the path itself or of the nearest folder above it on the same disk that was tuned.
    ``file``: where settings are kept; the user's own file by default."""
    known = read_settings(file or default_file()).paths
    real = path.resolve()
    folders = (real, *real.parents)
    disk = next(disk_of(folder) for folder in folders if os.path.exists(folder))
    for folder in folders:
        if os.path.exists(folder) and disk_of(folder) != disk:
            break
        if str(folder) in known:
            return known[str(folder)]
    return None


class IoChoice(NamedTuple):
    """How to swap."""

    engine: str
    block_bytes: int
    depth: int
    is_tuned: bool = False  # at least in part

    @property
    def text(self) -> str:
        return io_text(self.engine, self.block_bytes, self.depth) + (", tuned" if self.is_tuned else "")


def io_text(engine: str, block_bytes: int, depth: int) -> str:
    return f"{engine}, blocks of {block_bytes >> 10} KiB, depth {depth}"


def io_choice(
    paths: Sequence[str | Path], section: Mapping[str, Any] | None, *, settings_file: Path | None = None
) -> IoChoice:
    """How state swaps to ``paths``, which are used alike: what a configuration's section ``offload_optimizer`` says,
    else what the first path was tuned to, else the defaults. ``settings_file``: the user's own by default."""
    own = section or {}
    engine, block_bytes, depth = (own.get(key) for key in ("io_engine", "io_block_bytes", "io_depth"))
    tuned = settings_for(Path(paths[0]), file=settings_file)
    usual = (
        IoChoice(tuned.engine, tuned.block_bytes, tuned.depth) if tuned else IoChoice("io_uring", 1 << 20, 32)
    )
    return IoChoice(
        engine or usual.engine,
        block_bytes or usual.block_bytes,
        depth or usual.depth,
        is_tuned=tuned is not None and not (engine and block_bytes and depth),
    )


def check_settings_file(file: Path) -> None:
    """ConfigError where settings cannot be added to it."""
    read_settings(file)
    with _beside(Path(os.path.realpath(file))):
        pass


def write_settings(path: Path, settings: IoSettings, *, file: Path) -> None:
    """Adds to the file; readers see the old content or the new one, never half of it."""
    real = Path(os.path.realpath(file))  # a link stays one
    with _beside(real) as partial, _locked(real.parent):
        content = read_settings(real)
        content.paths[str(path.resolve())] = settings
        partial.write_text(content.model_dump_json(indent=1) + "\n")
        if real.exists():
            shutil.copymode(real, partial)
        os.replace(partial, real)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time, where the file system knows locks: else one of two would lose what it adds."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _beside(file: Path) -> Iterator[Path]:
    """An empty file in the same folder, removed where it still is at the end."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{uuid.uuid4().hex}.tmp")
        partial.touch(exist_ok=False)
        try:
            yield partial
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written ({error.strerror or error}): give another --settings"
        ) from None


def slow_path_warning(
    path: Path | str,
    rates: Rates,
    *,
    read_bytes: float = 0.0,
    written_bytes: float = 0.0,
    compute_s: float | None = None,
) -> str | None:
    """A sentence where reads and writes together stay below 5 GB/s, or where a step that moves so many bytes waits for
    them longer than the ``compute_s`` that it is likely to compute; None elsewhere."""
    is_slow = rates.both_bytes_per_s < SLOW_BYTES_PER_S
    time_s = rates.predict_s(read_bytes=read_bytes, written_bytes=written_bytes)
    exceeds = compute_s is not None and time_s > compute_s
    if not is_slow and not exceeds:
        return None
    text = f"{path}: reads and writes together go at {rates.both_bytes_per_s / 1e9:.2f} GB/s"
    if is_slow:
        text += f", which is below {SLOW_BYTES_PER_S / 1e9:.0f} GB/s"
    if not read_bytes + written_bytes:
        return f"{text}; swapping may take longer than the step computes"
    text += f"; at that rate the transfers of a step take about {time_s:.2g} s"
    if exceeds:
        text += f" (forward and backward at half of the GPU's peak: {compute_s:.2g} s)"
    return text

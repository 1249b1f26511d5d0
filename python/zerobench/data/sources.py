"""Sources of tokens: one file (mapped), JSON lines and Parquet, a folder or the standard library (all read)."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from zerobench.data import records
from zerobench.errors import DataError


class IdWidth(NamedTuple):
    format: Literal["H", "I"]  # of memoryview.cast
    itemsize: int


ID_WIDTHS = {"u16": IdWidth("H", 2), "u32": IdWidth("I", 4)}
"""Unsigned little-endian token ids, by the values of --tokens."""
STDLIB_LIMIT_BYTES = 32 << 20
FOLDER_LIMIT_BYTES = 1 << 30
_PROBE_BYTES = 8192
_NO_BARE_IDS = {b"\x93NUMPY": "a NumPy file", b"PAR1": "a Parquet file", b"PK\x03\x04": "a zip archive"}
_DIGESTED_WHOLE_BYTES = 1 << 30
_PIECE_NUM, _PIECE_BYTES = 1024, 1 << 16
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def open_bytes(spec: str, *, text_field: str | None = None) -> tuple[memoryview, str]:
    """Return the bytes of text that ``spec`` names and a short description of them. ``text_field``: the field of JSON
    lines and Parquet that holds text; "text" where it is None. Raises DataError."""
    if spec == "stdlib":
        _expect_records(spec, False, text_field)
        return _read_stdlib()
    with _readable(spec) as path:
        if path.is_dir():
            return _read_folder(path, text_field)
        _expect_records(spec, records.is_kind_of(path), text_field)
        if records.is_kind_of(path):
            text = records.read(_regular(path), text_field, limit_bytes=FOLDER_LIMIT_BYTES)
            return memoryview(text), str(path)
        return _map_text(path), str(path)


def open_ids(spec: str, width: str) -> tuple[memoryview, str]:
    """Return the token ids of the file that ``spec`` names, and a short description. ``width``: one of ID_WIDTHS.
    Raises DataError."""
    if spec == "stdlib":
        raise DataError(
            "--tokens reads a file of token ids, and stdlib is text: remove it, or give --data a file"
        )
    with _readable(spec) as path:
        if path.is_dir():
            raise DataError(f"{spec}: is a folder, and --tokens reads one file: give --data the file")
        content = _map_file(path)
    for start, kind in _NO_BARE_IDS.items():
        if content[: len(start)] == start:
            raise DataError(
                f"{spec}: is {kind}, and --tokens reads bare ids: write them with numpy's tofile, without a header"
            )
    itemsize = ID_WIDTHS[width].itemsize
    if len(content) % itemsize:
        raise DataError(
            f"{spec}: holds {len(content)} bytes, which is not a whole number of {width} ids: give the width "
            "that it was written with"
        )
    if sys.byteorder != "little":
        raise DataError("--tokens reads little-endian ids, and this machine is big-endian: give --data text")
    return content.cast(ID_WIDTHS[width].format), spec


@contextlib.contextmanager
def _readable(spec: str) -> Iterator[Path]:
    """Turn errors of reading ``spec`` into a DataError."""
    if not spec:
        raise DataError("--data is empty: give it a path, stdlib or synthetic")
    try:
        yield Path(spec)
    except FileNotFoundError:
        raise DataError(f"{spec}: no such file or folder: give --data a path, stdlib or synthetic") from None
    except OSError as error:
        raise DataError(f"{spec}: cannot be read ({error.strerror}): give --data a readable path") from None


def _expect_records(spec: str, has_records: bool, text_field: str | None) -> None:
    if text_field is not None and not has_records:
        raise DataError(
            f"--text-field {text_field} applies to JSON lines and Parquet ({', '.join(records.SUFFIXES)}), and {spec} "
            "has neither: remove it"
        )


def digest(content: memoryview) -> str:
    """Return the digest of the length and all bytes; above 1 GiB, of the length and of pieces that are spread over the
    content."""
    content = content.cast("B")
    found = hashlib.blake2b(str(len(content)).encode(), digest_size=16)
    if len(content) <= _DIGESTED_WHOLE_BYTES:
        found.update(content)
    else:
        for start in range(0, len(content), len(content) // _PIECE_NUM):
            found.update(content[start : start + _PIECE_BYTES])
    return found.hexdigest()


def _regular(path: Path) -> Path:
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: is neither a regular file nor a folder: give --data one of those")
    return path


def _map_text(path: Path) -> memoryview:
    content = _map_file(path)
    at = bytes(content[:_PROBE_BYTES]).find(b"\0")
    if at >= 0:
        raise DataError(
            f"{path}: is binary (byte {at} is zero), and --data takes text: give it text, JSON lines or Parquet "
            f"({', '.join(records.SUFFIXES)}), or add --tokens {' or '.join(ID_WIDTHS)} for a file of token ids"
        )
    return content


def _map_file(path: Path) -> memoryview:
    """A mapping: ranks of one host share the page cache, and a large file costs no memory of its own."""
    with _regular(path).open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            raise DataError(f"{path}: is empty: give --data a file with text")
        mapping = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ)
    return memoryview(mapping)


def _walk(root: Path, *, skip: frozenset[str]) -> Iterator[Path]:
    """Regular files below ``root`` in one order on every machine, without hidden and ``skip`` ones and without folders
    of results, which grow while ranks read."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = [
            name
            for name in folders
            if name not in skip and not name.startswith(".") and not _holds_results(Path(folder, name))
        ]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    regular = (path for path in found if path.is_file())
    yield from sorted(regular, key=lambda path: path.relative_to(root).as_posix())


def _holds_results(folder: Path) -> bool:
    """As a comparison leaves them."""
    return (folder / "results.json").is_file() and (folder / "logs").is_dir()


def _join(
    paths: Iterable[Path], *, limit_bytes: int, text_field: str | None = None
) -> tuple[bytearray, int, bool]:
    """Concatenated text files (no NUL near the start), how many, and whether the limit cut them off. Of JSON lines and
    Parquet the text counts."""
    joined, num_files = bytearray(), 0
    for path in paths:
        if records.is_kind_of(path):
            joined += records.read(path, text_field, limit_bytes=limit_bytes)
        else:
            with path.open("rb") as file:
                start = file.read(_PROBE_BYTES)
                if b"\0" in start:
                    continue
                if len(joined) + os.fstat(file.fileno()).st_size > limit_bytes:
                    return joined, num_files, True
                joined += start
                joined += file.read()
        if len(joined) > limit_bytes:
            return joined, num_files, True
        num_files += 1
    return joined, num_files, False


def _read_folder(root: Path, text_field: str | None) -> tuple[memoryview, str]:
    paths = list(_walk(root, skip=frozenset({"__pycache__"})))
    _expect_records(str(root), any(map(records.is_kind_of, paths)), text_field)
    joined, num_files, cut_off = _join(paths, limit_bytes=FOLDER_LIMIT_BYTES, text_field=text_field)
    if cut_off:
        raise DataError(
            f"{root}: holds more than {FOLDER_LIMIT_BYTES >> 30} GiB of text, which every rank would read: "
            "join the files into one (one file is mapped, not read) or name a smaller folder"
        )
    if not joined:
        raise DataError(f"{root}: holds no text file that is not empty: give --data a folder with text")
    return memoryview(joined).toreadonly(), f"{root} ({num_files} files)"


def _read_stdlib() -> tuple[memoryview, str]:
    root = Path(sysconfig.get_path("stdlib"))
    try:
        sources = (path for path in _walk(root, skip=_SKIPPED_FOLDERS) if path.suffix == ".py")
        joined, num_files, _ = _join(sources, limit_bytes=STDLIB_LIMIT_BYTES)
    except OSError as error:
        raise DataError(
            f"{root}: standard library cannot be read ({error.strerror}): give --data a path"
        ) from None
    if not joined:
        raise DataError(f"{root}: holds no standard library sources: give --data a file with text")
    return memoryview(joined).toreadonly(), f"stdlib ({num_files} Python files)"

"""Where bytes of text come from: one file (mapped), a folder or the standard library (both read)."""

from __future__ import annotations

import hashlib
import mmap
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from zerobench.errors import DataError

STDLIB_LIMIT_BYTES = 32 << 20
FOLDER_LIMIT_BYTES = 1 << 30
_PROBE_BYTES = 8192
_DIGESTED_WHOLE_BYTES = 1 << 30
_PIECE_NUM, _PIECE_BYTES = 1024, 1 << 16
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def open_bytes(spec: str) -> tuple[memoryview, str]:
    """The bytes that ``spec`` names and a short description of them. Raises DataError."""
    if spec == "stdlib":
        return _read_stdlib()
    if not spec:
        raise DataError("--data names nothing: give it a path, stdlib or synthetic")
    path = Path(spec)
    try:
        if path.is_dir():
            return _read_folder(path)
        return _map_file(path)
    except FileNotFoundError:
        raise DataError(f"{spec}: no such file or folder: give --data a path, stdlib or synthetic") from None
    except OSError as error:
        raise DataError(f"{spec}: cannot be read ({error.strerror}): give --data a readable path") from None


def digest(content: memoryview) -> str:
    """Of the length and all bytes; of a mapping above 1 GiB, of pieces that are spread over it."""
    found = hashlib.blake2b(str(len(content)).encode(), digest_size=16)
    if len(content) <= _DIGESTED_WHOLE_BYTES:
        found.update(content)
    else:
        for start in range(0, len(content), len(content) // _PIECE_NUM):
            found.update(content[start : start + _PIECE_BYTES])
    return found.hexdigest()


def _map_file(path: Path) -> tuple[memoryview, str]:
    """A mapping: ranks of one host share the page cache, and a large file costs no memory of its own."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path}: is neither a regular file nor a folder: give --data one of those")
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            raise DataError(f"{path}: is empty: give --data a file with text")
        mapping = mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_READ)
    return memoryview(mapping), str(path)


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


def _join(paths: Iterable[Path], *, limit_bytes: int) -> tuple[bytearray, int, bool]:
    """Concatenated text files (no NUL near the start), how many, and whether the limit cut them off."""
    joined, num_files = bytearray(), 0
    for path in paths:
        with path.open("rb") as file:
            start = file.read(_PROBE_BYTES)
            if b"\0" in start:
                continue
            if len(joined) + os.fstat(file.fileno()).st_size > limit_bytes:
                return joined, num_files, True
            joined += start
            joined += file.read()
        num_files += 1
    return joined, num_files, False


def _read_folder(root: Path) -> tuple[memoryview, str]:
    paths = _walk(root, skip=frozenset({"__pycache__"}))
    joined, num_files, cut_off = _join(paths, limit_bytes=FOLDER_LIMIT_BYTES)
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

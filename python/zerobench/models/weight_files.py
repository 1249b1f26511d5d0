"""Which files of a folder hold a model's weights. Imports neither torch nor transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path

from zerobench.errors import ConfigError

STEMS = ("model.safetensors", "pytorch_model.bin")
CURE = "complete the download, or take --model-option weights=random"


def source(folder: Path) -> Path | None:
    """The file, or the index of files, that counts where there are several: the first one, as in transformers."""
    names = [name for stem in STEMS for name in (stem, f"{stem}.index.json")]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def has_weights(folder: Path) -> bool:
    """Return whether the folder holds any weights, complete or not."""
    return source(folder) is not None or bool(missing_files(folder))


def weight_map(index: Path) -> dict[str, Path]:
    """File by tensor name. Raises ConfigError for what is no index."""
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: index.parent / file for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index} is not an index of weights: {CURE}") from None


def missing_files(folder: Path) -> list[str]:
    """Return the files that an index names and the folder lacks. Without weights to read, return the first file of
    which there are only traces: a link that leads nowhere, or files without their index."""
    found = source(folder)
    if found is None:
        return [name for stem in STEMS for name in _traces(folder, stem)][:1]
    if found.suffix == ".json":
        return sorted(file.name for file in set(weight_map(found).values()) if not file.is_file())
    return []


def _traces(folder: Path, stem: str) -> list[str]:
    index, (name, _, suffix) = f"{stem}.index.json", stem.partition(".")
    has_files = any(folder.glob(f"{name}-*-of-*.{suffix}"))
    return [each for each in (stem, index) if os.path.lexists(folder / each) or (each == index and has_files)]


def is_whole(folder: Path) -> bool:
    """Return whether all weights of a download are there."""
    try:
        return source(folder) is not None and not missing_files(folder)
    except ConfigError:
        return False


def checked_weights(folder: Path) -> Path:
    """The folder. Raises ConfigError where it holds no weights, or not all that its index names."""
    if missing := missing_files(folder):
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{folder} lacks {missing[0]}{others} of its weights: {CURE}")
    if source(folder) is None:
        raise ConfigError(f"{folder} holds no weights ({' or '.join(STEMS)}): {CURE}")
    return folder

"""Which files of a folder hold a model's weights. Imports neither torch nor transformers."""

from __future__ import annotations

import json
from pathlib import Path

from zerobench.errors import ConfigError

STEMS = (
    "model.safetensors",
    "pytorch_model.bin",
)  # the first of these counts, whole or sharded, as in transformers
CURE = "complete the download, or take --model-option weights=random"


def has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for stem in STEMS for name in (f"{stem}.index.json", stem))


def weight_map(index: Path) -> dict[str, Path]:
    """File by tensor name. Raises ConfigError for what is no index."""
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: index.parent / file for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index} is no index of weights: {CURE}") from None


def missing_files(folder: Path) -> list[str]:
    """What the index of a sharded checkpoint names and the folder lacks."""
    for stem in STEMS:
        index = folder / f"{stem}.index.json"
        if (folder / stem).is_file():
            break
        if index.is_file():
            return sorted({file.name for file in weight_map(index).values() if not file.is_file()})
    return []


def is_whole(folder: Path) -> bool:
    """Whether all weights of a download are there."""
    try:
        return has_weights(folder) and not missing_files(folder)
    except ConfigError:
        return False


def checked_weights(folder: Path) -> Path:
    """The folder. Raises ConfigError where it holds no weights, or not all that its index names."""
    if not has_weights(folder):
        raise ConfigError(f"{folder} holds no weights ({' or '.join(STEMS)}): {CURE}")
    if missing := missing_files(folder):
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{folder} lacks {missing[0]}{others} of its weights: {CURE}")
    return folder

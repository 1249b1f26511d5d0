"""Configurations from names and from dictionaries. No name needs a network:

- ``gpt2``, ``tiny`` and the like: zerobench's own presets (presets.py), plain PyTorch.
- ``organisation/name``: the hub's name, built by transformers: a shipped configuration (hub.json) or one that lies in
  the hub's cache on this machine. Chat and instruct variants are shipped by name, never guessed from a suffix.
  ``hf:NAME`` is short for the shipped name that ends in ``/NAME``; so ``gpt2`` is our preset and ``hf:gpt2``
  (``openai-community/gpt2``) transformers' GPT-2, and neither ever stands in for the other.
- ``llama-1.3b``, ``llama``: the shapes of the peer benchmark, built by transformers.
- a path that begins with ``/``, ``./``, ``../`` or ``~``: a folder with a config.json and, perhaps, weights.
- ``package.module:function``: what a user's own function makes.

Of a folder, an architecture that this package knows is an HFConfig, with all its sizes; any other is a FolderConfig,
which only building it tells about (``examine``).

Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from zerobench.engine.config import read_json
from zerobench.errors import ConfigError, did_you_mean
from zerobench.host import imports, packages
from zerobench.models.config import ModelConfig, suggest
from zerobench.models.folder_config import FolderConfig, from_folder
from zerobench.models.hf_config import RANDOM_WEIGHTS, HFConfig, from_published, is_known
from zerobench.models.place_config import PlaceConfig, from_place
from zerobench.models.presets import PresetConfig, preset_names, resolve_preset
from zerobench.models.weight_files import checked_weights, has_weights, is_whole

# Of names of the hub, such as Qwen2.5-7B-Instruct-AWQ and Qwen2.5-7B-Instruct-GPTQ-Int4.
_QUANTISED = re.compile(
    r"[-_.](awq|gptq|gguf|ggml|exl2|bnb|fp8|nf4|int[48]|[2-8]-?bits?|w\d+a\d+)(?![a-z])", re.I
)


def resolve(
    name: str, overrides: Mapping[str, Any] | None = None, *, hub_cache: Path | None = None
) -> ModelConfig:
    """Return the model ``name`` with ``overrides`` of its fields; None leaves what it has, but for ``sliding_window``,
    where it is a value. ``hub_cache``: the folder of the hub's downloads; this machine's by default.

    Raises ConfigError for an unknown name, option or size, and where a package that builds the model is missing.
    """
    config = find(name, overrides, hub_cache=hub_cache)
    check_packages(config)
    return config


def find(
    name: str, overrides: Mapping[str, Any] | None = None, *, hub_cache: Path | None = None
) -> ModelConfig:
    """Do as ``resolve`` without asking whether this machine can build it: sizes alone need no package. Raises
    ConfigError as ``resolve`` does, but for packages."""
    if name in preset_names():
        return resolve_preset(name, overrides)
    given = dict(overrides or {})
    if given.get("weights") not in (None, RANDOM_WEIGHTS):
        given["weights"] = str(checked_weights(_folder(str(given["weights"]))))
    if name.startswith(("/", "./", "../", "~")):
        folder = _folder(name)
        return _of_folder(str(folder), folder, given)
    known = hub_models()
    name = _without_prefix(name) if name.startswith("hf:") else name
    cached = cached_folder(name, hub_cache) if "/" in name else None
    if name in known:  # a download that was interrupted is none
        weights = str(cached) if cached is not None and is_whole(cached) else RANDOM_WEIGHTS
        return from_published(name, known[name]["config"], overrides=given, weights=weights)
    if cached is not None:
        return _of_folder(name, cached, given)
    if imports.is_place(name) and not name.startswith("hf:"):
        return from_place(name, given)
    raise ConfigError(f"{_refusal(name, list(known))}{_local_hint(name)}")


def from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration that ``model_dump`` gave ``values``. Raises pydantic's ValidationError."""
    kinds: dict[str, type[ModelConfig]] = {
        "architecture": HFConfig,
        "published": FolderConfig,
        "place": PlaceConfig,
    }
    kind = next((kind for key, kind in kinds.items() if key in values), PresetConfig)
    return kind.model_validate(values)


def _of_folder(name: str, folder: Path, overrides: Mapping[str, Any]) -> HFConfig | FolderConfig:
    path = folder / "config.json"
    try:
        published = read_json(path, may_repeat_keys=True)
    except ConfigError as error:
        raise ConfigError(f"model {name!r}: {error}") from None
    if not isinstance(published, dict):
        raise ConfigError(f"model {name!r}: {path} holds no JSON object: give a model's config.json")
    weights = str(folder) if has_weights(folder) else RANDOM_WEIGHTS
    read = from_published if is_known(published) else from_folder
    config = read(name, published, overrides=overrides, weights=weights)
    if config.weights == str(folder):
        checked_weights(folder)
    return config


def _folder(text: str) -> Path:
    folder = Path(
        os.path.expanduser(text)
    ).resolve()  # which leaves ~name as it is where nobody has that name
    if not text or not os.path.isdir(folder):  # which is false of a name that is too long, too
        raise ConfigError(f"{text or 'an empty name'}: no such folder: name one that holds a config.json")
    return folder


@cache
def hub_models() -> dict[str, dict[str, Any]]:
    """Shipped configurations by hub name: {"config": fields of config.json, "parameters": published number}."""
    text = Path(__file__).with_name("hub.json").read_text(encoding="utf-8")
    models: dict[str, dict[str, Any]] = {}
    for name, model in json.loads(text)["models"].items():
        base = models.get(model.get("shape_of"), model)
        models[name] = {**base, "config": {**base["config"], **model.get("config", {})}}
    return models


def cached_folder(name: str, hub_cache: Path | None) -> Path | None:
    """Return the hub's snapshot of ``name`` in a cache, by default that of this machine, if it holds a config.json."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json", cache_dir=hub_cache)
    except ValueError:  # no name that the hub could have
        return None
    return Path(found).parent if isinstance(found, str) else None


def check_packages(
    config: ModelConfig,
    *,
    is_installed: Callable[[str], bool] = packages.is_installed,
    major_version: Callable[[str], int] = packages.major_version,
) -> None:
    """Raise ConfigError in one sentence where a package that the model needs is missing."""
    if not isinstance(config, HFConfig | FolderConfig):
        return
    if not is_installed("transformers"):
        raise ConfigError(
            f"model {config.name!r} needs transformers: pip install '.[hf]' in zerobench's checkout"
        )
    if getattr(config, "architecture", None) == "mixtral" and major_version("transformers") < 5:
        raise ConfigError(
            f"model {config.name!r}: before transformers 5 each expert is a module of its own, and one that no token "
            "reaches has no gradient, which DDP and FSDP do not take: pip install -U transformers"
        )
    if config.attention == "flash_attention_2" and not is_installed("flash_attn"):
        raise ConfigError(
            "attention 'flash_attention_2' needs flash-attn: pip install flash-attn, or choose sdpa (which uses flash "
            "attention kernels where they fit)"
        )


def _without_prefix(name: str) -> str:
    short = name.removeprefix("hf:")
    if "/" in short:
        return short
    full = [known for known in hub_models() if known.rpartition("/")[2] == short and "/" in known]
    return full[0] if full else name


def _refusal(name: str, known: list[str]) -> str:
    """Return why no model has ``name``."""
    if quantised := _QUANTISED.search(name):
        hint = did_you_mean(name[: quantised.start()], known, cutoff=0.5)
        return (
            f"model {name!r} is quantised, and zerobench trains no quantised weights: "
            f"{hint}use the model that it was made from"
        )
    if os.path.isdir(name) and not os.path.exists(os.path.join(name, "config.json")):
        return f"the folder {name!r} has no config.json: give the folder that save_pretrained() or `hf download` wrote"
    return f"unknown model {name!r}: {suggest(name, [*preset_names(), *known])}"


def _local_hint(name: str) -> str:
    return (
        f"; for the folder of that name write ./{name}"
        if os.path.isfile(os.path.join(name, "config.json"))
        else ""
    )

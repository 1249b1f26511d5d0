"""Weights of a Hugging Face checkpoint, read a tensor at a time, so that no host needs room for a whole model."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerobench.errors import ConfigError
from zerobench.models.weight_files import CURE, checked_weights, source, weight_map

_FUSED_EXPERTS = re.compile(r"(?P<layer>.*)\.mlp\.experts\.(?P<kind>gate_up_proj|down_proj)")


class Checkpoint:
    """A folder of safetensors or torch files, one or sharded with an index."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._files = self._index()  # file by tensor name
        self._open = cache(self._open_file)

    def expect_names(self, model: nn.Module) -> None:
        """Raise ConfigError for a parameter of the model that the checkpoint lacks. Reads no values."""
        aliases = self._aliases(model)
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        for name, parameter in model.named_parameters():
            spelled = (key for alias in aliases[id(parameter)] for key in self._spellings(alias, prefix))
            if next(spelled, None) is None and not self._is_fused(name):
                raise self._lacks(name)

    def load_into(self, model: nn.Module, names: Iterable[str]) -> None:
        """Copy the checkpoint's values, in the parameters' dtypes. Raises ConfigError for what it lacks."""
        aliases = self._aliases(model)
        parameters = dict(model.named_parameters())
        prefix = f"{getattr(model, 'base_model_prefix', '')}."
        for name in names:
            parameter = parameters[name]
            spellings = (key for alias in aliases[id(parameter)] for key in self._spellings(alias, prefix))
            found = list(dict.fromkeys(spellings))
            values = self.read(found[0]) if found else self._fused(name, parameter.shape)
            if values is None:
                raise self._lacks(name)
            if values.shape != parameter.shape:
                raise ConfigError(
                    f"parameter {name!r} has shape {tuple(values.shape)} in {self.folder} and {tuple(parameter.shape)} "
                    "in the model: leave sizes as published or take random weights"
                )
            for other in found[1:]:
                self._expect_tied(found[0], values, other)
            parameter.copy_(values)

    @staticmethod
    def _aliases(model: nn.Module) -> dict[int, list[str]]:
        """Names of each parameter, several of a tied one, by its id."""
        aliases: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        return aliases

    def read(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise self._lacks(name)
        file = self._files[name]
        source = self._open(file)
        try:
            values = source.get_tensor(name) if file.suffix == ".safetensors" else source[name]
        except Exception as error:
            raise ConfigError(f"{file} lacks {name!r}, for which the index names it: {CURE}") from error
        if not isinstance(values, torch.Tensor):
            raise ConfigError(f"{file} holds a {type(values).__name__} as {name!r} and no tensor: {CURE}")
        return values

    def _lacks(self, name: str) -> ConfigError:
        return ConfigError(
            f"the checkpoint in {self.folder} has no parameter {name!r}: it is of another model"
        )

    def _expect_tied(self, name: str, values: torch.Tensor, other: str) -> None:
        if not torch.equal(self.read(other).to(values.dtype), values):
            raise ConfigError(
                f"the checkpoint in {self.folder} has other values for {other!r} than for {name!r}, and the model one "
                f"weight: take --model-option tied_embeddings=false --model-option weights={self.folder}"
            )

    def _index(self) -> dict[str, Path]:
        found = source(checked_weights(self.folder))
        assert found is not None
        if found.suffix == ".json":
            return weight_map(found)
        return dict.fromkeys(self._open_file(found).keys(), found)

    @staticmethod
    def _open_file(file: Path) -> Any:
        try:
            if file.suffix == ".safetensors":
                from safetensors import safe_open

                return safe_open(file, framework="pt")
            # Files from before torch 1.6 are no zip archives, and cannot be mapped.
            held = torch.load(file, map_location="cpu", mmap=zipfile.is_zipfile(file), weights_only=True)
            if not isinstance(held, Mapping):
                raise TypeError(f"it holds a {type(held).__name__}, no tensors by name")
            return held
        except Exception as error:  # of many kinds: a pointer to a file that was not fetched, half of a file
            said = " ".join(str(error).split())
            raise ConfigError(f"{file} cannot be read as weights ({said}): {CURE}") from error

    def _spellings(self, name: str, prefix: str) -> Iterator[str]:
        """Yield the names that this checkpoint has for a parameter: with or without the base model's prefix, norms in
        BERT's old words, the router of Mixtral under its older parent."""
        for spelling in (name, name.removeprefix(prefix)):
            for old, new in (
                ("", ""),
                ("LayerNorm.weight", "LayerNorm.gamma"),
                ("LayerNorm.bias", "LayerNorm.beta"),
                (".mlp.gate.", ".block_sparse_moe.gate."),
            ):
                written = spelling.replace(old, new) if old else spelling
                if written in self._files:
                    yield written

    def _is_fused(self, name: str) -> bool:
        match = _FUSED_EXPERTS.fullmatch(name)
        return match is not None and f"{match['layer']}.block_sparse_moe.experts.0.w1.weight" in self._files

    def _fused(self, name: str, shape: torch.Size) -> torch.Tensor | None:
        """Mixtral's experts, which transformers 5 keeps in one tensor and checkpoints in one each."""
        match = _FUSED_EXPERTS.fullmatch(name)
        if match is None or not self._is_fused(name):
            return None
        experts = [f"{match['layer']}.block_sparse_moe.experts.{expert}" for expert in range(shape[0])]
        if match["kind"] == "down_proj":
            return torch.stack([self.read(f"{expert}.w2.weight") for expert in experts])
        return torch.stack(
            [
                torch.cat([self.read(f"{expert}.w1.weight"), self.read(f"{expert}.w3.weight")])
                for expert in experts
            ]
        )

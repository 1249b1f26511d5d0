"""Presets by name, every field overridable, and the exact parameter count. Imports no torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zerobench.errors import ConfigError

if TYPE_CHECKING:
    from zerobench.models.transformer import Transformer


class ModelConfig(BaseModel):
    """Shape of a decoder-only transformer: pre-norm, learned positions, biases, as GPT-2."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = "custom"
    num_layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    max_seq_length: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    ffn_multiplier: int = Field(default=4, gt=0)  # width of the feed-forward layer over hidden_size
    tied_embeddings: bool = True  # token embedding and output projection share one weight
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)  # above zero, strategies draw different masks

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> ModelConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}: "
                f"use a multiple of {self.num_heads} or another num_heads"
            )
        return self

    @property
    def ffn_size(self) -> int:
        return self.ffn_multiplier * self.hidden_size

    def check_seq_length(self, seq_length: int) -> None:
        """Raise ConfigError unless sequences of ``seq_length`` tokens can be trained (two to predict one)."""
        if not 2 <= seq_length <= self.max_seq_length:
            raise ConfigError(
                f"seq_length {seq_length} is outside 2 to {self.max_seq_length} (max_seq_length of model "
                f"{self.name!r}): choose another seq_length or override max_seq_length"
            )


def _gpt(num_layers: int, hidden_size: int, num_heads: int, max_seq_length: int) -> dict[str, int]:
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "max_seq_length": max_seq_length,
        "vocab_size": 50257,
    }


_PRESETS: dict[str, dict[str, int]] = {
    "tiny": _gpt(4, 64, 4, 256) | {"vocab_size": 256},  # bytes; some 10 ms a step on one core
    "gpt2": _gpt(12, 768, 12, 1024),
    "gpt2-medium": _gpt(24, 1024, 16, 1024),
    "gpt2-large": _gpt(36, 1280, 20, 1024),
    "gpt2-xl": _gpt(48, 1600, 25, 1024),
    "gpt-64m": _gpt(12, 512, 8, 512),
    "gpt-512m": _gpt(24, 1024, 16, 1024),
}


def preset_names() -> list[str]:
    return list(_PRESETS)


def _suggest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(known)}"


def resolve(name: str, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The preset ``name`` with ``overrides`` of ModelConfig's fields; None leaves what the preset has."""
    if name not in _PRESETS:
        raise ConfigError(f"unknown model {name!r}: {_suggest(name, preset_names())}")
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    fields = [field for field in ModelConfig.model_fields if field != "name"]
    for key in given:
        if key not in fields:
            raise ConfigError(f"unknown model option {key!r}: {_suggest(key, fields)}")
    try:
        return ModelConfig(name=name, **{**_PRESETS[name], **given})
    except ValidationError as error:
        raise ConfigError(f"model {name!r}: {_first_problem(error)}") from None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    if not problem["loc"]:  # our own validator: the sentence names its fields
        return str(problem["msg"]).removeprefix("Value error, ")
    message = str(problem["msg"]).removeprefix("Input ")
    return f"{'.'.join(str(part) for part in problem['loc'])} {message}, got {problem['input']!r}"


def parameter_count(config: ModelConfig) -> int:
    """Exact number of parameters, a tied weight counted once."""
    h, ffn = config.hidden_size, config.ffn_size
    layer_norm = 2 * h
    attention = (3 * h * h + 3 * h) + (h * h + h)  # query, key and value in one; output projection
    feed_forward = (h * ffn + ffn) + (ffn * h + h)
    block = 2 * layer_norm + attention + feed_forward
    embeddings = config.vocab_size * h + config.max_seq_length * h
    head = 0 if config.tied_embeddings else config.vocab_size * h
    return embeddings + config.num_layers * block + layer_norm + head


def build(config: ModelConfig, seed: int) -> Transformer:
    """The fp32 model on CPU. The same ``seed`` gives the same bits; global random state plays no part."""
    from zerobench.models.transformer import build_transformer

    return build_transformer(config, seed)

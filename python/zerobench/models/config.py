"""Parts that all configurations of models have in common. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zerobench.errors import ConfigError, did_you_mean

T = TypeVar("T", bound="ModelConfig")

NULLABLE_FIELDS = ("sliding_window",)


class ModelConfig(BaseModel):
    """Facts of a model that a comparison reads. Sizes of sequences and of the vocabulary are in tokens. ``from_dict``
    reads a dumped one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = "custom"
    num_layers: int = Field(gt=0)
    max_seq_length: int | None = Field(default=None, gt=0)  # None: any
    vocab_size: int | None = Field(default=None, gt=0)  # None: it takes no tokens
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)  # above zero, strategies draw different masks

    @property
    def least_layers(self) -> int:
        """Fewest layers that ``with_layers`` can leave."""
        return 1

    @property
    def begins_whole(self) -> bool:
        """True if every rank makes the whole model before any strategy divides it."""
        return False

    def with_layers(self: T, layers: int) -> T:
        """Return the same model with another number of layers."""
        return self if layers == self.num_layers else self.model_copy(update=self._changes_for(layers))

    def _changes_for(self, layers: int) -> dict[str, Any]:
        """Return the fields that another number of layers changes."""
        return {"num_layers": layers}

    def seq_length_of(self, asked: int) -> int:
        """Return the tokens of a sample where sequences of ``asked`` tokens were asked for."""
        return asked

    def check_seq_length(self, seq_length: int) -> None:
        """Raise ConfigError unless sequences of ``seq_length`` tokens can be trained (two to predict one)."""
        if seq_length < 2 or (self.max_seq_length is not None and seq_length > self.max_seq_length):
            allowed = (
                f"is outside 2 to {self.max_seq_length} (max_seq_length of model {self.name!r}): choose another "
                "seq_length or override max_seq_length"
                if self.max_seq_length is not None
                else "is too short: use at least 2"
            )
            raise ConfigError(f"seq_length {seq_length} {allowed}")


class SizedConfig(ModelConfig):
    """A model whose every size is known, so that its parameters and FLOPs are too."""

    hidden_size: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    max_seq_length: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    tied_embeddings: bool = True  # token embedding and output projection share one weight

    @model_validator(mode="after")
    def _heads_divide_hidden(self) -> SizedConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}: "
                f"use a multiple of {self.num_heads} or another num_heads"
            )
        return self


def make(kind: type[T], name: str, fields: Mapping[str, Any]) -> T:
    """A configuration of ``kind``. Raises ConfigError in one sentence."""
    try:
        return kind(name=name, **fields)
    except ValidationError as error:
        raise ConfigError(f"model {name!r}: {first_problem(error)}") from None


def checked_overrides(overrides: Mapping[str, Any] | None, *, known: Iterable[str]) -> dict[str, Any]:
    """``overrides`` without those that are None and must have a value. Raises ConfigError for a name that is not
    ``known``."""
    fields = list(known)
    given = {
        key: value for key, value in (overrides or {}).items() if value is not None or key in NULLABLE_FIELDS
    }
    for key in given:
        if key not in fields:
            raise ConfigError(f"unknown model option {key!r}: {suggest(key, fields)}")
    return given


def suggest(name: str, known: list[str]) -> str:
    return f"{did_you_mean(name, known, cutoff=0.5)}known: {', '.join(known)}"


def first_problem(error: ValidationError) -> str:
    """One sentence of the first thing that is wrong."""
    problem = error.errors()[0]
    if not problem["loc"]:  # our own validator: the sentence names its fields
        return str(problem["msg"]).removeprefix("Value error, ")
    message = str(problem["msg"]).removeprefix("Input ").partition(" or instance of")[0]
    return f"{'.'.join(str(part) for part in problem['loc'])} {message}, got {problem['input']!r}"

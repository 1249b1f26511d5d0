"""zerobench's own models in plain PyTorch by preset name, every field overridable. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from zerobench.models.config import SizedConfig, checked_overrides, make


class PresetConfig(SizedConfig):
    """Shape of a decoder-only transformer: pre-norm, learned positions, biases, as GPT-2; attention is torch's sdpa."""

    ffn_multiplier: int = Field(default=4, gt=0)  # width of the feed-forward layer over hidden_size

    @property
    def ffn_size(self) -> int:
        return self.ffn_multiplier * self.hidden_size


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
    """Names of our own models, as ``resolve`` takes them."""
    return list(_PRESETS)


def resolve_preset(name: str, overrides: Mapping[str, Any] | None = None) -> PresetConfig:
    """The preset ``name`` with ``overrides`` of PresetConfig's fields; None leaves what the preset has. Raises
    ConfigError for an unknown field or an impossible value."""
    fields = [field for field in PresetConfig.model_fields if field != "name"]
    return make(PresetConfig, name, {**_PRESETS[name], **checked_overrides(overrides, known=fields)})

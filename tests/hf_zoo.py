"""Tiny versions of every Hugging Face architecture that zerobench builds."""

from __future__ import annotations

import torch

from zerobench import models

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "max_seq_length": 32, "vocab_size": 256}
GATED = {"ffn_size": 48, "num_kv_heads": 2}
MODELS = {
    "hf:gpt2": {},
    "meta-llama/Meta-Llama-3-8B": GATED,
    "mistralai/Mistral-7B-v0.1": GATED | {"sliding_window": 6},
    "mistralai/Mixtral-8x7B-v0.1": GATED,
    "Qwen/Qwen2.5-7B": GATED,
    "Qwen/Qwen2.5-0.5B": GATED,
    "facebook/opt-1.3b": {},
    "facebook/opt-350m": {"embedding_size": 16},
    "google-bert/bert-large-uncased": {},
}


def config(name: str, **overrides):
    return models.resolve(name, SIZES | MODELS[name] | {"weights": "random"} | overrides)


def build(name: str, *, seed: int = 0, device: str = "cpu", checkpointing: bool = False, **overrides):
    return models.build(config(name, **overrides), seed, device=device, checkpointing=checkpointing)


def batch(*, seed: int = 0, batch_size: int = 2, seq_length: int = 16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(256, (batch_size, seq_length), generator=generator)
    return {"input_ids": input_ids, "labels": input_ids}

"""Tiny folders with a config.json, as ``hf download`` leaves them, of architectures that people train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
# Key: (class, the rest of its config.json).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", {**_GROUPED, "head_dim": 8, "attention_dropout": 0.1}),
    "gemma": ("GemmaForCausalLM", {**_GROUPED, "head_dim": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        {**_GROUPED, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_SIZES, "hidden_dropout": 0.1}),
    "phi": ("PhiForCausalLM", {**_SIZES, "resid_pdrop": 0.1}),
    "opt": (
        "OPTForCausalLM",
        {
            "vocab_size": 256,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 64,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "t5": (
        "T5ForConditionalGeneration",
        {
            "vocab_size": 256,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.1,
            "decoder_start_token_id": 0,
            "is_encoder_decoder": True,
        },
    ),
    "bert": ("BertForSequenceClassification", _SIZES),
    "vit": (
        "ViTForImageClassification",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 16,
            "patch_size": 8,
            "num_channels": 3,
            "id2label": {"0": "a", "1": "b", "2": "c"},
            "label2id": {"a": 0, "b": 1, "c": 2},
        },
    ),
}


def write(parent: Path, kind: str, **changes: Any) -> Path:
    """Return a new folder of an architecture, with ``changes`` of its config.json; None takes a key away."""
    class_name, sizes = ARCHITECTURES[kind]
    published = {"model_type": kind, "architectures": [class_name], **sizes, **changes}
    folder = parent / kind
    folder.mkdir()
    kept = {key: value for key, value in published.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder

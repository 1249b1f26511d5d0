"""Architectures of transformers on two ranks at every stage: the same bits, and what plain PyTorch trains.

Each is here for something that its modules do and others do not: blocks used twice, lists of lists, weights that
another module reads, activations that all models of a process share, experts, scans, encoders and decoders.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

import ranks
import transformers
import zoo

STAGES = (0, 1, 2, 3)
VOCABULARY = 128
CAUSAL, MASKED, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT_ATTENTION = {
    "kv_lora_rank": 8,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
ALTERNATE_UPDATES = {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "intermediate_size": [48] * 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
OF_XLM = {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
OF_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
OF_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}


def noise(step: int, rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + rank))


def tokens(step: int, rank: int, length: int = 12, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + seed)
    return torch.randint(3, VOCABULARY, (2, length), generator=generator)


def text(step: int, rank: int, micro: int = 0) -> dict[str, Any]:
    ids = tokens(step, rank)
    return {"input_ids": ids, "labels": ids}


def pairs(step: int, rank: int, micro: int = 0) -> dict[str, Any]:
    return {"input_ids": tokens(step, rank), "labels": tokens(step, rank, length=6, seed=1)}


def images(step: int, rank: int, micro: int = 0) -> dict[str, Any]:
    return {"pixel_values": noise(step, rank, 2, 3, 32, 32), "labels": tokens(step, rank)[:, 0] % 2}


def spectra(step: int, rank: int, micro: int = 0) -> dict[str, Any]:
    return {"input_features": noise(step, rank, 2, 16, 40), "labels": tokens(step, rank, length=6)}


@dataclass(frozen=True)
class Family:
    """An architecture, as transformers' Auto classes name it."""

    kind: str
    model_type: str
    sizes: dict[str, Any]
    batch: Callable[..., dict[str, Any]] = text
    sharded_units: Any = "auto"  # at stage 3

    def make(self) -> nn.Module:
        config = transformers.CONFIG_MAPPING[self.model_type](**self.sizes)
        for name in list(vars(config)):
            if "drop" in name and isinstance(getattr(config, name), float):
                setattr(config, name, 0.0)
        return LossOf(getattr(transformers, self.kind).from_config(config))

    def case(self) -> zoo.Case:
        optimizer = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.01}
        return zoo.Case(self.make, self.batch, config={"optimizer": optimizer}, steps=3)


class LossOf(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.model(**batch).loss


FAMILIES = {
    "gpt_neox": Family(CAUSAL, "gpt_neox", SIZES),
    "opt": Family(CAUSAL, "opt", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    "openai-gpt": Family(
        CAUSAL,
        "openai-gpt",
        {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    ),
    "gemma3n_text": Family(CAUSAL, "gemma3n_text", SIZES | ALTERNATE_UPDATES),
    "qwen3_moe": Family(CAUSAL, "qwen3_moe", SIZES | EXPERTS | {"num_experts": 4, "head_dim": 8}),
    "deepseek_v3": Family(
        CAUSAL,
        "deepseek_v3",
        SIZES
        | EXPERTS
        | LATENT_ATTENTION
        | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    ),
    "mamba": Family(CAUSAL, "mamba", SIZES | {"state_size": 4}),
    "albert": Family(MASKED, "albert", SIZES | {"embedding_size": 16}),
    "deberta_v2": Family(
        MASKED,
        "deberta-v2",
        SIZES
        | {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "max_relative_positions": 16,
        },
    ),
    "funnel": Family(
        MASKED,
        "funnel",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
            "block_sizes": [2, 2],
            "num_decoder_layers": 1,
        },
    ),
    "xlm": Family(MASKED, "xlm", OF_XLM),
    # Its encoder calls layer.forward().
    "squeezebert": Family(
        MASKED, "squeezebert", SIZES | {"embedding_size": 32}, sharded_units=["SqueezeBertEncoder"]
    ),
    "t5": Family(SEQ2SEQ, "t5", OF_T5, pairs),
    "bart": Family(SEQ2SEQ, "bart", OF_BART, pairs),
    "vit": Family(
        "AutoModelForImageClassification", "vit", SIZES | {"image_size": 32, "patch_size": 8}, images
    ),
    "swin": Family(
        "AutoModelForImageClassification",
        "swin",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        images,
    ),
    "whisper": Family(
        "AutoModelForSpeechSeq2Seq",
        "whisper",
        OF_BART
        | {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 64}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        spectra,
    ),
}


def train(rank: ranks.Rank, name: str, stage: int) -> dict[str, Any]:
    family = FAMILIES[name]
    units = family.sharded_units if stage == 3 else "auto"
    found = zoo.train_engine(family.case(), rank, stage=stage, units=units)
    return {key: found[key] for key in ("parameters", "digest", "awaited_early")}


def train_all(rank: ranks.Rank) -> dict[tuple[str, int], dict]:
    return zoo.at_every_stage(rank, train, FAMILIES)


@pytest.fixture(scope="module")
def results():
    return ranks.run(train_all, world_size=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_stage_trains_what_plain_pytorch_trains(results, name):
    for stage in STAGES:
        for rank, by_case in enumerate(results):
            found = by_case[name, stage]
            assert "error" not in found, f"stage {stage}, rank {rank}: {found['error']}"
            assert found["digest"] == results[0][name, 0]["digest"], f"stage {stage}, rank {rank}"
            hidden = name == "squeezebert" and stage < 3
            assert found["awaited_early"] == (
                [f"model.transformer.encoder.layers.{i}" for i in range(2)] if hidden else []
            )
    case = FAMILIES[name].case()
    expected = zoo.train_plainly(case, world_size=2)["parameters"]
    origin = {key: value.detach() for key, value in zoo.make(case).named_parameters()}
    assert zoo.relative(results[0][name, 3]["parameters"], expected, origin) < 1e-3

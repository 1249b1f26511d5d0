"""Sizes of the transformers library's architectures, read from and written to their config.json. Imports neither
torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from zerobench.errors import ConfigError
from zerobench.models.config import ModelConfig, checked_overrides, make

RANDOM_WEIGHTS = "random"


@dataclass(frozen=True)
class Architecture:
    """One of transformers' architectures: its classes, and what its config.json calls our fields."""

    config_class: str
    model_class: str
    keys: Mapping[str, str]  # our field: key of config.json
    dropouts: tuple[str, ...]
    others: tuple[str, ...]  # further keys that decide what is computed, handed on as they are
    tied: bool = False  # what a config.json means that does not say


_COMMON = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
    "max_seq_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
}
_LLAMA = {**_COMMON, "num_kv_heads": "num_key_value_heads", "head_size": "head_dim"}
_WINDOWED = {**_LLAMA, "sliding_window": "sliding_window"}
_LLAMA_OTHERS = ("hidden_act", "initializer_range", "rms_norm_eps", "rope_theta", "rope_scaling")

ARCHITECTURES = {
    "gpt2": Architecture(
        "GPT2Config",
        "GPT2LMHeadModel",
        _COMMON
        | {
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "num_heads": "n_head",
            "ffn_size": "n_inner",
            "max_seq_length": "n_positions",
        },
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        ("activation_function", "initializer_range", "layer_norm_epsilon", "scale_attn_weights",
         "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
        tied=True,
    ),
    "llama": Architecture(
        "LlamaConfig",
        "LlamaForCausalLM",
        _LLAMA,
        ("attention_dropout",),
        (*_LLAMA_OTHERS, "attention_bias", "mlp_bias"),
    ),
    "mistral": Architecture(
        "MistralConfig", "MistralForCausalLM", _WINDOWED, ("attention_dropout",), _LLAMA_OTHERS
    ),
    "mixtral": Architecture(
        "MixtralConfig",
        "MixtralForCausalLM",
        _WINDOWED | {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        ("attention_dropout",),
        (*_LLAMA_OTHERS, "output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    ),
    "qwen2": Architecture(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        _LLAMA,
        ("attention_dropout",),
        _LLAMA_OTHERS,
    ),
    "opt": Architecture(
        "OPTConfig",
        "OPTForCausalLM",
        _COMMON | {"ffn_size": "ffn_dim", "embedding_size": "word_embed_proj_dim"},
        ("dropout", "attention_dropout"),
        ("activation_function", "init_std", "do_layer_norm_before", "_remove_final_layer_norm"),
        tied=True,
    ),
    "bert": Architecture(
        "BertConfig",
        "BertForMaskedLM",
        _COMMON,
        ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        ("hidden_act", "initializer_range", "layer_norm_eps", "type_vocab_size"),
        tied=True,
    ),
}  # fmt: skip
# Keys that would change the computation in a way that the sizes here do not describe, and the value that does not.
_UNSUPPORTED = {
    "quantization_config": None,
    "use_sliding_window": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
}


class HFConfig(ModelConfig):
    """A model that transformers builds. Every size is resolved; ``other`` is handed to its configuration class."""

    architecture: Literal["gpt2", "llama", "mistral", "mixtral", "qwen2", "opt", "bert"]
    num_kv_heads: int = Field(gt=0)
    head_size: int = Field(gt=0)
    ffn_size: int = Field(gt=0)
    embedding_size: int = Field(
        gt=0
    )  # of the token embedding; a projection follows where it differs (OPT 350M)
    num_experts: int = Field(default=0, ge=0)  # 0: a dense model
    experts_per_token: int = Field(default=0, ge=0)
    sliding_window: int | None = Field(default=None, gt=0)  # tokens that attention looks back; None: all
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    weights: str = RANDOM_WEIGHTS  # or the folder that they are loaded from
    other: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _heads_and_experts_fit(self) -> HFConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}: "
                "override both or neither"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}: "
                "use at most as many"
            )
        if self.architecture == "bert" and not self.tied_embeddings:
            raise ValueError(
                "tied_embeddings false leaves BERT's head a bias that no gradient reaches: leave them tied"
            )
        return self

    def hf_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the architecture's configuration class."""
        kind = ARCHITECTURES[self.architecture]
        arguments = {key: getattr(self, field) for field, key in kind.keys.items()}
        if self.head_size * self.num_heads == self.hidden_size:
            arguments.pop("head_dim", None)  # not every version of every class knows it
        arguments |= dict.fromkeys(kind.dropouts, self.dropout)
        # No padding: our batches are full, and a padding row of the embedding would get no gradient.
        fixed = {"use_cache": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        return {**self.other, **arguments, **fixed, "attn_implementation": self.attention}


def overridable(architecture: str) -> list[str]:
    """Fields that may be given instead of the published ones."""
    return [*ARCHITECTURES[architecture].keys, "dropout", "attention", "weights"]


def from_published(
    name: str, published: Mapping[str, Any], *, overrides: Mapping[str, Any] | None, weights: str
) -> HFConfig:
    """The configuration that a config.json describes, with ``overrides`` of our fields, as ``models.resolve`` has them.

    A size that follows from others in the file (head size, feed-forward of four times the width, as many key and value
    heads as heads) follows here too. Other sizes than published come with random weights unless ``weights`` is
    overridden. Raises ConfigError.
    """
    architecture = published.get("model_type")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"model {name!r} has architecture {architecture!r}, which zerobench does not build: "
            f"use one of {', '.join(ARCHITECTURES)}"
        )
    for key, harmless in _UNSUPPORTED.items():
        if published.get(key) not in (None, harmless):
            raise ConfigError(f"model {name!r} has {key} {published[key]!r}, which zerobench does not build")
    given = checked_overrides(overrides, known=overridable(architecture))
    fields = _own_fields(name, architecture, published)
    sizes_changed = any(
        key in ARCHITECTURES[architecture].keys and fields.get(key) != given[key] for key in given
    )
    fields = {"weights": RANDOM_WEIGHTS if sizes_changed else weights, **fields, **given}
    hidden_size, num_heads = fields["hidden_size"], fields["num_heads"]
    if _positive(hidden_size) and _positive(num_heads):  # else the validation says so
        fields.setdefault("head_size", max(1, hidden_size // num_heads))
        fields.setdefault("ffn_size", 4 * hidden_size)
    fields.setdefault("num_kv_heads", num_heads)
    fields.setdefault("embedding_size", hidden_size)
    return make(HFConfig, name, {"architecture": architecture, **fields})


def _positive(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _own_fields(name: str, architecture: str, published: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields of a config.json, without those that follow from others."""
    kind = ARCHITECTURES[architecture]
    fields = {
        field: published[key]
        for field, key in kind.keys.items()
        if key in published and (published[key] is not None or field == "sliding_window")
    }
    fields.setdefault("tied_embeddings", kind.tied)
    missing = [kind.keys[f] for f in ("num_layers", "hidden_size", "num_heads", "max_seq_length", "vocab_size")
               if f not in fields]  # fmt: skip
    if missing:
        raise ConfigError(f"the config.json of model {name!r} lacks {', '.join(missing)}: complete it")
    follows = {
        "head_size": fields["hidden_size"] // fields["num_heads"],
        "num_kv_heads": fields["num_heads"],
        "ffn_size": 4 * fields["hidden_size"],
        "embedding_size": fields["hidden_size"],
    }
    fields = {field: value for field, value in fields.items() if follows.get(field) != value}
    given = _rope_as_two_keys(published)
    return {**fields, "other": {key: given[key] for key in kind.others if given.get(key) is not None}}


def _rope_as_two_keys(published: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters``, as transformers 5 writes them, as the two keys that both 4 and 5 read."""
    rope = dict(published.get("rope_parameters") or {})
    theta = rope.pop("rope_theta", None)
    given = {**published}
    if theta is not None:
        given["rope_theta"] = theta
    if rope.get("rope_type", "default") != "default":
        given["rope_scaling"] = rope
    return given

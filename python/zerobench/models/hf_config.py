"""Sizes of the transformers library's architectures, read from and written to their config.json. Imports neither
torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from zerobench.errors import ConfigError
from zerobench.models.config import SizedConfig, checked_overrides, make

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
    required: tuple[str, ...] = ()  # our fields for which transformers' own default is another model's size


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
        required=("ffn_size",),
    ),
    "mistral": Architecture(
        "MistralConfig",
        "MistralForCausalLM",
        _WINDOWED,
        ("attention_dropout",),
        _LLAMA_OTHERS,
        required=("ffn_size", "num_kv_heads", "sliding_window"),
    ),
    "mixtral": Architecture(
        "MixtralConfig",
        "MixtralForCausalLM",
        _WINDOWED | {"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        ("attention_dropout",),
        (*_LLAMA_OTHERS, "output_router_logits", "router_aux_loss_coef"),
        required=("ffn_size", "num_kv_heads", "num_experts", "experts_per_token"),
    ),
    "qwen2": Architecture(
        "Qwen2Config",
        "Qwen2ForCausalLM",
        _LLAMA,
        ("attention_dropout",),
        _LLAMA_OTHERS,
        required=("ffn_size", "num_kv_heads"),
    ),
    "opt": Architecture(
        "OPTConfig",
        "OPTForCausalLM",
        _COMMON | {"ffn_size": "ffn_dim", "embedding_size": "word_embed_proj_dim"},
        ("dropout", "attention_dropout"),
        ("activation_function", "init_std", "do_layer_norm_before", "_remove_final_layer_norm"),
        tied=True,
        required=("ffn_size",),
    ),
    "bert": Architecture(
        "BertConfig",
        "BertForMaskedLM",
        _COMMON,
        ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        ("hidden_act", "initializer_range", "layer_norm_eps", "type_vocab_size"),
        tied=True,
        required=("ffn_size",),
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
    "position_embedding_type": "absolute",
    "router_jitter_noise": 0.0,  # drawn whatever the dropout is
}
_GROUPED_NUMEL = 8  # of two bytes: torch's grouped products take rows in multiples of 16 bytes
_REQUIRED = ("num_layers", "hidden_size", "num_heads", "max_seq_length", "vocab_size")


class HFConfig(SizedConfig):
    """A model that transformers builds. Every size is resolved; ``other`` is handed to its configuration class."""

    architecture: Literal["gpt2", "llama", "mistral", "mixtral", "qwen2", "opt", "bert"]
    num_kv_heads: int = Field(gt=0)
    head_size: int = Field(gt=0)
    ffn_size: int = Field(gt=0)
    # Of the token embedding; a projection follows where it differs (OPT 350M).
    embedding_size: int = Field(gt=0)
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
        if "rope_theta" in ARCHITECTURES[self.architecture].others and self.head_size % 2:
            raise ValueError(
                f"head_size {self.head_size} is odd, and rotary embeddings turn pairs: use a hidden_size that is a "
                "multiple of 2 x num_heads, or another num_heads or head_size"
            )
        if self.architecture == "mixtral":
            self._check_experts()
        if self.architecture == "bert" and not self.tied_embeddings:
            raise ValueError(
                "tied_embeddings false leaves BERT's head a bias that no gradient reaches: leave them tied"
            )
        return self

    def _check_experts(self) -> None:
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is outside 1 to num_experts {self.num_experts}: use one "
                "or more, and at most as many as there are"
            )
        for field in ("hidden_size", "ffn_size"):
            if getattr(self, field) % _GROUPED_NUMEL:
                raise ValueError(
                    f"{field} {getattr(self, field)} is not a multiple of {_GROUPED_NUMEL}, which the product of all "
                    "experts needs: use one that is"
                )

    def _changes_for(self, layers: int) -> dict[str, Any]:
        """Loaded weights are for all layers, so fewer begin at random."""
        return {"num_layers": layers, "weights": RANDOM_WEIGHTS}

    def hf_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the architecture's configuration class."""
        kind = ARCHITECTURES[self.architecture]
        arguments = {key: getattr(self, field) for field, key in kind.keys.items()}
        arguments |= dict.fromkeys(kind.dropouts, self.dropout)
        # No padding: our batches are full, and a padding row of the embedding would get no gradient.
        fixed = {"use_cache": False, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
        return {**self.other, **arguments, **fixed, "attn_implementation": self.attention}


def is_known(published: Mapping[str, Any]) -> bool:
    """Return whether a config.json is of an architecture, and of the class of it, with sizes that are listed here."""
    kind = (
        ARCHITECTURES.get(published["model_type"]) if isinstance(published.get("model_type"), str) else None
    )
    classes = published.get("architectures")
    if kind is None or not classes:
        return kind is not None
    base = kind.config_class.removesuffix("Config")
    # A folder of the base model, or of BERT's two tasks of pretraining, is built with the head that is trained here.
    return classes[0] in (kind.model_class, f"{base}Model", f"{base}ForPreTraining")


def overridable(architecture: str) -> list[str]:
    """Fields that may be given instead of the published ones."""
    return [*ARCHITECTURES[architecture].keys, "dropout", "attention", "weights"]


def from_published(
    name: str, published: Mapping[str, Any], *, overrides: Mapping[str, Any] | None, weights: str
) -> HFConfig:
    """The configuration that a config.json of a known architecture describes, with ``overrides`` of our fields, as
    ``models.resolve`` has them.

    A size that follows from others in the file (head size, feed-forward of four times the width, as many key and value
    heads as heads) follows here too. Other sizes than published come with random weights unless ``weights`` is
    overridden. Raises ConfigError.
    """
    architecture = published["model_type"]
    for key, harmless in _UNSUPPORTED.items():
        if published.get(key) not in (None, harmless):
            raise ConfigError(f"model {name!r} has {key} {published[key]!r}, which zerobench does not build")
    given = checked_overrides(overrides, known=overridable(architecture))
    fields = _own_fields(name, architecture, published)
    resolved = _with_what_follows(fields)
    sizes_changed = any(
        key in ARCHITECTURES[architecture].keys and resolved.get(key) != given[key] for key in given
    )
    fields = {"weights": RANDOM_WEIGHTS if sizes_changed else weights, **fields, **given}
    return make(HFConfig, name, {"architecture": architecture, **_with_what_follows(fields)})


def _with_what_follows(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that follow from others, where they are not given; from impossible ones nothing does, and the
    validation says so."""
    hidden_size, num_heads = fields["hidden_size"], fields["num_heads"]
    follows: dict[str, Any] = {"num_kv_heads": num_heads, "embedding_size": hidden_size}
    if _positive(hidden_size) and _positive(num_heads):
        follows |= {"head_size": max(1, hidden_size // num_heads), "ffn_size": 4 * hidden_size}
    return {**follows, **fields}


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
    missing = [kind.keys[field] for field in (*_REQUIRED, *kind.required) if field not in fields]
    if missing:
        raise ConfigError(f"the config.json of model {name!r} lacks {', '.join(missing)}: complete it")
    sizes = {field: fields[field] for field in ("hidden_size", "num_heads")}
    follows = {field: value for field, value in _with_what_follows(sizes).items() if field not in sizes}
    fields = {field: value for field, value in fields.items() if follows.get(field) != value}
    given = _rope_as_two_keys(name, published)
    return {**fields, "other": {key: given[key] for key in kind.others if given.get(key) is not None}}


def _rope_as_two_keys(name: str, published: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_parameters``, as transformers 5 writes them, as the two keys that both 4 and 5 read."""
    written = published.get("rope_parameters") or {}
    if not isinstance(written, Mapping):
        raise ConfigError(
            f"the config.json of model {name!r} has rope_parameters {written!r}: give an object"
        )
    rope = dict(written)
    theta = rope.pop("rope_theta", None)
    given = {**published}
    if theta is not None:
        given["rope_theta"] = theta
    if rope.get("rope_type", "default") != "default":
        given["rope_scaling"] = rope
    return given

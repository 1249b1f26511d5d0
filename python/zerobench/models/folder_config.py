"""Any model of transformers from its config.json: what decides the batches is read here, all else by transformers.
Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from zerobench.errors import ConfigError
from zerobench.models.config import checked_overrides, make
from zerobench.models.hf_config import RANDOM_WEIGHTS
from zerobench.models.measured import OWN_FUNCTION, MeasuredConfig
from zerobench.models.tasks import Task, task_of

_LAYER_KEYS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
_POSITION_KEYS = ("max_position_embeddings",)
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_ROUTED_KEY = "num_experts_per_tok"
_SIZES = ("num_layers", "hidden_size")
_OTHERS = ("dropout", "attention", "weights")
# Keys of config.json that say nothing about what is trained: parameters begin in fp32, and remote code never runs.
_LEFT_OUT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "auto_map", "architectures")


class FolderConfig(MeasuredConfig):
    """A model that transformers builds from ``published``, with the class that its config.json names."""

    published: dict[str, Any]  # keys of config.json, with what was given instead
    class_name: str | None = None  # None: what AutoModelForCausalLM takes
    has_own_code: bool = False  # config.json names Python code of the folder, which never runs
    task: Task = "tokens"
    hidden_size: int | None = None
    num_experts: int = 0  # 0: none, or routed in a way that is not known here
    experts_per_token: int = 0
    attention: Literal["sdpa", "eager", "flash_attention_2"] | None = None  # None: transformers' choice
    weights: str = RANDOM_WEIGHTS  # or the folder that they are loaded from

    @property
    def least_layers(self) -> int:
        return 1 if self.layer_parameters else self.num_layers

    @property
    def predicts_tokens(self) -> bool:
        return self.task == "tokens"

    def seq_length_of(self, asked: int) -> int:
        """A sample without tokens counts as one."""
        return 1 if self.task == "images" else asked

    def check_seq_length(self, seq_length: int) -> None:
        if self.task != "images":
            super().check_seq_length(seq_length)

    def _changes_for(self, layers: int) -> dict[str, Any]:
        changes: dict[str, Any] = {
            "num_layers": layers,
            "published": _with_layers(self.published, layers),
            "weights": RANDOM_WEIGHTS,
        }
        if self.parameters is not None:
            changes["parameters"] = self.parameters + (layers - self.num_layers) * self.layer_parameters
        return changes


def from_folder(
    name: str, published: Mapping[str, Any], *, overrides: Mapping[str, Any] | None, weights: str
) -> FolderConfig:
    """Return the configuration that a config.json describes. ``overrides`` may name each of its keys, and the fields
    ``num_layers``, ``hidden_size``, ``dropout``, ``attention`` and ``weights``. Other values than published come with
    random weights unless ``weights`` is overridden. Raises ConfigError for a model that cannot be trained."""
    _check_kind(name, published)
    class_name = _class_name(name, published)
    kept = {key: value for key, value in published.items() if key not in _LEFT_OUT}
    given = checked_overrides(overrides, known=folder_options(kept))
    keys = {key: value for key, value in given.items() if key not in (*_SIZES, *_OTHERS)}
    resolved = {**kept, **keys, **_sizes(name, kept, given)}
    if "num_layers" in given:
        resolved = _with_layers(resolved, given["num_layers"])
    fields: dict[str, Any] = {
        "published": resolved,
        "class_name": class_name,
        "has_own_code": "auto_map" in published,
        "task": "tokens" if class_name is None else task_of(name, class_name),
        "num_layers": max((resolved[key] for key in _LAYER_KEYS if _is_size(resolved.get(key))), default=1),
        "hidden_size": _first_size(resolved, _WIDTH_KEYS),
        "max_seq_length": _first_size(resolved, _POSITION_KEYS),
        "vocab_size": _first_size(resolved, ("vocab_size",)),
        "dropout": given.get("dropout", 0.0),
        "attention": given.get("attention"),
        "weights": given.get("weights", weights if resolved == kept else RANDOM_WEIGHTS),
    }
    if fields["task"] == "images":
        fields["vocab_size"] = None
    if _first_size(resolved, ("n_group",)) in (None, 1):
        fields["num_experts"] = _first_size(resolved, _EXPERT_KEYS) or 0
        fields["experts_per_token"] = _first_size(resolved, (_ROUTED_KEY,)) or 0
        if not fields["experts_per_token"]:
            fields["num_experts"] = 0
    return make(FolderConfig, name, fields)


def folder_options(published: Mapping[str, Any]) -> list[str]:
    """Return what may be given instead of a value of ``published``."""
    return list(dict.fromkeys([*_SIZES, *_OTHERS, *published]))


def published_arguments(config: FolderConfig) -> dict[str, Any]:
    """Return the keys for the configuration class."""
    if not config.num_experts:
        return dict(config.published)
    return {**config.published, _ROUTED_KEY: config.experts_per_token}


def _check_kind(name: str, published: Mapping[str, Any]) -> None:
    if not isinstance(published.get("model_type"), str):
        raise ConfigError(
            f"model {name!r} has architecture {published.get('model_type')!r}, which transformers does not have: give "
            "model_type as text in its config.json"
        )
    if published.get("quantization_config") is not None:
        raise ConfigError(
            f"model {name!r} has quantization_config {published['quantization_config']!r}, and zerobench trains no "
            "quantised weights: use the model that it was made from"
        )
    parts = [key for key in ("text_config", "vision_config", "audio_config") if key in published]
    if len(parts) > 1:
        raise ConfigError(
            f"model {name!r} takes several kinds of input ({' and '.join(parts)} in its config.json), for which "
            f"zerobench makes no batches: {OWN_FUNCTION}"
        )


def _class_name(name: str, published: Mapping[str, Any]) -> str | None:
    """Return the class that the config.json names first."""
    classes = published.get("architectures") or [None]
    if not isinstance(classes, list) or not (classes[0] is None or isinstance(classes[0], str)):
        raise ConfigError(
            f"the config.json of model {name!r} has architectures {classes!r}: give a list with a class's name"
        )
    return classes[0]


def _sizes(name: str, published: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``hidden_size`` changes, and refuse sizes that the config.json does not have."""
    if "num_layers" in given:
        if not _is_size(given["num_layers"]):
            raise ConfigError(
                f"model {name!r}: num_layers {given['num_layers']!r} is not a number above zero"
            )
        if not any(_is_size(published.get(key)) for key in _LAYER_KEYS):
            raise ConfigError(
                f"model {name!r} has no number of layers ({', '.join(_LAYER_KEYS)}) in its config.json: remove "
                "num_layers"
            )
    if "hidden_size" not in given:
        return {}
    key = next((key for key in _WIDTH_KEYS if _is_size(published.get(key))), None)
    if key is None:
        raise ConfigError(
            f"model {name!r} has no width ({', '.join(_WIDTH_KEYS)}) in its config.json: remove hidden_size"
        )
    return {key: given["hidden_size"]}


def _with_layers(published: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return ``published`` with ``layers`` layers. A list with an entry for each layer loses those of the last ones, or
    goes where layers are added: transformers then makes its own."""
    before = {published[key] for key in _LAYER_KEYS if _is_size(published.get(key))}
    found: dict[str, Any] = {}
    for key, value in published.items():
        if key in _LAYER_KEYS and _is_size(value):
            found[key] = layers
        elif not (isinstance(value, list) and len(value) in before):
            found[key] = value
        elif layers <= len(value):
            found[key] = value[:layers]
    return found


def _first_size(published: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    return next((published[key] for key in keys if _is_size(published.get(key))), None)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0

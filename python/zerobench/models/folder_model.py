"""Any model of transformers, built from what its config.json holds. Code that comes with a model never runs."""

from __future__ import annotations

from typing import Any

from torch import nn

from zerobench.errors import ConfigError
from zerobench.models.folder_config import FolderConfig, published_arguments
from zerobench.models.inputs import follow_precision
from zerobench.models.measured import OWN_FUNCTION

# Keys that draw random numbers in forward, whatever the dropout is.
_NOISES = ("layerdrop", "drop_path", "jitter_noise")


def transformers_config(config: FolderConfig) -> Any:
    """Return transformers' configuration object. Raises ConfigError for a model that it does not know."""
    import transformers

    published = published_arguments(config)
    kind = published["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        own = (
            ", and the Python code of the folder is never run (no trust_remote_code)"
            if config.has_own_code
            else ""
        )
        raise ConfigError(
            f"model {config.name!r}: transformers {transformers.__version__} has no model_type {kind!r}{own}: pip "
            f"install -U transformers, or {OWN_FUNCTION}"
        )
    try:
        found = transformers.CONFIG_MAPPING[kind].from_dict(published)
    except Exception as error:  # of many kinds, and some over several lines
        raise _refused(config, error) from error
    _without_noise(found, config.dropout)
    if getattr(found, "use_cache", None):
        found.use_cache = False
    if config.attention is not None:
        found._attn_implementation = config.attention
    if getattr(found, "pad_token_id", None) is None and config.task == "sequences":
        found.pad_token_id = 0  # decoders look for the last token that is no padding
    if getattr(found, "decoder_start_token_id", None) is None and getattr(found, "is_encoder_decoder", False):
        found.decoder_start_token_id = getattr(found, "pad_token_id", None) or 0
    if config.task in ("sequences", "images") and getattr(found, "problem_type", None) is None:
        found.problem_type = "regression" if found.num_labels == 1 else "single_label_classification"
    return found


def folder_model(config: FolderConfig) -> nn.Module:
    """Return the model, its values not yet those of the seed."""
    kind = transformers_config(config)
    model_class = _class_of(config)
    try:
        model: nn.Module = model_class(kind)
    except Exception as error:
        raise _refused(config, error) from error
    if getattr(model, "loss_type", "") is None and config.task == "tokens":
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    follow_precision(model)
    return model


def _class_of(config: FolderConfig) -> Any:
    import transformers

    name = config.class_name
    if name is None:
        names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        name = names.get(config.published["model_type"])
        if name is None:
            raise ConfigError(
                f"model {config.name!r}: its config.json names no class, and AutoModelForCausalLM has none for "
                f"{config.published['model_type']!r}: give the class under architectures"
            )
    found = getattr(transformers, name, None)
    if found is None:
        own = (
            "; the Python code of the folder is never run (no trust_remote_code)"
            if config.has_own_code
            else ""
        )
        raise ConfigError(
            f"model {config.name!r}: transformers {transformers.__version__} has no class {name}{own}: pip install -U "
            f"transformers, or {OWN_FUNCTION}"
        )
    return found


def _without_noise(kind: Any, dropout: float) -> None:
    """Set every dropout, and switch off what draws besides: strategies would draw other numbers."""
    for key, value in vars(kind).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if any(noise in key for noise in _NOISES):
            setattr(kind, key, 0.0)
        elif "dropout" in key or key.endswith("pdrop"):
            setattr(kind, key, dropout)


def _refused(config: FolderConfig, error: Exception) -> ConfigError:
    said = " ".join(str(error).split())
    return ConfigError(f"model {config.name!r}: transformers refuses it: {said}")

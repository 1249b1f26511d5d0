"""From a configuration to a model: ours, or transformers'. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerobench.errors import ConfigError
from zerobench.models.checkpointing import enable_checkpointing
from zerobench.models.config import ModelConfig
from zerobench.models.counts import parameter_count
from zerobench.models.hf_config import ARCHITECTURES, RANDOM_WEIGHTS, HFConfig
from zerobench.models.parse import check_packages
from zerobench.models.presets import PresetConfig

if TYPE_CHECKING:
    import torch
    from torch import nn


def build(
    config: ModelConfig,
    seed: int,
    *,
    device: str | torch.device | None = None,
    checkpointing: bool = False,
) -> nn.Module:
    """The fp32 model in training mode, on ``device`` (default: torch's default device).

    Its forward takes ``input_ids`` and ``labels``, int64 of shape (batch, tokens) and laid out alike, and returns an
    output with ``.loss``: next-token loss, and for BERT the masked language model loss over every position. On
    ``"meta"`` no parameter has memory; ``materialise`` gives it module by module, with the same values. The same
    ``seed`` gives the same bits on one kind of device; global random state plays no part. ``checkpointing`` recomputes
    every block's activations in backward.

    Raises ConfigError where a package is missing or a checkpoint does not fit.
    """
    import torch

    from zerobench.models.materialise import Origin, materialise, on_meta

    device = torch.get_default_device() if device is None else torch.device(device)
    model = on_meta(
        lambda: _transformers_model(config) if isinstance(config, HFConfig) else _own_model(config)
    )
    weights = config.weights if isinstance(config, HFConfig) and config.weights != RANDOM_WEIGHTS else None
    model.zerobench_origin = Origin(seed=seed, weights=weights)  # type: ignore[assignment]
    if checkpointing:
        enable_checkpointing(model)
    if device.type != "meta":
        materialise(model, device=device)
    return model.train()


def _own_model(config: ModelConfig) -> nn.Module:
    from zerobench.models.transformer import Transformer

    assert isinstance(config, PresetConfig)
    return Transformer(config)


def _transformers_model(config: HFConfig) -> nn.Module:
    check_packages(config)
    import transformers

    kind = ARCHITECTURES[config.architecture]
    try:
        hf_config = getattr(transformers, kind.config_class)(**config.hf_arguments())
        model: nn.Module = getattr(transformers, kind.model_class)(hf_config)
    except Exception as error:  # of many kinds, and some over several lines
        said = " ".join(str(error).split())
        raise ConfigError(f"model {config.name!r}: transformers refuses it: {said}") from error
    # GPT-2's class name does not tell; without, transformers warns.
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]
    built, expected = sum(p.numel() for p in model.parameters()), parameter_count(config)
    if built != expected:
        raise ConfigError(
            f"model {config.name!r} has {built} parameters in transformers {transformers.__version__} and "
            f"{expected} by its configuration: this version builds another architecture"
        )
    return model

"""From a configuration to a model: ours, or transformers'. Importing this imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerobench.errors import ConfigError
from zerobench.models.checkpointing import enable_checkpointing
from zerobench.models.config import ModelConfig
from zerobench.models.counts import parameter_count
from zerobench.models.folder_config import FolderConfig
from zerobench.models.hf_config import ARCHITECTURES, RANDOM_WEIGHTS, HFConfig
from zerobench.models.parse import check_packages
from zerobench.models.place_config import PlaceConfig
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

    Other batches than tokens are those of ``open_batches``. A model that a function makes, and one whose values cannot
    be drawn part by part (``config.begins_whole``), has memory on every device.

    Raises ConfigError where a package is missing or a checkpoint does not fit.
    """
    import torch

    from zerobench.models.materialise import Origin, materialise, on_meta

    device = torch.get_default_device() if device is None else torch.device(device)
    if config.begins_whole:
        model = _whole_model(config, seed)
    else:
        model = on_meta(lambda: _unseeded_model(config))
        model.zerobench_origin = Origin(seed=seed, weights=_weights(config))  # type: ignore[assignment]
    if checkpointing:
        enable_checkpointing(model)
    if device.type != "meta":
        model = model.to(device) if config.begins_whole else model
        materialise(model, device=device)
    return model.train()


def _unseeded_model(config: ModelConfig) -> nn.Module:
    if isinstance(config, FolderConfig):
        from zerobench.models.folder_model import folder_model

        check_packages(config)
        return folder_model(config)
    return _transformers_model(config) if isinstance(config, HFConfig) else _own_model(config)


def _whole_model(config: ModelConfig, seed: int) -> nn.Module:
    """Make it as its own code does, from torch's seeded generators, and load its weights where it has some."""
    import torch

    if isinstance(config, PlaceConfig):
        from zerobench.models.place_model import place_model

        return place_model(config, seed)
    torch.manual_seed(seed)
    model = _unseeded_model(config)
    if (weights := _weights(config)) is not None:
        from zerobench.models.checkpoint import Checkpoint

        with torch.no_grad():
            Checkpoint(weights).load_into(model, dict(model.named_parameters()))
    return model


def _weights(config: ModelConfig) -> str | None:
    """Return the folder that weights are loaded from, None where they are drawn."""
    if isinstance(config, HFConfig | FolderConfig) and config.weights != RANDOM_WEIGHTS:
        return config.weights
    return None


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

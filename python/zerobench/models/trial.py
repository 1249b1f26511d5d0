"""Builds a model and trains on one micro-batch, to tell what its configuration alone does not, and why it cannot be
compared. ``examine`` runs this in a process of its own; it is of use in tests as a function, too."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zerobench.errors import ConfigError, Error
from zerobench.host import imports
from zerobench.models.batches import open_batches
from zerobench.models.building import build
from zerobench.models.checkpoint import Checkpoint
from zerobench.models.checkpointing import enable_checkpointing
from zerobench.models.config import make
from zerobench.models.folder_config import FolderConfig
from zerobench.models.hf_config import RANDOM_WEIGHTS
from zerobench.models.measured import OWN_FUNCTION, MeasuredConfig
from zerobench.models.parse import from_dict
from zerobench.models.place_config import PlaceConfig
from zerobench.models.place_model import load_source

_TRAINED_NUMEL = 1 << 28  # a model of more parameters is not trained here: seconds, and GiB
_TRIAL_LAYERS = 2  # enough to see each kind of layer of most models
_BATCH_SIZE = 2
_SEED = 0


def tried(config: MeasuredConfig, *, seq_length: int, checkpointing: bool = False) -> MeasuredConfig:
    """Return ``config`` with what its model tells. Raises ConfigError for a model that cannot be compared."""
    if isinstance(config, PlaceConfig):
        config = _with_source(config)
        model = build(config.model_copy(update={"dropout": 0.0}), _SEED)
        config = config.model_copy(update={"parameters": count(model)})
        config.check_seq_length(seq_length)
        train_once(config, model, seq_length=seq_length, checkpointing=checkpointing)
        return config
    assert isinstance(config, FolderConfig)
    model = build(config, _SEED, device="meta")
    config = _with_facts(config, model)
    config.check_seq_length(seq_length)
    if config.weights != RANDOM_WEIGHTS:
        Checkpoint(config.weights).expect_names(model)
    small, config = _with_fewer_layers(config)
    small = small.model_copy(update={"weights": RANDOM_WEIGHTS, "dropout": 0.0})
    if config.attention == "flash_attention_2" or (small.parameters or 0) > _TRAINED_NUMEL:
        return config  # no kernels of CPUs; too large
    try:
        model = build(small, _SEED, device="cpu")
    except ConfigError:  # its values cannot be drawn part by part
        config, small = (each.model_copy(update={"whole": True}) for each in (config, small))
        model = build(small, _SEED, device="cpu")
    train_once(small, model, seq_length=seq_length, checkpointing=checkpointing)
    return config


def train_once(
    config: MeasuredConfig, model: nn.Module, *, seq_length: int, checkpointing: bool = False
) -> None:
    """Run forward and backward on one micro-batch. Raises ConfigError where there is no loss, or none that strategies
    can be compared by."""
    if checkpointing:
        enable_checkpointing(model)
    device = next((parameter.device for parameter in model.parameters()), None)
    if device is None:
        raise ConfigError(f"model {config.name!r} has no parameter: there is nothing to train")
    if (config.parameters or 0) > _TRAINED_NUMEL:
        return
    batches = open_batches(config, "synthetic", seed=_SEED, seq_length=seq_length)
    batch = batches.micro_batches(0, rank=0, world_size=1, batch_size=_BATCH_SIZE)[0]
    batch = {key: tensor.to(device) for key, tensor in batch.items()}
    _expect_main_input(config, model, batch)
    first, loss = (_loss(config, model, batch) for _ in range(2))
    one, other = float(first.detach()), float(loss.detach())
    if one != other and math.isfinite(one):
        raise ConfigError(
            f"model {config.name!r} has loss {one:.7g} and then {other:.7g} on the same batch, so strategies cannot be "
            "verified against each other: draw random numbers in the batch function, not in forward, and use torch's "
            "dropout modules"
        )
    if not loss.requires_grad:
        raise ConfigError(
            f"the loss of model {config.name!r} depends on no parameter: there is nothing to train"
        )
    loss.backward()
    _expect_gradients(config, model)


def _loss(config: MeasuredConfig, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    cure = "fix that" if isinstance(config, PlaceConfig) else f"fix that, or {OWN_FUNCTION}"
    try:
        loss: torch.Tensor | None = model(**batch).loss
    except Error:
        raise
    except Exception as error:
        raise ConfigError(
            f"model {config.name!r} fails on a batch of {_shapes(batch)}: {imports.told(error)}: {cure}"
        ) from error
    if loss is None:
        raise ConfigError(
            f"model {config.name!r} returns no loss for a batch of {_shapes(batch)}: {OWN_FUNCTION}"
        )
    return loss


def count(model: nn.Module) -> int:
    """Return the number of parameters, a tied one counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _with_source(config: PlaceConfig) -> PlaceConfig:
    source = load_source(config.place, _SEED)
    told = {
        "own_batches": source.batch is not None,
        "vocab_size": source.vocab_size,
        "max_seq_length": source.max_seq_length,
    }
    return make(PlaceConfig, config.name, {**config.model_dump(exclude={"name"}), **told})


def _with_facts(config: FolderConfig, model: nn.Module) -> FolderConfig:
    """Read from transformers' configuration what the config.json may leave to its defaults."""
    kind: Any = model.config
    update: dict[str, Any] = {
        "parameters": count(model),
        "attention": config.attention or getattr(kind, "_attn_implementation", None),
    }
    if config.task != "images":
        update["vocab_size"] = getattr(kind, "vocab_size", None) or config.vocab_size
        update["max_seq_length"] = getattr(kind, "max_position_embeddings", None) or config.max_seq_length
        if update["vocab_size"] is None:
            raise ConfigError(
                f"model {config.name!r} has no vocabulary, and {type(model).__name__} would be given tokens: "
                f"{OWN_FUNCTION}"
            )
    if update["attention"] not in ("sdpa", "eager", "flash_attention_2"):
        update["attention"] = None
    return config.model_copy(update=update)


def _with_fewer_layers(config: FolderConfig) -> tuple[FolderConfig, FolderConfig]:
    """Return a model with few layers to try, and ``config`` with what a layer adds. A model that cannot be built with
    fewer layers keeps them all."""
    fewer = min(_TRIAL_LAYERS, config.num_layers - 1)
    if fewer < 1:
        return config, config
    small = config.with_layers(fewer)
    try:
        parameters = count(build(small, _SEED, device="meta"))
    except ConfigError:
        return config, config
    assert config.parameters is not None
    each = (config.parameters - parameters) // (config.num_layers - fewer)
    config = config.model_copy(update={"layer_parameters": each})
    small = small.model_copy(update={"layer_parameters": each, "parameters": parameters})
    return (small if config.num_layers > _TRIAL_LAYERS else config), config


def _expect_main_input(config: MeasuredConfig, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    """transformers' models name the input that they are about."""
    wanted = getattr(model, "main_input_name", None)
    if isinstance(config, FolderConfig) and wanted is not None and wanted not in batch:
        raise ConfigError(
            f"model {config.name!r} ({type(model).__name__}) takes {wanted}, for which zerobench makes no batches: "
            f"{OWN_FUNCTION}"
        )


def _expect_gradients(config: MeasuredConfig, model: nn.Module) -> None:
    """DDP does not take parameters without a gradient, and optimizers leave them where others decay them."""
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if not without:
        return
    more = f" and {len(without) - 1} more" if len(without) > 1 else ""
    name = without[0].removeprefix("model.") if isinstance(config, PlaceConfig) else without[0]
    raise ConfigError(
        f"model {config.name!r}: no gradient reaches {name!r}{more}, which strategies treat differently: leave such "
        "parameters out or freeze them (requires_grad_(False))"
        + ("" if isinstance(config, PlaceConfig) else f"; {OWN_FUNCTION}")
    )


def _shapes(batch: Mapping[str, torch.Tensor]) -> str:
    return ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in batch.items())


def main() -> None:
    """Answer the request on standard input; what the model's code prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.read())
    sys.path += [path for path in request["path"] if path not in sys.path]
    config = from_dict(request["config"])
    assert isinstance(config, MeasuredConfig)
    answer: dict[str, Any] = {}
    try:
        found = tried(config, seq_length=request["seq_length"], checkpointing=request["checkpointing"])
        answer = {"config": found.model_dump()}
    except Error as error:
        answer = {"error": str(error)}
    json.dump(answer, answers)
    answers.close()


if __name__ == "__main__":
    main()

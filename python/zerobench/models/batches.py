"""Batches of a model: the tokens of --data, and what else its forward takes. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from zerobench import data
from zerobench.models.config import ModelConfig
from zerobench.models.folder_config import FolderConfig
from zerobench.models.place_config import PlaceConfig

if TYPE_CHECKING:
    import torch

    from zerobench.data import BatchRequest

Make = Callable[["BatchRequest"], Mapping[str, "torch.Tensor"]]
_IMAGE_SIZE = 224  # of models that take any size


def open_batches(
    config: ModelConfig, spec: str, *, seed: int, seq_length: int, **options: Any
) -> data.Dataset:
    """Return the batches of a model over the data that ``spec`` names. ``options``: further ones of
    ``data.open_data``."""
    tokens = None
    if config.vocab_size is not None:
        tokens = data.open_data(
            spec, seed=seed, seq_length=seq_length, vocab_size=config.vocab_size, **options
        )
    make = _make_function(config, seed)
    if make is None:
        assert tokens is not None
        return tokens
    return data.MadeDataset(make, tokens, seed=seed, seq_length=seq_length)


def _make_function(config: ModelConfig, seed: int) -> Make | None:
    """Return the function that makes batches, or None where tokens are all there is to them."""
    if isinstance(config, PlaceConfig) and config.own_batches:
        from zerobench.models.place_model import load_source

        return load_source(config.place, seed).batch
    if isinstance(config, FolderConfig) and config.task != "tokens":
        from zerobench.models.folder_model import transformers_config

        kind = transformers_config(config)
        makers = {"images": _images, "sequences": _sequences, "each_token": _each_token, "spans": _spans}
        return lambda request: makers[config.task](request, kind)
    return None


def _images(request: BatchRequest, kind: Any) -> dict[str, torch.Tensor]:
    import torch

    size = getattr(kind, "image_size", None) or _IMAGE_SIZE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (request.batch_size, getattr(kind, "num_channels", 3), height, width)
    pixels = torch.randn(shape, generator=request.generator)
    return {"pixel_values": pixels, "labels": _classes(request, kind, (request.batch_size,))}


def _sequences(request: BatchRequest, kind: Any) -> dict[str, torch.Tensor]:
    return {"input_ids": request.tokens(), "labels": _classes(request, kind, (request.batch_size,))}


def _each_token(request: BatchRequest, kind: Any) -> dict[str, torch.Tensor]:
    import torch

    shape = (request.batch_size, request.seq_length)
    labels = torch.randint(kind.num_labels, shape, generator=request.generator)
    return {"input_ids": request.tokens(), "labels": labels}


def _spans(request: BatchRequest, kind: Any) -> dict[str, torch.Tensor]:
    import torch

    first, last = (
        torch.randint(request.seq_length, (request.batch_size,), generator=request.generator)
        for _ in range(2)
    )
    return {"input_ids": request.tokens(), "start_positions": first, "end_positions": last}


def _classes(request: BatchRequest, kind: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Return labels as the loss of the model's problem takes them: one label is a value to predict."""
    import torch

    if kind.problem_type == "multi_label_classification":
        return torch.randint(2, (*shape, kind.num_labels), generator=request.generator).float()
    if kind.problem_type == "regression":
        values = shape if kind.num_labels == 1 else (*shape, kind.num_labels)
        return torch.randn(values, generator=request.generator)
    return torch.randint(kind.num_labels, shape, generator=request.generator)

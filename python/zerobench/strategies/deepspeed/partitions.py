"""Masters and moments that a rank holds under DeepSpeed's stage 3, wherever they are: on the GPU, on the host, or on
NVMe, sub-group by sub-group. Written against 0.19.8; its own readers support neither a ratio nor a pipelined swap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerobench.strategies.shared import full_fp32


def partitions(
    optimizer: Any, key: str | None, *, change: bool = False
) -> Iterator[tuple[Any, torch.Tensor]]:
    """(parameter, this rank's piece) of the masters, or of the state ``key``. A piece may be read until the next one is
    asked for; with ``change`` it may be written too."""
    for index, group in enumerate(optimizer.fp16_groups):
        with _at_hand(optimizer, index, change=change):
            flat = optimizer.fp32_partitioned_groups_flat[index]
            source = flat.detach() if key is None else state_of(optimizer, flat)[key]
            offset = 0
            for parameter in group:
                numel = parameter.partition_numel()
                yield parameter, source.narrow(0, offset, numel)
                offset += numel


def state_of(optimizer: Any, flat: torch.Tensor) -> Mapping[str, Any]:
    """Return the optimizer's state of a sub-group's masters; those that a ratio leaves on the GPU have an optimizer of
    their own."""
    for owner in (optimizer.optimizer, getattr(optimizer, "backup_optimizer", None)):
        if owner is not None and flat in owner.state:
            return owner.state[flat]
    return {}


def gathered(optimizer: Any, key: str | None) -> dict[int, torch.Tensor]:
    """Full fp32 CPU copies by the identity of their parameter. Collective."""
    return {
        id(parameter): gather(optimizer, parameter, piece) for parameter, piece in partitions(optimizer, key)
    }


def gather(optimizer: Any, parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else piece.device
    return full_fp32(optimizer._fp32_state_allgather(parameter, piece.to(device)))


def set_partitions(optimizer: Any, full: Mapping[int, torch.Tensor]) -> None:
    """Write this rank's pieces of full fp32 tensors, by the identity of their parameter, into the masters."""
    rank = dist.get_rank()
    with torch.no_grad():
        for parameter, piece in partitions(optimizer, None, change=True):
            numel = piece.numel()
            values = full[id(parameter)].flatten()[rank * numel : (rank + 1) * numel]  # the last is padded
            piece[: values.numel()].copy_(values)


@contextlib.contextmanager
def _at_hand(optimizer: Any, index: int, *, change: bool) -> Iterator[None]:
    """A sub-group's tensors in memory, read from NVMe and written back where they live there."""
    if not optimizer._swappable_optimizer_subgroup(index):
        yield
        return
    optimizer._optimizer_states_and_gradient_swap_in(index)
    try:
        yield
    finally:
        if change:
            optimizer._optimizer_states_and_gradient_swap_out(index)
        else:
            optimizer._release_swap_buffers(index)

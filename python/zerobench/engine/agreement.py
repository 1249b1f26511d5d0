"""Checks that all ranks were set up alike, before they share anything. A difference raises an error that names it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from zerobench.engine.config import Config
from zerobench.engine.parameters import hyperparameters_of
from zerobench.engine.units import UnitModules
from zerobench.errors import CommunicationError, ConfigError

if TYPE_CHECKING:
    from zerobench._core import Communicator
    from zerobench._core import Engine as CoreEngine

_DIGEST_BYTES = 32
_COUNT_BYTES = 8
_TEXT_BYTES = 400

# What may differ between ranks: where they are, and which CPUs and disks they have there.
_OF_THE_RANK = {
    "cpus",
    "local_rank",
    "local_world_size",
    "pin_threads",
    "rank",
    "rendezvous",
    "threads",
    "timeout_s",
    "world_size",
}
_OF_OFFLOAD = ("device", "ratio")  # all else is about a host's disks and memory


def setup_facts(config: Config, units: UnitModules, groups: list[dict[str, Any]]) -> list[str]:
    """Return what must be the same on every rank, one line each: configuration, hyperparameters by param group,
    parameters and buffers."""
    values = config.model_dump(mode="json", exclude=_OF_THE_RANK)
    if values["offload_optimizer"] is not None:
        values["offload_optimizer"] = {key: values["offload_optimizer"][key] for key in _OF_OFFLOAD}
    facts = [f"{key} {value}" for key, value in values.items()]
    for index, group in enumerate(groups):
        facts.append(f"param group {index} with {hyperparameters_of(group)}")
    group_of = {id(p): f"param group {index}" for index, group in enumerate(groups) for p in group["params"]}
    unit_of = units.unit_of_parameters()
    for name, parameter in units.modules[0].named_parameters():
        # Floating-point ones become of one dtype; others are shared as they are.
        dtype = "" if parameter.is_floating_point() else f" and {parameter.dtype}"
        owner = group_of.get(id(parameter), "no param group")
        facts.append(
            f"parameter '{name}' of shape {tuple(parameter.shape)}{dtype} in {owner} and unit "
            f"'{units.names[unit_of[name]]}'"
        )
    for name, buffer in units.modules[0].named_buffers():
        facts.append(f"buffer '{name}' of shape {tuple(buffer.shape)}, {buffer.dtype}")
    return facts


def expect_same_setup(communicator: Communicator, facts: list[str]) -> None:
    """Raise ConfigError, the same on every rank, where ranks have other ``facts`` than rank 0. Collective."""
    if (found := _first_difference(communicator, facts)) is not None:
        other, theirs, first = found
        raise ConfigError(
            f"rank {other} was set up differently from rank 0: it has {theirs}, and rank 0 has {first}; give every "
            "rank the same model, param groups and configuration"
        )
    # No rank goes on before all have the answer: what one fails at next, each finds out for itself.
    if communicator.world_size > 1:
        with contextlib.suppress(CommunicationError):
            communicator.barrier()


def expect_same_unheld(communicator: Communicator | CoreEngine, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigError, the same on every rank, where ranks have other buffers and integer parameters than rank 0 by
    now, before they share them. Collective."""
    facts = [
        f"'{name}' of shape {tuple(tensor.shape)}, {tensor.dtype}" for name, tensor in sorted(tensors.items())
    ]
    if (found := _first_difference(communicator, facts)) is not None:
        other, theirs, first = found
        raise ConfigError(
            f"persistent buffers of rank {other} differ from rank 0's, and a state holds one copy for all ranks: it "
            f"has {theirs}, and rank 0 has {first}; register buffers that differ between ranks with persistent=False"
        )


def _first_difference(
    communicator: Communicator | CoreEngine, facts: list[str]
) -> tuple[int, str, str] | None:
    """The first rank with other facts than rank 0, the first of its facts that is another, and rank 0's in its place.
    None where all are alike. Collective."""
    if communicator.world_size == 1:
        return None
    whole = _digest("\n".join(facts)) + len(facts).to_bytes(_COUNT_BYTES, "little")
    answers = _exchange(communicator, whole)
    if len(set(answers)) == 1:
        return None
    counts = [int.from_bytes(answer[_DIGEST_BYTES:], "little") for answer in answers]
    common = min(counts)
    digests = _exchange(communicator, b"".join(_digest(fact) for fact in facts[:common]))
    first = next(
        (
            index
            for index in range(common)
            if len({rank[index * _DIGEST_BYTES : (index + 1) * _DIGEST_BYTES] for rank in digests}) > 1
        ),
        common,
    )
    mine = facts[first] if first < len(facts) else "nothing further"
    answers = _exchange(communicator, _digest(mine) + mine.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES))
    other = next(rank for rank, answer in enumerate(answers) if answer != answers[0])
    said = [answer[_DIGEST_BYTES:].decode(errors="ignore").rstrip() for answer in answers]
    return other, said[other], said[0]


def raise_everywhere(communicator: Communicator | CoreEngine, error: Exception | None) -> None:
    """Raise this rank's ``error``, or where it has none another rank's: ConfigError as that, others as
    CommunicationError. Ranks are as they were. Collective."""
    if communicator.world_size > 1:
        message = b"" if error is None else b"%d%s" % (isinstance(error, ConfigError), str(error).encode())
        answers = _exchange(communicator, message[:_TEXT_BYTES].ljust(_TEXT_BYTES))
        for rank, answer in enumerate(answers):
            if error is None and (said := answer.decode(errors="ignore").rstrip()):
                text = f"rank {rank}: {said[1:]}"
                error = ConfigError(text) if said[0] == "1" else CommunicationError(text, rank)
    if error is not None:
        raise error


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _exchange(communicator: Communicator | CoreEngine, message: bytes) -> list[bytes]:
    """Every rank's message, by rank; all are equally long."""
    if not message:
        return [b""] * communicator.world_size
    together = communicator.exchange(message)
    size = len(message)
    return [together[begin : begin + size] for begin in range(0, len(together), size)]

"""Engines in every place, plain PyTorch to compare them with, and a loop over checks, for tests of training scripts."""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ranks
import torch
import zoo

import zerobench

CASE = zoo.CASES["blocks"]
NAME = "blocks.1.up.weight"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HOST = {"offload_optimizer": {"device": "cpu"}}
PLACES: dict[str, dict[str, Any]] = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "1 host": {"stage": 1, **HOST},
    "2 host": {"stage": 2, **HOST},
    "3 host": {"stage": 3, **HOST},
    "3 all host": {"stage": 3, **HOST, "offload_param": {"device": "cpu"}},
    "2 nvme": {"stage": 2, "offload_optimizer": zoo.SWAP},
    "3 nvme": {"stage": 3, "offload_optimizer": zoo.SWAP, "offload_param": {"device": "nvme"}},
}
DEVICE = tuple(place for place in PLACES if len(PLACES[place]) == 1)
# Relative L2 distances from plain PyTorch: of gradients and first moments, of parameters, and of their whole change.
TOLERANCES = {"fp32": (2e-5, 2e-5, 5e-3), "bf16": (0.05, 0.01, 0.15), "fp16": (0.01, 0.005, 0.05)}

LOSS_SCALE = 256.0  # at which no gradient of these models overflows fp16

_settings: dict[str, str] = {}
_ends: dict[Any, tuple[str, Any]] = {}
_untouched: dict[Any, str] = {}


def _set_all_to_none(engine: zerobench.Engine) -> None:
    for parameter in engine.module.parameters():
        parameter.grad = None


DROPS: dict[str, Callable[[zerobench.Engine], None]] = {
    "engine.zero_grad": lambda engine: engine.zero_grad(),
    "engine.drop_gradients": lambda engine: engine.drop_gradients(),
    "optimizer.zero_grad": lambda engine: engine.optimizer.zero_grad(),
    "module.zero_grad": lambda engine: engine.module.zero_grad(),
    "another optimizer's": lambda engine: torch.optim.SGD(engine.module.parameters(), lr=0.1).zero_grad(),
    "every .grad": _set_all_to_none,
    "not to None": lambda engine: engine.zero_grad(set_to_none=False),
    "optimizer, not to None": lambda engine: engine.optimizer.zero_grad(set_to_none=False),
}
"""The ways that PyTorch scripts drop gradients."""


def run_all(
    rank: ranks.Rank, checks: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], folder: str
) -> list[tuple[str | None, Any]]:
    """Call every check with this rank and its arguments. Return what each raised, and what each returned."""
    _settings["folder"] = folder
    outcomes: list[tuple[str | None, Any]] = []
    for index, (check, arguments) in enumerate(checks):
        _settings["engines"] = "0"  # also where a check failed on one rank only
        place = replace(rank, meeting_point=f"{rank.meeting_point}-{index}")
        try:
            outcomes.append((None, check(place, *arguments)))
        except BaseException:  # pytest's own failures are not Exceptions
            outcomes.append((traceback.format_exc(), None))
    return outcomes


def start(
    rank: ranks.Rank,
    place: str,
    *,
    case: zoo.Case = CASE,
    model: torch.nn.Module | None = None,
    **config: Any,
) -> zerobench.Engine:
    """Return an engine in this place, at a meeting point of its own."""
    model = zoo.make(case) if model is None else model
    settings = zoo.optimizer_config(case) | PLACES[place] | config
    if settings.get("precision") == "fp16":
        settings.setdefault("loss_scale", {"initial_scale": LOSS_SCALE})
    if "nvme" in place:
        offload = settings["offload_optimizer"] | {"nvme_path": [_settings["folder"]]}
        settings["offload_optimizer"] = offload
    _settings["engines"] = str(int(_settings["engines"]) + 1)
    own = replace(rank, meeting_point=f"{rank.meeting_point}-{_settings['engines']}")
    return zerobench.initialize(model, config=own.config(**settings), model_parameters=case.groups(model))


def backward(
    engine: zerobench.Engine,
    rank: ranks.Rank,
    step: int,
    *,
    micros: Iterable[int] = (0,),
    case: zoo.Case = CASE,
) -> None:
    """Run forward and backward of these micro-batches."""
    for micro in micros:
        engine.backward(engine(**case.batch(step, rank.rank, micro)))


def train(
    engine: zerobench.Engine,
    rank: ranks.Rank,
    steps: Iterable[int],
    *,
    micros: int = 1,
    case: zoo.Case = CASE,
) -> None:
    """Train whole windows."""
    for step in steps:
        backward(engine, rank, step, micros=range(micros), case=case)
        engine.step()


def end(engine: zerobench.Engine) -> dict[str, Any]:
    """Return the state at the end of a training, with a digest of all its bits, and close the engine."""
    parameters = engine.full_parameters()
    moments = {kind: engine.full_optimizer_state(kind) for kind in ("exp_avg", "exp_avg_sq")}
    served = engine.state_dict()
    names = {name for name, _ in engine.module.named_parameters()}
    digests = [
        zoo.digest(found)
        for found in (
            parameters,
            moments["exp_avg"],
            moments["exp_avg_sq"],
            {name: value for name, value in served.items() if name in names},
        )
    ]
    engine.close()
    return {"parameters": parameters, **moments, "digest": "-".join(digests)}


def untouched(rank: ranks.Rank, place: str, *, micros: int = 1, steps: int = 2, **config: Any) -> str:
    """Return the digest of an ordinary training in this place."""
    key = (place, rank.world_size, micros, steps, repr(config))
    if key not in _untouched:
        engine = start(rank, place, gradient_accumulation_steps=micros, **config)
        train(engine, rank, range(steps), micros=micros)
        _untouched[key] = end(engine)["digest"]
    return _untouched[key]


def nothing(*_: Any) -> None:
    """Leave everything as it is."""


def last(rank: ranks.Rank) -> int:
    """Return the number of the last rank."""
    return rank.world_size - 1


def expect_same_everywhere(key: Any, place: str, digest: Any) -> None:
    """Raise AssertionError where another place ended this training with other bits."""
    first_place, first = _ends.setdefault(key, (place, digest))
    assert digest == first, f"place {place!r} ends with other bits than {first_place!r}"


def keeps_masters_apart(place: str, precision: str = "fp32") -> bool:
    """Return whether an update starts from values other than the parameters that a script can reach."""
    return precision != "fp32" or "host" in place or "nvme" in place


class Plain:
    """A copy of the model that one process trains on the data of all ranks, with torch's own optimizer."""

    def __init__(
        self, world_size: int, precision: str = "fp32", *, case: zoo.Case = CASE, **optimizer: Any
    ) -> None:
        self.world_size = world_size
        self.case = case
        self.dtype = DTYPES[precision]
        self.loss_scale = LOSS_SCALE if precision == "fp16" else 1.0
        self.masters = zoo.make(case)
        self.model = copy.deepcopy(self.masters).to(self.dtype)
        self.named = {name: p for name, p in self.masters.named_parameters() if p.requires_grad}
        self.origin = {name: p.detach().clone() for name, p in self.named.items()}
        settings = {"lr": zoo.LR, "weight_decay": 0.01} | dict(case.config.get("optimizer", {})) | optimizer
        kind = torch.optim.Adam if settings.pop("type", "adamw") == "adam" else torch.optim.AdamW
        groups = [
            {**group, "params": [p for p in group["params"] if p.requires_grad]}
            for group in case.groups(self.masters)
        ]
        self.optimizer = kind(groups, **settings)

    def backward(
        self, step: int, *, micros: Iterable[int] = (0,), change: Callable[[dict], dict] = lambda batch: batch
    ) -> None:
        """Set the masters' gradients to the average over ranks and micro-batches."""
        shares = [(rank, micro) for micro in micros for rank in range(self.world_size)]
        low = dict(self.model.named_parameters())
        for master in self.named.values():
            master.grad = torch.zeros_like(master)
        for rank, micro in shares:
            loss = self.model(**zoo.cast(change(self.case.batch(step, rank, micro)), self.dtype))
            (loss.float() * self.loss_scale).backward()
            for name, master in self.named.items():
                if low[name].grad is not None:
                    master.grad += low[name].grad.float() / (self.loss_scale * len(shares))
                low[name].grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return copies of the masters' gradients."""
        return {name: p.grad.clone() for name, p in self.named.items()}

    def step(self, held: Iterable[str] = ()) -> None:
        """Update all parameters but those that are held."""
        for name in held:
            self.named[name].grad = None
        self.optimizer.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the parameters that forwards use."""
        for low, master in zip(self.model.parameters(), self.masters.parameters(), strict=True):
            low.copy_(master)

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return parameters and moments by name, as ``end`` does."""
        moments = {
            kind: {
                name: self.optimizer.state[p].get(kind, torch.zeros_like(p)).detach()
                for name, p in self.named.items()
            }
            for kind in ("exp_avg", "exp_avg_sq")
        }
        return {
            "parameters": {name: p.detach() for name, p in self.named.items()},
            "origin": self.origin,
            **moments,
        }


@functools.cache
def plainly(world_size: int, precision: str = "fp32", *, micros: tuple[int, ...]) -> Mapping[str, Any]:
    """Return what plain PyTorch makes of steps with so many micro-batches each."""
    plain = Plain(world_size, precision)
    for step, num in enumerate(micros):
        plain.backward(step, micros=range(num))
        plain.step()
    return plain.state()


def expect_close(found: Mapping[str, Any], plain: Mapping[str, Any], precision: str = "fp32") -> None:
    """Raise AssertionError where an engine's end is further from plain PyTorch's than the tolerance."""
    gradient, parameter, update = TOLERANCES[precision]
    trained = {name: found["parameters"][name] for name in plain["parameters"]}
    distances = {
        "exp_avg": (zoo.relative(found["exp_avg"], plain["exp_avg"]), gradient),
        "exp_avg_sq": (zoo.relative(found["exp_avg_sq"], plain["exp_avg_sq"]), 2 * gradient),
        "parameters": (zoo.relative(trained, plain["parameters"]), parameter),
        "updates": (zoo.relative(trained, plain["parameters"], plain["origin"]), update),
    }
    assert all(distance <= allowed for distance, allowed in distances.values()), distances

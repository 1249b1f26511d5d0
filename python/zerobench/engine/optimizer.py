"""The optimizer object that user code and learning rate schedulers see; the update itself runs in the engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from zerobench.engine.config import OptimizerConfig
from zerobench.engine.parameters import expect_possible
from zerobench.errors import ConfigError, StateError


class Updater(Protocol):
    """An engine, as its optimizer calls it."""

    def step(self) -> None: ...
    def drop_gradients(self) -> None: ...
    def was_step_skipped(self) -> bool: ...


class _StateElsewhere(Mapping[torch.Tensor, Any]):
    """Has every trained parameter and the state of none."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        raise _state_error()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _state_error() -> StateError:
    return StateError(
        "the optimizer's state is the engine's: save engine.full_state(), which every rank calls, and go on with "
        "engine.load_full_state(**state)"
    )


_KEYS = ("lr", "betas", "eps", "weight_decay")


class ZeroOptimizer(torch.optim.Optimizer):
    """Param groups with live ``lr``, ``betas``, ``eps`` and ``weight_decay``; ``step`` is the engine's.

    ``zero_grad`` drops the gradients that wait for a step; a step ends them, too. ``state`` cannot be read or changed:
    it is spread over ranks and tiers.
    """

    _engine: Updater | None = None  # torch adds the first groups before there is one

    def __init__(self, param_groups: Iterable[dict[str, Any]], defaults: OptimizerConfig) -> None:
        super().__init__(
            list(param_groups),
            {
                "lr": defaults.lr,
                "betas": defaults.betas,
                "eps": defaults.eps,
                "weight_decay": defaults.weight_decay,
            },
        )
        self.decoupled = defaults.type == "adamw"
        for index, group in enumerate(self.param_groups):
            expect_possible(index, group, cure="give zerobench.initialize another in model_parameters")
            unknown = set(group) - {"params", "param_names", "name", "initial_lr", *_KEYS}
            if unknown:
                raise ConfigError(
                    f"param group {index} has the unknown key '{sorted(unknown)[0]}'; known keys are {', '.join(_KEYS)}"
                )
        self._parameter_nums = self._count_parameters()
        # Not empty: torch's get_optimizer_state_dict steps an optimizer without state to make some, with a rate of 0.
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state: Any = _StateElsewhere(parameters)

    def attach(self, engine: Updater) -> None:
        """Tie to the engine that updates these groups."""
        self._engine = engine

    @property
    def overflow(self) -> bool:
        """Return whether fp16 overflowed in the last step, which was skipped then."""
        return self._engine is not None and self._engine.was_step_skipped()

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Hyperparameters by group, as they are now. Raises ConfigError for what no update can have, StateError where
        groups lost parameters or got others."""
        if self._count_parameters() != self._parameter_nums:
            raise StateError(
                "param groups hold other parameters than at zerobench.initialize, which laid out their state; put them "
                "back, or train with a new engine that is given these groups"
            )
        cure = "set it in engine.optimizer.param_groups and repeat the call"
        return [
            {**expect_possible(index, group, cure=cure), "decoupled": self.decoupled}
            for index, group in enumerate(self.param_groups)
        ]

    def _count_parameters(self) -> list[int]:
        return [len(group["params"]) for group in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For torch's own constructor. Raises StateError once an engine updates the groups."""
        if self._engine is not None:
            raise StateError(
                "param groups cannot be added after zerobench.initialize, which lays out their state; pass this group "
                "to zerobench.initialize(model_parameters=...) of a new engine"
            )
        super().add_param_group(param_group)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One engine step. Closures are not supported."""
        if closure is not None:
            raise ConfigError(
                "the engine's optimizer does not support closures; call engine.backward(loss) and engine.step()"
            )
        if self._engine is None:
            raise ConfigError(
                "this optimizer does not belong to an engine; use the one that zerobench.initialize returned"
            )
        self._engine.step()

    def state_dict(self) -> dict[str, Any]:
        """Raises StateError: the state is spread over ranks and tiers."""
        raise _state_error()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises StateError, as ``state_dict`` does."""
        self.state_dict()

    def step_was_called(self) -> None:
        """Tell learning rate schedulers that a step precedes theirs, as torch's own wrapper of ``step`` does."""
        self._opt_called = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait for a step, as ``engine.zero_grad()``; nothing where there are none."""
        if self._engine is not None:
            self._engine.drop_gradients()

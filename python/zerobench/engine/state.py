"""The full state of an engine: what ``torch.save`` keeps and another engine goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerobench.engine.agreement import expect_same_unheld, raise_everywhere
from zerobench.engine.facts import EngineFacts
from zerobench.engine.gathering import EngineGathering
from zerobench.engine.optimizer import ZeroOptimizer
from zerobench.engine.parameters import hyperparameters_of
from zerobench.engine.state_checks import Checked, checked_for_loading
from zerobench.engine.unheld_tensors import of_rank_0, unheld_tensors
from zerobench.errors import StateError


class EngineState(EngineFacts, EngineGathering):
    """The part of an engine that gives its full state and goes on from one."""

    optimizer: ZeroOptimizer

    def full_state(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """All that ``load_full_state`` takes, on the host: ``torch.save`` it on rank 0. Collective, between steps.

        Tensors have the parameters' full shapes by name: ``parameters`` (as ``full_parameters``), ``exp_avg`` and
        ``exp_avg_sq`` in fp32; ``buffers`` have their own dtypes. It takes 12 bytes of host memory for each parameter
        on every rank; with ``rank0_only`` on rank 0 alone, and other ranks' has no tensors. ``parameter_steps`` has the
        step counts of parameters that were held in some steps (``gradients``).

        Raises StateError where micro-batches wait for a step, whose gradients no state has.
        """
        self._core.check_gradients()
        if pending := self._core.window_backwards:
            raise StateError(
                f"full_state() was called while the gradients of {pending} micro-batch{'es' * (pending > 1)} wait "
                "for a step, and a state has no gradients: call engine.step(end_window=True) before, or "
                "engine.zero_grad()"
            )
        unheld = unheld_tensors(self.module)
        expect_same_unheld(self._core, unheld)
        buffers = {name: of_rank_0(self._core, tensor) for name, tensor in sorted(unheld.items())}
        return {
            "parameters": self.full_parameters(rank0_only=rank0_only),
            "exp_avg": self.full_optimizer_state("exp_avg", rank0_only=rank0_only),
            "exp_avg_sq": self.full_optimizer_state("exp_avg_sq", rank0_only=rank0_only),
            "step": self.global_steps,
            "parameter_steps": {
                name: self.global_steps - held for name, held in self._core.held_steps().items()
            },
            "loss_scale": self.loss_scale_state(),
            "param_groups": [hyperparameters_of(group) for group in self.optimizer.param_groups],
            "buffers": {} if rank0_only and self.topology.rank > 0 else buffers,
        }

    def full_parameters(self, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Full fp32 masters on the host by parameter name (of frozen parameters the values that they have, tied ones by
        their first name), on every rank or, with ``rank0_only``, on rank 0 and none on others. Collective."""
        return self._core.full_state("master", rank0_only=rank0_only)

    def full_optimizer_state(self, kind: str, *, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """Full "exp_avg" or "exp_avg_sq" of trained parameters, as ``full_parameters``. Collective; ValueError for
        another ``kind``."""
        return self._core.full_state(kind, rank0_only=rank0_only)

    def load_full_state(
        self,
        *,
        parameters: Mapping[str, torch.Tensor],
        exp_avg: Mapping[str, torch.Tensor],
        exp_avg_sq: Mapping[str, torch.Tensor],
        step: int,
        loss_scale: Mapping[str, float] | None = None,
        param_groups: Sequence[Mapping[str, Any]] | None = None,
        buffers: Mapping[str, torch.Tensor] | None = None,
        parameter_steps: Mapping[str, int] | None = None,
    ) -> None:
        """Go on from a state as ``full_state`` gave it: rank 0's becomes everybody's. Collective, between steps.

        Also what takes an engine further that an error behind ``optimizer_in_backward`` left torn: from here on it is
        as a new engine with this state. A loss scale that is not given stays, and so do the hyperparameters of param
        groups, learning rates among them; each rank takes its own, which must be the same. ``buffers`` are persistent
        ones and parameters that are no floating-point numbers; where they are not given, rank 0's stay. Other ranks'
        tensors are not read, and may be none, as ``full_state(rank0_only=True)`` gives them.

        Raises StateError inside a forward, backward or gather, ConfigError for names or shapes that the model lacks,
        for a loss scale that this precision has no use for, for another number of groups, and for numbers that cannot
        be; then nothing was loaded.
        """
        unheld = unheld_tensors(self.module)
        checked: Checked | None = None
        refusal: Exception | None = None
        try:
            checked = checked_for_loading(
                self._known.named,
                {"parameters": parameters, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq},
                step=step,
                loss_scale=loss_scale,
                scales_loss=self._core.loss_scale_state is not None,
                param_groups=param_groups,
                groups=self.optimizer.param_groups,
                buffers=buffers,
                unheld=unheld,
                parameter_steps=parameter_steps,
                may_be_none=self.topology.rank > 0,
            )
        except Exception as error:  # of this rank alone, perhaps
            refusal = error
        self._enter_stream()
        raise_everywhere(self._core, refusal)
        assert checked is not None
        expect_same_unheld(self._core, unheld)
        self._core.load_full_state(
            checked.tensors, step=checked.step, loss_scale=checked.loss_scale, held_steps=checked.held_steps
        )
        self._hooks.parameters_changed()
        for name, value in (buffers or {}).items():
            unheld[name].data.copy_(value)
        self._share_unheld()
        self._changes.accept()
        self._accept_values()
        if checked.param_groups is not None:
            for group, loaded in zip(self.optimizer.param_groups, checked.param_groups, strict=True):
                group.update(loaded)
        self._stepped = False

"""A window of micro-batches: its end, and its gradients between the last backward and the step."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import torch

from zerobench.engine.agreement import raise_everywhere
from zerobench.engine.config import Config
from zerobench.engine.gradients import Gradients
from zerobench.engine.notices import Notices
from zerobench.engine.topology import Topology
from zerobench.errors import ConfigError, StateError

if TYPE_CHECKING:
    from zerobench._core import Engine as CoreEngine
    from zerobench.engine.placement import Place


class EngineWindow:
    """The part of an engine that is about gradients which wait for a step."""

    _core: CoreEngine
    _notices: Notices
    _place: Place
    _enter_stream: Callable[..., None]
    _trains: bool  # else no parameter was trainable in initialize
    config: Config
    topology: Topology
    _boundary: bool | None = None
    _drops_since_step: int = 0

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the running (or next) backward is the last one before the optimizer updates."""
        if self._boundary is not None:
            return self._boundary
        self._core.check_gradients()  # the script may have dropped them
        return self._core.window_backwards + 1 >= self.config.gradient_accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next backwards end their window, until the next such call, instead of counting micro-batches.

        None counts again. A window may end early; the step then averages over the micro-batches that there were. Every
        rank makes the same calls.
        """
        if is_boundary is not None and not isinstance(is_boundary, bool):
            raise ConfigError(f"is_boundary must be True, False or None, not {is_boundary!r}")
        self._expect_trained("set_gradient_accumulation_boundary")
        self._boundary = is_boundary

    def grad_norm(self) -> float:
        """Return the global L2 norm of the averaged, unscaled gradients that the next step will use, before
        ``gradient_clipping``; after ``clip_grad_norm_`` or a change that of the result. Collective.

        Waits for the device. Raises StateError where no whole window of micro-batches waits for its step.
        """
        self._expect_trained("grad_norm")
        self._enter_stream()
        return self._core.gradient_norm()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients that the next step will use so that their global L2 norm is at most ``max_norm``, as
        ``torch.nn.utils.clip_grad_norm_`` does. Returns the norm before, a float32 scalar on the host. Collective.

        Raises ConfigError for a ``max_norm`` that is not positive, StateError as ``grad_norm`` does.
        """
        self._expect_trained("clip_grad_norm_")
        limit = float(max_norm)
        if not limit > 0:
            raise ConfigError(f"max_norm must be a positive number, not {max_norm!r}")
        self._enter_stream()
        return torch.tensor(
            self._core.clip_gradients(limit) if limit < math.inf else self._core.gradient_norm()
        )

    @contextlib.contextmanager
    def gradients(
        self,
        modifier_rank: int | Literal["all"] | None = 0,
        *,
        device: torch.device | str | None = None,
    ) -> Iterator[Gradients]:
        """Give the block the gradients that the next step will use, by parameter name. Collective.

        They are full, averaged over ranks and micro-batches, unscaled, and float32 on ``device`` (by default where the
        engine computes): 4 bytes a parameter on every rank. At the end of the block, the values of ``modifier_rank``
        become everybody's. With ``"all"`` every rank makes the same changes, which are compared by a checksum and
        not sent; with None nothing may be changed. ``gradients[name] = None`` holds a parameter in this step.

        Raises ConfigError for a rank that does not exist, StateError where no whole window waits for its step, with
        ``optimizer_in_backward``, for a change with ``modifier_rank=None``, and on every rank where ranks made
        different changes with ``"all"``; then the gradients stay as they were.
        """
        self._expect_trained("gradients")
        if modifier_rank is not None and modifier_rank != "all":
            is_rank = isinstance(modifier_rank, int) and not isinstance(modifier_rank, bool)
            if not is_rank or not 0 <= modifier_rank < self.topology.world_size:
                raise ConfigError(
                    f'modifier_rank must be a rank below {self.topology.world_size}, "all" or None, not '
                    f"{modifier_rank!r}"
                )
        self._enter_stream()
        tensors = self._core.read_gradients(str(device or self._place.name))
        found = Gradients(tensors, is_read_only=modifier_rank is None)
        has_failed = True
        try:
            yield found
            has_failed = False
        finally:
            found.close()
            self._enter_stream()
            if modifier_rank is None:
                self._expect_only_read(found, has_failed=has_failed)
            else:
                self._write(found, modifier_rank)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that wait for a step, of the whole window; nothing where there are none. Every rank calls
        it, or its next step ends with an error."""
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Drop the gradients that wait for a step, as ``zero_grad`` does. To combine the gradients of two losses
        (PCGrad), read the first ones by ``gradients``, drop them, and write the result after the second backward."""
        self._core.check_gradients()
        pending = self._core.window_backwards
        if not pending:
            return
        self._enter_stream()
        is_short = not self._core.window_is_reduced
        self._core.drop_gradients()
        self._drops_since_step += 1
        if is_short and self._drops_since_step == max(2, self.config.gradient_accumulation_steps):
            self._notices.warn(
                f"zero_grad() has dropped {self._drops_since_step} unfinished windows of micro-batches since the last "
                f"step, the last one after {pending} of {self.config.gradient_accumulation_steps}. A window that is "
                "dropped before each micro-batch never reaches a step: call zero_grad() after engine.step()",
                same_on_all_ranks=True,
            )

    def _expect_trained(self, call: str, cure: str = "remove this call") -> None:
        """Raise StateError, which names ``cure``, if the engine has no trainable parameters."""
        if not self._trains:
            raise StateError(
                f"engine.{call}() was called on an engine without trainable parameters: in zerobench.initialize each "
                f"had requires_grad=False. For a frozen model, {cure}. To train the model, call requires_grad_(True) "
                "on its parameters before zerobench.initialize, with a new engine"
            )

    def _expect_only_read(self, found: Gradients, *, has_failed: bool) -> None:
        name = None if has_failed else found.changed_name()
        error = (
            None
            if name is None
            else StateError(
                f"the gradient of '{name}' was changed in engine.gradients(modifier_rank=None), which only reads; name "
                'the rank whose changes count, or "all" where every rank makes the same ones'
            )
        )
        try:
            raise_everywhere(self._core, error)
        except Exception:
            if not has_failed:  # else the block's own error is the one to report
                raise

    def _write(self, found: Gradients, modifier_rank: int | Literal["all"]) -> None:
        if modifier_rank == "all":
            self._expect_same_changes(found)
            self._core.write_gradients(found.kept(), held=found.held(), source_rank=-1)
            return
        held = self._held_on(found, modifier_rank)
        self._core.write_gradients(found.kept(), held=held, source_rank=modifier_rank)

    def _held_on(self, found: Gradients, rank: int) -> list[str]:
        """Return the names of the parameters that this rank holds. Collective."""
        flags = self._core.exchange(bytes(found[name] is None for name in found))
        begin = rank * len(found)
        return [name for name, flag in zip(found, flags[begin : begin + len(found)], strict=True) if flag]

    def _expect_same_changes(self, found: Gradients) -> None:
        """Raise StateError on every rank if ranks have different gradients now. Collective."""
        if self.topology.world_size == 1:
            return
        sums = found.checksums()
        digest = hashlib.sha256(json.dumps(sums).encode()).digest()
        answers = self._core.exchange(digest)
        size = len(digest)
        if len({answers[at : at + size] for at in range(0, len(answers), size)}) == 1:
            return
        packed = b"".join(value.to_bytes(8, "little", signed=True) for value in sums.values())
        together = self._core.exchange(packed)
        ranks = [together[at : at + len(packed)] for at in range(0, len(together), len(packed))]
        name, rank = next(
            (name, rank)
            for index, name in enumerate(sums)
            for rank, theirs in enumerate(ranks)
            if theirs[8 * index : 8 * index + 8] != ranks[0][8 * index : 8 * index + 8]
        )
        reason = (
            f"ranks 0 and {rank} changed the gradient of '{name}' differently in "
            'engine.gradients(modifier_rank="all"); make the same change on every rank (the same random seed), or name '
            "the rank whose changes count"
        )
        raise StateError(reason)

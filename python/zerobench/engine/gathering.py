"""Gather, read, change and share the parameters and buffers of an engine between steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerobench.engine.agreement import expect_same_unheld
from zerobench.engine.change_watch import ChangeWatch
from zerobench.engine.hooks import ModuleHooks
from zerobench.engine.known_parameters import KnownParameters
from zerobench.engine.topology import Topology
from zerobench.engine.unheld_tensors import persistent_buffers, settle_buffers, share_tensors, unheld_tensors
from zerobench.engine.units import UnitModules
from zerobench.engine.value_watch import Samples, ValueWatch
from zerobench.errors import ConfigError, StateError

if TYPE_CHECKING:
    from typing_extensions import Self

    from zerobench._core import Engine as CoreEngine
    from zerobench.engine.placement import Place

CHANGE_CURE = (
    "change it inside `with engine.gather(modifier_rank=0):`, on every rank; a module that sets parameters in its "
    "first forward has that forward there, before training"
)


class EngineGathering:
    """The part of an engine that reads and changes parameters and buffers between steps."""

    _changes: ChangeWatch
    _core: CoreEngine
    _dtypes: dict[str, str]
    _enter_stream: Callable[..., None]
    _hooks: ModuleHooks
    _known: KnownParameters
    _parameter_units: dict[str, int]
    _place: Place
    _units: UnitModules
    _values: ValueWatch | None
    module: nn.Module
    topology: Topology

    @contextlib.contextmanager
    def gather(
        self,
        parameters: Iterable[nn.Parameter] | nn.Parameter | nn.Module | Self | None = None,
        *,
        modifier_rank: int | None = None,
    ) -> Iterator[None]:
        """Hold parameters (default: all) unsharded inside the block. Collective.

        With ``modifier_rank``, that rank's values at the end of the block become everybody's, masters included;
        without, nothing may be changed inside.

        Raises ConfigError for a parameter that the model does not have and for a rank that there is not, StateError
        inside a forward or backward, for parameters that were changed before without a ``gather``, and for a change
        inside without ``modifier_rank``.
        """
        units = self._units_of(parameters)
        if modifier_rank is not None and not 0 <= modifier_rank < self.topology.world_size:
            raise ConfigError(
                f"modifier_rank {modifier_rank} is not below the world size {self.topology.world_size}"
            )
        self._enter_stream()

        def is_gathered(name: str) -> bool:
            return self._parameter_units[name] in units

        self._changes.expect_same(is_gathered, CHANGE_CURE, repeats=False)
        self._core.gather(units, may_change=modifier_rank is not None)
        self._parameters_arrived()
        if self._values is not None:
            self._values.check(CHANGE_CURE, but=self._changes.changed_names(), repeats=False)
        before = (
            self._values.sample(is_gathered) if self._values is not None and modifier_rank is None else {}
        )
        may_load, self._hooks.may_load = self._hooks.may_load, modifier_rank is not None
        has_failed = True
        try:
            yield
            has_failed = False
        finally:
            self._hooks.may_load = may_load
            lost = None if has_failed or modifier_rank is not None else self._lost_change(is_gathered, before)
            self._core.end_gather(units, modifier_rank=-1 if modifier_rank is None else modifier_rank)
            if modifier_rank is not None:
                share_tensors(self._core, self._integers_of(units), rank=modifier_rank)
            if modifier_rank is not None or self._core.parameters_sharded:  # there other changes are gone
                self._changes.accept(is_gathered)
                self._accept_values()
            if lost is not None:
                raise lost

    def sync_buffers(self) -> None:
        """Give every rank the values of rank 0's persistent buffers, as DistributedDataParallel does before each
        forward (``broadcast_buffers``); nothing is averaged. Collective, between steps.

        Call it before an evaluation where ranks must agree: statistics of BatchNorm follow each rank's own batches.
        Buffers registered with ``persistent=False`` stay each rank's own.

        Raises ConfigError, the same on every rank, where ranks have buffers of other names, shapes or dtypes.
        """
        self._enter_stream()
        self._settle_buffers()
        buffers = persistent_buffers(self.module)
        expect_same_unheld(self._core, buffers)
        share_tensors(self._core, buffers)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The module's full state dict (parameters in param_dtype, buffers) as copies. Collective."""
        with self.gather():
            copies = {
                name: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for name, value in self.module.state_dict().items()
            }
            if self._place.device is not None:
                self._place.device.synchronize()  # whether a peer was lost before, the block's end says
        return copies

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a full state dict into the module and the masters: rank 0's values become everybody's. Collective,
        between steps; moments stay as they are. Returns and raises what ``torch.nn.Module.load_state_dict`` does."""
        try:
            with self.gather(modifier_rank=0):
                return self.module.load_state_dict(state_dict, strict=strict)
        finally:
            expect_same_unheld(self._core, unheld_tensors(self.module))
            self._share_unheld(
                but=self._integers_of(self._units_of(None)).values()
            )  # those the gather has shared

    def _parameters_arrived(self) -> None:
        """Parameters that are not sharded can be read as the last step left them."""
        if self._values is None or self._core.parameters_sharded or self._values.has_values:
            return
        if self._changes.is_due:
            self._values.remember()

    def _accept_values(self) -> None:
        """Parameters have new values that the engine knows."""
        if self._values is not None:
            self._values.forget()
            if not self._core.is_updating:
                self._parameters_arrived()

    def _lost_change(self, is_gathered: Callable[[str], bool], before: Samples) -> StateError | None:
        """Return an error for a change that the end of a gather without ``modifier_rank`` loses, of parameters that had
        values ``before``."""
        cure = "pass modifier_rank to engine.gather(), the rank whose changes become everybody's"
        try:
            self._changes.expect_same(is_gathered, cure)
            if self._values is not None:
                self._values.expect_same(before, cure)
        except StateError as error:
            if self._values is not None:
                self._values.mark_reported()
            return error
        return None

    def _integers_of(self, units: list[int]) -> dict[str, torch.Tensor]:
        """Parameters that the core does not hold, and that a gather makes everybody's."""
        return {
            name: parameter
            for name, parameter in self._known.named.items()
            if not parameter.is_floating_point() and self._parameter_units[name] in units
        }

    def _settle_buffers(self) -> None:
        settle_buffers(self.module, device=self._place.name, dtype=self._param_dtype())

    def _share_unheld(self, *, but: Iterable[torch.Tensor] = ()) -> None:
        """Rank 0's for all, but for buffers that belong to no state: those are each rank's own."""
        self._settle_buffers()
        done = set(map(id, but))
        unheld = unheld_tensors(self.module)
        share_tensors(self._core, {name: value for name, value in unheld.items() if id(value) not in done})

    def _units_of(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter | nn.Module | Self | None
    ) -> list[int]:
        if parameters is None or parameters is self:
            return list(range(len(self._units.names)))
        if isinstance(parameters, nn.Parameter):
            parameters = [parameters]
        if isinstance(parameters, EngineGathering):
            parameters = parameters.module
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        if isinstance(parameters, str) or not isinstance(parameters, Iterable):
            raise ConfigError(
                f"gather accepts parameters, a module or nothing, not {parameters!r}; to gather by name, pass "
                "engine.module.get_parameter(name) or get_submodule(name)"
            )
        names = {id(parameter): name for name, parameter in self._known.named.items()}
        units = set()
        for parameter in parameters:
            if id(parameter) not in names:
                what = (
                    f"a parameter of shape {tuple(parameter.shape)}"
                    if isinstance(parameter, torch.Tensor)
                    else repr(parameter)
                )
                raise ConfigError(f"gather got {what} that the model does not have")
            units.add(self._parameter_units[names[id(parameter)]])
        return sorted(units)

    def _param_dtype(self) -> torch.dtype:
        found = getattr(torch, self._dtypes["param"])
        assert isinstance(found, torch.dtype)
        return found

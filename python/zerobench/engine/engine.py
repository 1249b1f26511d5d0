"""The training engine: ``initialize`` wraps a model, and the engine trains it at any ZeRO stage.

Hooks (hooks.py) tell the C++ core (csrc/zero/engine.h) when a unit's forward or backward begins and ends. Gradients
reach the core through autograd's accumulation nodes without touching Python.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerobench import _native
from zerobench.engine import config as config_module
from zerobench.engine import notices, other_arguments, placement
from zerobench.engine import topology as topology_module
from zerobench.engine.agreement import expect_same_setup, setup_facts
from zerobench.engine.change_watch import ChangeWatch
from zerobench.engine.config import Config
from zerobench.engine.departures import tell_peers_of_the_end, told_to_peers
from zerobench.engine.gathering import CHANGE_CURE
from zerobench.engine.hooks import ModuleHooks, expect_not_updating
from zerobench.engine.input_backward import InputBackward
from zerobench.engine.known_parameters import KnownParameters
from zerobench.engine.left_out import LeftOut
from zerobench.engine.notices import Notices
from zerobench.engine.optimizer import ZeroOptimizer
from zerobench.engine.parameters import (
    Materialise,
    core_arguments,
    materialise_unit,
    param_groups,
)
from zerobench.engine.rank_cpus import rank_cpus
from zerobench.engine.state import EngineState
from zerobench.engine.swap_watch import SwapWatch
from zerobench.engine.trainable_model import expect_trainable, hold, release
from zerobench.engine.unheld_tensors import share_tensors, tensors_to_share
from zerobench.engine.units import find_units, large_unit_notice
from zerobench.engine.value_watch import ValueWatch
from zerobench.engine.window import EngineWindow
from zerobench.errors import ConfigError, StateError
from zerobench.host.facts import HostFacts, read_host_facts

if TYPE_CHECKING:
    from zerobench._core import AdamHyperparameters


def initialize(
    model: nn.Module,
    *,
    config: Mapping[str, Any] | Config | str | Path | None = None,
    model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
    materialise: Materialise | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    **others: Any,
) -> Engine:
    """Wrap ``model`` for training at ``config``'s ZeRO stage. Collective: every rank calls it.

    ``model_parameters`` are torch-style param groups (dicts with ``params`` and own ``lr``, ``betas``, ``eps``,
    ``weight_decay``) or parameters; by default every parameter of the model in one group. Parameters that need no
    gradient are kept and gathered but not updated; an engine without any other runs forwards alone. Rank 0's values
    become every rank's, those of buffers and of integer and complex parameters too. Buffers keep their dtype, but for
    statistics of normalisation layers, which torch wants in the parameters' dtype.

    Parameters on the meta device are given memory and values by ``materialise(model, names, device=...)``
    (``zerobench.models.materialise.materialise``, or one's own), unit by unit, and sharded at once: a model larger than
    one device, or than the host, can be built.

    ``process_group`` is a process group of torch.distributed. Only its ranks call this, and they train this model;
    other groups can train at the same time. Without it, ranks come from the configuration, the default process group or
    the launcher's environment variables.

    The engine also unpacks as ``engine, optimizer, dataloader, lr_scheduler`` (the last two None), and has these by
    number, as in ``initialize(...)[0]``.

    ``others``: further arguments of DeepSpeed's ``initialize`` may be None. Any other value is a ConfigError that says
    what to do instead.

    Raises ConfigError, CommunicationError (ranks missing), OutOfMemoryError, OSError (of swap files).
    """
    other_arguments.expect_none(others)
    return Engine(
        model, config_module.parse(config), model_parameters, materialise, process_group=process_group
    )


class Engine(EngineWindow, EngineState):
    """A model under training. Calls that gather or reduce are collective: make them equally often on every rank.

    ``module`` is the model, ``optimizer`` its ZeroOptimizer, ``config`` and ``topology`` are what was resolved,
    ``communicator`` is the kind that connects the ranks, and ``communicator_note`` why it is not another one, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        model_parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | None = None,
        materialise: Materialise | None = None,
        *,
        process_group: torch.distributed.ProcessGroup | None = None,
        host: HostFacts | None = None,
    ) -> None:
        _native.load()
        from zerobench import _core as core

        expect_trainable(model, materialise)
        self.module = model
        self.config = config
        host = host or read_host_facts()
        notices.configure(host.environment)
        group = topology_module.group_of_ranks(config, host, process_group)
        self.topology = topology_module.resolve(config, host.environment, group)
        self._notices = Notices(self.topology.rank)
        self.optimizer = ZeroOptimizer(param_groups(model, model_parameters), config.optimizer)
        self._trains = any(group["params"] for group in self.optimizer.param_groups)
        self._units = find_units(model, config.units)
        self._dtypes = config.effective_dtypes()
        self._stepped = False
        arguments = core_arguments(units=self._units, groups=self.optimizer.param_groups, dtypes=self._dtypes)
        self._place = placement.choose(model, config, self.topology, host)
        self._stream = self._place.stream()
        used_bytes = self._place.used_bytes()
        communicators = topology_module.make_communicators(
            core, config, self.topology, self._place.device, process_group, environment=host.environment
        )
        self._communicator_bytes = max(self._place.used_bytes() - used_bytes, 0)
        expect_same_setup(communicators.reduce, setup_facts(config, self._units, self.optimizer.param_groups))
        share = rank_cpus(
            config, self.topology, communicators.reduce, host, gpu_bus_id=self._place.gpu_bus_id
        )
        on_gpu = self._place.device is not None
        use = placement.cpu_use(config, self.topology, share, quota=host.cpu_quota, beside_gpu=on_gpu)
        remainders = config.stores_param_remainders(on_gpu=on_gpu)
        self._update_cpus = use.text
        self.communicator = communicators.kind
        self.communicator_note = communicators.note
        self._notices.info(
            f"world size {self.topology.world_size}, stage {config.stage}, communicator {communicators.kind}"
            + (f" ({communicators.note})" if communicators.note else ""),
            same_on_all_ranks=True,
        )
        self._close_communicators = communicators.close
        self._core_types = core
        self._core = core.Engine(
            options=core.EngineOptions(
                stage=config.stage,
                accumulation_steps=config.gradient_accumulation_steps,
                clip=config.gradient_clipping or 0.0,
                prefetch_bytes=config.prefetch_bytes,
                reshard_after_forward=config.reshard_after_forward,
                keep_parameter_shards=placement.keeps_parameter_shards(
                    config, communicators.kind, remainders=remainders
                ),
                store_param_remainders=remainders,
                keep_root_bytes=config.keep_root_bytes,
                push_gradient_bytes=config.push_gradient_bytes,
                optimizer_in_backward=config.optimizer_in_backward,
                overlap_updates=config.overlap_updates,
                loss_scale=core.LossScaleOptions(
                    enabled=config.scales_loss() and self._trains, **config.loss_scale.model_dump()
                ),
                offload=placement.offload_options(config, self.topology, use),
            ),
            unit_names=self._units.names,
            unit_cures=self._units.cures(),
            root_unit=0,
            parameters=arguments,
            gather_communicator=communicators.gather,
            reduce_communicator=communicators.reduce,
            device=self._place.name,
            parts=self._place.parts(use),
            materialise=materialise
            and functools.partial(
                materialise_unit, materialise=materialise, units=self._units, device=self._place.name
            ),
        )
        tell_peers_of_the_end(self._core)
        self._settle_buffers()
        share_tensors(self._core, tensors_to_share(model))
        self._known = KnownParameters(model)
        for parameter in model.parameters():
            parameter.grad = None  # of another training
        # Frozen parameters keep what others write where they are not sharded.
        self._changes = ChangeWatch(
            self._known.trained | (self._known.frozen if self._core.parameters_sharded else {})
        )
        self._values: ValueWatch | None = None
        if self._core.parameters_sharded or self._dtypes["param"] != "float32" or config.offload_optimizer:
            self._values = ValueWatch(self._known.trained)
        self._parameters_arrived()
        self.optimizer.attach(self)
        self._parameter_units = self._units.unit_of_parameters()
        self._input_backward: InputBackward | None = None
        if self._core.parameters_sharded and not self._trains:
            self._input_backward = InputBackward(self._core, self._enter_stream)
        casts = config.cast_forward_inputs and self._dtypes["param"] != "float32"
        self._hooks = ModuleHooks(
            self._core,
            units=self._units,
            input_dtype=self._param_dtype() if casts else None,
            enter=self._enter_forward,
            arrived=self._parameters_arrived,
            trains=self._trains,
            input_backward=self._input_backward,
        )
        hold(self._known.named.values())
        self._left_out = LeftOut(self._known, self._notices) if self.topology.rank == 0 else None
        self._tell_large_unit()
        self._offload_ratio: float | None = None
        if offload := config.offload_optimizer:
            self._offload_ratio = None if offload.ratio == "auto" else offload.ratio
        self._swap_watch: SwapWatch | None = None
        if offload and offload.device == "nvme" and self.topology.local_rank == 0:
            self._swap_watch = SwapWatch(offload.nvme_path, self._notices, clock_s=time.perf_counter)
        if self._core.awaits_share:
            self._place.begin_trial()

    @told_to_peers
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forward of the model."""
        try:
            return self.module(*args, **kwargs)
        except Exception:
            raise  # the hooks have ended the forward
        except BaseException:  # Ctrl-C, for which torch calls no hooks
            self._hooks.forward_interrupted()
            raise

    forward = __call__

    @told_to_peers
    def backward(self, loss: torch.Tensor) -> None:
        """Backward of a micro-batch's mean loss, a floating-point tensor of one element. Averaging over micro-batches
        and ranks is the engine's.

        Raises whatever backward raises; the gradients of all micro-batches since the last step are dropped then and the
        engine stays usable. Raises StateError for what is no such tensor, for a backward that a step must precede, for
        an engine without trainable parameters and, soon if not at once, where a parameter was changed in place outside
        of ``gather(modifier_rank=...)``.
        """
        self._expect_trained("backward", "take gradients of its inputs by loss.backward()")
        if not isinstance(loss, torch.Tensor):
            raise StateError(
                f"backward needs the loss as a tensor, not a {type(loss).__name__}; pass what the forward returned "
                "(loss, not loss.item())"
            )
        if loss.numel() != 1:
            raise StateError(
                f"backward needs a scalar loss, not one of shape {tuple(loss.shape)}; reduce it with .mean()"
            )
        if not loss.is_floating_point():
            raise StateError(f"backward needs a floating-point loss, not {loss.dtype}; convert it before")
        if not loss.requires_grad:
            raise StateError(
                "backward needs a loss that gradients flow through, and this one has none: compute it from what the "
                "engine returned, outside torch.no_grad() and without .detach()"
            )
        self._enter_stream(of="engine.backward()")
        last = self._expect_room_in_window()
        if not self._stepped:
            self._known.expect_same()
        scale = self._core.loss_scale
        if last:
            self._changes.check(CHANGE_CURE)
            if self._changes.is_due and self._values is not None:
                self._values.check(CHANGE_CURE)
        updates = last and self.config.optimizer_in_backward
        self._core.begin_backward(last=last, groups=self._hyperparameters() if updates else [])
        try:
            (loss.float() * scale if scale != 1.0 else loss).backward()
        except BaseException as error:
            self._abort_backward(error)
            raise
        self._core.end_backward()
        if self._left_out is not None:
            self._left_out.backward_ended()

    @told_to_peers
    def step(self, *, end_window: bool = False) -> None:
        """Update parameters at the accumulation boundary; before it, do nothing.

        With ``end_window`` a window that has fewer micro-batches ends here, and the step averages over those that
        there were: for the last batches of an epoch. Nothing happens where no micro-batch waits for a step. Every rank
        calls it, after equally many micro-batches.

        On CUDA the call returns before the device has updated anything. At stages 1 and 2, and with state off the
        device, parameters arrive during the next forward; until then touching one raises an error. Read them through
        ``gather``, or set ``overlap_updates`` to false.

        With ``optimizer_in_backward`` the updates began in backward, with the learning rate of that moment, and this
        call ends the step: it must come before the next forward.

        In fp16 a step whose gradients overflow is skipped and the loss scale lowered. Raises NonFiniteGradientError
        for them in other precisions, and in fp16 once a dynamic scale is at its floor (nothing is updated; on CUDA it
        is the next step, or whoever asks for the step's outcome, that raises), StateError without gradients,
        ConfigError for hyperparameters that no update can have, which leaves the gradients for another call.
        """
        self._expect_trained("step")
        self._enter_stream()
        if end_window:
            self._core.end_window()
            if not self._core.window_backwards:
                return
        elif self._core.window_backwards and not self._core.window_is_reduced:
            return
        self.optimizer.step_was_called()
        self._known.expect_same_trained()
        if self._core.window_backwards and self._core.awaits_share:
            self._place_state()
        self._core.step(self._hyperparameters())
        self._hooks.parameters_changed()
        self._stepped = True
        self._drops_since_step = 0
        self._changes.step_ended()
        if self._values is not None:
            self._values.forget()
            if not self._core.is_updating:
                self._parameters_arrived()
        if self._swap_watch is not None and not self._swap_watch.step_ended(self):
            self._swap_watch = None
        if self._left_out is not None:
            self._left_out.step_ended()

    def compile(self, **options: Any) -> None:
        """Compile the model's forward as a whole; ``options`` are those of torch.compile. Call it between steps.

        From then on a forward begins when all parameters have arrived, and no hook lies inside it that would end a
        graph. To have parameters arrive while earlier blocks compute, and gradients reduced while backward runs,
        compile each block's ``forward`` before ``initialize`` instead.

        Raises ConfigError where parameters are sharded (stage 3), since a graph has no place to gather them.
        """
        if self._core.parameters_sharded:
            raise ConfigError(
                "stage 3 gathers parameters between units, which a single graph of the whole model cannot do: "
                "compile each block's forward before zerobench.initialize, or use stage 0, 1 or 2"
            )
        self._hooks.await_units_at_once()
        self.module.forward = torch.compile(self.module.forward, **options)  # hooks on the model stay outside

    def train(self, mode: bool = True) -> Engine:
        """Put the model into training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the model into evaluation mode."""
        return self.train(False)

    def close(self) -> None:
        """Free the engine's memory and leave the other ranks. Stage 3 parameters lose their data.

        Warns where micro-batches still wait for a step, and of parameters that training left out.
        """
        pending = 0
        if self._hooks.are_installed:
            with contextlib.suppress(Exception):  # what matters now is that the engine ends
                self._core.check_gradients()
            pending = self._core.window_backwards
        self._hooks.remove()
        release(self._known.named.values())
        self._core.stop("is closing its engine", for_good=True)  # its own updates and files may take long
        try:
            self._core.close()
        finally:
            self._close_communicators()
            self._close_communicators = _nothing
            if self._left_out is not None:
                self._left_out.close()
                self._left_out = None
        if pending:
            self._notices.warn(
                f"engine.close() dropped the gradients of {pending} micro-batch{'es' * (pending > 1)} that no step has "
                "used; call engine.step(end_window=True) before, or engine.zero_grad() to drop them"
            )

    def __iter__(self) -> Iterator[Any]:
        return iter((self, self.optimizer, None, None))

    def __getitem__(self, index: int) -> Any:
        return tuple(self)[index]

    def __getattr__(self, name: str) -> Any:
        # Unknown names fall through to the model, as training scripts expect of an engine.
        if name.startswith("_") or name == "module":
            raise AttributeError(
                f"Engine has no attribute '{name}' (it is not a torch.nn.Module). Use engine.module where a module is "
                "required."
            )
        value = getattr(self.module, name)
        if self._hooks.are_installed:  # what it may read
            if name in ("parameters", "named_parameters"):
                return value  # whoever touches one too early learns it there
            if isinstance(value, (nn.Module, torch.Tensor)):
                expect_not_updating(self._core)
                self._parameters_arrived()
            elif isinstance(value, MethodType) and self._core.try_wait_updates():
                self._parameters_arrived()
        return value

    def _expect_room_in_window(self) -> bool:
        """Return whether the backward that begins ends its window. Raises StateError where that has ended already."""
        steps = self.config.gradient_accumulation_steps
        self._core.check_gradients()  # the script may have dropped them
        pending = self._core.window_backwards
        if self._core.window_is_reduced or pending >= steps:
            raise StateError(
                f"backward was called more than {pending} times without a step; call engine.step() after "
                "each backward, and set gradient_accumulation_steps to the number of backwards a step"
            )
        last = self.is_gradient_accumulation_boundary()
        if not last and pending + 1 >= steps:
            raise StateError(
                f"set_gradient_accumulation_boundary(False) asks for a window of more than {steps} "
                f"micro-batch{'es' * (steps > 1)}; set gradient_accumulation_steps to the most that a step takes"
            )
        return last

    def _enter_forward(self) -> None:
        """Before each forward of the model."""
        self._enter_stream(of="a forward of the engine")
        if self._values is not None and self._changes.is_due and not self._values.has_values:
            if self._core.is_updating and not self._core.parameters_sharded:
                self._core.await_all_updates()
            self._parameters_arrived()

    def _hyperparameters(self) -> list[AdamHyperparameters]:
        return [self._core_types.AdamHyperparameters(**group) for group in self.optimizer.hyperparameters()]

    def _enter_stream(self, *, of: str | None = None) -> None:
        """Tell the core which stream the caller computes on. Raises StateError where ``of`` is being captured."""
        if self._input_backward is not None:
            self._input_backward.end()  # one that an exception has left
        stream = self._place.stream()
        if of is not None and stream:  # the default stream, 0, cannot be captured
            self._place.expect_no_capture(of)
        if stream != self._stream:
            self._core.set_compute_stream(stream)
            self._stream = stream

    def _tell_large_unit(self) -> None:
        """Warn on one rank where units that were found by structure make gathers of stage 3 large."""
        if self.config.units != "auto" or not self._core.parameters_sharded:
            return
        element_bytes = self._param_dtype().itemsize
        if notice := large_unit_notice(self._units, element_bytes=element_bytes):
            self._notices.warn(notice, same_on_all_ranks=True)

    def _place_state(self) -> None:
        """Put as much of the optimizer state on the device as the first forward and backward have left free there, and
        reading the full state does; at stage 3 a further unit may be gathered in later steps."""
        assert self.config.offload_optimizer is not None
        units, ranks = self._core.units(), self.topology.world_size
        largest_numel = max(flat["padded_numel"] for unit in units for flat in unit["flats"])
        free_bytes = self._place.free_bytes(
            limit_bytes=self.config.offload_optimizer.device_memory_bytes,
            extra_bytes=4 * (largest_numel + largest_numel // ranks),
        )
        if self._core.parameters_sharded:
            free_bytes -= max(unit["gather_bytes"] for unit in units)
        share = placement.fitting_share(units, free_bytes=free_bytes)
        self._offload_ratio = self._core.place_state(share)

    def _abort_backward(self, error: BaseException) -> None:
        try:
            self._core.abort_backward()
        except Exception as abort_error:  # the peers are gone too: the first error matters
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"while leaving the backward: {abort_error}")
        self._core.rethrow_hook_error()


def _nothing() -> None:
    """Do nothing: a closed engine has nothing left to close."""

"""The training engine: ``initialize`` wraps a model, and the engine trains it at any ZeRO stage.

Hooks (hooks.py) tell the C++ core (csrc/zero/engine.h) when a unit's forward or backward begins and ends. Gradients
reach the core through autograd's accumulation nodes without touching Python.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerobench import _native
from zerobench.engine import config as config_module
from zerobench.engine import notices, other_arguments, placement
from zerobench.engine import topology as topology_module
from zerobench.engine.agreement import expect_same_setup, expect_same_unheld, raise_everywhere, setup_facts
from zerobench.engine.change_watch import ChangeWatch
from zerobench.engine.config import Config
from zerobench.engine.departures import tell_peers_of_the_end, told_to_peers
from zerobench.engine.facts import EngineFacts
from zerobench.engine.full_state import (
    Checked,
    checked_for_loading,
    of_rank_0,
    persistent_buffers,
    settle_buffers,
    share_tensors,
    tensors_to_share,
    unheld_tensors,
)
from zerobench.engine.hooks import ModuleHooks, expect_not_updating
from zerobench.engine.input_backward import InputBackward
from zerobench.engine.known_parameters import KnownParameters
from zerobench.engine.left_out import LeftOut
from zerobench.engine.notices import Notices
from zerobench.engine.optimizer import ZeroOptimizer
from zerobench.engine.parameters import (
    Materialise,
    core_arguments,
    hyperparameters_of,
    materialise_unit,
    param_groups,
)
from zerobench.engine.rank_cpus import rank_cpus
from zerobench.engine.swap_watch import SwapWatch
from zerobench.engine.trainable_model import expect_trainable, hold, release
from zerobench.engine.units import find_units, large_unit_notice
from zerobench.engine.value_watch import Samples, ValueWatch
from zerobench.engine.window import EngineWindow
from zerobench.errors import ConfigError, StateError
from zerobench.host.facts import HostFacts, read_host_facts

if TYPE_CHECKING:
    from zerobench._core import AdamHyperparameters

_CHANGE_CURE = (
    "change it inside `with engine.gather(modifier_rank=0):`, on every rank; a module that sets parameters in its "
    "first forward has that forward there, before training"
)
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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


class Engine(EngineFacts, EngineWindow):
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
            input_dtype=_TORCH_DTYPES[self._dtypes["param"]] if casts else None,
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

    # --- training -----------------------------------------------------------------------------------------------

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
            self._changes.check(_CHANGE_CURE)
            if self._changes.is_due and self._values is not None:
                self._values.check(_CHANGE_CURE)
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

    # --- reading and changing parameters ------------------------------------------------------------------------

    @contextlib.contextmanager
    def gather(
        self,
        parameters: Iterable[nn.Parameter] | nn.Parameter | nn.Module | Engine | None = None,
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

        self._changes.expect_same(is_gathered, _CHANGE_CURE, repeats=False)
        self._core.gather(units, may_change=modifier_rank is not None)
        self._parameters_arrived()
        if self._values is not None:
            self._values.check(_CHANGE_CURE, but=self._changes.changed_names(), repeats=False)
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

    # --- internals ----------------------------------------------------------------------------------------------

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
        element_bytes = _TORCH_DTYPES[self._dtypes["param"]].itemsize
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

    def _integers_of(self, units: list[int]) -> dict[str, torch.Tensor]:
        """Parameters that the core does not hold, and that a gather makes everybody's."""
        return {
            name: parameter
            for name, parameter in self._known.named.items()
            if not parameter.is_floating_point() and self._parameter_units[name] in units
        }

    def _settle_buffers(self) -> None:
        settle_buffers(self.module, device=self._place.name, dtype=_TORCH_DTYPES[self._dtypes["param"]])

    def _share_unheld(self, *, but: Iterable[torch.Tensor] = ()) -> None:
        """Rank 0's for all, but for buffers that belong to no state: those are each rank's own."""
        self._settle_buffers()
        done = set(map(id, but))
        unheld = unheld_tensors(self.module)
        share_tensors(self._core, {name: value for name, value in unheld.items() if id(value) not in done})

    def _units_of(
        self, parameters: Iterable[nn.Parameter] | nn.Parameter | nn.Module | Engine | None
    ) -> list[int]:
        if parameters is None or parameters is self:
            return list(range(len(self._units.names)))
        if isinstance(parameters, nn.Parameter):
            parameters = [parameters]
        if isinstance(parameters, (nn.Module, Engine)):
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

    def _abort_backward(self, error: BaseException) -> None:
        try:
            self._core.abort_backward()
        except Exception as abort_error:  # the peers are gone too: the first error matters
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"while leaving the backward: {abort_error}")
        self._core.rethrow_hook_error()


def _nothing() -> None:
    """Do nothing: a closed engine has nothing left to close."""

"""Types of the C++ core. Made with pybind11-stubgen from a built core, then simplified (docs/reference/building.md)."""

from collections.abc import Sequence
from typing import Any

import torch

class ThreadPool:
    """
    Pinned threads for loops over memory; the caller counts as one.
    """
    def __init__(self, thread_num: int, cpus: Sequence[int] = []) -> None: ...
    @property
    def thread_num(self) -> int: ...

class Ledger:
    """
    Bytes that an engine holds, by tier and category.
    """
    def bytes(self, *, peak: bool) -> dict[str, dict[str, int]]:
        """
        {tier: {category: bytes}}, now or at each category's peak.
        """
    def reset_peaks(self) -> None: ...

class PinnedStats:
    """
    What lies under a PinnedPool's blocks.
    """
    @property
    def fill_ms(self) -> float: ...
    @property
    def huge_bytes(self) -> int: ...
    @property
    def is_on_node(self) -> bool: ...
    @property
    def is_registered(self) -> bool: ...
    @property
    def mapped_bytes(self) -> int: ...
    @property
    def peak_requested_bytes(self) -> int: ...
    @property
    def register_ms(self) -> float: ...
    @property
    def requested_bytes(self) -> int: ...

class PinnedPool:
    """
    Pinned host memory in exact sizes (csrc/memory/pinned_pool.h).
    """
    def __init__(
        self,
        size_bytes: int,
        *,
        thread_num: int,
        cpus: Sequence[int] = [],
        numa_node: int = -1,
        lock: bool = False,
        parts: object = None,
    ) -> None:
        """
        parts is a device's capsule whose driver then knows the memory; without one it is plain memory, which lock keeps
        from being swapped out.
        """
    def stats(self) -> PinnedStats: ...
    def tensor(self, size_bytes: int) -> torch.Tensor:
        """
        A block of the pool as bytes, given back with its last reference.
        """

class AdamHyperparameters:
    """
    Hyperparameters of one param group.
    """
    def __init__(
        self, *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool
    ) -> None: ...

class AdamRunner:
    """
    Adam, and the stream of the same traffic, over flat CPU tensors.
    """
    def __init__(
        self,
        *,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        gradient: torch.Tensor,
        low_precision: torch.Tensor | None,
        hyperparameters: AdamHyperparameters,
    ) -> None: ...
    def step(self, pool: ThreadPool, *, step: int, grad_factor: float = 1.0) -> None:
        """
        adam_step over the pool; step counts from 1.
        """
    def step_as(self, isa: str, *, step: int, grad_factor: float = 1.0) -> None:
        """
        The form for one instruction set, in this thread.
        """
    def stream_mix(self, pool: ThreadPool) -> None:
        """
        The same traffic with additions for arithmetic; overwrites what a step overwrites.
        """
    @property
    def bytes_per_step(self) -> int:
        """
        What a step and stream_mix read and write.
        """

class IoBench:
    """
    Swap files with a pager over them, beside plain loops over the same files.
    """
    def __init__(
        self, *, directories: Sequence[str], chunk_bytes: int, chunk_num: int, direct: bool = True
    ) -> None: ...
    def close(self) -> None:
        """
        Ends the pager and its engine.
        """
    def fill(self, *, chunk_num: int) -> int:
        """
        Writes so many more chunks with random bytes, before all else; how many are left.
        """
    def open(self, *, engine: str, block_bytes: int, depth: int, frame_num: int) -> None:
        """
        A new pager of so many frames, with an engine of its own.
        """
    def run(self, mode: str, *, chunk_num: int) -> tuple[float, int]:
        """
        Takes chunks through the pager: read, write or both. Seconds and bytes moved.
        """
    def run_raw(
        self, engine: str, *, mode: str, block_bytes: int, depth: int, chunk_num: int
    ) -> tuple[float, int]:
        """
        The same bytes of the same files by a plain loop. Seconds and bytes moved.
        """
    @property
    def chunk_bytes(self) -> int: ...
    @property
    def paths(self) -> list[str]: ...

class RegisteredBuffer:
    """
    Memory that collectives may name.
    """
    def tensor(self, dtype: str, *, rank: int | None = None) -> torch.Tensor:
        """
        The whole buffer, or another rank's part of it, as a flat torch tensor that keeps it alive.
        """
    @property
    def bytes(self) -> int: ...

class Work:
    """
    A started collective.
    """
    def test(self) -> bool: ...
    def test_source_free(self) -> bool: ...
    def wait(self) -> None: ...
    def wait_source_free(self) -> None: ...

class Communicator:
    """
    Collectives over registered buffers (csrc/comm/communicator.h).
    """
    def abort(self, reason: str) -> None: ...
    def allocate(self, bytes: int, *, shared: bool) -> RegisteredBuffer:
        """
        Registered memory; shared memory is a collective call and may be a source.
        """
    def barrier(self) -> None: ...
    def begin_group(self) -> None:
        """
        What is started until end_group may be put in together.
        """
    def close(self) -> None: ...
    def communication_bytes(self) -> dict[str, int]: ...
    def end_group(self) -> None: ...
    def exchange(self, mine: bytes) -> bytes:
        """
        Every rank's bytes, one after the other; all ranks give equally many.
        """
    def poisoned(self) -> str | None:
        """
        The original cause, once this communicator is poisoned.
        """
    def progress(self) -> None: ...
    def repeat(
        self,
        collective: str,
        calls: int,
        *,
        source: RegisteredBuffer | None = None,
        destination: RegisteredBuffer | None = None,
        numel: int = 0,
        dtype: str = "float32",
    ) -> None:
        """
        Runs a collective `calls` times without Python in between: barrier, all_gather, reduce_scatter, all_reduce.
        """
    def start_all_gather(
        self,
        source: RegisteredBuffer,
        destination: RegisteredBuffer,
        *,
        shard_bytes: int,
        source_offset_bytes: int = 0,
        destination_offset_bytes: int = 0,
    ) -> Work: ...
    def start_all_reduce(
        self, buffer: RegisteredBuffer, *, numel: int, dtype: str, offset_bytes: int = 0
    ) -> Work: ...
    def start_broadcast(self, buffer: RegisteredBuffer, *, bytes: int, root: int = 0) -> Work: ...
    def start_reduce_scatter(
        self,
        source: RegisteredBuffer,
        destination: RegisteredBuffer,
        *,
        shard_numel: int,
        dtype: str,
        source_offset_bytes: int = 0,
        destination_offset_bytes: int = 0,
    ) -> Work: ...
    @property
    def kind(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...

class ParameterArgument:
    """
    A parameter as the engine takes it over.
    """
    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        *,
        param_dtype: str,
        reduce_dtype: str,
        accumulate_dtype: str,
        trainable: bool,
        param_group: int,
        unit: int,
    ) -> None: ...

class LossScaleOptions:
    """
    Loss scale of fp16 training.
    """
    def __init__(
        self,
        *,
        enabled: bool,
        dynamic: bool,
        initial_scale: float,
        growth_factor: float,
        backoff_factor: float,
        growth_interval_steps: int,
        min_scale: float,
    ) -> None: ...

class PagedStateOptions:
    """
    Optimizer state in files (csrc/stores/paged_state.h).
    """
    def __init__(
        self,
        *,
        directories: Sequence[str],
        owner: str,
        engine: str,
        block_bytes: int,
        depth: int,
        allow_fallback: bool,
        checksums: bool,
    ) -> None: ...

class OffloadOptions:
    """
    Optimizer state on the host (csrc/stores/host_store.h).
    """
    def __init__(
        self,
        *,
        ratio: float | None,
        parameters: str,
        thread_num: int,
        cpus: Sequence[int],
        numa_node: int,
        lock: bool,
        ranks_on_host: int,
        chunk_numel: int | None,
        paged: PagedStateOptions | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        """
        ratio is the share of the state that is not on the device, None leaves it to Engine.place_state; parameters
        says where the shards of stage 3 are: device, host or nvme; paged puts the state into files, but for what
        memory_bytes of the host hold. Where chunk_numel is None it goes by them.
        """

class EngineOptions:
    """
    How an engine keeps and moves its state.
    """
    def __init__(
        self,
        *,
        stage: int,
        accumulation_steps: int,
        clip: float,
        prefetch_bytes: int | None,
        reshard_after_forward: bool,
        keep_parameter_shards: bool,
        store_param_remainders: bool,
        keep_root_bytes: int,
        push_gradient_bytes: int,
        optimizer_in_backward: bool,
        overlap_updates: bool,
        loss_scale: LossScaleOptions,
        offload: OffloadOptions | None,
    ) -> None:
        """
        offload: OffloadOptions, or None for state on the device.
        """

class Engine:
    """
    One rank's ZeRO engine (csrc/zero/engine.h).
    """
    def __init__(
        self,
        *,
        options: EngineOptions,
        unit_names: Sequence[str],
        root_unit: int,
        parameters: Sequence[ParameterArgument],
        gather_communicator: Communicator,
        reduce_communicator: Communicator,
        device: str,
        parts: Any,
        materialise: Any,
        unit_cures: Sequence[str] = ...,
    ) -> None:
        """
        device is torch's name of where parameters live; parts is a capsule that makes the engine compute there;
        materialise(unit), or None, is called before a unit is built and returns tensors by parameter index; unit_cures
        are what errors tell to do where a forward uses a unit without a call of its module.
        """
    def abandon_forward(self) -> None: ...
    def abort(self, reason: str) -> None: ...
    def abort_backward(self) -> None: ...
    def await_inputs(self, unit: int) -> None: ...
    def begin_backward(self, last: bool, groups: Sequence[AdamHyperparameters]) -> None:
        """
        groups are the hyperparameters of the step that this backward ends, where the optimizer runs in backward.
        """
    def begin_forward(self, train: bool) -> None: ...
    def begin_input_backward(self) -> None:
        """
        Begins a backward towards inputs of an engine that trains nothing. Collective.
        """
    def broadcast(self, tensor: torch.Tensor) -> None:
        """
        Makes rank 0's values everybody's, in place. Collective.
        """
    def close(self) -> None: ...
    def communication_bytes(self) -> dict[str, int]: ...
    def communication_ms(self) -> float: ...
    def end_backward(self) -> None: ...
    def end_forward(self) -> None: ...
    def end_gather(self, units: Sequence[int], *, modifier_rank: int) -> None: ...
    def end_input_backward(self) -> None:
        """
        Ends it; does nothing where none has begun. Collective.
        """
    def exchange(self, mine: bytes) -> bytes:
        """
        Every rank's bytes, one after the other; all ranks give equally many. Collective.
        """
    def await_all_updates(self) -> None:
        """
        Parameters that are not sharded can be read from here on in the compute stream. Collective.
        """
    def check_gradients(self) -> None:
        """
        Raises StateError where a script has put something in the place of gradients' guards, and drops gradients where
        it has dropped all guards.
        """
    def clip_gradients(self, max_norm: float) -> float:
        """
        Scales the gradients that the next step will use to at most this norm; returns the norm before. Collective.
        """
    def drop_gradients(self) -> None: ...
    def end_window(self) -> None:
        """
        Reduces what a window of fewer micro-batches has brought. Collective.
        """
    def gradient_norm(self) -> float:
        """
        Global norm of the gradients that the next step will use. Collective.
        """
    def held_steps(self) -> dict[str, int]:
        """
        Applied steps that left a parameter alone, by name, of those with any.
        """
    @property
    def is_updating(self) -> bool:
        """
        Whether the last step's updates may be under way.
        """
    def read_gradients(self, device: str) -> dict[str, torch.Tensor]:
        """
        Full gradients by name: averaged, unscaled, float32, on this device. Collective.
        """
    @property
    def window_is_reduced(self) -> bool: ...
    def write_gradients(
        self, gradients: dict[str, torch.Tensor], *, held: Sequence[str], source_rank: int
    ) -> None:
        """
        The next step uses these (those of source_rank, or where it is -1 each rank's own, which are the same) and
        leaves the held parameters alone. Collective.
        """
    def full_state(self, kind: str, *, rank0_only: bool) -> dict[str, torch.Tensor]:
        """
        Full values by parameter name, fp32; with rank0_only none on other ranks. Collective.
        """
    def gather(self, units: Sequence[int], *, may_change: bool) -> None: ...
    def has_frozen(self, unit: int) -> bool: ...
    def load_full_state(
        self,
        states: dict[str, dict[str, torch.Tensor]],
        *,
        step: int,
        loss_scale: tuple[float, int] | None,
        held_steps: dict[str, int],
    ) -> None:
        """
        Rank 0's full values by kind and parameter name, its loss_scale_state (None: it stays) and its held_steps, for
        all. Collective.
        """
    def try_wait_updates(self) -> bool:
        """
        Makes what is not sharded readable as the last step left it; False if that takes a forward or a gather.
        """
    def start_timeline(self) -> None:
        """
        Records from now on what updates, transfers and collectives do, and when.
        """
    def stop_timeline(self) -> list[tuple[str, str, str, int, int]]:
        """
        (place, what, unit, begin, end) of each, in nanoseconds of time.perf_counter_ns.
        """
    @property
    def store_chunk_numel(self) -> int:
        """
        Elements that one stage of the pipeline of offloaded state works on; 0 where there is none, or not yet.
        """
    def store_pinned(self) -> dict[str, Any]:
        """
        Host memory of offloaded state, as asked for and as taken.
        """
    def store_waited_for_files_ms(self) -> float:
        """
        Of that, while the updates themselves waited for files.
        """
    def inputs_done(self, unit: int) -> None: ...
    def outcome(self) -> tuple[bool, float]:
        """
        (applied, global gradient norm before clipping) of the last step. Blocks until it is known.
        """
    def post_forward(self, unit: int) -> None: ...
    def place_state(self, fitting_share: float) -> float:
        """
        Behind the first backward: puts the share of optimizer state on the device that fits on every rank's, of which
        this rank says its own, and returns the share on the host. Collective.
        """
    def pre_backward(self, unit: int) -> None: ...
    def pre_forward(self, unit: int) -> None: ...
    def pre_forward_with_root(self, unit: int) -> None:
        """
        Gathers a unit that a forward of stage 3 uses without a call of its module; later forwards gather it with the
        root.
        """
    def reset_counters(self) -> None: ...
    def rethrow_hook_error(self) -> None: ...
    def set_compute_stream(self, stream: int) -> None:
        """
        The native stream that the caller computes on from now on.
        """
    def step(self, groups: Sequence[AdamHyperparameters]) -> None: ...
    def stop(self, why: str, *, for_good: bool = False) -> None:
        """
        Tells peers that wait for this rank that it has stopped, until it makes its next collective call; `why` follows
        its name. Nothing once the engine was closed. From any thread.
        """
    def swap_stats(self) -> dict[str, Any]:
        """
        What state in files has moved since the engine was made; updates waited for wait_s of it.
        """
    def store_traffic(self) -> dict[str, int]:
        """
        What offloaded state moved since the engine was made. Waits for updates and transfers of files that are under
        way.
        """
    def store_waited_ms(self) -> float:
        """
        How long the callers were blocked for updates since the engine was made.
        """
    def unit_state(self, arg0: int) -> tuple[str, str]: ...
    def units(self) -> list[dict[str, Any]]: ...
    @property
    def awaits_share(self) -> bool: ...
    @property
    def ledger(self) -> Ledger: ...
    @property
    def loss_scale(self) -> float: ...
    @property
    def loss_scale_state(self) -> tuple[float, int] | None:
        """
        (scale, good steps since it changed), None where no loss is scaled.
        """
    @property
    def parameters_sharded(self) -> bool: ...
    @property
    def prefetch_bytes(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def steps_applied(self) -> int: ...
    @property
    def window_backwards(self) -> int: ...
    @property
    def world_size(self) -> int: ...

def adopt_communicator(capsule: object) -> Communicator:
    """
    Takes over the communicator that another module made.
    """

def allowed_cpus() -> list[int]:
    """
    CPUs that this process may run on.
    """

def available_host_bytes() -> int:
    """
    What the machine and this process's cgroups still have.
    """

def available_isas() -> list[str]:
    """
    Vector instruction sets that this machine and build have, worst first.
    """

def best_isa() -> str:
    """
    The instruction set that kernels use.
    """

def cpu_device_parts(*, thread_num: int, cpus: Sequence[int]) -> Any:
    """
    The CPU as the device of an engine, with threads for its optimizer.
    """

def cpus_of_numa_node(node: int) -> list[int]:
    """
    CPUs of a NUMA node, whether this process may run there or not; none for an unknown one.
    """

def install_counting_allocator() -> None:
    """
    Counts torch's CPU tensors from now on, so that process_usage_peak_bytes covers them.
    """

def io_uring_refusal() -> str | None:
    """
    Why io_uring is not usable here; None where it is.
    """

def lockable_bytes() -> int:
    """
    What mlock may still lock (RLIMIT_MEMLOCK).
    """

def make_c10d_communicator(group_name: str, *, hosts: PeerHosts | None = None) -> Communicator:
    """
    Wraps a live CPU process group of torch.distributed by its group_name. `hosts` lets an error name
    a lost rank.
    """

class PeerHosts:
    """
    The hosts of all ranks.
    """
    def __init__(self, ranks: Sequence[tuple[str, str, int]], *, own: int, listener: int) -> None:
        """
        `ranks` has each rank's host, and the address and port where the rank listens. Takes over the file descriptor
        `listener`, -1 for none.
        """
    def close(self) -> None:
        """
        Stops listening.
        """

class PacedLink:
    """
    A link that ranks pretend to have.
    """
    def __init__(self, *, bytes_per_s: float, latency_s: float) -> None: ...

def make_paced_communicator(communicator: object, *, link: PacedLink) -> Communicator:
    """
    Takes over a c10d communicator, whose operations then take the time that `link` needs.
    """

def make_shm_communicator(
    *, rank: int, world_size: int, rendezvous: str, timeout_s: float = 300.0
) -> Communicator:
    """
    Connects the ranks of one host over shared memory. Blocks until all are there.
    """

def memcpy_each(
    destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], calls: int = 1
) -> None:
    """
    The C library's memcpy from each flat tensor to its destination, in this thread, `calls` times.
    """

def numa_node_of_cpus(cpus: Sequence[int]) -> int:
    """
    The NUMA node that most of these CPUs belong to; -1 where the machine lists none.
    """

def process_usage_bytes() -> int:
    """
    Bytes of CPU tensors and engine buffers alive in this process.
    """

def process_usage_peak_bytes() -> int:
    """
    Largest process_usage_bytes since the last reset.
    """

def release_communicator(communicator: Communicator) -> object:
    """
    Gives a communicator to another module, as a capsule.
    """

def remove_stale_swap_files(directory: str) -> int:
    """
    Removes what crashed runs left in the directory; returns how many files.
    """

def reset_process_usage_peak() -> None: ...
def stream_triad(
    destination: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, factor: float, pool: ThreadPool
) -> None:
    """
    destination = a + factor * b past the caches: 12 bytes per element.
    """

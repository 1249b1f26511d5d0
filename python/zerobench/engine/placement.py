"""Place where an engine computes: a CUDA device or this rank's CPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from zerobench import _native
from zerobench.engine.config import Config, OffloadOptimizerConfig
from zerobench.engine.rank_cpus import expect_usable
from zerobench.engine.topology import Topology
from zerobench.errors import ConfigError, StateError
from zerobench.host.cpu_shares import CpuShare
from zerobench.host.facts import HostFacts
from zerobench.host.io_settings import io_choice

if TYPE_CHECKING:
    from zerobench._core import OffloadOptions, PagedStateOptions
    from zerobench._cuda import CudaDevice

# What offload_ratio auto leaves alone of the device's memory: later steps fragment torch's memory in other ways than
# the trial, and each buffer of state rounds up to the driver's pages.
_MARGIN = 0.02
_CUDA_MARGIN_BYTES = 256 << 20


class Place(ABC):
    """A device as the core and torch see it."""

    name: str  # torch's name: "cpu", "cuda:0"
    device: CudaDevice | None  # None on CPU

    @property
    def gpu_bus_id(self) -> str | None:
        """Bus id of the device, as the driver writes it; None on CPU."""
        return None

    @abstractmethod
    def parts(self, use: CpuUse) -> Any:
        """The capsule that makes an engine compute here, in the caller's stream."""

    @abstractmethod
    def stream(self) -> int:
        """The native handle of the stream that the caller computes on now."""

    @abstractmethod
    def expect_no_capture(self, what: str) -> None:
        """Raise StateError where the caller's stream is being captured into a CUDA graph."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Memory in use on a device of its own, by anyone; 0 where the device's memory is the host's."""

    @abstractmethod
    def begin_trial(self) -> None:
        """Peaks of memory count from here."""

    @abstractmethod
    def free_bytes(self, *, limit_bytes: int | None, extra_bytes: int) -> int:
        """Return the bytes that the trial left free at its peak, of the device or of a limit below it, less a margin.
        What follows holds at least ``extra_bytes`` in addition to what is allocated now."""


class CpuPlace(Place):
    """This rank's share of the CPUs."""

    name = "cpu"
    device = None

    def __init__(self, topology: Topology) -> None:
        self._ranks_on_machine = topology.place_on_machine[1]

    def parts(self, use: CpuUse) -> Any:
        return _native.load().cpu_device_parts(thread_num=use.device.num, cpus=use.device.pinned_to)

    def stream(self) -> int:
        return 0

    def expect_no_capture(self, what: str) -> None:
        pass

    def used_bytes(self) -> int:
        return 0

    def begin_trial(self) -> None:
        _native.load().reset_process_usage_peak()

    def free_bytes(self, *, limit_bytes: int | None, extra_bytes: int) -> int:
        """Return what is free by the ledger, and by torch's allocator if it is counted. Without a limit, count this
        rank's share of what the host has available."""
        core = _native.load()
        now_bytes = core.process_usage_bytes()
        peak_bytes = max(core.process_usage_peak_bytes(), now_bytes + extra_bytes)
        if limit_bytes is None:
            limit_bytes = now_bytes + core.available_host_bytes() // self._ranks_on_machine
        return limit_bytes - peak_bytes - round(_MARGIN * limit_bytes)


class CudaPlace(Place):
    """One CUDA device."""

    device: CudaDevice

    def __init__(self, index: int) -> None:
        _native.load_cuda()
        from zerobench import _cuda as cuda

        self.name = f"cuda:{index}"
        info = cuda.device_info(index)
        _native.expect_kernels_for(self.name, info.name, major=info.compute_major, minor=info.compute_minor)
        torch.cuda.set_device(index)
        torch.cuda.empty_cache()  # NCCL connects next, and asks the driver for memory only once
        self._index = index
        self.device = cuda.make_device(index, on_out_of_memory=torch.cuda.empty_cache)

    @property
    def gpu_bus_id(self) -> str | None:
        return _native.load_cuda().device_info(self._index).pci_bus_id

    def parts(self, use: CpuUse) -> Any:
        self.device.set_compute_stream(self.stream())
        return self.device.parts()

    def stream(self) -> int:
        return torch.cuda.current_stream(self._index).cuda_stream

    def expect_no_capture(self, what: str) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise StateError(
                f"{what} was captured into a CUDA graph, and a replay does not run the engine's hooks: run it outside "
                "of torch.cuda.graph(); to save launches, compile blocks with torch.compile"
            )

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._index)
        return total - free

    def begin_trial(self) -> None:
        torch.cuda.synchronize(self._index)
        torch.cuda.empty_cache()  # of the model as it was given
        torch.cuda.reset_peak_memory_stats(self._index)

    def free_bytes(self, *, limit_bytes: int | None, extra_bytes: int) -> int:
        """Return what is free by the driver's count of what all processes use, and by the peak of what torch's
        allocator took from the driver."""
        torch.cuda.synchronize(self._index)
        _, total_bytes = torch.cuda.mem_get_info(self._index)
        limit_bytes = min(limit_bytes or total_bytes, total_bytes)
        outside_bytes = self.used_bytes() - torch.cuda.memory_reserved(self._index)
        peak_bytes = max(
            torch.cuda.max_memory_reserved(self._index),
            torch.cuda.memory_allocated(self._index) + extra_bytes,
        )
        return limit_bytes - outside_bytes - peak_bytes - round(_MARGIN * limit_bytes) - _CUDA_MARGIN_BYTES


def offload_options(config: Config, topology: Topology, use: CpuUse) -> OffloadOptions | None:
    """Return where the optimizer state lies, for the core; None if it is on the device."""
    offload = config.offload_optimizer
    if offload is None:
        return None
    _native.load()
    from zerobench import _core as core

    node = core.numa_node_of_cpus(list(use.share.cpus)) if offload.numa_node == "auto" else offload.numa_node
    return core.OffloadOptions(
        ratio=None if offload.ratio == "auto" else offload.ratio,
        parameters=parameter_home(config),
        thread_num=use.offload.num,
        cpus=use.offload.pinned_to,
        numa_node=-1 if node is None else node,
        lock=offload.lock_memory,
        ranks_on_host=topology.place_on_machine[1],
        chunk_numel=offload.chunk_numel,
        paged=paged_options(offload, topology) if offload.device == "nvme" else None,
        memory_bytes=offload.host_memory_bytes,
    )


def parameter_home(config: Config) -> str:
    """Return where shards of parameters lie between gathers, in the core's terms."""
    if config.offload_param is None:
        return "device"
    return "nvme" if config.offload_param.device == "nvme" else "host"


def paged_options(offload: OffloadOptimizerConfig, topology: Topology) -> PagedStateOptions:
    """How the state lies in files; what the configuration leaves open is what `tune io` found."""
    io = io_choice(offload.nvme_path, dict(offload))
    _native.load()
    from zerobench import _core as core

    return core.PagedStateOptions(
        directories=offload.nvme_path,
        owner=f"rank{topology.rank}",
        engine=io.engine,
        block_bytes=io.block_bytes,
        depth=io.depth,
        allow_fallback=offload.io_allow_fallback,
        checksums=offload.io_checksums,
    )


def fitting_share(units: list[dict[str, Any]], *, free_bytes: int) -> float:
    """Return the share of these units' optimizer state on this rank that fits in ``free_bytes``. State that is split
    keeps a master of fp32 parameters too; if all of it is on the device, the parameters are their own masters."""
    flats = [flat for unit in units for flat in unit["flats"] if flat["trainable"]]
    numel = sum(flat["shard_numel"] for flat in flats)
    whole_bytes = sum(flat["shard_numel"] * (8 if flat["param_dtype"] == "float32" else 12) for flat in flats)
    return 1.0 if whole_bytes <= free_bytes else max(free_bytes, 0) / (12 * numel)


def keeps_parameter_shards(config: Config, communicator: str, *, remainders: bool) -> bool:
    """Masters on the host are no source for a gather, unless parameters are there too: the configuration takes no
    ``false`` there. What is left of masters with ``remainders`` is none either."""
    if config.offload_param is not None:
        return False
    if config.offload_optimizer is not None or remainders:
        return True
    if config.keep_parameter_shards is None:
        return communicator == "peer"
    return config.keep_parameter_shards


class UpdateThreads(NamedTuple):
    """Threads of the CPU's Adam; the caller counts as one."""

    num: int
    pinned_to: list[int]  # one CPU each; empty where they are not pinned

    def on(self, share: CpuShare) -> str:
        """In words, with the CPUs that they run on, or that they are meant for where they are not pinned."""
        threads = "thread" if self.num == 1 else "threads"
        return (
            f"{self.num} pinned {threads} on {share}"
            if self.pinned_to
            else f"{self.num} {threads} for {share}"
        )


class CpuUse(NamedTuple):
    """Part of its CPUs that a rank updates with."""

    share: CpuShare
    device: UpdateThreads  # of what is on the device, where that is the CPU
    offload: UpdateThreads  # of what is off the device
    text: str | None  # both in words; None where a GPU updates everything


def cpu_use(
    config: Config, topology: Topology, share: CpuShare, *, quota: float | None, beside_gpu: bool
) -> CpuUse:
    """The threads of both, by the configuration and the rank's share of its host."""
    offload = config.offload_optimizer
    device = update_threads(config, topology, share.cpus, quota=quota, asked=config.threads)
    asked = (offload and offload.threads) or config.threads
    away = update_threads(config, topology, share.cpus, quota=quota, asked=asked, beside_gpu=beside_gpu)
    used = None if beside_gpu and offload is None else device if offload is None else away
    return CpuUse(share, device, away, used and used.on(share))


def update_threads(
    config: Config,
    topology: Topology,
    cpus: Sequence[int],
    *,
    quota: float | None,
    asked: int | None,
    beside_gpu: bool = False,
) -> UpdateThreads:
    """As many as were asked for, else one for each of the rank's ``cpus``, but no more than its share of the time that
    control groups allow (``quota``): the kernel stops all threads of a group that has used up its time."""
    share = len(cpus)
    is_pinned = config.pin_threads and (config.cpus is not None or not topology.may_overlap)
    _, num_ranks = topology.place_on_machine
    if asked is None and quota is not None and (allowed := int(quota) // num_ranks) < share:
        share = max(1, allowed)
        # Other containers have the same CPUs and would pin to the first of them too.
        is_pinned = is_pinned and config.cpus is not None
    # Beside a GPU, whoever starts its work needs a core too.
    threads = asked or (share - 1 if beside_gpu and share > 2 else share)
    return UpdateThreads(threads, list(cpus) if is_pinned and threads <= len(cpus) else [])


class CudaDevices(NamedTuple):
    """The CUDA devices that torch shows this process."""

    num: int
    current: int


def read_cuda_devices() -> CudaDevices:
    """Return what torch sees. Initialises CUDA where there is a device."""
    if not torch.cuda.is_available():
        return CudaDevices(num=0, current=0)
    return CudaDevices(torch.cuda.device_count(), torch.cuda.current_device())


def choose(model: nn.Module, config: Config, topology: Topology, host: HostFacts) -> Place:
    """Return the place that ``cuda_index`` names. Raises ConfigError, also for CPUs that the host does not give."""
    expect_usable(config, host)
    index = cuda_index(model, config, topology, read_cuda_devices)
    return CpuPlace(topology) if index is None else CudaPlace(index)


def cuda_index(
    model: nn.Module, config: Config, topology: Topology, read_devices: Callable[[], CudaDevices]
) -> int | None:
    """Return the configured device, None for the CPU; by default the one that the model's parameters are on.

    Parameters on the meta device go to CUDA where torch sees a device. An engine that stays on the CPU for another
    reason asks for no devices, and so leaves CUDA alone. Raises ConfigError.
    """
    kind = config.device
    homes = {parameter.device for parameter in model.parameters()}
    on_cuda = sorted({device.index or 0 for device in homes if device.type == "cuda"})
    if kind == "auto":
        only_meta = all(device.type == "meta" for device in homes)
        kind = "cuda" if on_cuda or (only_meta and read_devices().num) else "cpu"
    if kind == "cpu":
        return None
    devices = read_devices()
    if not devices.num:
        raise ConfigError(
            "device 'cuda' was asked for and torch sees no CUDA device; remove device to train on CPU"
        )
    if len(on_cuda) > 1:
        raise ConfigError(
            f"the model's parameters are spread over the CUDA devices {on_cuda}; put a rank's model on one of them"
        )
    index = on_cuda[0] if on_cuda else _device_of_rank(topology, devices)
    if config.communicator == "peer":  # whose ranks may share devices
        index %= devices.num
    if index >= devices.num:
        raise ConfigError(
            f"rank {topology.rank} would use CUDA device {index}, by its local rank, and torch sees "
            f"{devices.num}; if each rank sees its own device only, make all devices of the host visible to it, or "
            "move its model to its device first; otherwise start at most one rank per device, or set communicator to "
            "'peer', with which ranks may share a device for trials"
        )
    return index


def _device_of_rank(topology: Topology, devices: CudaDevices) -> int:
    """Return the CUDA device of a rank whose model is on none: by the launcher's local rank, else the one that the
    script made current, else by the local rank. Local ranks of a process group begin at 0 in each group."""
    if topology.launched is not None:
        return topology.launched[0]
    return devices.current or topology.local_rank

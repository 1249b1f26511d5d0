"""Which rank this process is, and the communicators that connect it to the others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zerobench import _native
from zerobench.config import Config
from zerobench.errors import ConfigError
from zerobench.launched import expect_rank, number_in, with_slurm
from zerobench.meeting import expect_to_meet

_engines_made: Counter[str] = Counter()  # by meeting point: the ranks of one meet for their n-th engine there


@dataclass(frozen=True)
class Topology:
    """Ranks as torch.distributed counts them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def resolve(config: Config, environment: Mapping[str, str] = os.environ) -> Topology:
    """Topology from the configuration, else from torchrun's or srun's environment, else one rank."""
    if config.world_size is None:
        environment = with_slurm(environment)

    def value(configured: int | None, key: str, default: int) -> int:
        return number_in(environment, key, default=default) if configured is None else configured

    world_size = value(config.world_size, "WORLD_SIZE", 1)
    rank = value(config.rank, "RANK", 0)
    if config.world_size == 1:
        rank = 0
    expect_rank(rank, world_size)
    local_world_size = min(value(config.local_world_size, "LOCAL_WORLD_SIZE", world_size), world_size)
    local_rank = value(config.local_rank, "LOCAL_RANK", rank % max(local_world_size, 1))
    if local_rank < 0 or local_world_size < 1:
        raise ConfigError(
            f"local rank {local_rank} is none of {local_world_size} ranks; check LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    return Topology(rank, world_size, min(local_rank, local_world_size - 1), local_world_size)


@dataclass(frozen=True)
class Communicators:
    """What an engine talks over."""

    kind: str
    gather: Any
    reduce: Any
    close: Callable[[], None]  # after the engine has let go of them
    note: str | None = None  # to read times with: why "auto" did not choose what it prefers


def make_communicators(
    core: Any, config: Config, topology: Topology, device: Any | None = None
) -> Communicators:
    """Two communicators (gathers, reductions) of the configured kind. Collective.

    ``device`` is the CUDA module's device of an engine that computes there. Raises ConfigError where the kind cannot
    connect these ranks, or moves memory that the engine does not compute in.
    """
    kind: str = config.communicator
    host_kind = "shm" if topology.local_world_size == topology.world_size else "c10d"
    if kind == "auto" and device is None:
        kind = host_kind
    of_gpus = kind in ("nccl", "peer") or (kind == "auto" and device is not None)
    if of_gpus != (device is not None):
        raise ConfigError(
            f"communicator '{kind}' moves memory of GPUs and this engine computes on CPU; use 'auto', 'shm' or 'c10d'"
            if device is None
            else f"communicator '{kind}' moves host memory and this engine computes on a GPU; use 'auto', 'nccl' or "
            "'peer'"
        )
    if kind == "peer" and host_kind != "shm":
        raise ConfigError(
            f"communicator 'peer' connects GPUs of one host, but {topology.world_size} ranks are spread over several "
            f"({topology.local_world_size} here); use 'nccl'"
        )
    make_control = _make_shm if (host_kind if of_gpus else kind) == "shm" else _make_c10d
    control = make_control(core, config, topology)
    if device is None:
        return control
    may_be_peer = kind != "nccl" and host_kind == "shm" and topology.world_size > 1
    return _on_device("nccl" if kind == "auto" and not may_be_peer else kind, control, core, config, device)


def _rendezvous_from_environment(topology: Topology) -> str:
    keys = (
        "ZEROBENCH_RENDEZVOUS",
        "TORCHELASTIC_RUN_ID",
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    parts = [f"{key}={os.environ[key]}" for key in keys if key in os.environ]
    if not parts and topology.world_size > 1:
        raise ConfigError(
            "ranks cannot find each other: start them with torchrun, or set the configuration's rendezvous to the same "
            "unique text on all ranks"
        )
    return "/".join(parts) or f"pid={os.getpid()}"


def _make_shm(core: Any, config: Config, topology: Topology) -> Communicators:
    if topology.local_world_size != topology.world_size:
        raise ConfigError(
            f"communicator 'shm' connects ranks of one host, but {topology.world_size} ranks are spread over "
            f"several ({topology.local_world_size} here); use 'c10d'"
        )
    text = f"{config.rendezvous or _rendezvous_from_environment(topology)}/{topology.world_size}"
    number = _engines_made[text]
    _engines_made[text] += 1
    gather, reduce = (
        core.make_shm_communicator(
            rank=topology.rank,
            world_size=topology.world_size,
            rendezvous=f"{text}/{number}/{role}",
            timeout_s=config.timeout_s,
        )
        for role in ("gather", "reduce")
    )
    return Communicators("shm", gather, reduce, close=_nothing)


def _make_c10d(core: Any, config: Config, topology: Topology) -> Communicators:
    from datetime import timedelta

    import torch.distributed as dist

    timeout = timedelta(seconds=config.timeout_s)
    if not dist.is_initialized():  # stays: another engine would meet a store that is going away
        environment = with_slurm(os.environ)
        if topology.world_size > 1 and "MASTER_ADDR" not in environment:
            raise ConfigError(
                "communicator 'c10d' needs torch.distributed: start the ranks with torchrun, or call "
                "torch.distributed.init_process_group first"
            )
        for name in ("MASTER_ADDR", "MASTER_PORT"):  # where torch looks for them
            if name in environment:
                os.environ[name] = environment[name]
        if topology.world_size > 1:
            expect_to_meet(topology.world_size, address=environment["MASTER_ADDR"])
        store = None if "MASTER_ADDR" in environment else dist.HashStore()
        dist.init_process_group(
            "gloo", rank=topology.rank, world_size=topology.world_size, timeout=timeout, store=store
        )
    groups = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)]
    gather, reduce = (core.make_c10d_communicator(group.group_name) for group in groups)

    def close() -> None:
        for group in groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)

    return Communicators("c10d", gather, reduce, close)


def _on_device(kind: str, control: Communicators, core: Any, config: Config, device: Any) -> Communicators:
    """Communicators in the device's lanes; what ranks tell each other on the host goes over ``control``. "auto" is
    "peer" where all ranks can use it."""
    cuda = _native.load_cuda()
    given = {"device": device, "timeout_s": config.timeout_s}
    shared = (
        _shared_gpus(control.gather, cuda.device_info(device.ordinal).pci_bus_id) if kind == "peer" else None
    )
    gather, reduce = (core.release_communicator(c) for c in (control.gather, control.reduce))
    obstacle = cuda.peer_obstacle(control=gather, **given) if kind == "auto" else ""
    if kind == "auto":
        kind = "nccl" if obstacle else "peer"
    make = cuda.make_peer_communicator if kind == "peer" else cuda.make_nccl_communicator

    gather, reduce = (
        core.adopt_communicator(make(lane=lane, control=capsule, **given))
        for lane, capsule in (("gather", gather), ("reduce", reduce))
    )
    note = f"not peer: {obstacle}" if obstacle else shared
    return Communicators(kind, gather, reduce, control.close, note)


def _shared_gpus(control: Any, pci_bus_id: str) -> str | None:
    """Says so where ranks of this host share GPUs. Collective."""
    width = 32
    everyones = control.exchange(pci_bus_id.encode().ljust(width)[:width])
    num_gpus = len({everyones[at : at + width] for at in range(0, len(everyones), width)})
    if num_gpus == control.world_size:
        return None
    gpus = "one GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
    return f"{control.world_size} ranks take turns on {gpus}, so their times say nothing"


def _nothing() -> None:
    pass

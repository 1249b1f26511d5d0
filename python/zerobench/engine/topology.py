"""Which rank this process is, and the communicators that connect it to the others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerobench import _native
from zerobench.engine.config import Config
from zerobench.engine.presence import make_peer_hosts
from zerobench.engine.process_groups import RankGroup, find_group, make_gloo_groups, meet
from zerobench.errors import ConfigError
from zerobench.host.facts import HostFacts
from zerobench.host.identity import HOST_VARIABLE
from zerobench.host.launched import TORCHRUN, LaunchedRank, expect_rank, find_rank, find_same_rank, with_slurm
from zerobench.host.meeting import expect_to_meet
from zerobench.host.network import NATIVE, NETWORK_VARIABLE, Link, parse_network
from zerobench.host.places import Place

if TYPE_CHECKING:
    from zerobench._core import Communicator
    from zerobench._cuda import CudaDevice

_engines_made: Counter[str] = Counter()  # by meeting point: the ranks of one meet for their n-th engine there


@dataclass(frozen=True)
class Topology:
    """Ranks as torch.distributed counts them. Local ranks are the engine's ranks on this host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    # Local rank and world size as a launcher or the configuration gives them; they count ranks outside of the engine
    # too. None where neither does.
    launched: Place | None = field(default=None, compare=False)
    met_on_machine: Place | None = field(default=None, compare=False)  # None where ranks did not meet
    is_part: bool = field(default=False, compare=False)  # the default process group has more ranks
    meeting_point: str | None = field(default=None, compare=False, repr=False)

    @property
    def place_on_machine(self) -> Place:
        """Index and number of this process among those that divide the machine's CPUs and memory."""
        return self.met_on_machine or self.launched or (self.local_rank, self.local_world_size)

    @property
    def may_overlap(self) -> bool:
        """True if another group's ranks may have the same place on the machine, since no launcher gave places."""
        return self.is_part and self.launched != self.place_on_machine


def group_of_ranks(config: Config, host: HostFacts, given: Any | None = None) -> RankGroup | None:
    """Return the process group whose ranks train, or None where all of them are on one host by their launcher's
    numbers.

    Ranks of several launchers may be on one host all the same. Where their variables name an address, this makes
    torch.distributed's default group, in which they tell each other. Collective then.
    """
    identities = {"host": host.identity, "machine": host.machine}
    if group := find_group(given, **identities):
        return group
    topology = resolve(config, host.environment)
    is_named = bool(host.environment.get(HOST_VARIABLE))
    is_on_one_host = topology.local_world_size == topology.world_size and not is_named
    if topology.world_size == 1 or is_on_one_host:
        return None
    if _missing_address(with_slurm(host.environment)) and not is_named:
        return None
    _init_process_group(config, topology, host.environment)
    return find_group(None, **identities)


def resolve(config: Config, environment: Mapping[str, str], group: RankGroup | None = None) -> Topology:
    """Return this process's place among the ranks. The first source that gives rank and world size counts: the
    configuration, the process group, the environment (launched.py). Collective where there is a process group.

    Raises ConfigError where sources disagree or are half set, CommunicationError where ranks of the group are missing.
    """
    rank, world_size = (
        _in_environment(config, environment) if group is None else _in_group(config, environment, group)
    )
    of_launch = (rank, world_size) if group is None else group.launch
    launched = find_same_rank(environment, *of_launch)
    told = _told_place(launched)
    on_machine = None
    if group is None:
        local_rank, local_world_size = told or (rank, world_size)
        launcher = launched.launcher if launched else TORCHRUN
        point = config.rendezvous or launcher.meeting_point(environment)
    else:
        point, (local_rank, local_world_size), on_machine = meet(
            group, launched=_configured_place(config) or told, timeout_s=config.timeout_s
        )
        point = "/".join(filter(None, (config.rendezvous, point)))
    if config.local_world_size is not None:
        local_world_size = min(config.local_world_size, world_size)
        local_rank = local_rank if local_rank < local_world_size else rank % local_world_size
    if config.local_rank is not None:
        expect_rank(
            config.local_rank, local_world_size, names=("local_rank", "local_world_size"), noun="local rank"
        )
        local_rank = config.local_rank
        told = local_rank, local_world_size
    return Topology(
        rank,
        world_size,
        local_rank,
        local_world_size,
        launched=told,
        met_on_machine=on_machine,
        is_part=world_size < of_launch[1],
        meeting_point=point,
    )


def _is_configured(config: Config) -> bool:
    return config.world_size == 1 or (config.rank is not None and config.world_size is not None)


def _in_group(config: Config, environment: Mapping[str, str], group: RankGroup) -> tuple[int, int]:
    """Return rank and world size of the group, which no higher source contradicts."""
    rank, world_size = group.rank, group.world_size
    where = (
        "the group that was passed as process_group"
        if group.is_given
        else "torch.distributed's default process group"
    )
    _expect_configured(
        config,
        rank,
        world_size,
        f"{where} makes this process rank {rank} of {world_size}",
        "or pass the group of the ranks that train as process_group",
    )
    given = environment.get(TORCHRUN.rank), environment.get(TORCHRUN.world_size)
    contradicts = all(given) and given != (str(rank), str(world_size))
    if contradicts and not group.is_given and not _is_configured(config):
        raise ConfigError(
            f"RANK={given[0]} and WORLD_SIZE={given[1]} disagree with {where}, which makes this process rank {rank} of "
            f"{world_size}. Give both the same values; where the variables count hosts, pass "
            "process_group=torch.distributed.group.WORLD."
        )
    return rank, world_size


def _in_environment(config: Config, environment: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and world size of the configuration, else of the environment, else one rank."""
    if _is_configured(config):
        assert config.world_size is not None
        return config.rank or 0, config.world_size
    found = find_rank(environment)
    if found is not None:
        variables = f"{found.launcher.rank}={found.rank} and {found.launcher.world_size}={found.world_size}"
        _expect_configured(config, found.rank, found.world_size, f"the environment has {variables}")
        return found.rank, found.world_size
    if config.rank is not None or config.world_size is not None:
        names = ("rank", "world_size") if config.world_size is None else ("world_size", "rank")
        raise ConfigError(
            f"the configuration sets {names[0]}={getattr(config, names[0])} and not {names[1]}. Set both, or remove it "
            "and start the ranks with torchrun."
        )
    return 0, 1


def _expect_configured(config: Config, rank: int, world_size: int, other: str, cure: str = "") -> None:
    """Raise ConfigError where the configuration sets other numbers than the ``other`` source."""
    given = {"rank": config.rank, "world_size": config.world_size}
    given = {name: value for name, value in given.items() if value is not None}
    if any(value != {"rank": rank, "world_size": world_size}[name] for name, value in given.items()):
        said = " and ".join(f"{name}={value}" for name, value in given.items())
        ways = ", ".join(filter(None, (f"Remove {' and '.join(given)} from the configuration", cure)))
        raise ConfigError(f"the configuration sets {said}, but {other}. {ways}.")


def _configured_place(config: Config) -> Place | None:
    if config.local_rank is None or config.local_world_size is None:
        return None
    return config.local_rank, config.local_world_size


def _told_place(launched: LaunchedRank | None) -> tuple[int, int] | None:
    """Return local rank and world size where the launcher sets one of them."""
    if launched is None or (launched.local_rank is None and launched.local_world_size is None):
        return None
    local_world_size = min(launched.local_world_size or launched.world_size, launched.world_size)
    local_rank = launched.rank if launched.local_rank is None else launched.local_rank
    if launched.local_rank is None:
        local_rank %= local_world_size
    return min(local_rank, local_world_size - 1), local_world_size


@dataclass(frozen=True)
class Communicators:
    """Communicators of an engine, for gathers and for reductions."""

    kind: str
    gather: Communicator
    reduce: Communicator
    close: Callable[[], None]  # after the engine has let go of them
    note: str | None = None  # to read times with: why "auto" did not choose what it prefers


def make_communicators(
    core: Any,
    config: Config,
    topology: Topology,
    device: CudaDevice | None = None,
    process_group: Any | None = None,
    *,
    environment: Mapping[str, str],
) -> Communicators:
    """Make two communicators (gathers, reductions) of the configured kind. Collective.

    ``device`` is the CUDA module's device of an engine that computes there. ``process_group`` is the one that
    ``topology`` was resolved with, and so is ``environment``. Raises ConfigError where the kind cannot connect these
    ranks, or moves memory that the engine does not compute in.
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
    link = _find_link(topology, environment)
    control = (
        _make_shm(core, config, topology)
        if (host_kind if of_gpus else kind) == "shm"
        else _make_c10d(core, config, topology, process_group, environment, link)
    )
    if device is None:
        return control
    may_be_peer = kind != "nccl" and host_kind == "shm" and topology.world_size > 1
    kind = "nccl" if kind == "auto" and not may_be_peer else kind
    return _on_device(kind, control, core, config, device, link)


def _find_link(topology: Topology, environment: Mapping[str, str]) -> Link | None:
    """Return the link whose time collectives take, None where they take their own.

    Raises ConfigError where ranks share a host, and so a link.
    """
    link = parse_network(environment.get(NETWORK_VARIABLE) or NATIVE, source=NETWORK_VARIABLE)
    if link is None or topology.world_size == 1:
        return None
    if topology.local_world_size != 1:
        raise ConfigError(
            f"{NETWORK_VARIABLE} gives each host of one rank a link, and {topology.local_world_size} ranks are on this "
            f"host: set {HOST_VARIABLE} to another text on each rank, or unset {NETWORK_VARIABLE}"
        )
    return link


def _make_shm(core: Any, config: Config, topology: Topology) -> Communicators:
    if topology.local_world_size != topology.world_size:
        raise ConfigError(
            f"communicator 'shm' connects ranks of one host, but {topology.world_size} ranks are spread over "
            f"several ({topology.local_world_size} here); use 'c10d'"
        )
    point = topology.meeting_point
    if point is None and topology.world_size > 1:
        raise ConfigError(
            "ranks cannot find each other: nothing names their meeting point. Start them with torchrun, or set the "
            "configuration's rendezvous, or the variable ZEROBENCH_RENDEZVOUS, to the same unique text on all ranks."
        )
    text = f"{point or f'pid={os.getpid()}'}/{topology.world_size}"
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


def _make_c10d(
    core: Any,
    config: Config,
    topology: Topology,
    group: Any | None,
    environment: Mapping[str, str],
    link: Link | None,
) -> Communicators:
    import torch.distributed as dist

    if not dist.is_initialized():  # stays: another engine would meet a store that is going away
        _init_process_group(config, topology, environment)
    groups = make_gloo_groups(group, point=topology.meeting_point, num=2, timeout_s=config.timeout_s)
    hosts = make_peer_hosts(core, groups[0], environment)
    gather, reduce = (core.make_c10d_communicator(each.group_name, hosts=hosts) for each in groups)
    if link is not None:
        shared = core.PacedLink(bytes_per_s=link.data_bytes_per_s, latency_s=link.latency_s)
        gather, reduce = (core.make_paced_communicator(each, link=shared) for each in (gather, reduce))

    def close() -> None:
        hosts.close()
        for each in groups:
            if dist.is_initialized():
                dist.destroy_process_group(each)

    return Communicators("c10d", gather, reduce, close)


def _init_process_group(config: Config, topology: Topology, environment: Mapping[str, str]) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    environment = with_slurm(environment)
    if topology.world_size > 1:
        if missing := _missing_address(environment):
            raise ConfigError(
                f"communicator 'c10d' needs torch.distributed, and {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set: start the ranks with torchrun, set MASTER_ADDR to "
                "rank 0's host and MASTER_PORT to a free port there, or call torch.distributed.init_process_group first"
            )
        for name in ("MASTER_ADDR", "MASTER_PORT"):  # where torch looks for them
            os.environ[name] = environment[name]
        expect_to_meet(topology.world_size, address=environment["MASTER_ADDR"])
    dist.init_process_group(
        "gloo",
        rank=topology.rank,
        world_size=topology.world_size,
        timeout=timedelta(seconds=config.timeout_s),
        store=dist.HashStore() if topology.world_size == 1 else None,
    )


def _missing_address(environment: Mapping[str, str]) -> list[str]:
    return [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]


def _on_device(
    kind: str, control: Communicators, core: Any, config: Config, device: CudaDevice, link: Link | None
) -> Communicators:
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
    if link is not None:  # then ranks are of several hosts, and the kind is nccl
        given["link"] = cuda.DeviceLink(
            device=device, bytes_per_s=link.data_bytes_per_s, latency_s=link.latency_s
        )
    gather, reduce = (
        core.adopt_communicator(make(lane=lane, control=capsule, **given))
        for lane, capsule in (("gather", gather), ("reduce", reduce))
    )
    note = f"not peer: {obstacle}" if obstacle else shared
    return Communicators(kind, gather, reduce, control.close, note)


def _shared_gpus(control: Communicator, pci_bus_id: str) -> str | None:
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

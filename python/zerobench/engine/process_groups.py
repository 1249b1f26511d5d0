"""Ranks by a process group of torch.distributed, which tell each other where they are over the group's store.

A store serves groups of every backend: NCCL ranks exchange texts before they have chosen a GPU.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

from zerobench.errors import CommunicationError, ConfigError
from zerobench.host.places import Place, place_among

_POLL_S = (0.001, 0.05)  # between two looks into the store: at first, and at most


class Meeting(NamedTuple):
    """A meeting point and places that a group agreed on."""

    point: str  # no other group or engine has this text
    local: Place  # among the group's ranks on this host
    on_machine: Place  # among all known ranks on this machine, which share its cores


@dataclass(frozen=True)
class RankGroup:
    """The process group whose ranks train, as one of them knows it."""

    rank: int
    world_size: int
    launch: tuple[int, int]  # rank and world size in the default process group
    host: str  # equal on ranks of one host
    machine: str  # equal on ranks of one machine
    store: Any | None  # by which the ranks tell each other texts; None where there is none
    handle: Any  # torch's group
    is_given: bool  # to initialize; else it is the default process group


def find_group(given: Any | None, *, host: str, machine: str) -> RankGroup | None:
    """Return the ``given`` process group, else torch.distributed's default one, or None where there is none. ``host``
    and ``machine`` are the identities of this process's.

    Raises ConfigError where ``given`` is not a process group that this process is a rank of.
    """
    import torch.distributed as dist

    if given is not None:
        _expect_member(given)
    everyone = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    group: Any = everyone if given is None else given
    if group is None:
        return None
    place = group.rank(), group.size()
    has_store = group.size() > 1 and dist.get_backend(group) != "mpi"
    return RankGroup(
        *place,
        launch=place if everyone is None else (everyone.rank(), everyone.size()),
        host=host,
        machine=machine,
        store=group.get_group_store() if has_store else None,
        handle=group,
        is_given=given is not None,
    )


def _expect_member(group: Any) -> None:
    """Raise ConfigError for what is not a process group that this process is a rank of."""
    import torch.distributed as dist

    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigError(
            "this process is not in the group that was passed as process_group. Call zerobench.initialize only on the "
            "ranks of the group."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group is a {type(group).__name__}. Pass a process group of torch.distributed, such as "
            "torch.distributed.group.WORLD or what new_group or DeviceMesh.get_group returns."
        )


def meet(group: RankGroup, *, launched: Place | None, timeout_s: float) -> Meeting:
    """Agree on a meeting point and on places. Collective over the group.

    ``launched`` is the local rank and world size that a launcher gave this rank. Ranks of one host whose launchers gave
    none, or gave numbers that do not fit together, are numbered in the group's order. So are ranks of one machine.
    """
    is_whole = group.launch == (group.rank, group.world_size)
    mine: dict[str, Any] = {
        "host": group.host,
        "machine": group.machine,
        "local": launched if is_whole else None,  # else it counts ranks outside of the group too
        "launched": launched,
        "point": uuid.uuid4().hex,
    }
    everyone = [mine] if group.world_size == 1 else _exchange(group, mine, timeout_s=timeout_s)
    told = {key: [its[key] for its in everyone] for key in mine}
    return Meeting(
        told["point"][0],
        local=place_among(group.rank, told["host"], told["local"]),
        on_machine=place_among(
            group.rank, told["machine"], told["launched"], is_part=group.world_size < group.launch[1]
        ),
    )


def make_gloo_groups(group: Any, *, point: str | None, num: int, timeout_s: float) -> list[Any]:
    """Make process groups of the ranks of ``group``, or of all ranks where it is None. Collective over these ranks.

    ``new_group`` would need every rank of the default group, or, with ``use_local_synchronization``, as many groups on
    each rank: it makes its name of their number.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    timeout = timedelta(seconds=timeout_s)
    if group is None or group is dist.group.WORLD:
        return [dist.new_group(backend="gloo", timeout=timeout) for _ in range(num)]
    ranks = dist.get_process_group_ranks(group)
    made = []
    for index in range(num):
        name: Any = f"zerobench-{point}-{index}"
        each, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            group.rank(),
            ranks,
            dist.Backend("gloo"),
            group.get_group_store(),
            name,
            timeout=timeout,
        )
        distributed_c10d._world.pg_group_ranks[each] = {rank: at for at, rank in enumerate(ranks)}
        made.append(each)
    return made


def _exchange(group: RankGroup, mine: dict[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
    """Return every rank's facts, by rank. Rank 0 collects them, so that each other rank reads one key."""
    import torch.distributed as dist

    store, rank = group.store, group.rank
    if store is None:
        facts: list[Any] = [None] * group.world_size
        dist.all_gather_object(facts, mine, group=group.handle)
        return facts
    # By number, and counted after success only: ranks that miss each other once can meet at the next try.
    counter = f"zerobench/engines/{rank}"
    prefix = f"zerobench/{store.add(counter, 0)}"
    keys = [f"{prefix}/{other}" for other in range(group.world_size)]
    store.set(keys[rank], json.dumps(mine))
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        for other in range(1, group.world_size):
            _await(store, keys[other], deadline, f"rank {other} of the process group", timeout_s)
        store.set(f"{prefix}/all", json.dumps([json.loads(text) for text in store.multi_get(keys)]))
    else:
        _await(store, f"{prefix}/all", deadline, "a rank of the process group", timeout_s)
    everyone = json.loads(store.get(f"{prefix}/all"))
    store.add(counter, 1)
    return everyone


def _await(store: Any, key: str, deadline: float, who: str, timeout_s: float) -> None:
    # Short looks: a wait in the store neither hears Ctrl-C nor times out without log lines of torch's.
    for pause_s in _pauses():
        if store.check([key]):
            return
        if time.monotonic() >= deadline:
            raise CommunicationError(
                f"{who} did not call zerobench.initialize within timeout_s={timeout_s:g} seconds. Call it on every "
                "rank of the group, or pass the group of the ranks that train as process_group."
            )
        time.sleep(pause_s)


def _pauses() -> Iterator[float]:
    pause_s, most_s = _POLL_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, most_s)

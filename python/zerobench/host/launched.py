"""Environment variables by which launchers number ranks: one table, read by precedence."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from zerobench.errors import ConfigError


class LaunchedRank(NamedTuple):
    """A rank as its launcher numbers it. Local numbers are None where the launcher does not set them."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None


@dataclass(frozen=True)
class Launcher:
    """The environment variables that a launcher sets."""

    name: str
    rank: str
    world_size: str
    local_rank: tuple[str, ...]  # the first that is set
    local_world_size: tuple[str, ...]
    job: tuple[str, ...]  # equal on the ranks of one host, and together another text for every launch
    own_options: tuple[
        str, ...
    ] = ()  # which the launcher reads itself, so they alone mean that it did not run

    def find(self, environment: Mapping[str, str]) -> LaunchedRank | None:
        """Return this process's rank, or None where this launcher did not start it. Raise ConfigError for half of the
        variables and for numbers that are out of range."""
        given = {name: environment[name] for name in (self.rank, self.world_size) if environment.get(name)}
        options = [name for name in self.own_options if environment.get(name)]
        if options and self.rank not in given:
            raise ConfigError(
                f"{options[0]}={environment[options[0]]} is an option of {self.name}, and {self.rank} is not set. "
                f"Start the script with `{self.name}`, or unset the variable."
            )
        if not given:
            return None
        world_size = number_in(environment, self.world_size) if self.world_size in given else None
        if world_size is None or (world_size > 1 and self.rank not in given):
            is_set, missing = (self.rank, self.world_size)[:: 1 if world_size is None else -1]
            raise ConfigError(
                f"{is_set}={given[is_set]} is set and {missing} is not. Set both or neither, or start the ranks with "
                f"{self.name}."
            )
        rank = number_in(environment, self.rank, default=0)
        expect_rank(rank, world_size, names=(self.rank, self.world_size))
        return LaunchedRank(self, rank, world_size, *self._local(environment, world_size))

    def meeting_point(self, environment: Mapping[str, str]) -> str | None:
        """Return a text that only the ranks of one launch share, or None where the variables hold none."""
        names = ("ZEROBENCH_RENDEZVOUS", *self.job, "MASTER_ADDR", "MASTER_PORT")
        return "/".join(f"{name}={environment[name]}" for name in names if environment.get(name)) or None

    def _local(self, environment: Mapping[str, str], world_size: int) -> tuple[int | None, int | None]:
        rank_name, size_name = (
            next((name for name in names if environment.get(name)), None)
            for names in (self.local_rank, self.local_world_size)
        )
        local_rank = number_in(environment, rank_name) if rank_name else None
        local_world_size = number_in(environment, size_name) if size_name else None
        if rank_name or size_name:
            expect_rank(
                local_rank or 0,
                world_size if local_world_size is None else local_world_size,
                names=(rank_name or self.local_rank[0], size_name or self.world_size),
                noun="local rank",
            )
        return local_rank, local_world_size


class _Srun(Launcher):
    """A step of several tasks. ``SLURM_PROCID`` alone is also set in a batch script, which is one process."""

    def find(self, environment: Mapping[str, str]) -> LaunchedRank | None:
        num_tasks = number_in(environment, self.world_size, default=1)
        if num_tasks == 1 or _of_a_daemon(num_tasks, environment):
            return None
        rank = number_in(environment, self.rank)
        expect_rank(rank, num_tasks, names=(self.rank, self.world_size))
        local_rank, local_world_size = (
            number_in(environment, self.local_rank[0]),
            _slurm_tasks_here(environment),
        )
        names = (self.local_rank[0], self.local_world_size[0])
        expect_rank(local_rank, local_world_size, names=names, noun="local rank")
        return LaunchedRank(self, rank, num_tasks, local_rank, local_world_size)


TORCHRUN = Launcher(
    "torchrun",
    rank="RANK",
    world_size="WORLD_SIZE",
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    job=("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID"),
    own_options=(
        "PET_NPROC_PER_NODE", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT",
        "PET_RDZV_BACKEND", "PET_RDZV_ID", "PET_STANDALONE",
    ),
)  # fmt: skip
SRUN = _Srun(
    "srun",
    rank="SLURM_PROCID",
    world_size="SLURM_STEP_NUM_TASKS",
    local_rank=("SLURM_LOCALID",),
    local_world_size=("SLURM_STEP_TASKS_PER_NODE",),
    job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_MPI = (
    Launcher(
        "Open MPI's mpirun",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    # MPICH's Hydra names no job: its ranks need ZEROBENCH_RENDEZVOUS.
    Launcher(
        "an MPI launcher that sets PMI_RANK",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        job=("I_MPI_HYDRA_UUID", "PALS_APID", "PMI_JOBID"),
    ),
)
LAUNCHERS = (TORCHRUN, SRUN, *_MPI)  # by precedence

# Sizes of launchers that the table does not read: more than one rank, and no way to tell which.
_OTHER_SIZES = (
    "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE",
)  # fmt: skip


def find_rank(environment: Mapping[str, str]) -> LaunchedRank | None:
    """Return what the first launcher of the table that started this process tells, or None in a process of its own.

    Raises ConfigError for variables that are half set, and where a launcher started several ranks that it does not
    number in a known way.
    """
    for launcher in LAUNCHERS:
        if found := launcher.find(environment):
            return found
    for name in _OTHER_SIZES:
        if number_in(environment, name, default=1) > 1:
            raise ConfigError(
                f"{name}={environment[name]} means several ranks, and no known variable gives this process its rank. "
                "Set RANK and WORLD_SIZE, start the ranks with torchrun, or unset the variable to train on one rank."
            )
    return None


def find_same_rank(environment: Mapping[str, str], rank: int, world_size: int) -> LaunchedRank | None:
    """Return what a launcher tells that gives this very rank, or None. Other variables are not judged."""
    for launcher in LAUNCHERS:
        with contextlib.suppress(ConfigError):
            found = launcher.find(environment)
            if found and (found.rank, found.world_size) == (rank, world_size):
                return found
    return None


def with_slurm(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment, with torchrun's variables where only srun's tell of several ranks. Raise ConfigError for
    what is missing or odd among these."""
    if "WORLD_SIZE" in environment or "SLURM_PROCID" not in environment:
        return environment
    launched = SRUN.find(environment)
    if launched is None:
        return environment
    found = {
        "RANK": str(launched.rank),
        "WORLD_SIZE": str(launched.world_size),
        "LOCAL_RANK": str(launched.local_rank),
        "LOCAL_WORLD_SIZE": str(launched.local_world_size),
    }
    if "MASTER_ADDR" not in environment:
        found["MASTER_ADDR"] = slurm_first_host(_text_in(environment, "SLURM_STEP_NODELIST"))
    if "MASTER_PORT" not in environment:
        found["MASTER_PORT"] = str(20000 + number_in(environment, "SLURM_JOB_ID") % 10000)
    return {**environment, **found}


def number_in(environment: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    """Return a whole number from the environment, or ``default`` where the variable is not set or empty."""
    if default is not None and not environment.get(name):
        return default
    text = _text_in(environment, name)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name} is '{text}', not a number") from None


def expect_rank(
    rank: int, world_size: int, *, names: tuple[str, str] = ("RANK", "WORLD_SIZE"), noun: str = "rank"
) -> None:
    """Raise ConfigError for a rank that is out of range."""
    if world_size < 1:
        raise ConfigError(f"{names[1]}={world_size} is out of range: it counts ranks and must be 1 or more.")
    if not 0 <= rank < world_size:
        allowed = f"the only {noun} is 0" if world_size == 1 else f"{noun}s are 0 to {world_size - 1}"
        raise ConfigError(f"{names[0]}={rank} is out of range: with {names[1]}={world_size}, {allowed}.")


def slurm_first_host(nodes: str) -> str:
    """Return the first host of a list such as n[08-11,15]-ib,login."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    assert match is not None  # it matches the empty text, too
    return "".join(part or "" for part in match.groups())


def _of_a_daemon(num_tasks: int, environment: Mapping[str, str]) -> bool:
    """Return whether the step is mpirun's: in a Slurm job mpirun starts a daemon a host by srun, and the ranks inherit
    the daemon's variables."""
    for launcher in _MPI:
        with contextlib.suppress(ConfigError):
            found = launcher.find(environment)
            if found and found.world_size != num_tasks:
                return True
    return False


def _slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """Return this node's entry of SLURM_STEP_TASKS_PER_NODE, such as 4(x2),3."""
    text, node = _text_in(environment, "SLURM_STEP_TASKS_PER_NODE"), number_in(environment, "SLURM_NODEID")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(
                f"the environment variable SLURM_STEP_TASKS_PER_NODE is '{text}', not as srun sets it"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if not 0 <= node < len(counts):
        raise ConfigError(f"SLURM_NODEID is {node} and SLURM_STEP_TASKS_PER_NODE '{text}' has no such node")
    return counts[node]


def _text_in(environment: Mapping[str, Any], name: str) -> str:
    if not environment.get(name):
        raise ConfigError(
            f"the environment variable {name} is missing, which torchrun and srun set: start the ranks with one of them"
        )
    return str(environment[name])

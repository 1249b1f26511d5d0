"""What torchrun or srun tell a process of its place among the ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from zerobench.errors import ConfigError

_SLURM = {
    "RANK": "SLURM_PROCID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "LOCAL_RANK": "SLURM_LOCALID",
}


def with_slurm(environment: Mapping[str, str]) -> Mapping[str, str]:
    """The environment, with torchrun's variables where only srun's tell of several ranks. Raises ConfigError for what
    is missing or odd among these."""
    # SLURM_PROCID alone is also set in a batch script, which is one process; a step has its number of tasks.
    if "WORLD_SIZE" in environment or "SLURM_PROCID" not in environment:
        return environment
    if number_in(environment, "SLURM_STEP_NUM_TASKS", default=1) == 1:
        return environment
    found = {name: str(number_in(environment, slurm)) for name, slurm in _SLURM.items()}
    found["LOCAL_WORLD_SIZE"] = str(_slurm_tasks_here(environment))
    if "MASTER_ADDR" not in environment:
        found["MASTER_ADDR"] = slurm_first_host(_text_in(environment, "SLURM_STEP_NODELIST"))
    if "MASTER_PORT" not in environment:
        found["MASTER_PORT"] = str(20000 + number_in(environment, "SLURM_JOB_ID") % 10000)
    return {**environment, **found}


def number_in(environment: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    """A whole number from the environment."""
    if default is not None and name not in environment:
        return default
    text = _text_in(environment, name)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name} is '{text}', not a number") from None


def expect_rank(rank: int, world_size: int) -> None:
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank {rank} is none of {world_size} ranks, which count from 0; check RANK and WORLD_SIZE"
        )


def slurm_first_host(nodes: str) -> str:
    """Of a list such as n[08-11,15]-ib,login."""
    match = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    assert match is not None  # it matches the empty text, too
    return "".join(part or "" for part in match.groups())


def _slurm_tasks_here(environment: Mapping[str, str]) -> int:
    """This node's entry of SLURM_STEP_TASKS_PER_NODE, such as 4(x2),3."""
    text, node = _text_in(environment, "SLURM_STEP_TASKS_PER_NODE"), number_in(environment, "SLURM_NODEID")
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(
                f"the environment variable SLURM_STEP_TASKS_PER_NODE is '{text}', not as srun sets it"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise ConfigError(f"SLURM_NODEID is {node} and SLURM_STEP_TASKS_PER_NODE '{text}' has no such node")
    return counts[node]


def _text_in(environment: Mapping[str, Any], name: str) -> str:
    if not environment.get(name):
        raise ConfigError(
            f"the environment variable {name} is missing, which torchrun and srun set: start the ranks with one of them"
        )
    return str(environment[name])

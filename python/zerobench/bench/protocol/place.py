"""A rank's place among the ranks of its machine, which jobs hand to it in its environment. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class MachinePlace(NamedTuple):
    """Place of a rank among the ranks of its machine."""

    num_ranks: int  # that share memory and disks
    core_rank: int  # among the ranks that share this one's cores
    num_core_ranks: int

    @classmethod
    def of_one_launcher(cls, local_rank: int, local_world_size: int) -> MachinePlace:
        """Return the place of a rank whose launcher started all ranks of the machine."""
        return cls(local_world_size, local_rank, local_world_size)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> MachinePlace:
        return cls(*(int(environment[name]) for name in _VARIABLES))

    def environment(self) -> dict[str, str]:
        return {name: str(value) for name, value in zip(_VARIABLES, self, strict=True)}


_VARIABLES = ("ZEROBENCH_MACHINE_RANKS", "ZEROBENCH_CORE_RANK", "ZEROBENCH_CORE_RANKS")

"""Ranks that torchrun or Slurm started."""

from __future__ import annotations

import pytest

from zerobench.bench.given import given_ranks, slurm_first_host
from zerobench.errors import ConfigError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "70001", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "a,b",
}  # fmt: skip


def test_ranks_of_torchrun_and_srun_are_found() -> None:
    for environment in (TORCHRUN, SRUN):
        given = given_ranks(environment)
        assert given is not None
        assert (given.rank, given.world_size, given.local_rank, given.local_world_size) == (3, 4, 1, 2)
    assert given_ranks({}) is None
    # A batch script has a process id and one process.
    assert given_ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        given_ranks({key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"})
    assert slurm_first_host("one,two") == "one"

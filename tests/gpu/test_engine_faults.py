"""Faults of a training engine on GPUs: a rank killed in backward, and a gradient that is not a number.

tests/dist makes engines of CPU ranks meet the same (test_lost_ranks.py, test_exceptions.py).
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import engine_faults
import ranks
from gpu_ranks import KINDS, SLACK_S, needs_gpus, prepare

TIMEOUT_S = 20.0
START_S = 120.0  # what processes, devices and communicators may take to start
CHECKS = [
    (stage, precision, communicator, world_size)
    for world_size, communicator in ((1, "auto"), (2, "peer"))
    for stage in (0, 1, 3)
    for precision in ("bf16", "fp16")
]


def lose_a_rank(rank: ranks.Rank, stage: int, kind: str) -> dict[str, Any]:
    return engine_faults.killed_in_backward(
        rank, stage, prepare(rank), communicator=kind, timeout_s=TIMEOUT_S
    )


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=needs_gpus(kind, 2)) for kind in KINDS])
def test_a_rank_killed_in_backward_is_named_by_the_other(kind: str, stage: int) -> None:
    victim = engine_faults.VICTIM
    with ranks.Group(lose_a_rank, stage, kind) as group:
        group.wait([victim], timeout_s=START_S)
        assert group.outcomes[victim].exit_code == -signal.SIGKILL, group.outcomes[victim]
        group.wait([0], timeout_s=TIMEOUT_S + SLACK_S)
    survivor = group.outcomes[0]
    assert survivor.error is None and survivor.exit_code == 0, survivor
    assert engine_faults.NAMES_THE_DEAD.fullmatch(survivor.value["error"]), survivor.value["error"]
    assert survivor.value["rank"] == victim
    assert survivor.value["step"] in (2, 3)  # the device was behind
    assert survivor.value["again"] == [survivor.value["error"]] * 2
    assert survivor.value["closing_s"] < SLACK_S


def meet_a_nan(rank: ranks.Rank, stage: int, precision: str, communicator: str) -> None:
    device = prepare(rank)
    if precision == "fp16":
        engine_faults.not_a_number_in_fp16(rank, stage, device, communicator=communicator)
    else:
        engine_faults.not_a_number(rank, stage, precision, device, communicator=communicator)


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple, list[str | None]]:
    """Return the error of each rank, by check."""
    found = {}
    for world_size in (1, 2):
        mine = [check for check in CHECKS if check[-1] == world_size]
        runs = [(meet_a_nan, check[:-1]) for check in mine]
        by_rank = ranks.run(ranks.run_checks, runs, world_size=world_size, timeout_s=200.0)
        found |= dict(zip(mine, zip(*by_rank, strict=True), strict=True))
    return found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: "-".join(map(str, check)))
def test_a_gradient_that_is_not_a_number(outcomes, check) -> None:
    for rank, error in enumerate(outcomes[check]):
        assert error is None, f"rank {rank}: {error}"

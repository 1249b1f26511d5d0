"""A rank that falls away while the others' GPUs wait for it: they hear of it at once, whatever the timeout.

tests/dist/test_fallen_ranks.py is the same on CPU ranks, at every stage and tier. Here three ranks share the machine's
GPUs, and the hosts of those that train on wait for their devices in each pass.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import fallen_ranks
import ranks
import zoo
from fallen_ranks import ON_HOST, SOON_S, VICTIM, Planted, await_file, end_process, heard, note_time
from gpu_ranks import prepare

GRACE_S = 8.0  # what ranks that take turns on a GPU take on top
START_S = 120.0  # what processes, devices and communicators may take to start
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "optimizer on the host": {"offload_optimizer": ON_HOST},
    "parameters on the host": {"offload_optimizer": ON_HOST, "offload_param": {"device": "cpu"}},
}
EXCEPTIONS = [
    ("device", 1, "forward"),
    ("device", 1, "backward"),
    ("device", 3, "forward"),
    ("device", 3, "backward"),
    ("optimizer on the host", 1, "step"),
    ("parameters on the host", 3, "forward"),
]
ENDS = [
    ("exit", "device", 1),
    ("exit", "parameters on the host", 3),
    ("kill", "optimizer on the host", 1),
    ("kill", "device", 3),
]


def start(rank: ranks.Rank, tier: str, stage: int, device: str) -> Any:
    engine = fallen_ranks.start(rank, device=device, stage=stage, communicator="peer", **TIERS[tier])
    fallen_ranks.train(engine, rank, done=0, steps=2, device=device)
    if rank.rank != VICTIM:
        first = engine.module.blocks[0]
        first.register_forward_pre_hook(lambda *_: torch.cuda.synchronize())
        first.up.weight.register_hook(lambda _: torch.cuda.synchronize())
    return engine


def fall_by_exceptions(rank: ranks.Rank, folder: str) -> list[dict[str, Any]]:
    """The rank at fault catches what it raised, and stays until the others have heard of it."""
    device = prepare(rank)
    found = []
    for number, (tier, stage, where) in enumerate(EXCEPTIONS):
        place = replace(rank, meeting_point=f"{rank.meeting_point}-{number}")
        engine = start(place, tier, stage, device)
        if rank.rank == VICTIM:
            fallen_ranks.plant(engine, where, fallen_ranks.raise_planted)
            note_time(folder, number)
            with pytest.raises(Planted):
                fallen_ranks.train(engine, rank, done=2, steps=3, device=device)
            for other in (0, 2):
                await_file(Path(folder) / f"{number} {other}")
        else:
            found.append(heard(engine, rank, folder, number, device))
        engine.close()
    return found


def test_others_hear_of_an_exception_that_leaves_a_call_of_the_engine(tmp_path: Path) -> None:
    found = ranks.run(fall_by_exceptions, str(tmp_path), world_size=3)
    for of_rank in (found[0], found[2]):
        for case, told in zip(EXCEPTIONS, of_rank, strict=True):
            assert f"rank {VICTIM} raised Planted (planted) and did not come to " in told["error"], (
                case,
                told,
            )
            assert told["after_s"] < SOON_S + GRACE_S, (case, told)


def fall_with_the_process(
    rank: ranks.Rank, kind: str, tier: str, stage: int, folder: str
) -> dict[str, Any] | None:
    device = prepare(rank)
    engine = start(rank, tier, stage, device)
    if rank.rank != VICTIM:
        return heard(engine, rank, folder, kind, device)
    engine.backward(engine(**zoo.on_device(zoo.points(2, rank.rank), device)))
    note_time(folder, kind)
    end_process(kind)
    return None


@pytest.mark.parametrize(("kind", "tier", "stage"), ENDS)
def test_others_hear_of_the_end_of_a_process(tmp_path: Path, kind: str, tier: str, stage: int) -> None:
    with ranks.Group(fall_with_the_process, kind, tier, stage, str(tmp_path), world_size=3) as group:
        group.wait([0, 2], timeout_s=START_S)
    for rank in (0, 2):
        assert group.outcomes[rank].error is None, group.outcomes[rank].error
        told = group.outcomes[rank].value
        assert f"rank {VICTIM} " in told["error"], told
        assert told["after_s"] < SOON_S + GRACE_S, told

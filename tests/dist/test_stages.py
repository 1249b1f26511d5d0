"""Every kind of model at every stage: the same bits at all stages and ranks, and what plain PyTorch trains.

All cases of a world size run in one group of processes.
"""

from __future__ import annotations

import pytest
import ranks
import zoo

STAGES = (0, 1, 2, 3)
ON_THREE_RANKS = (
    "blocks",
    "odd sizes",
    "param groups and schedule",
    "lora",
    "tied",
    "skipped on one rank",
    "order differs",
    "used differently",
    "bf16",
)
RUNS = {2: tuple(zoo.CASES), 3: ON_THREE_RANKS}
# Relative L2 of the optimizer's first moments and of all updates together. Adam turns noise into full steps.
TOLERANCES = {"fp32": (2e-4, 5e-3), "bf16": (0.03, 0.15), "fp16": (0.01, 0.05)}

pytestmark = pytest.mark.usefixtures("one_thread")


def train_all(rank: ranks.Rank, names: tuple[str, ...]) -> dict[tuple[str, int], dict]:
    return {
        (name, stage): zoo.train_or_error(zoo.CASES[name], rank, stage=stage)
        for name in names
        for stage in STAGES
    }


@pytest.fixture(scope="module")
def results():
    return {
        world_size: ranks.run(train_all, names, world_size=world_size) for world_size, names in RUNS.items()
    }


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        # Steps that overflow differ from a plain loop's; test_precision.py holds fp16 against fp32.
        left_out = {"fp16"} if metafunc.function is test_trains_what_plain_pytorch_trains else set()
        runs = [(w, name) for w, names in RUNS.items() for name in names if name not in left_out]
        metafunc.parametrize(("world_size", "case"), runs)


def accumulates_shards(case: str) -> bool:
    """Stages 2 and 3 then add what was reduced, stages 0 and 1 reduce what was added."""
    return zoo.CASES[case].config.get("gradient_accumulation_steps", 1) > 1


def test_all_stages_end_with_the_same_bits(results, world_size, case):
    by_rank = results[world_size]
    for rank in by_rank:
        for stage in STAGES:
            assert "error" not in rank[case, stage], f"stage {stage}: {rank[case, stage]['error']}"
    for alike in ((0, 1), (2, 3)) if accumulates_shards(case) else (STAGES,):
        for key in ("digest", "norms", "scales", "applied", "served"):
            found = {repr(rank[case, stage][key]) for rank in by_rank for stage in alike}
            assert len(found) == 1, (key, alike, found)
        for rank in by_rank:
            assert len({repr(rank[case, stage]["losses"]) for stage in alike}) == 1


def test_trains_what_plain_pytorch_trains(results, world_size, case):
    settings = zoo.CASES[case]
    expected = zoo.train_plainly(settings, world_size=world_size)
    gradient, update = TOLERANCES[settings.config.get("precision", "fp32")]
    origin = {name: p.detach() for name, p in zoo.make(settings).named_parameters()}
    for stage in STAGES if accumulates_shards(case) else (0,):
        found = results[world_size][0][case, stage]
        assert zoo.relative(found["exp_avg"], expected["exp_avg"]) <= gradient
        assert zoo.relative(found["parameters"], expected["parameters"], origin) <= update
        assert found["norms"] == pytest.approx(expected["norms"], rel=10 * gradient)
        for rank in range(world_size):
            assert results[world_size][rank][case, stage]["losses"] == pytest.approx(
                expected["losses"][rank], rel=10 * gradient, abs=1e-5
            )

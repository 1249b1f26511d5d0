"""Training scripts drawn at random, at all stages and placements: the same bits, and what plain PyTorch trains."""

from __future__ import annotations

import random

import pytest
import ranks
import small_models
import zoo

STAGES = (0, 1, 2, 3)
SEEDS = {2: range(16), 3: range(16, 22)}  # by world size
BLOCKS = {
    "Block": small_models.Block,
    "ExpertBlock": small_models.ExpertBlock,
    "NormBlock": small_models.NormBlock,
    "LoraBlock": lambda: small_models.LoraBlock(merged=False),
    "Twice": small_models.Twice,
}
GRADIENT, UPDATE = 2e-4, 5e-3  # relative, as in test_stages.py

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:None of the inputs have requires_grad"
    ),  # reentrant checkpoints, evaluated
]


def draw_case(seed: int) -> zoo.Case:
    draw = random.Random(f"case {seed}")
    block, num_blocks = draw.choice(sorted(BLOCKS)), draw.randint(2, 4)
    reentrant = draw.choice([None, None, False, True])
    backwards = draw.choice([1, 1, 2])
    window = draw.choice(["FB", "FFS"] if backwards == 1 else ["FFBB", "FBFB"])
    config = {
        "gradient_accumulation_steps": backwards,
        "gradient_clipping": draw.choice([None, 0.05]),
        "prefetch_bytes": draw.choice([None, 0, 10_000, 1 << 30]),
        "units": draw.choice(["auto", "auto", [block], [block, "Linear"], []]),
    }
    return zoo.Case(
        lambda: small_models.Chain(num_blocks, block=BLOCKS[block], reentrant=reentrant),
        zoo.ordered(draw_order(draw, num_blocks)),
        groups=draw.choice([zoo.one_group, zoo.by_kind]),
        config={key: value for key, value in config.items() if value is not None},
        schedule=draw.random() < 0.5,
        plan="".join(draw.choice(["", "", "E"]) + each for each in window),
    )


def draw_order(draw: random.Random, num_blocks: int):
    """Draw an order of the blocks, with repetitions and gaps: one for all, or another in each step or on each rank."""
    salt, by_step, by_rank = draw.random(), draw.random() < 0.5, draw.random() < 0.5

    def order(step: int, rank: int) -> list[int]:
        chosen = random.Random(f"{salt} {step if by_step else ''} {rank if by_rank else ''}")
        return [chosen.randrange(num_blocks) for _ in range(chosen.randint(1, num_blocks + 1))]

    return order


def draw_placement(seed: int, stage: int) -> dict:
    draw = random.Random(f"placement {seed} {stage}")
    options: dict = {}
    if stage > 0 and draw.random() < 0.5:
        options["offload_optimizer"] = {"device": "cpu", "chunk_numel": draw.choice([64, 4096])}
    if stage == 3:
        options["keep_root_bytes"] = draw.choice([0, 1 << 29])
        options["reshard_after_forward"] = draw.random() < 0.7
        if "offload_optimizer" in options and draw.random() < 0.5:
            options["offload_param"] = {"device": "cpu"}
    if draw.random() < 0.3 and "gradient_clipping" not in draw_case(seed).config:
        options["optimizer_in_backward"] = True
    return options


def train_all(rank: ranks.Rank, seeds: range) -> dict[tuple[int, int], dict]:
    return {
        (seed, stage): zoo.train_or_error(draw_case(seed), rank, stage=stage, **draw_placement(seed, stage))
        for seed in seeds
        for stage in STAGES
    }


@pytest.fixture(scope="module")
def results():
    return {size: ranks.run(train_all, seeds, world_size=size) for size, seeds in SEEDS.items()}


@pytest.mark.parametrize(
    ("world_size", "seed"), [(size, seed) for size, seeds in SEEDS.items() for seed in seeds]
)
def test_random_training_is_right(results, world_size, seed):
    case, by_rank = draw_case(seed), results[world_size]
    # Stages 2 and 3 add what was reduced, stages 0 and 1 reduce what was added.
    alike = ((0, 1), (2, 3)) if case.config["gradient_accumulation_steps"] > 1 else (STAGES,)
    for stages in alike:
        for found in by_rank:
            for stage in stages:
                assert "error" not in found[seed, stage], f"stage {stage}: {found[seed, stage]['error']}"
                zoo.assert_same_end(found[seed, stage], found[seed, stages[0]], stage=stage)
    expected = zoo.train_plainly(case, world_size=world_size)
    origin = {name: p.detach() for name, p in zoo.make(case).named_parameters()}
    for stages in alike:
        found = by_rank[0][seed, stages[0]]
        assert zoo.relative(found["exp_avg"], expected["exp_avg"]) <= GRADIENT
        assert zoo.relative(found["parameters"], expected["parameters"], origin) <= UPDATE
        assert found["norms"] == pytest.approx(expected["norms"], rel=10 * GRADIENT)
        for rank in range(world_size):
            assert by_rank[rank][seed, stages[0]]["losses"] == pytest.approx(
                expected["losses"][rank], rel=10 * GRADIENT, abs=1e-5
            )
            assert by_rank[rank][seed, stages[0]]["digest"] == found["digest"]

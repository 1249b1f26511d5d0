"""A model compiled as a whole at stages 0 to 2 on several ranks: one graph, the same bits at every stage."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import ranks
from builders import make_settings, tiny_model

# The compiler's own code warns.
pytestmark = pytest.mark.filterwarnings("default")

WORLD_SIZE = 2
SEQ_LENGTH = 16
MODEL = {
    "num_layers": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "max_seq_length": SEQ_LENGTH,
    "tied_embeddings": True,
}
STAGES = (0, 1, 2)
NUM_STEPS = 3


def train(rank: ranks.Rank, name: str, **fields):
    from zerobench import strategies
    from zerobench.data import open_data
    from zerobench.strategies.shared import checksum

    settings = make_settings(
        rank=rank.rank,
        world_size=rank.world_size,
        rendezvous=rank.meeting_point,
        batch_size=2,
        seq_length=SEQ_LENGTH,
        precision="bf16",
        clip=0.5,
        deterministic=True,
        **fields,
    )
    data = open_data("synthetic", seed=0, seq_length=SEQ_LENGTH, vocab_size=256)
    strategy = strategies.get(name)(settings)
    strategy.build(partial(tiny_model, **MODEL))
    strategy.reset_counters()
    place = {"rank": rank.rank, "world_size": rank.world_size, "batch_size": 2, "grad_accum": 1}
    steps = [strategy.step(data.micro_batches(step, **place), norm=True) for step in range(NUM_STEPS)]
    found = {
        "graphs": strategy.compiled_graphs(),
        "losses": [float(step.loss) for step in steps],
        "norms": [float(step.grad_norm) for step in steps],
        "validation": strategy.evaluate(data.micro_batches(NUM_STEPS, **place)),
        "checksum": checksum(strategy.full_parameters()),
    }
    strategy.close()
    return found


def train_all(rank: ranks.Rank):
    found = {stage: train(rank, f"zero{stage}", compile="whole") for stage in STAGES}
    return {**found, "eager": train(rank, "zero1")}


@pytest.fixture(scope="module")
def trained():
    return ranks.run(train_all, world_size=WORLD_SIZE, timeout_s=280.0)


def test_the_model_is_one_graph_at_every_stage(trained):
    assert [of_rank[stage]["graphs"] for of_rank in trained for stage in STAGES] == [1.0] * 6
    assert trained[0]["eager"]["graphs"] is None


def test_stages_agree_bit_for_bit(trained):
    assert len({of_rank[stage]["checksum"] for of_rank in trained for stage in STAGES}) == 1
    for of_rank in trained:
        for key in ("losses", "norms", "validation"):
            assert of_rank[0][key] == of_rank[1][key] == of_rank[2][key]


def test_compiled_training_follows_eager_training(trained):
    for of_rank in trained:
        assert of_rank[1]["losses"] == pytest.approx(of_rank["eager"]["losses"], rel=2e-2)
        assert of_rank[1]["norms"] == pytest.approx(of_rank["eager"]["norms"], rel=2e-2)


def compile_stage_3(rank: ranks.Rank):
    import zerobench
    from zerobench.errors import ConfigError

    engine = zerobench.initialize(tiny_model(**MODEL), config=rank.config(stage=3))
    with pytest.raises(ConfigError, match="compile each block's forward") as error:
        engine.compile()
    engine.close()
    return str(error.value)


def test_stage_3_refuses_and_names_the_cure():
    assert all("stage 0, 1 or 2" in text for text in ranks.run(compile_stage_3, world_size=WORLD_SIZE))


def compile_calls(rank: ranks.Rank):
    """Blocks whose calls are compiled, with the engine's hooks in them."""
    import torch

    import zerobench

    for stage in (1, 3):
        torch._dynamo.reset()
        model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2))
        )
        place = replace(rank, meeting_point=f"{rank.meeting_point}-{stage}")
        engine = zerobench.initialize(model, config=place.config(stage=stage))
        for block in model:
            block.compile(backend="eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(3):
                engine.backward(engine(torch.ones(2, 4, requires_grad=True)).square().mean())
                engine.step()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"forward before zerobench\.initialize"):
            torch.compile(torch.nn.Sequential(model), backend="eager", fullgraph=True)(torch.ones(2, 4))
        engine.close()


def test_hooks_inside_compiled_calls_are_no_part_of_graphs():
    ranks.run(compile_calls, world_size=WORLD_SIZE)

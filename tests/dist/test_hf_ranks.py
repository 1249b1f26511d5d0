"""transformers' Llama and Mixtral on two ranks at every stage: the same bits, and what plain PyTorch trains.

Each rank of Mixtral sees so few tokens that some experts get none, others than on the other rank.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install '.[hf]'")

import hf_zoo
import ranks
import zoo

NUM_STEPS = 3
LR = 1e-3
STAGES = (0, 1, 2, 3)
# Tokens of a rank's batch: of Mixtral's 8 experts a layer at most 4 work on 2 tokens.
TOKENS = {"meta-llama/Meta-Llama-3-8B": 16, "mistralai/Mixtral-8x7B-v0.1": 2}
every_model = pytest.mark.parametrize("name", TOKENS)


def batch(name: str, step: int, rank: int) -> dict[str, torch.Tensor]:
    return hf_zoo.batch(seed=10 * step + rank, batch_size=1, seq_length=TOKENS[name])


def train(rank: ranks.Rank, name: str, stage: int) -> dict[str, torch.Tensor]:
    import zerobench

    config = rank.config(stage=stage, optimizer={"lr": LR, "weight_decay": 0.0})
    engine, *_ = zerobench.initialize(model=hf_zoo.build(name), config=config)
    for step in range(NUM_STEPS):
        engine.backward(engine(**batch(name, step, rank.rank)).loss)
        engine.step()
    parameters = engine.full_parameters()
    engine.close()
    return parameters


def train_all(rank: ranks.Rank) -> dict[tuple[str, int], dict]:
    return zoo.at_every_stage(rank, train, TOKENS)


@pytest.fixture(scope="module")
def results():
    return ranks.run(train_all, world_size=2)


def plainly(name: str) -> dict[str, torch.Tensor]:
    model = hf_zoo.build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for step in range(NUM_STEPS):
        for rank in range(2):
            (model(**batch(name, step, rank)).loss / 2).backward()
        for parameter in model.parameters():  # the engine counts a missing gradient as zero
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
        optimizer.zero_grad()
    return {key: parameter.detach() for key, parameter in model.named_parameters()}


@every_model
def test_all_stages_and_ranks_end_with_the_same_bits(results, name):
    expected = results[0][name, 0]
    for stage in STAGES:
        for rank, by_case in enumerate(results):
            found = by_case[name, stage]
            assert "error" not in found, f"stage {stage}, rank {rank}: {found['error']}"
            for key, value in expected.items():
                assert torch.equal(found[key], value), f"stage {stage}, rank {rank}: {key}"


@every_model
def test_trains_what_plain_pytorch_trains(results, name):
    found, expected, start = results[0][name, 3], plainly(name), dict(hf_zoo.build(name).named_parameters())
    moved = torch.cat([(expected[key] - start[key]).flatten() for key in expected])
    apart = torch.cat([(expected[key] - found[key]).flatten() for key in expected])
    assert moved.norm() > 0.1
    assert (apart.norm() / moved.norm()).item() < 5e-3


def test_each_rank_leaves_other_experts_out():
    """The premise of this module, from the router's choices in the first step."""
    name, chosen = "mistralai/Mixtral-8x7B-v0.1", []
    for rank in range(2):
        model = hf_zoo.build(name)
        logits = model(**batch(name, 0, rank), output_router_logits=True).router_logits
        chosen.append([set(layer.topk(2, dim=-1).indices.flatten().tolist()) for layer in logits])
    assert all(len(experts) < 8 for by_layer in chosen for experts in by_layer)
    assert chosen[0] != chosen[1]

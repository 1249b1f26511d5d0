"""A pairwise subset of benchmarks/parity_grid.py in one group of processes; and that training learns the text."""

from __future__ import annotations

import itertools
import math

import parity_grid
import pytest
import ranks

CELLS = parity_grid.pairwise_subset()


def run_subset(rank: ranks.Rank):
    return parity_grid.run_cells(rank.rank, CELLS, rank.meeting_point)


@pytest.fixture(scope="module")
def verdicts():
    by_rank = ranks.run(run_subset, world_size=max(parity_grid.WORLD_SIZES), timeout_s=280.0)
    return [parity_grid.judge(cell, [of[index] for of in by_rank]) for index, cell in enumerate(CELLS)]


@pytest.mark.parametrize("index", range(len(CELLS)), ids=[str(cell)[5:-1] for cell in CELLS])
def test_stages_agree_and_are_right(verdicts, index):
    assert verdicts[index]["identical"], verdicts[index]
    assert verdicts[index]["ok"], verdicts[index]


def test_the_page_counts_cells_by_precision(verdicts):
    text = parity_grid.markdown(verdicts, took_s=60.0)
    assert f"{len(CELLS)} of {len(CELLS)} cells are right" in text
    for precision in parity_grid.MODELS:
        num = sum(cell.precision == precision for cell in CELLS)
        assert f"| {precision} | {num} of {num} | {num} of {num} |" in text


def test_the_subset_is_pairwise():
    plain = [cell for cell in CELLS if cell.grad_accum == 1]
    values = {
        "world_size": parity_grid.WORLD_SIZES,
        "precision": tuple(parity_grid.MODELS),
        "clip": (False, True),
        "checkpointing": (False, True),
        "tied": (False, True),
    }
    for (one, of_one), (other, of_other) in itertools.combinations(values.items(), 2):
        found = {(getattr(cell, one), getattr(cell, other)) for cell in plain}
        assert found == set(itertools.product(of_one, of_other)), (one, other)


LEARN_STEPS = 250


def learn(rank: ranks.Rank):
    """`tiny` on real text: the held-out loss before and after, and the unigram entropy of the bytes."""
    import torch

    import zerobench
    from zerobench import models
    from zerobench.data import open_data

    config = models.resolve("tiny", {})
    data = open_data("stdlib", seed=0, seq_length=64, vocab_size=config.vocab_size)
    engine = zerobench.initialize(
        models.build(config, seed=0),
        config=rank.config(stage=3, optimizer={"lr": 3e-3}, gradient_clipping=1.0),
    )

    def held_out():
        batches = data.validation_batches(rank=0, world_size=1, batch_size=8, num_batches=8)
        engine.eval()
        with torch.no_grad():
            losses = [engine(**batch).loss.item() for batch in batches]
        engine.train()
        return sum(losses) / len(losses), torch.cat([batch["input_ids"].flatten() for batch in batches])

    before, text = held_out()
    for step in range(LEARN_STEPS):
        for batch in data.micro_batches(
            step, rank=rank.rank, world_size=rank.world_size, batch_size=8, grad_accum=1
        ):
            engine.backward(engine(**batch).loss)
            engine.step()
    after, _ = held_out()
    shares = torch.bincount(text).double() / len(text)
    entropy = -float((shares[shares > 0] * shares[shares > 0].log()).sum())
    engine.close()
    return before, after, entropy


def test_training_learns_the_text():
    for before, after, entropy in ranks.run(learn, timeout_s=280.0):
        assert before == pytest.approx(math.log(256), rel=0.05)  # knows nothing
        assert after < 0.85 * entropy  # knows more than how often each byte comes

"""Models that use an embedding's or a head's weight without calling the module, in the default setting."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.nn.functional as F
import zoo
from small_models import WIDTH, Block
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import zerobench

STAGES = range(4)
WORDS = 211  # so that embedding and head are units


class FusedLoss(torch.autograd.Function):
    """Cross entropy that computes gradients in its forward, chunk by chunk, as Liger's does."""

    @staticmethod
    def forward(ctx, h, weight, labels):
        loss, grad_h, grad_weight = h.new_zeros(()), torch.empty_like(h), torch.zeros_like(weight)
        for begin in range(0, len(h), 8):
            rows = slice(begin, begin + 8)
            logits = (h[rows] @ weight.t()).float()
            grad = logits.softmax(-1)
            loss += F.cross_entropy(logits, labels[rows], reduction="sum") / len(h)
            grad -= F.one_hot(labels[rows], logits.shape[1])
            grad = (grad / len(h)).to(h.dtype)
            grad_h[rows] = grad @ weight
            grad_weight += grad.t() @ h[rows]
        ctx.save_for_backward(grad_h, grad_weight)
        return loss

    @staticmethod
    def backward(ctx, grad):
        grad_h, grad_weight = ctx.saved_tensors
        return grad_h * grad, grad_weight * grad, None


class Language(nn.Module):
    """An embedding, blocks and a head that the batch has called or used by its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor, loss: str = "fused") -> torch.Tensor:
        h = self.mix(self.embedded(ids))
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        if loss == "interrupt":
            raise KeyboardInterrupt
        h, labels = h[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
        if loss == "called" or not self.training:
            return F.cross_entropy(self.head(h).float(), labels)
        if loss == "checkpointed":
            return checkpoint(self.plain_loss, h, labels, use_reentrant=False)
        if loss == "plain":
            return self.plain_loss(h, labels)
        return FusedLoss.apply(h, self.head.weight, labels)

    def plain_loss(self, h: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(h, self.head.weight).float(), labels)

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)


class TokenAdapter(Language):
    """New values for some tokens of a frozen embedding, as in PEFT's trainable tokens."""

    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__()
        self.embed.requires_grad_(not frozen)
        self.register_buffer("tokens", torch.tensor([2, 3, 5]))
        self.values = nn.Parameter(torch.ones(3, WIDTH))

    def embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.embed.weight.index_copy(0, self.tokens, self.values))


def words(step: int, rank: int, micro: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return {"ids": torch.randint(0, WORDS, (3, 8), generator=generator)}


def by(loss: str):
    return lambda step, rank, micro=0: words(step, rank, micro) | {"loss": loss}


CASES = {
    "fused loss": zoo.Case(Language, words, steps=3),
    "fused loss, evaluation": zoo.Case(Language, words, plan="EFBE", steps=3),
    "fused loss, a large root": zoo.Case(Language, words, config={"keep_root_bytes": 0}, steps=3),
    "fused loss, bf16": zoo.Case(Language, words, config={"precision": "bf16"}, steps=3),
    "weight used by an operator": zoo.Case(Language, by("plain"), config={"prefetch_bytes": 0}, steps=3),
    "weight used in a checkpoint": zoo.Case(Language, by("checkpointed"), steps=3),
    "two forwards": zoo.Case(Language, by("plain"), plan="FFS", steps=3),
    "token adapter": zoo.Case(TokenAdapter, by("called"), steps=3),
    "token adapter, trained embedding, fused loss": zoo.Case(
        lambda: TokenAdapter(frozen=False), words, steps=3
    ),
    "ranks that differ": zoo.Case(
        Language, lambda step, rank, micro=0: by("plain" if rank else "called")(step, rank, micro), steps=4
    ),
}


def train_all(rank: ranks.Rank) -> dict[tuple[str, int], dict[str, Any]]:
    return zoo.at_every_stage(
        rank, lambda place, name, stage: zoo.train_engine(CASES[name], place, stage=stage), CASES
    )


@pytest.fixture(scope="module")
def results():
    return ranks.run(train_all)


@pytest.mark.parametrize("name", CASES)
def test_all_stages_end_with_the_same_bits(results, name):
    for found in results:
        for stage in STAGES:
            assert "error" not in found[name, stage], found[name, stage]["error"]
            assert found[name, stage]["digest"] == results[0][name, 0]["digest"], stage
            assert found[name, stage]["losses"] == found[name, 0]["losses"], stage


@pytest.mark.parametrize("name", CASES)
def test_trains_what_plain_pytorch_trains(results, name):
    plain = zoo.train_plainly(CASES[name], world_size=2)
    tolerance = 0.01 if "bf16" in name else 2e-5
    assert zoo.relative(results[0][name, 3]["parameters"], plain["parameters"]) < tolerance


def start(rank: ranks.Rank, **config: Any) -> zerobench.Engine:
    torch.manual_seed(7)
    return zerobench.initialize(Language(), config=rank.config(stage=3, **config))


def step(engine: zerobench.Engine, rank: ranks.Rank, number: int, loss: str) -> None:
    engine.backward(engine(**words(number, rank.rank), loss=loss))
    engine.step()


def bytes_by_step(rank: ranks.Rank, loss: str) -> list[int]:
    engine = start(rank)
    found = []
    for number in range(4):
        engine.reset_counters()
        step(engine, rank, number, loss)
        found.append(engine.communication_bytes())
    engine.close()
    return found


def test_a_head_that_goes_with_the_root_costs_no_more_from_the_second_step_on():
    fused, called = (ranks.run(bytes_by_step, loss)[0] for loss in ("fused", "called"))
    assert fused[1] <= called[1]
    assert fused[2] == fused[3] <= called[3]


def later_use(rank: ranks.Rank) -> None:
    engine = start(rank)
    step(engine, rank, 0, "called")
    with pytest.raises(RuntimeError, match=r"'head.weight' is sharded .* set \"units\": \[\"Block\"\]"):
        engine(**words(1, rank.rank))
    step(engine, rank, 1, "called")
    engine.close()


def test_a_use_that_the_first_forward_lacks_is_an_error_that_names_units():
    ranks.run(later_use)


def interrupted(rank: ranks.Rank) -> None:
    engine = start(rank)
    with pytest.raises(KeyboardInterrupt):
        engine(**words(0, rank.rank), loss="interrupt")
    assert _get_current_dispatch_mode() is None
    step(engine, rank, 0, "fused")
    assert _get_current_dispatch_mode() is None
    engine.close()


def test_a_forward_that_was_interrupted_leaves_no_mode_and_the_next_is_watched():
    ranks.run(interrupted)


def with_another_mode(rank: ranks.Rank) -> None:
    """Count operations by a mode that is entered and left by the model's own hooks."""
    engine = start(rank)
    counter = FlopCounterMode(display=False)
    hooks = [
        engine.module.register_forward_pre_hook(lambda *_: counter.__enter__() and None),
        engine.module.register_forward_hook(lambda *_: counter.__exit__(None, None, None)),
    ]
    step(engine, rank, 0, "called")
    for hook in hooks:
        hook.remove()
    step(engine, rank, 1, "called")
    assert _get_current_dispatch_mode() is None
    assert counter.get_total_flops() > 0
    engine.close()


def test_modes_that_scripts_enter_in_a_forward_are_left_alone():
    ranks.run(with_another_mode)


def compiled_blocks(rank: ranks.Rank) -> int:
    """Return how often blocks' graphs ran in the first forward."""
    torch.manual_seed(7)
    model, calls = Language(), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*arguments: torch.Tensor) -> Any:
            calls.append(1)
            return graph(*arguments)

        return run

    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    engine = zerobench.initialize(model, config=rank.config(stage=3))
    step(engine, rank, 0, "fused")
    engine.close()
    return len(calls)


@pytest.mark.filterwarnings("default")
def test_compiled_blocks_run_compiled_in_the_first_forward():
    assert ranks.run(compiled_blocks) == [3, 3]

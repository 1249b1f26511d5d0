"""Gradients and parameters in the hands of scripts, between backward and step, while streams run ahead of the host."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import ranks
from gpu_ranks import can_connect, prepare
from torch import nn

import zerobench
from zerobench.errors import StateError

WIDTH = 256
LATE_CYCLES = 50_000_000  # tens of milliseconds, in which the host gets far ahead of the device
HOST = {"offload_optimizer": {"device": "cpu"}}
PLACES = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "1 on host": {"stage": 1, **HOST},
    "3 on host": {"stage": 3, **HOST},
}
RUNS = [(1, "nccl"), (2, "peer")] + [(2, "nccl")] * can_connect("nccl", 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, 4))


def batch(step: int, rank: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(8, WIDTH, generator=generator).cuda()


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().pow(2).mean()


def start(rank: ranks.Rank, communicator: str, place: str, **more: Any) -> Any:
    device = prepare(rank)
    config = rank.config(communicator=communicator, optimizer={"lr": 1e-2}, **PLACES[place], **more)
    return zerobench.initialize(make_model().to(device), config=config)


def is_sharded(rank: ranks.Rank, place: str) -> bool:
    return PLACES[place]["stage"] == 3 and rank.world_size > 1


def digest(engine: Any) -> str:
    found = hashlib.sha256()
    for tensors in (engine.full_parameters(), engine.full_optimizer_state("exp_avg")):
        for name in sorted(tensors):
            found.update(tensors[name].numpy().tobytes())
    return found.hexdigest()


def reading_right_after_step(rank, communicator, place, overlaps):
    """A parameter held from before is read as the step left it, or raises; it is never stale."""
    if is_sharded(rank, place):
        return
    engine = start(rank, communicator, place, precision="bf16", overlap_updates=overlaps)
    held = dict(engine.module.named_parameters())
    raised = 0
    for step in range(5):
        engine.backward(loss_of(engine, batch(step, rank.rank)))
        torch.cuda._sleep(LATE_CYCLES)
        engine.step()
        seen = {}
        for name, parameter in held.items():
            assert parameter.numel() and parameter.requires_grad
            try:
                seen[name] = parameter.detach().clone()
            except RuntimeError as error:
                assert "engine.gather()" in str(error) and name in str(error)
                raised += 1
        right = engine.full_parameters()
        for name, values in seen.items():
            assert torch.equal(values.cpu(), right[name].bfloat16()), (step, name)
    is_late = (rank.world_size > 1 and place != "0") or "host" in place
    assert (raised > 0) == (overlaps and is_late), raised
    with engine.gather():
        assert torch.equal(held["0.weight"].cpu(), engine.state_dict()["0.weight"].cpu())
    engine.close()


def touching_gradients(rank, communicator, place):
    engine = start(rank, communicator, place)
    weight = engine.module[1].up.weight
    touches = {
        "clone": lambda: weight.grad.clone(),
        "add": lambda: weight.grad.add_(1.0),
        "norm": lambda: nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0),
        "host": lambda: weight.grad.cpu(),
        "scaler": lambda: torch._amp_foreach_non_finite_check_and_unscale_(
            [weight.grad], torch.zeros(1).cuda(), torch.ones(1).cuda()
        ),
    }
    for step, touch in enumerate(touches.values()):
        engine.backward(loss_of(engine, batch(step, rank.rank)))
        assert weight.grad.device == weight.device and weight.grad.shape == weight.shape
        with pytest.raises(RuntimeError, match=r"'1\.up\.weight'|'0\.weight'.*engine\.gradients\(\)"):
            touch()
        engine.step()
        assert weight.grad is None
    engine.backward(loss_of(engine, batch(9, rank.rank)))
    weight.grad = torch.ones_like(weight.grad, device=weight.device)
    with pytest.raises(StateError, match=r"\.grad of '1\.up\.weight' was replaced"):
        engine.step()
    engine.step()
    engine.close()


def reading_gradients(rank, communicator, place):
    """Averages over the ranks, as plain PyTorch computes them on one device."""
    plain = make_model().to(prepare(rank))
    for other in range(rank.world_size):
        (loss_of(plain, batch(0, other)) / rank.world_size).backward()
    right = {name: p.grad for name, p in plain.named_parameters()}
    engine = start(rank, communicator, place)
    engine.backward(loss_of(engine, batch(0, rank.rank)))
    torch.cuda._sleep(LATE_CYCLES)
    norm = engine.grad_norm()
    with engine.gradients(modifier_rank=None) as gradients:
        for name, values in right.items():
            torch.testing.assert_close(gradients[name], values, rtol=1e-4, atol=1e-6)
    expected = torch.linalg.vector_norm(torch.stack([g.norm() for g in right.values()])).item()
    assert norm == pytest.approx(expected, rel=1e-4)
    engine.step()
    assert engine.get_global_grad_norm() == norm
    engine.close()


def changing_gradients(rank, communicator, place):
    """Noise, a held layer, clipped values and clipping, with bits for other places to compare with."""
    engine = start(rank, communicator, place, precision="bf16", reduce_dtype="float32")
    last = rank.world_size - 1
    held_before = None
    for step in range(6):
        engine.backward(loss_of(engine, batch(step, rank.rank)))
        torch.cuda._sleep(LATE_CYCLES // 4)
        if step % 2:
            engine.clip_grad_norm_(0.05)
        generator = torch.Generator("cuda").manual_seed(step)
        everywhere = step % 3 == 0
        with engine.gradients(modifier_rank="all" if everywhere else last) as gradients:
            for name, values in gradients.items():
                if everywhere or rank.rank == last:
                    noise = torch.randn(values.shape, generator=generator, device=values.device)
                    values.add_(noise, alpha=1e-3).clamp_(-0.01, 0.01)
                if step < 3 and name.startswith("4."):
                    gradients[name] = None
        engine.step()
        if step == 2:
            held_before = engine.full_parameters()["4.weight"]
    assert torch.equal(held_before, make_model()[4].weight.detach())
    steps = engine.full_state()["parameter_steps"]
    assert steps == {"4.weight": 3, "4.bias": 3}
    found = digest(engine)
    engine.close()
    return found


def short_windows(rank, communicator, place):
    """Two of four micro-batches and a dropped one before them train what a window of two trains, bit for bit."""
    digests = []
    for steps in (2, 4):
        engine = start(rank, communicator, place, gradient_accumulation_steps=steps)
        for step in range(3):
            if steps == 4:
                engine.backward(1e6 * loss_of(engine, batch(step, rank.rank, 7)))
                engine.optimizer.zero_grad()
            for micro in range(2):
                engine.backward(loss_of(engine, batch(step, rank.rank, micro)))
                engine.step()
            if steps == 4:
                engine.step(end_window=True)
        assert engine.global_steps == 3
        digests.append(digest(engine))
        engine.close()
    assert digests[0] == digests[1]


def changing_data(rank, communicator, place):
    """A change through .data that the next step would lose is noticed in the first steps."""
    if is_sharded(rank, place):
        return
    engine = start(rank, communicator, place, precision="bf16", overlap_updates=False)
    with pytest.raises(StateError, match=r"changed through its \.data.*modifier_rank=0"):
        for step in range(3):
            engine.backward(loss_of(engine, batch(step, rank.rank)))
            engine.step()
            for parameter in engine.module.parameters():
                parameter.data.clamp_(-0.01, 0.01)
    engine.close()


def capturing(rank, communicator, place):
    """Replays run no hooks, so a capture is refused and leaves the engine usable."""
    engine = start(rank, communicator, place)
    x = batch(0, rank.rank)
    engine.backward(loss_of(engine, x))
    engine.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty graph
        with (
            pytest.raises(StateError, match="captured into a CUDA graph"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            engine(x)
    engine.backward(loss_of(engine, x))
    engine.step()
    assert engine.global_steps == 2
    engine.close()


CHECKS = {
    **{
        f"reading, {'overlapping' if overlaps else 'waiting'}, {place}": (
            reading_right_after_step,
            (place, overlaps),
        )
        for place in PLACES
        for overlaps in (True, False)
    },
    **{
        f"{check.__name__}, {place}": (check, (place,))
        for check in (touching_gradients, reading_gradients, short_windows, changing_data)
        for place in PLACES
    },
    "capturing, 0": (capturing, ("0",)),
    "capturing, 2": (capturing, ("2",)),
}


def run_all(rank: ranks.Rank, communicator: str) -> tuple[list[str | None], dict[str, str]]:
    checks = [(check, (communicator, *arguments)) for check, arguments in CHECKS.values()]
    errors = ranks.run_checks(rank, checks)
    digests = {}
    for index, place in enumerate(PLACES):
        of_its_own = ranks.Rank(rank.rank, rank.world_size, f"{rank.meeting_point}-changing-{index}")
        digests[place] = changing_gradients(of_its_own, communicator, place)
    return errors, digests


@pytest.fixture(scope="module")
def results():
    found = {}

    def of(world_size: int, communicator: str) -> list[Any]:
        run = world_size, communicator
        if run not in found:
            found[run] = ranks.run(run_all, communicator, world_size=world_size, timeout_s=280.0)
        return found[run]

    return of


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize(("world_size", "communicator"), RUNS)
def test_borders(results, world_size, communicator, name):
    index = list(CHECKS).index(name)
    for rank, (errors, _) in enumerate(results(world_size, communicator)):
        assert errors[index] is None, f"rank {rank}: {errors[index]}"


@pytest.mark.parametrize(("world_size", "communicator"), RUNS)
def test_changed_gradients_train_the_same_bits_in_every_place(results, world_size, communicator):
    by_rank = [digests for _, digests in results(world_size, communicator)]
    assert all(digests == by_rank[0] for digests in by_rank)
    assert len(set(by_rank[0].values())) == 1, by_rank[0]

"""Engines without trainable parameters: teachers, reward models that pass gradients on, states and memory.

All combinations run in one group of ranks; plain PyTorch on all ranks' data is what they are held against.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import ranks
import torch
import torch.nn.functional as F
import zoo
from small_models import WIDTH, Block
from torch import nn

import zerobench

STEPS = 3
WORLD_SIZE = 2
LR = 0.05
HOST = {"chunk_numel": 128}
STUDENT_STAGES = (1, 3)
PLACEMENTS = ("device", "host", "nvme")
# A step's teacher forwards (T), student forwards (S), student backwards (B) of the oldest loss; t: a teacher's forward
# inside the student's, between two of its blocks.
ORDERS = ("TSB", "STB", "tSB", "TTSSBB", "STSTBB", "TSBTSB")
PREFETCHES = {"default": None, "none": 0, "everything": 1 << 30}

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Blocks between an inlet and an outlet; ``between`` is called after the first block."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inlet = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.outlet = nn.Linear(WIDTH, 7)
        self.between = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        for index, block in enumerate(self.blocks):
            h = block(h)
            if index == 0 and self.between is not None:
                self.between()
        return self.outlet(h)


def teacher_net() -> Net:
    return Net(4, seed=1).requires_grad_(False)


def student_net() -> Net:
    return Net(2, seed=2)


def inputs(step: int, rank: int, micro: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1000 * step + 10 * rank + micro))


def placed(placement: str, path: str) -> dict[str, Any]:
    if placement == "device":
        return {}
    if placement == "host":
        return {"offload_optimizer": HOST, "offload_param": {}}
    return {"offload_optimizer": zoo.SWAP | {"nvme_path": path}, "offload_param": {"device": "nvme"}}


def start(rank: ranks.Rank, model: nn.Module, stage: int, **config: Any) -> zerobench.Engine:
    optimizer = {"type": "adamw", "lr": LR, "weight_decay": 0.0}
    return zerobench.initialize(model, config=rank.config(stage=stage, optimizer=optimizer, **config))


def mode_of(step: int) -> Any:
    """How a script may call a teacher."""
    return (torch.no_grad, torch.inference_mode, contextlib.nullcontext)[step % 3]()


def distill(teacher: Any, student: Any, model: Net, backward: Any, order: str, rank: int) -> dict[str, Any]:
    """Losses and the teacher's outputs, in the order of the plan; ``backward`` ends windows of as many micro-batches as
    there are before the next forward."""
    losses: list[float] = []
    outputs: list[torch.Tensor] = []
    for step in range(STEPS):
        waiting: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        counts = {"T": 0, "S": 0}

        def teach(step=step, targets=targets, counts=counts):
            with mode_of(step):
                found = teacher(inputs(step, rank, counts["T"]))
            counts["T"] += 1
            targets.append(found.clone())
            outputs.append(targets[-1])

        for each in order:
            if each == "T":
                teach()
            elif each == "t":
                model.between = teach
            elif each == "S":
                logits.append(student(inputs(step, rank, counts["S"])))
                counts["S"] += 1
                model.between = None
            while logits and targets:
                loss = F.kl_div(
                    logits.pop(0).log_softmax(-1), targets.pop(0).softmax(-1), reduction="batchmean"
                )
                losses.append(loss.item())
                waiting.append(loss)
            if each == "B":
                backward(waiting.pop(0))
    return {"losses": losses, "outputs": torch.stack(outputs)}


def micro_steps(order: str) -> int:
    return 2 if order.endswith("BB") else 1


def distill_with_engines(rank: ranks.Rank, path: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    found = {}
    for placement in PLACEMENTS:
        for stage in STUDENT_STAGES:
            for order in ORDERS:
                # The default with every order; the others where both engines gather.
                for prefetch in PREFETCHES if stage == 3 and placement != "host" else ("default",):
                    model = student_net()
                    ahead = {"prefetch_bytes": PREFETCHES[prefetch]}
                    teacher = start(rank, teacher_net(), 3, **placed(placement, path), **ahead)
                    student = start(
                        rank, model, stage, gradient_accumulation_steps=micro_steps(order), **ahead
                    )
                    teacher.eval()

                    def backward(loss: torch.Tensor, student: Any = student) -> None:
                        student.backward(loss)
                        student.step()

                    found[placement, stage, order, prefetch] = distill(
                        teacher, student, model, backward, order, rank.rank
                    )
                    teacher.close()
                    student.close()
    return found


def distill_plainly(order: str) -> list[dict[str, Any]]:
    """Return each rank's findings, with one student that both ranks' losses train."""
    student, teacher = student_net(), teacher_net()
    results: list[dict[str, Any]] = [{"losses": [], "outputs": []} for _ in range(WORLD_SIZE)]
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR, weight_decay=0.0)
    num = micro_steps(order)
    for step in range(STEPS):
        micros = range(order.count("B"))
        for micro in micros:
            if micro % num == 0:
                optimizer.zero_grad()
            for rank, result in enumerate(results):
                x = inputs(step, rank, micro)
                output = teacher(x)
                loss = F.kl_div(student(x).log_softmax(-1), output.softmax(-1), reduction="batchmean")
                (loss / (WORLD_SIZE * num)).backward()
                result["losses"].append(loss.item())
                result["outputs"].append(output)
            if micro % num == num - 1:
                optimizer.step()
    for result in results:
        result["outputs"] = torch.stack(result["outputs"])
    return results


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    return ranks.run(distill_with_engines, str(tmp_path_factory.mktemp("disk")), world_size=WORLD_SIZE)


@pytest.mark.parametrize("order", ORDERS)
def test_a_student_learns_from_a_sharded_teacher_as_in_plain_torch(distilled, order):
    for rank, expected in enumerate(distill_plainly(order)):
        points = {point: found for point, found in distilled[rank].items() if point[2] == order}
        assert len(points) == 2 * 3 + 1 * 2 * 2  # the other prefetches: stage 3, on the device and on NVMe
        for point, found in points.items():
            assert torch.equal(found["outputs"], expected["outputs"]), point
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5), point


# --- gradients through an engine that trains nothing ---------------------------------------------------------------

REWARDS = (*(("device", stage) for stage in range(4)), ("host", 3), ("nvme", 3))


class Writer(nn.Module):
    """A generator that a reward model trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.outlet = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.pad(x, (0, WIDTH - 5))
        for block in self.blocks:
            h = block(h)
        return self.outlet(h)


def input_gradients(reward: Any, rank: int) -> dict[str, torch.Tensor]:
    """Return gradients of the inputs, taken in several ways."""
    found = {}

    def fresh(micro: int) -> torch.Tensor:
        return inputs(0, rank, micro).requires_grad_()

    x = fresh(0)
    reward(x).square().sum().backward()
    found["backward"] = x.grad
    x = fresh(1)
    (found["autograd.grad"],) = torch.autograd.grad(reward(x)[:, 0].sum(), x)
    x, y = fresh(2), fresh(3)
    first, second = reward(x), reward(y)
    reward(fresh(4))  # that no backward comes to
    (first.sum() + second.square().sum()).backward()
    found["two forwards, one backward"] = torch.stack([x.grad, y.grad])
    x, y = fresh(5), fresh(6)
    first, second = reward(x), reward(y)
    second.sum().backward()
    with torch.no_grad():
        reward(x)
    first.square().sum().backward()
    found["two forwards, two backwards"] = torch.stack([x.grad, y.grad])
    x = fresh(7)
    output = reward(x).view(-1, 7)
    output += 1
    output[0].mul_(2)
    output.square().sum().backward()
    found["changed in place"] = x.grad
    x = fresh(8)
    hidden = torch.tanh(x)
    torch.utils.checkpoint.checkpoint(reward, hidden, use_reentrant=False).square().sum().backward()
    found["checkpointed"] = x.grad
    return found


def write_for_rewards(reward: Any, writer: Any, backward: Any, rank: int) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = -reward(writer(inputs(step, rank, 0)))[:, 0].mean()
        backward(loss)
        losses.append(loss.item())
    return losses


def rewarded(rank: ranks.Rank, path: str) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for placement, stage in REWARDS:
        reward = start(rank, teacher_net(), stage, **placed(placement, path))
        found[placement, stage] = input_gradients(reward, rank.rank)
        reward.close()
        for writer_stage in STUDENT_STAGES:
            reward = start(rank, teacher_net(), stage, **placed(placement, path))
            writer = start(rank, Writer(), writer_stage)

            def backward(loss: torch.Tensor, writer: Any = writer) -> None:
                writer.backward(loss)
                writer.step()

            found[placement, stage, writer_stage] = write_for_rewards(reward, writer, backward, rank.rank)
            writer.close()
            reward.close()
    return found


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    return ranks.run(rewarded, str(tmp_path_factory.mktemp("disk")), world_size=WORLD_SIZE)


@pytest.mark.parametrize(("placement", "stage"), REWARDS)
def test_gradients_reach_the_inputs_of_a_frozen_model(rewards, placement, stage):
    for rank, found in enumerate(rewards):
        for way, expected in input_gradients(teacher_net(), rank).items():
            assert torch.equal(found[placement, stage][way], expected), way


@pytest.mark.parametrize(("placement", "stage"), REWARDS)
def test_a_model_trains_through_a_frozen_one(rewards, placement, stage):
    writer, reward = Writer(), teacher_net()
    optimizer = torch.optim.AdamW(writer.parameters(), lr=LR, weight_decay=0.0)
    expected: list[list[float]] = [[] for _ in range(WORLD_SIZE)]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank, losses in enumerate(expected):
            loss = -reward(writer(inputs(step, rank, 0)))[:, 0].mean()
            (loss / WORLD_SIZE).backward()
            losses.append(loss.item())
        optimizer.step()
    for rank, found in enumerate(rewards):
        for writer_stage in STUDENT_STAGES:
            losses = found[placement, stage, writer_stage]
            assert losses == pytest.approx(expected[rank], rel=1e-5), writer_stage


def backward_that_raises(rank: ranks.Rank) -> None:
    """In the middle of the model, on every rank; the next calls find nothing of it."""
    model = teacher_net()
    engine = start(rank, model, 3)

    def refuse(_: torch.Tensor) -> None:
        raise ArithmeticError("refused")

    def refuse_gradient(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(refuse)

    expected = teacher_net()(inputs(0, 0, 0))
    for go_on in (
        lambda: engine(inputs(0, 0, 0)),
        lambda: engine.state_dict() and engine(inputs(0, 0, 0)),
        lambda: input_gradients(engine, 0) and engine(inputs(0, 0, 0)),
    ):
        handle = model.blocks[1].register_forward_hook(refuse_gradient)
        output = engine(inputs(0, 0, 0).requires_grad_())
        handle.remove()
        with pytest.raises(ArithmeticError, match="refused"):
            output.sum().backward()
        assert torch.equal(go_on(), expected)
    engine.close()


def test_an_engine_goes_on_after_a_backward_that_raised():
    ranks.run(backward_that_raises)


# --- states and memory ----------------------------------------------------------------------------------------------


def save_and_load(rank: ranks.Rank, path: str) -> None:
    for placement in PLACEMENTS:
        engine = start(rank, teacher_net(), 3, precision="bf16", **placed(placement, path))
        expected = teacher_net().bfloat16().state_dict()

        def assert_holds(
            state: dict[str, torch.Tensor], engine: Any = engine, placement: str = placement
        ) -> None:
            found = engine.state_dict()
            assert found.keys() == state.keys()
            for name, value in state.items():
                assert torch.equal(found[name], value), (placement, name)
            for name, value in engine.full_parameters().items():
                assert torch.equal(value, state[name].float()), (placement, name)

        assert_holds(expected)
        kept = engine.full_state()
        assert kept["exp_avg"] == kept["exp_avg_sq"] == {}
        other = Net(4, seed=5 + rank.rank).bfloat16().state_dict()
        of_rank_0 = Net(4, seed=5).bfloat16().state_dict()
        engine.load_state_dict(other)
        assert_holds(of_rank_0)
        engine.load_full_state(**kept)
        assert_holds(expected)
        with engine.gather(modifier_rank=1):
            if rank.rank == 1:
                with torch.no_grad():
                    engine.module.blocks[2].up.weight.fill_(0.5)
        expected["blocks.2.up.weight"].fill_(0.5)
        assert_holds(expected)
        plain = Net(4, seed=1).bfloat16()
        plain.load_state_dict(expected)
        with torch.no_grad():
            output = engine(inputs(0, 0, 0))
        assert torch.equal(output, plain(inputs(0, 0, 0).bfloat16()))
        engine.close()


def test_states_are_saved_and_loaded_wherever_parameters_lie(tmp_path):
    ranks.run(save_and_load, str(tmp_path))


def memory_held(rank: ranks.Rank, path: str) -> dict[str, Any]:
    found = {}
    for placement in PLACEMENTS:
        engine = start(rank, teacher_net(), 3, precision="bf16", **placed(placement, path))
        for step in range(2):
            with torch.no_grad():
                engine(inputs(step, 0, 0))
        flats = [flat for unit in engine.units() for flat in unit["flats"]]
        found[placement] = {
            "held": engine.memory_bytes(),
            "shards": 2 * sum(flat["shard_numel"] for flat in flats),
            "swapped": engine.swap_stats(),
        }
        engine.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_parameters_take_memory(world_size, tmp_path):
    for found in ranks.run(memory_held, str(tmp_path), world_size=world_size):
        for placement, facts in found.items():
            for tier in facts["held"].values():
                for category in ("master", "exp_avg", "exp_avg_sq", "gradients"):
                    assert tier.get(category, 0) == 0, (placement, category)
        assert found["device"]["held"]["device"]["parameters"] >= found["device"]["shards"]
        for placement, tier in (("host", "host"), ("nvme", "nvme")):
            held = found[placement]["held"]
            assert held[tier]["parameters"] == found[placement]["shards"], placement
            assert held["device"].get("parameters", 0) == 0, placement
        assert found["nvme"]["swapped"]["read_bytes"] > 0
        assert found["nvme"]["swapped"]["engine"]

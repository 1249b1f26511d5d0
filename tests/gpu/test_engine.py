"""The engine on GPUs: every kind of model at every stage ends with the same bits, and trains what CPUs train.

One process a rank; all cases of a world size run in one group of processes. Ranks of the peer communicator take turns
where there are fewer GPUs.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import ranks
import zoo
from gpu_ranks import can_connect, ordinal_of, prepare

STAGES = (0, 1, 2, 3)
# Making communicators takes most of the time of several GPUs.
ON_SEVERAL = (
    "blocks",
    "odd sizes",
    "param groups and schedule",
    "lora",
    "tied",
    "tied as a plain tensor",
    "skipped on one rank",
    "order differs",
    "used differently",
    "non-reentrant twice",
    "accumulation",
    "evaluation in between",
    "prefetch everything",
    "no prefetch",
    "bf16",
    "bf16 remainders",
    "bf16 reduced in fp32",
    "bf16 accumulated in fp32",
    "fp16",
)
RUNS = {(1, "nccl"): tuple(zoo.CASES)}
# With what gradients take to the ranks that reduce them: the models here are too small to push any by default.
COMMUNICATORS = {
    "nccl": {"communicator": "nccl"},
    "peer": {"communicator": "peer"},
    "peer, pushed": {"communicator": "peer", "push_gradient_bytes": 0},
    "peer, large ones pushed": {"communicator": "peer", "push_gradient_bytes": 256},
}
RUNS |= {
    (world_size, communicator): tuple(name for name in ON_SEVERAL if name in zoo.CASES)
    for world_size in (2, 4)
    for communicator in COMMUNICATORS
    if can_connect(COMMUNICATORS[communicator]["communicator"], world_size)
}
# As tests/dist/test_stages.py: relative L2 of the first moments and of all updates together.
TOLERANCES = {"fp32": (2e-4, 5e-3), "bf16": (0.03, 0.15), "fp16": (0.01, 0.05)}


def train_all(rank: ranks.Rank, names: tuple[str, ...], communicator: str) -> dict[tuple[str, int], dict]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    device = f"cuda:{ordinal_of(rank.rank)}"
    torch.cuda.set_device(device)
    return {
        (name, stage): zoo.train_or_error(
            zoo.CASES[name], rank, stage=stage, device=device, **COMMUNICATORS[communicator]
        )
        for name in names
        for stage in STAGES
    }


@pytest.fixture(scope="module")
def results():
    found = {}

    def of(world_size, communicator):
        run = world_size, communicator
        if run not in found:
            found[run] = ranks.run(train_all, RUNS[run], communicator, world_size=world_size, timeout_s=300.0)
        return found[run]

    return of


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        # Steps that overflow differ from a plain loop's.
        left_out = {"fp16"} if metafunc.function is test_trains_what_plain_pytorch_trains else set()
        runs = [(*run, name) for run, names in RUNS.items() for name in names if name not in left_out]
        metafunc.parametrize(("world_size", "communicator", "case"), runs)


def accumulates_shards(case: str) -> bool:
    """Stages 2 and 3 then add what was reduced, stages 0 and 1 reduce what was added."""
    return zoo.CASES[case].config.get("gradient_accumulation_steps", 1) > 1


def test_all_stages_end_with_the_same_bits(results, world_size, communicator, case):
    by_rank = results(world_size, communicator)
    for rank in by_rank:
        for stage in STAGES:
            assert "error" not in rank[case, stage], f"stage {stage}: {rank[case, stage]['error']}"
    for alike in ((0, 1), (2, 3)) if accumulates_shards(case) and world_size > 1 else (STAGES,):
        for key in ("digest", "norms", "scales", "applied", "served"):
            found = {repr(rank[case, stage][key]) for rank in by_rank for stage in alike}
            assert len(found) == 1, (key, alike, found)
        for rank in by_rank:
            assert len({repr(rank[case, stage]["losses"]) for stage in alike}) == 1


@pytest.mark.parametrize(("world_size", "communicator"), RUNS)
def test_remainders_end_as_whole_masters_do(results, world_size, communicator):
    found = results(world_size, communicator)[0]
    assert (
        len({found[case, stage]["digest"] for case in ("bf16", "bf16 remainders") for stage in STAGES}) == 1
    )


def test_trains_what_plain_pytorch_trains(results, world_size, communicator, case):
    settings = zoo.CASES[case]
    expected = zoo.train_plainly(settings, world_size=world_size)
    gradient, update = TOLERANCES[settings.config.get("precision", "fp32")]
    origin = {name: p.detach() for name, p in zoo.make(settings).named_parameters()}
    for stage in STAGES if accumulates_shards(case) else (0,):
        found = results(world_size, communicator)[0][case, stage]
        assert zoo.relative(found["exp_avg"], expected["exp_avg"]) <= gradient
        assert zoo.relative(found["parameters"], expected["parameters"], origin) <= update
        assert found["norms"] == pytest.approx(expected["norms"], rel=10 * gradient)
        for rank in range(world_size):
            assert results(world_size, communicator)[rank][case, stage]["losses"] == pytest.approx(
                expected["losses"][rank], rel=10 * gradient, abs=1e-5
            )


def train_on_streams(rank: ranks.Rank, name: str, stage: int) -> list[str]:
    """An engine made on the default stream, trained there and on a stream of its own, while the default one is late:
    autograd adds gradients up where the engine was made."""
    import zerobench

    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    case = zoo.CASES[name]
    digests = []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        settings = rank.config(stage=stage, **zoo.optimizer_config(case))
        engine = zerobench.initialize(zoo.make(case).to("cuda:0"), config=settings)
        stream.wait_stream(torch.cuda.default_stream())
        for step in range(case.steps):
            torch.cuda._sleep(20_000_000)
            with torch.cuda.stream(stream):
                zoo.run_plan(engine, case, step, rank.rank, [], "cuda:0")
        torch.cuda.synchronize()
        digests.append(zoo.state_of(engine)["digest"])
        engine.close()
    return digests


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["tied", "used twice", "non-reentrant twice"])
def test_a_stream_of_its_own_trains_the_same(name, stage):
    digests = ranks.run(train_on_streams, name, stage, world_size=1)[0]
    assert digests[0] == digests[1]


def make_on_streams(rank: ranks.Rank, stage: int) -> list[str]:
    """Engines of models that lie on the device, made on the default stream and on one of its own, which is late."""
    import zerobench

    device = prepare(rank)
    case = zoo.CASES["blocks"]
    digests = []
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        model = zoo.make(case).to(device)
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)
            settings = rank.config(stage=stage, communicator="peer", **zoo.optimizer_config(case))
            engine = zerobench.initialize(model, config=settings)
        digests.append(zoo.digest(engine.full_parameters()))
        engine.close()
    return digests


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_is_read_in_the_stream_that_the_engine_is_made_in(world_size, stage):
    for digests in ranks.run(make_on_streams, stage, world_size=world_size):
        assert digests[0] == digests[1]


SLEEP_CYCLES = 200_000_000  # about 0.1 s


def spoil_free_memory(device: str) -> None:
    """All small pieces that torch's allocator has for the default stream."""
    reserved, pieces = torch.cuda.memory_reserved(), []
    while torch.cuda.memory_reserved() == reserved:
        pieces += [torch.full((128,), float("nan"), device=device) for _ in range(256)]


def train_partly_aside(rank: ranks.Rank, stage: int, part: str) -> list[str]:
    """Forwards or steps in a stream of their own, all else on the default one; updates come late."""
    import zerobench

    device = prepare(rank)
    case = zoo.CASES["blocks"]
    main = torch.cuda.default_stream()
    digests = []
    for side in (main, torch.cuda.Stream()):
        forward, update = (side, main) if part == "forward" else (main, side)
        settings = rank.config(stage=stage, communicator="peer", **zoo.optimizer_config(case))
        engine = zerobench.initialize(zoo.make(case).to(device), config=settings)
        for step in range(case.steps):
            batch = zoo.on_device(case.batch(step, rank.rank, 0), device)
            forward.wait_stream(main)
            with torch.cuda.stream(forward):
                loss = engine(**batch)
            spoil_free_memory(device)
            main.wait_stream(forward)
            engine.backward(loss)
            update.wait_stream(main)
            reduce = torch.cuda.ExternalStream(engine._place.device.stream("reduce"))
            with torch.cuda.stream(update if part == "step" else reduce):  # that updates run in
                torch.cuda._sleep(SLEEP_CYCLES)
            with torch.cuda.stream(update):
                engine.step()
            spoil_free_memory(device)
            main.wait_stream(update)
        digests.append(zoo.state_of(engine)["digest"])
        engine.close()
    return digests


@pytest.mark.parametrize(("world_size", "stage", "part"), [(1, 0, "step"), (2, 2, "forward")])
def test_gradients_stay_until_updates_have_read_them(world_size, stage, part):
    for digests in ranks.run(train_partly_aside, stage, part, world_size=world_size):
        assert digests[0] == digests[1]


def delay_lanes(engine: Any) -> None:
    """Delay the work that is in the engine's lanes now."""
    for lane in ("gather", "reduce"):
        with torch.cuda.stream(torch.cuda.ExternalStream(engine._place.device.stream(lane))):
            torch.cuda._sleep(20_000_000)


def compute_aside(model: torch.nn.Module, side: torch.cuda.Stream) -> None:
    """Each block of a Chain in a stream of its own, which comes late."""

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        main = torch.cuda.current_stream()
        h = model.inlet(x)
        for block in model.blocks:
            side.wait_stream(main)
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                h = block(h)
            main.wait_stream(side)
        return torch.nn.functional.mse_loss(model.outlet(h).float(), y.float())

    model.forward = forward


def train_aside(rank: ranks.Rank, name: str, stage: int) -> list[str]:
    import zerobench

    device = prepare(rank)
    case = zoo.CASES[name]
    digests = []
    for side in (None, torch.cuda.Stream()):
        model = zoo.make(case).to(device)
        if side is not None:
            compute_aside(model, side)
        settings = rank.config(stage=stage, communicator="peer", **zoo.optimizer_config(case))
        engine = zerobench.initialize(model, config=settings)
        for step in range(case.steps):
            delay_lanes(engine)
            zoo.run_plan(engine, case, step, rank.rank, [], device)
        torch.cuda.synchronize()
        digests.append(zoo.state_of(engine)["digest"])
        engine.close()
    return digests


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["blocks", "lora"])
def test_a_block_in_a_stream_of_its_own_trains_the_same(name, stage):
    for digests in ranks.run(train_aside, name, stage, world_size=2):
        assert digests[0] == digests[1]


def use_before_the_call(model: torch.nn.Module) -> None:
    """The last block's weights, before the first block."""
    model.identity = torch.nn.Identity()

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        last = model.blocks[-1]
        h = model.inlet(x)
        h = h + torch.nn.functional.linear(torch.nn.functional.linear(h, last.up.weight), last.down.weight)
        for block in model.blocks:
            h = block(h)
        return torch.nn.functional.mse_loss(model.outlet(h).float(), y.float())

    model.forward = forward


def train_used_early(rank: ranks.Rank, stage: int) -> list[tuple[str, list[str]]]:
    """With the blocks as units, and with none."""
    import zerobench

    device = prepare(rank)
    case = zoo.CASES["blocks"]
    found = []
    for units in ("auto", ["Identity"]):
        model = zoo.make(case).to(device)
        use_before_the_call(model)
        settings = rank.config(
            stage=stage, communicator="peer", **(zoo.optimizer_config(case) | {"units": units})
        )
        engine = zerobench.initialize(model, config=settings)
        for step in range(case.steps):
            delay_lanes(engine)
            zoo.run_plan(engine, case, step, rank.rank, [], device)
        torch.cuda.synchronize()
        awaited = [unit["name"] for unit in engine.units() if unit["is_awaited_early"]]
        found.append((zoo.state_of(engine)["digest"], awaited))
        engine.close()
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_use_before_a_blocks_call_trains_the_same(stage):
    for blocks, none in ranks.run(train_used_early, stage, world_size=2):
        assert blocks == (none[0], ["blocks.2"])
        assert none[1] == []

"""fp16 with its dynamic loss scale, and the c10d communicator, at every stage."""

from __future__ import annotations

import os

import pytest
import ranks
import small_models
import torch
import zoo

import zerobench
from zerobench.bench.launch.environments import free_ports
from zerobench.errors import NonFiniteGradientError

STAGES = (0, 1, 2, 3)
CASE = zoo.CASES["fp16"]
# Four elements of the first batches make gradients overflow at 2**20; 2**8 is fine.
SCALES = {"overflows at first": 2.0**24, "never overflows": 2.0**8}


def train(rank, stage, scale, poisoned=()):
    """Steps with a batch that overflows at any scale where ``poisoned`` says so."""
    model = zoo.make(CASE)
    config = rank.config(
        stage=stage,
        precision="fp16",
        gradient_clipping=1.0,
        optimizer={"lr": zoo.LR},
        loss_scale={"initial_scale": scale, "growth_interval_steps": 4},
    )
    engine = zerobench.initialize(model, config=config)
    record = {
        "scales": [engine.loss_scale],
        "applied": [],
        "steps": [],
        "norms": [],
        "kept": [],
        "losses": [],
    }
    for step in range(14):
        batch = zoo.points(step, rank.rank)
        before = zoo.state_of(engine)["digest"] if step in poisoned else None
        loss = engine(**batch)
        if step in poisoned and rank.rank == 1:  # one rank's overflow is everybody's
            loss = loss * float("inf")
        engine.backward(loss)
        engine.step()
        record["scales"].append(engine.loss_scale)
        record["applied"].append(engine.was_step_applied())
        record["steps"].append(engine.global_steps)
        record["norms"].append(engine.get_global_grad_norm())
        record["losses"].append(loss.item())
        if before is not None:
            record["kept"].append(zoo.state_of(engine)["digest"] == before)
    record |= zoo.state_of(engine)
    engine.close()
    return record


def train_all(rank):
    results = {(name, stage): train(rank, stage, scale) for name, scale in SCALES.items() for stage in STAGES}
    results |= {("poisoned", stage): train(rank, stage, 2.0**8, poisoned=(2, 3, 9)) for stage in STAGES}
    return results


@pytest.fixture(scope="module")
def fp16():
    return ranks.run(train_all)


@pytest.mark.parametrize("name", [*SCALES, "poisoned"])
def test_all_stages_skip_and_scale_alike(fp16, name):
    for key in ("digest", "scales", "applied", "steps", "served"):
        assert len({repr(rank[name, stage][key]) for rank in fp16 for stage in STAGES}) == 1, key
    norms = [rank[name, stage]["norms"] for rank in fp16 for stage in STAGES]
    assert len({repr(of_run) for of_run in norms}) == 1


def test_the_scale_halves_until_steps_are_applied(fp16):
    record = fp16[0]["overflows at first", 3]
    first = record["applied"].index(True)
    assert first > 0
    assert record["scales"][: first + 1] == [2.0**24 / 2**i for i in range(first + 1)]
    assert all(record["applied"][first:])
    assert record["steps"][-1] == len(record["applied"]) - first


def test_a_skipped_step_changes_nothing_and_the_scale_recovers(fp16):
    record = fp16[0]["poisoned", 0]
    assert [step for step, applied in enumerate(record["applied"]) if not applied] == [2, 3, 9]
    assert record["kept"] == [True] * 3
    assert record["scales"][3:5] == [2.0**7, 2.0**6]
    assert record["scales"][8] == 2.0**7  # after four good steps
    assert all(not torch.tensor(record["norms"][step]).isfinite() for step in (2, 3, 9))


def overflow_at_the_floor(rank):
    """A loss that stays NaN on one rank: skipped until the scale has nowhere to go, then told of on every rank."""
    said = {}
    for stage in STAGES:
        config = rank.config(
            stage=stage,
            precision="fp16",
            loss_scale={"initial_scale": 8.0, "min_scale": 2.0},
            optimizer={"lr": zoo.LR},
        )
        engine = zerobench.initialize(zoo.make(CASE), config=config)
        before, skipped = zoo.state_of(engine)["digest"], 0
        try:
            for _ in range(5):
                engine.backward(
                    engine(**zoo.points(0, rank.rank)) * (float("nan") if rank.rank == 1 else 1.0)
                )
                engine.step()
                skipped += not engine.was_step_applied()
        except NonFiniteGradientError as error:
            message = str(error)
        kept = zoo.state_of(engine)["digest"] == before
        engine.backward(engine(**zoo.points(0, rank.rank)))
        engine.step()
        said[stage] = (skipped, kept, engine.loss_scale, engine.was_step_applied(), message)
        engine.close()
    return said


def test_a_loss_that_stays_nan_raises_once_the_scale_is_at_its_floor():
    for said in ranks.run(overflow_at_the_floor):
        for skipped, kept, scale, applied_after, message in said.values():
            assert (skipped, kept, scale, applied_after) == (2, True, 2.0, True)
            assert "with the loss scale at its floor; nothing was updated. Lower the learning rate" in message


def test_fp16_trains_what_fp32_trains(fp16):
    """Losses follow those of float32 training if nothing overflows."""
    case = zoo.Case(
        small_models.Chain, config={"gradient_clipping": 1.0, "optimizer": {"lr": zoo.LR}}, steps=14
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = zoo.train_plainly(case, world_size=2)
    torch.set_num_threads(threads)
    for rank in range(2):
        assert fp16[rank]["never overflows", 2]["losses"] == pytest.approx(expected["losses"][rank], rel=0.02)
    assert fp16[0]["never overflows", 2]["norms"] == pytest.approx(expected["norms"], rel=0.05)


C10D_CASES = ("blocks", "odd sizes", "lora", "tied", "skipped on one rank", "order differs", "bf16")


def train_over_gloo(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    results = {}
    for name in C10D_CASES:
        for stage in STAGES:
            results[name, stage] = zoo.train_engine(zoo.CASES[name], rank, stage=stage, communicator="c10d")
    assert (
        len(torch.distributed.distributed_c10d._world.pg_map) == 1
    )  # the default group, for the next engine
    torch.distributed.destroy_process_group()
    for name in C10D_CASES:
        results[name, "shm"] = zoo.train_engine(zoo.CASES[name], rank, stage=3)
    return results


@pytest.fixture(scope="module", params=[2, 3])
def gloo(request):
    return ranks.run(train_over_gloo, free_ports(1)[0], world_size=request.param)


@pytest.mark.parametrize("name", C10D_CASES)
def test_c10d_gives_the_same_bits_at_all_stages(gloo, name):
    """Gloo sums in an order of its own, which is the same at every stage: the same buffers of the same sizes."""
    for key in ("digest", "norms", "served"):
        assert len({repr(rank[name, stage][key]) for rank in gloo for stage in STAGES}) == 1, key


@pytest.mark.parametrize("name", C10D_CASES)
def test_c10d_trains_what_shm_trains(gloo, name):
    origin = {key: p.detach() for key, p in zoo.make(zoo.CASES[name]).named_parameters()}
    tolerance = 0.1 if name == "bf16" else 1e-3
    assert (
        zoo.relative(gloo[0][name, 0]["parameters"], gloo[0][name, "shm"]["parameters"], origin) <= tolerance
    )
    if len(gloo) == 2 and name != "bf16":  # two terms have one sum
        assert gloo[0][name, 0]["digest"] == gloo[0][name, "shm"]["digest"]

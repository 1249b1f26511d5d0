"""`pipeline` against the single-process reference on the same global batch: each schedule on two ranks, and with DDP on
four. One group of processes runs all cases of a size."""

from __future__ import annotations

import os
from functools import cache, partial

import pytest
import ranks
import zoo
from builders import make_settings, tiny_model

from zerobench.bench.launch.environments import free_ports
from zerobench.data import open_data
from zerobench.strategies.base import OptimizerSettings

BATCH_SIZE = 2
SEQ_LENGTH = 32
NUM_STEPS = 3
STAGES = 2
MODEL = {"num_layers": 5, "hidden_size": 32, "num_heads": 2, "max_seq_length": SEQ_LENGTH}
ON_TWO = {
    "gpipe": {"pipeline_schedule": "gpipe", "micro_batches": 4},
    "1f1b": {"pipeline_schedule": "1f1b", "micro_batches": 4},
    "interleaved": {"pipeline_schedule": "interleaved", "micro_batches": 4},
    "gpipe-bf16": {"pipeline_schedule": "gpipe", "micro_batches": 4, "precision": "bf16"},
    "1f1b-bf16": {"pipeline_schedule": "1f1b", "micro_batches": 4, "precision": "bf16"},
    "interleaved-bf16": {"pipeline_schedule": "interleaved", "micro_batches": 4, "precision": "bf16"},
    "1f1b-fp16": {"pipeline_schedule": "1f1b", "micro_batches": 4, "precision": "fp16", "clip": 0.5},
    "clip": {"pipeline_schedule": "1f1b", "micro_batches": 2, "clip": 0.5},
    "checkpointing": {"pipeline_schedule": "1f1b", "micro_batches": 8, "checkpointing": True},
    "untied": {"pipeline_schedule": "1f1b", "micro_batches": 4, "tied": False},
}
ON_FOUR = {
    "1f1b": {"pipeline_schedule": "1f1b", "micro_batches": 4, "clip": 0.5},
    "1f1b-bf16": {"pipeline_schedule": "1f1b", "micro_batches": 4, "precision": "bf16", "clip": 0.5},
    "interleaved": {"pipeline_schedule": "interleaved", "micro_batches": 4},
    "gpipe-of-four": {"pipeline_schedule": "gpipe", "micro_batches": 8, "pipeline_stages": 4},
}
CASES = [(2, case) for case in ON_TWO] + [(4, case) for case in ON_FOUR]
TOLERANCES = {
    "fp32": {"gradient": 1e-4, "update": 1e-3, "loss": 1e-5, "norm": 1e-5, "evaluation": 1e-5},
    "bf16": {"gradient": 0.05, "update": 0.15, "loss": 5e-3, "norm": 0.02, "evaluation": 5e-3},
    "fp16": {"gradient": 0.01, "update": 0.05, "loss": 1e-3, "norm": 5e-3, "evaluation": 1e-3},
}


def fields_of(world_size, case):
    return (ON_TWO if world_size == 2 else ON_FOUR)[case]


@cache
def text():
    return open_data("stdlib", seed=0, seq_length=SEQ_LENGTH, vocab_size=256)


def train(strategy_class, world_size: int, case: str, *, rank: int, own_world_size: int) -> dict:
    fields = dict(fields_of(world_size, case))
    build = partial(tiny_model, **MODEL, tied_embeddings=fields.pop("tied", True))
    settings = make_settings(
        rank=rank,
        world_size=own_world_size,
        batch_size=BATCH_SIZE,
        seq_length=SEQ_LENGTH,
        grad_accum=2,
        optimizer=OptimizerSettings(lr=1e-3),
        timeout_s=60.0,
        **{"pipeline_stages": STAGES, **fields},
    )
    assert strategy_class.unsupported(settings) is None
    data = text()
    strategy = strategy_class(settings)
    strategy.build(build)

    def batches(step):
        if own_world_size == 1:
            return data.global_micro_batches(step, world_size=world_size, batch_size=BATCH_SIZE, grad_accum=2)
        return data.micro_batches(step, rank=rank, world_size=world_size, batch_size=BATCH_SIZE, grad_accum=2)

    def applied_step(step):
        for _ in range(8):  # fp16 may skip
            found = strategy.step(batches(step), norm=True)
            if found.applied:
                return found
        raise AssertionError("overflowed at every loss scale")

    result = {"initial": strategy.full_parameters()}
    first = applied_step(0)
    result |= {"loss": float(first.loss), "norm": float(first.grad_norm)}
    result["first_moments"] = strategy.first_moments()
    for step in range(1, NUM_STEPS):
        applied_step(step)
    strategy.reset_counters()
    strategy.step(batches(NUM_STEPS))
    result["communication_bytes"] = strategy.communication_bytes()
    result["memory_bytes"] = strategy.memory_bytes()["device"]
    result["parameters"] = strategy.full_parameters()
    result["evaluation"] = evaluated(strategy, data, result, rank)
    result["phases_ms"] = strategy.profiled_step(batches(NUM_STEPS + 1))
    result["schedule"] = strategy.schedule_times()
    result["after_profile"] = float(applied_step(NUM_STEPS + 2).loss)
    strategy.close()
    return result


def evaluated(strategy, data, result, rank):
    """Return the loss of a held-out batch of the rank, and of what forward read the worst."""
    from zerobench.bench.rank.reads import watched

    every = data.validation_batches(rank=0, world_size=1, batch_size=BATCH_SIZE, num_batches=4)
    with watched(strategy.module(), result["parameters"]) as reads:
        losses = (
            [strategy.evaluate([every[rank]])]
            if strategy.settings.world_size > 1
            else [strategy.evaluate([batch]) for batch in every]
        )
    result["read"], result["read names"] = reads.worst(), reads.names
    return losses


def run_cases(rank: ranks.Rank, port: int):
    import torch.distributed as dist

    from zerobench import strategies

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    found = {
        case: zoo.or_error(
            train,
            strategies.get("pipeline"),
            rank.world_size,
            case,
            rank=rank.rank,
            own_world_size=rank.world_size,
        )
        for case in (ON_TWO if rank.world_size == 2 else ON_FOUR)
    }
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def found():
    by_size = {size: ranks.run(run_cases, free_ports(1)[0], world_size=size) for size in (2, 4)}
    return lambda world_size, case: [of_rank[case] for of_rank in by_size[world_size]]


@pytest.fixture(scope="module")
def reference(one_thread):
    from zerobench import strategies

    @cache
    def of(world_size, case):
        return train(strategies.get("single"), world_size, case, rank=0, own_world_size=1)

    return of


def moved(result):
    return {name: result["parameters"][name] - result["initial"][name] for name in result["initial"]}


def errors(results, reference):
    moments, first = reference["first_moments"], results[0]
    floor = 1e-3 * max(float(tensor.norm()) for tensor in moments.values())
    ours, theirs = moved(first), moved(reference)
    assert ours.keys() == theirs.keys()
    difference = sum((ours[name] - theirs[name]).double().square().sum() for name in theirs)
    return {
        "gradient": max(
            float((first["first_moments"][name] - moments[name]).norm() / (moments[name].norm() + floor))
            for name in moments
        ),
        "update": float(
            (difference / sum(tensor.double().square().sum() for tensor in theirs.values())).sqrt()
        ),
        "loss": abs(sum(result["loss"] for result in results) / len(results) / reference["loss"] - 1),
        "norm": max(abs(result["norm"] / reference["norm"] - 1) for result in results),
        "evaluation": max(
            abs(result["evaluation"][0] / reference["evaluation"][rank] - 1)
            for rank, result in enumerate(results)
        ),
    }


@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_agrees_with_the_reference(found, reference, world_size, case):
    results = found(world_size, case)
    for result in results:
        assert "error" not in result, result["error"]
    tolerances = TOLERANCES[fields_of(world_size, case).get("precision", "fp32")]
    measured = errors(results, reference(world_size, case))
    assert all(measured[key] <= tolerances[key] for key in tolerances), measured


@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_what_forward_reads_is_what_the_first_owner_updated(found, world_size, case):
    """The tied weight included, which the last stage updates for itself."""
    results = found(world_size, case)
    assert all(result["read"].share == 0 for result in results)
    assert set().union(*(result["read names"] for result in results)) == results[0]["parameters"].keys()


def test_both_ends_of_a_pipeline_read_the_tied_weight(found):
    assert all("wte.weight" in result["read names"] for result in found(2, "1f1b"))
    first, last = found(2, "untied")
    assert "wte.weight" in first["read names"] and "wte.weight" not in last["read names"]


def test_a_rank_holds_its_stages_alone(found):
    first, last = (result["memory_bytes"] for result in found(2, "1f1b"))
    numel = sum(tensor.numel() for tensor in found(2, "1f1b")[0]["parameters"].values())
    tied = 256 * MODEL["hidden_size"]
    assert first["parameters"] + last["parameters"] == 4 * (numel + tied)
    assert first["exp_avg"] == first["exp_avg_sq"] == first["gradients"] == first["parameters"]
    assert first["master"] == 0


def test_low_precision_lies_beside_masters(found):
    for result in found(2, "1f1b-bf16"):
        memory = result["memory_bytes"]
        assert memory["master"] == 2 * memory["parameters"] == memory["exp_avg"]


def test_bytes_that_a_rank_moves(found):
    """Activations go forward and their gradients back, in the parameters' dtype; replicas reduce what they hold."""
    sequences = STAGES * 2 * BATCH_SIZE
    hidden = sequences * SEQ_LENGTH * MODEL["hidden_size"]
    tokens = 2 * 8 * sequences // STAGES * SEQ_LENGTH
    tied = 256 * MODEL["hidden_size"]

    def moved(world_size, case):
        return [result["communication_bytes"] for result in found(world_size, case)]

    one_way = {"all_gather": tokens, "all_reduce": 4 * tied}
    assert moved(2, "1f1b") == [{"point_to_point": 4 * hidden, **one_way}] * 2
    # Four parts: both ranks send three times.
    assert moved(2, "interleaved") == [{"point_to_point": 3 * 4 * hidden, **one_way}] * 2
    assert moved(2, "1f1b-bf16")[0]["point_to_point"] == 2 * hidden
    replicated = found(4, "1f1b")[0]
    assert (
        replicated["communication_bytes"]["all_reduce"] == 4 * tied + replicated["memory_bytes"]["parameters"]
    )


@pytest.mark.parametrize(("world_size", "case"), CASES)
def test_the_schedule_is_busy_for_a_part_of_its_time(found, world_size, case):
    for result in found(world_size, case):
        assert 0 < result["schedule"].busy_ms < result["schedule"].whole_ms
        assert set(result["phases_ms"]) == {"forward", "backward", "optimizer", "exposed_communication"}
        assert all(ms > 0 for ms in result["phases_ms"].values())


def test_training_goes_on_rightly_after_a_profiled_step(found, reference):
    losses = [result["after_profile"] for result in found(2, "interleaved")]
    assert sum(losses) / 2 == pytest.approx(reference(2, "interleaved")["after_profile"], rel=1e-4)

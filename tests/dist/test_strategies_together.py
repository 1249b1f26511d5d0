"""Peers against the single-process reference on the same global batch; planted faults must differ from it.

One group of two processes runs everything once (importing torch is what costs); tests look at what it left.
"""

from __future__ import annotations

import os
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
import zoo
from builders import make_settings, tiny_model
from faulty import FAULTS, OldParameter, PlainDataParallel

from zerobench import models, strategies
from zerobench.bench.launch.environments import free_ports
from zerobench.bench.rank.reads import watched
from zerobench.data import open_data
from zerobench.strategies.base import OptimizerSettings
from zerobench.strategies.flight_recorder import switch_recorder_on
from zerobench.strategies.peer import PeerStrategy
from zerobench.strategies.pieces import Pieces
from zerobench.strategies.shared import checksum

WORLD_SIZE = 2
BATCH_SIZE = 2
SEQ_LENGTH = 32
NUM_STEPS = 4
MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "max_seq_length": SEQ_LENGTH}
make_model = partial(tiny_model, **MODEL)
CASES = {
    "fp32": {"precision": "fp32"},
    "fp32-accum4-clip": {"precision": "fp32", "grad_accum": 4, "clip": 0.5},
    "fp32-checkpointing": {"precision": "fp32", "checkpointing": True, "deterministic": True},
    "bf16": {"precision": "bf16"},
    "bf16-accum4-clip": {"precision": "bf16", "grad_accum": 4, "clip": 0.5},
    "fp16-accum2-clip": {"precision": "fp16", "grad_accum": 2, "clip": 0.5},
}
PLAIN = [f"faulty:{PlainDataParallel.__name__}"]
PEERS = ["ddp", "fsdp2", *PLAIN]
OURS = ["zero0", "zero1", "zero2", "zero3"]
RIGHT = [*PEERS, *OURS]
RUNS = [(name, case) for case in CASES for name in RIGHT] + [
    ("fsdp2_keep", "fp32"),
    ("fsdp2_keep", "bf16-accum4-clip"),
    ("ddp_compress", "bf16"),
    ("ddp_compress", "fp16-accum2-clip"),
    ("ddp_master", "bf16"),
    ("ddp_master", "bf16-accum4-clip"),
    ("ddp_master", "fp16-accum2-clip"),
]
FAULTY = [f"faulty:{fault.__name__}" for fault in FAULTS]
OLD = f"faulty:{OldParameter.__name__}"
FAULT_CASES = ["fp32", "bf16", "fp16-accum2-clip"]
# Relative errors: of the reduced gradient of step 1, the k-step update, the loss, the norm and a held-out loss.
TOLERANCES = {
    "fp32": {"gradient": 1e-4, "update": 1e-3, "loss": 1e-5, "norm": 1e-5, "evaluation": 1e-5},
    "bf16": {"gradient": 0.05, "update": 0.15, "loss": 5e-3, "norm": 0.02, "evaluation": 5e-3},
    "fp16": {"gradient": 0.01, "update": 0.05, "loss": 1e-3, "norm": 5e-3, "evaluation": 1e-3},
}


@cache
def text():
    return open_data("stdlib", seed=0, seq_length=SEQ_LENGTH, vocab_size=256)


def applied_step(strategy, micro_batches):
    """Steps that fp16 overflow skips are made again: a sum over ranks in fp16 overflows at a lower loss scale."""
    for _ in range(8):
        step = strategy.step(micro_batches, norm=True)
        if step.applied:
            return step
    raise AssertionError("overflowed at every loss scale")


def train(name: str, case: str, *, rank: int, world_size: int) -> dict:
    """Every method of the protocol at least once, and what came out."""
    settings = make_settings(
        rank=rank,
        world_size=world_size,
        rendezvous=f"test-strategies-{os.environ.get('MASTER_PORT', 0)}",
        batch_size=BATCH_SIZE,
        seq_length=SEQ_LENGTH,
        optimizer=OptimizerSettings(lr=1e-3),
        timeout_s=60.0,
        **CASES[case],
    )
    data = text()
    sizes = {"batch_size": BATCH_SIZE, "grad_accum": settings.grad_accum}

    def batches(step):
        if world_size == 1:
            return data.global_micro_batches(step, world_size=WORLD_SIZE, **sizes)
        return data.micro_batches(step, rank=rank, world_size=world_size, **sizes)

    strategy = strategies.get(name)(settings)
    strategy.build(make_model)
    result = {"initial": strategy.full_parameters(), "dtypes": strategy.dtypes()}
    step = applied_step(strategy, batches(0))
    result |= {"loss": float(step.loss), "norm": float(step.grad_norm)}
    result["first_moments"] = strategy.first_moments()
    held_out = data.validation_batches(rank=0, world_size=1, batch_size=4, num_batches=2)
    result["validation_loss"] = strategy.evaluate(held_out)
    strategy.reset_counters()
    for index in range(1, NUM_STEPS):
        applied_step(strategy, batches(index))
    result["applied_steps"] = strategy.applied_steps()
    result["communication_bytes"] = strategy.communication_bytes()
    if isinstance(strategy, PeerStrategy):
        result["recorded_bytes"] = PeerStrategy.communication_bytes(strategy)
    result["memory_bytes"] = strategy.memory_bytes()
    result["parameters"] = strategy.full_parameters()
    with watched(strategy.module(), result["parameters"]) as reads:
        strategy.evaluate(held_out[:1])
    result["read"], result["read names"] = reads.worst(), reads.names
    result["phases_ms"] = strategy.profiled_step(batches(NUM_STEPS))
    result["collectives"] = strategy.collectives()
    strategy.reset_counters()
    result["after_profile"] = applied_step(strategy, batches(NUM_STEPS + 1))
    result["moved_after_profile"] = strategy.communication_bytes()
    strategy.close()
    result["deterministic_after"] = torch.are_deterministic_algorithms_enabled()
    return result


def plan() -> list[tuple[str, str]]:
    return [*RUNS, *((name, case) for case in FAULT_CASES for name in FAULTY), (OLD, "bf16")]


def run_rank(rank: int, ports: list[int], folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    switch_recorder_on()
    torch.distributed.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    results = {}
    for name, case in plan():
        results[name, case] = zoo.or_error(train, name, case, rank=rank, world_size=WORLD_SIZE)
    torch.distributed.destroy_process_group()
    # Where there is no group a strategy makes its own, and takes it away again.
    os.environ["MASTER_PORT"] = str(ports[1])
    results["own group"] = train("ddp", "fp32", rank=rank, world_size=WORLD_SIZE)
    results["own group"]["left"] = torch.distributed.is_initialized()
    os.environ["MASTER_PORT"] = str(ports[2])
    results["pieces"] = gather_pieces(rank)
    torch.save(results, Path(folder) / f"{rank}.pt")


def gather_pieces(rank: int) -> dict[str, torch.Tensor]:
    """Runs of 6, an uneven split, an empty one, one that both hold whole, and one that nobody holds."""
    full = torch.arange(6.0)
    mine = {
        "even": (full[:3], full[3:])[rank],
        "uneven": (full[:1], full[1:].bfloat16())[rank],
        "empty": (None, full)[rank],
        "whole": full.view(2, 3),
        "nothing": None,
    }
    torch.distributed.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    shapes = dict.fromkeys(mine, torch.Size((2, 3)))
    found = Pieces(mine, shapes, torch.device("cpu")).full_fp32()
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(run_rank, args=(free_ports(3), str(folder)), nprocs=WORLD_SIZE)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD_SIZE)]


@pytest.fixture(scope="module")
def references(one_thread) -> dict[str, dict]:
    return {case: train("single", case, rank=0, world_size=1) for case in CASES}


def relative(ours: dict, reference: dict) -> float:
    """L2 of the difference over L2 of the reference, over all tensors together."""
    assert ours.keys() == reference.keys()
    difference = sum((ours[name] - reference[name]).double().square().sum() for name in reference)
    return float((difference / sum(tensor.double().square().sum() for tensor in reference.values())).sqrt())


def errors(result: dict, reference: dict, loss: float) -> dict[str, float]:
    def moved(outcome):
        return {name: outcome["parameters"][name] - outcome["initial"][name] for name in outcome["initial"]}

    moments = reference["first_moments"]
    floor = 1e-3 * max(
        float(tensor.norm()) for tensor in moments.values()
    )  # for tensors that hardly have any
    return {
        "gradient": max(
            float((result["first_moments"][name] - moments[name]).norm() / (moments[name].norm() + floor))
            for name in moments
        ),
        "update": relative(moved(result), moved(reference)),
        "loss": abs(loss / reference["loss"] - 1),
        "norm": abs(result["norm"] / reference["norm"] - 1),
        "evaluation": abs(result["validation_loss"] / reference["validation_loss"] - 1),
    }


def measured_errors(ranks, references, name, case):
    for rank in ranks:
        assert "error" not in rank[name, case], rank[name, case]["error"]
    loss = sum(rank[name, case]["loss"] for rank in ranks) / WORLD_SIZE
    return errors(ranks[0][name, case], references[case], loss)


@pytest.mark.parametrize(("name", "case"), RUNS)
def test_agrees_with_the_reference(ranks, references, name, case):
    found = measured_errors(ranks, references, name, case)
    tolerances = TOLERANCES[CASES[case]["precision"]]
    assert all(found[key] <= tolerances[key] for key in tolerances), found


@pytest.mark.parametrize(("name", "case"), RUNS)
def test_every_rank_reads_its_masters(ranks, name, case):
    for rank in ranks:
        assert rank[name, case]["read"].share == 0.0
        assert rank[name, case]["read names"] == rank[name, case]["parameters"].keys()


@pytest.mark.parametrize(("name", "case"), RUNS)
def test_steps_that_fp16_applied_are_counted(ranks, name, case):
    counted = NUM_STEPS if CASES[case]["precision"] == "fp16" else None
    assert {rank[name, case]["applied_steps"] for rank in ranks} == {counted}


def test_a_rank_that_reads_an_old_parameter_is_seen(ranks):
    first, second = (rank[OLD, "bf16"]["read"] for rank in ranks)
    assert first.share == 0.0
    assert second.share > 0.5 and second.name == "ln_f.bias"


@pytest.mark.parametrize("case", FAULT_CASES)
@pytest.mark.parametrize("name", FAULTY)
def test_a_planted_fault_differs_from_the_reference(ranks, references, name, case):
    found = measured_errors(ranks, references, name, case)
    tolerances = TOLERANCES[CASES[case]["precision"]]
    assert any(found[key] > 1.5 * tolerances[key] for key in tolerances), found


@pytest.mark.parametrize(("name", "case"), RUNS)
def test_ranks_hold_the_same_parameters(ranks, name, case):
    sums = {checksum(rank[name, case]["parameters"]) for rank in ranks}
    assert len(sums) == 1
    assert checksum(ranks[0][name, case]["initial"]) == checksum(
        {key: value.detach() for key, value in make_model().named_parameters()}
    )
    assert sums != {checksum(ranks[0][name, case]["initial"])}


@pytest.mark.parametrize("case", [case for case in CASES if "grad_accum" not in CASES[case]])
def test_stages_agree_bit_for_bit(ranks, case):
    """Placement changes nothing; accumulation does, since stages 2 and 3 reduce every micro-batch."""
    assert len({checksum(ranks[0][name, case]["parameters"]) for name in OURS}) == 1


def test_memory_by_category(ranks, references):
    numel = models.parameter_count(models.resolve("tiny", MODEL))

    def memory(name, case):
        result = references[case] if name == "single" else ranks[0][name, case]
        return result["memory_bytes"]["device"]

    replicated = dict.fromkeys(("parameters", "gradients", "exp_avg", "exp_avg_sq"), 4 * numel) | {
        "master": 0
    }
    assert memory("single", "fp32") == replicated
    assert memory("ddp", "fp32") == replicated
    assert memory("ddp", "fp32-accum4-clip") == replicated
    assert memory("ddp", "bf16") == replicated
    low = {"parameters": 2 * numel, "gradients": (2 + 4) * numel, "master": 4 * numel}
    assert memory("single", "bf16") == replicated | low
    assert memory("ddp_master", "bf16") == replicated | low
    # Every first dimension of this model is even, so two shards need no padding.
    sharded = {key: value // 2 for key, value in replicated.items()}
    assert memory("fsdp2", "fp32") == sharded
    assert memory("fsdp2", "bf16-accum4-clip") == sharded | {"gradients": 2 * numel}


def test_communication_bytes(ranks):
    config = models.resolve("tiny", MODEL)
    numel, steps = models.parameter_count(config), NUM_STEPS - 1
    root = numel - sum(p.numel() for p in make_model().blocks.parameters())
    full = steps * 4 * numel

    def moved(name: str, case: str) -> dict[str, int]:
        return ranks[0][name, case]["communication_bytes"]

    assert moved("ddp", "fp32") == moved("ddp", "bf16-accum4-clip") == {"all_reduce": full}
    # Half of what is gathered before forward, of the blocks again before backward, and of what is reduced.
    gathered = numel + (numel - root)
    sharded = {"all_gather": steps * 4 * gathered // 2, "reduce_scatter": full // 2}
    assert moved("fsdp2", "fp32") == sharded
    assert moved("fsdp2", "bf16") == {name: bytes_ // 2 for name, bytes_ in sharded.items()}
    # What stays gathered is gathered once, and what is compressed is half as long.
    assert moved("fsdp2_keep", "fp32") == {"all_gather": full // 2, "reduce_scatter": full // 2}
    # Micro-batches reduce once, and gather again only what was let go.
    assert moved("fsdp2_keep", "bf16-accum4-clip") == {"all_gather": full // 4, "reduce_scatter": full // 4}
    gathered = root + 2 * 4 * (numel - root)
    assert moved("fsdp2", "bf16-accum4-clip") == {"all_gather": steps * gathered, "reduce_scatter": full // 4}
    assert moved("ddp_compress", "bf16") == {"all_reduce": full // 2}
    assert moved("ddp_master", "bf16-accum4-clip") == {"all_reduce": full // 2}


@pytest.mark.parametrize("case", ["fp32", "bf16-accum4-clip"])
@pytest.mark.parametrize("name", ["ddp", "fsdp2", *OURS])
def test_collectives_of_a_profiled_step_are_those_of_the_next_one(ranks, name, case):
    for rank in ranks:
        result = rank[name, case]
        by_name = Counter()
        for one in result["collectives"]:
            assert one.calls > 0 and one.ms >= 0
            by_name[one.name] += one.bytes
        assert by_name == {key: bytes_ for key, bytes_ in result["moved_after_profile"].items() if bytes_}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ddp", {("backward", "all_reduce")}),
        ("zero1", {("backward", "reduce_scatter"), ("optimizer", "all_gather")}),
        ("zero3", {("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")}),
        ("fsdp2", {("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")}),
    ],
)
def test_collectives_stand_in_their_phase(ranks, name, expected):
    found = ranks[0][name, "fp32"]["collectives"]
    assert {(one.phase, one.name) for one in found if one.bytes > 1000} == expected


def test_torch_records_what_peers_move(ranks):
    """Compare torch's record, which rows of peers without a count show, with the counts of peers that have one.
    torch's gloo makes a reduce_scatter of an all_reduce; ranks that ask for a norm or clip add a few values."""

    def both(name: str, case: str) -> tuple[dict[str, int], dict[str, int]]:
        return ranks[0][name, case]["communication_bytes"], ranks[0][name, case]["recorded_bytes"]

    for name, case in (("ddp", "fp32"), ("ddp", "bf16-accum4-clip"), ("ddp_compress", "bf16")):
        counted, recorded = both(name, case)
        assert recorded == counted
    for name, case in (("fsdp2", "fp32"), ("fsdp2_keep", "fp32")):
        counted, recorded = both(name, case)
        reduced = recorded.pop("all_reduce") - 2 * counted.pop("reduce_scatter")
        assert 0 <= reduced < 1000
        assert recorded == counted


@pytest.mark.parametrize(("name", "case"), [run for run in RUNS if run[0] not in PLAIN])
def test_phases_are_told_apart(ranks, references, name, case):
    phases = ranks[0][name, case]["phases_ms"]
    assert set(phases) == {"forward", "backward", "optimizer", "exposed_communication"}
    assert all(ms >= 0 for ms in phases.values())
    assert phases["exposed_communication"] > 0
    assert set(references[case]["phases_ms"]) == {"forward", "backward", "optimizer"}


@pytest.mark.parametrize("name", ["ddp", "fsdp2", *OURS])
def test_training_goes_on_rightly_after_a_profiled_step(ranks, references, name):
    after = [rank[name, "fp32"]["after_profile"] for rank in ranks]
    assert sum(float(step.loss) for step in after) / WORLD_SIZE == pytest.approx(
        float(references["fp32"]["after_profile"].loss), rel=1e-4
    )
    assert float(after[0].grad_norm) == pytest.approx(
        float(references["fp32"]["after_profile"].grad_norm), rel=1e-3
    )


def test_dtypes_say_what_runs(ranks, references):
    def roles(name, case):
        result = references[case] if name == "single" else ranks[0][name, case]
        found = result["dtypes"]
        return found.param, found.compute, found.reduce, found.master, found.state

    for name in ("single", "ddp", "fsdp2", *OURS):
        assert roles(name, "fp32") == ("float32",) * 5
    assert roles("single", "bf16") == ("bfloat16", "bfloat16", "bfloat16", "float32", "float32")
    assert roles("fsdp2", "fp16-accum2-clip") == ("float16", "float16", "float16", "float32", "float32")
    assert roles("zero3", "bf16") == roles("single", "bf16")
    assert roles("ddp", "bf16") == ("float32", "bfloat16", "float32", "float32", "float32")
    assert roles("ddp_master", "bf16") == roles("single", "bf16")
    assert roles("ddp_compress", "bf16") == ("float32", "bfloat16", "bfloat16", "float32", "float32")


def test_pieces_make_the_whole_on_every_rank(ranks):
    expected = torch.arange(6.0).view(2, 3)
    for rank in ranks:
        assert torch.equal(rank["pieces"].pop("nothing"), torch.zeros(2, 3))
        assert all(torch.equal(whole, expected) for whole in rank["pieces"].values())


def test_process_group_of_its_own_is_taken_away(ranks):
    assert ranks[0]["own group"]["left"] is False
    assert checksum(ranks[0]["own group"]["parameters"]) == checksum(ranks[0]["ddp", "fp32"]["parameters"])


def test_deterministic_algorithms_last_as_long_as_the_strategy(ranks):
    assert not any(rank[name, case]["deterministic_after"] for rank in ranks for name, case in plan())

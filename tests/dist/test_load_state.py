"""A state that is loaded goes on with the bits of the run it came from, in a new engine or in one that was torn."""

from __future__ import annotations

import dataclasses
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
import small_models
import torch
import zoo
from torch import nn

import zerobench
from zerobench.engine import state_checks
from zerobench.errors import CommunicationError, ConfigError, NonFiniteGradientError, StateError

STAGES = (0, 1, 2, 3)
CASES = {
    name: zoo.CASES[name]
    for name in ("blocks", "frozen", "tied", "odd sizes", "bf16", "param groups and schedule", "fp16")
} | {
    "fp16 whose scale grows next": dataclasses.replace(
        zoo.CASES["fp16"],
        config={"precision": "fp16", "loss_scale": {"initial_scale": 2.0**8, "growth_interval_steps": 4}},
    )
}
PLACEMENTS = ("device", "host", "files")
FACTS = ("step", "loss_scale")  # of a state, beside its tensors


def config_of(placement: str, folder: str) -> dict:
    if placement == "device":
        return {}
    files = zoo.SWAP | {"nvme_path": folder}
    return {"offload_optimizer": files if placement == "files" else {"device": "cpu", "chunk_numel": 128}}


def start(rank: ranks.Rank, case: zoo.Case, stage: int, **config):
    model = zoo.make(case)
    return zerobench.initialize(
        model,
        config=rank.config(stage=stage, **(zoo.optimizer_config(case) | config)),
        model_parameters=case.groups(model),
    )


def state_of(engine) -> dict:
    moments = {kind: engine.full_optimizer_state(kind) for kind in ("exp_avg", "exp_avg_sq")}
    return {
        "parameters": engine.full_parameters(),
        "step": engine.global_steps,
        "loss_scale": engine.loss_scale_state(),
        **moments,
    }


def end_of(engine, case: zoo.Case, rank: ranks.Rank) -> str:
    """All that is there after two more steps."""
    for step in (10, 11):
        zoo.run_plan(engine, case, step, rank.rank, [])
    found = state_of(engine)
    served = engine.state_dict()
    engine.close()
    facts = {fact: found.pop(fact) for fact in FACTS}
    tensors = {f"{kind} {name}": value for kind in found for name, value in found[kind].items()}
    tensors |= {f"served {name}": value.float() for name, value in served.items()}
    return zoo.digest(tensors) + f" {facts}"


def go_on(rank: ranks.Rank, folder: str) -> dict:
    """Return, by case, stage and placement, the uninterrupted run and the one that continued from its state."""
    ends = {}
    for name, case in CASES.items():
        for stage in STAGES:
            for placement in PLACEMENTS if stage > 0 else PLACEMENTS[:1]:
                engine = start(rank, case, stage, **config_of(placement, folder))
                for step in range(3):
                    zoo.run_plan(engine, case, step, rank.rank, [])
                kept = state_of(engine)
                plain = end_of(engine, case, rank)
                engine = start(rank, case, stage, **config_of(placement, folder))
                zoo.run_plan(engine, case, 5, rank.rank, [])
                if rank.rank > 0:  # only rank 0's counts
                    kept = {
                        kind: {name: torch.zeros_like(value) for name, value in states.items()}
                        for kind, states in kept.items()
                        if kind not in FACTS
                    } | {"step": 0, "loss_scale": None}
                engine.load_full_state(**kept)
                ends[name, stage, placement] = (plain, end_of(engine, case, rank))
    return ends


@pytest.mark.parametrize("world_size", [1, 2])
def test_goes_on_with_the_same_bits(tmp_path: Path, world_size: int):
    for ends in ranks.run(go_on, str(tmp_path), world_size=world_size):
        different = [point for point, (plain, loaded) in ends.items() if plain != loaded]
        assert not different


def keep_on_rank_0(rank: ranks.Rank) -> dict:
    """Return, by stage, the ends of runs that continue from a state on every rank, and from one on rank 0 alone."""
    ends = {}
    case = zoo.Case(lambda: WithRest(0))
    for stage in STAGES:
        engine = start(rank, case, stage)
        for step in range(3):
            zoo.run_plan(engine, case, step, rank.rank, [])
        everywhere, kept = engine.full_state(), engine.full_state(rank0_only=True)
        for kind, tensors in everywhere.items():
            if isinstance(tensors, dict):
                assert zoo.digest(kept[kind]) == zoo.digest(tensors if rank.rank == 0 else {}), kind
            else:
                assert kept[kind] == tensors
        engine.close()
        ends[stage] = []
        for state in (everywhere, kept):
            engine = start(rank, case, stage)
            engine.load_full_state(**state)
            ends[stage].append(end_of(engine, case, rank))
    return ends


def test_a_state_that_rank_0_alone_holds_becomes_everybodys():
    for ends in ranks.run(keep_on_rank_0, world_size=2):
        for stage, (of_every_rank, of_rank_0) in ends.items():
            assert of_every_rank == of_rank_0, stage


class Planted(Exception):
    """Error that a backward raises."""


def tear(engine, case: zoo.Case, rank: ranks.Rank, how: str) -> None:
    loss = engine(**case.batch(2, rank.rank, 0))
    if how == "not finite":
        with pytest.raises(NonFiniteGradientError, match="load_full_state"):
            engine.backward(loss * float("nan"))
            engine.step()
    else:

        def raises(_: torch.Tensor) -> None:
            raise Planted

        # What lies behind the first block's gradients is updated by then.
        hook = next(p for p in engine.module.parameters() if p.requires_grad).register_hook(raises)
        with pytest.raises(Planted):
            engine.backward(loss)
        hook.remove()
    with pytest.raises(StateError, match="load_full_state"):
        engine(**case.batch(3, rank.rank, 0))
    with pytest.raises(StateError, match="load_full_state"):
        engine.state_dict()


def tear_and_load(rank: ranks.Rank, folder: str) -> dict:
    """Return, by stage, placement and fault, the ends of a new engine with the state and of the torn one."""
    case = dataclasses.replace(zoo.CASES["blocks"], config={"optimizer_in_backward": True})
    ends = {}
    for stage in STAGES:
        for placement in PLACEMENTS if stage > 0 else PLACEMENTS[:1]:
            for how in ("not finite", "raises"):
                torn = start(rank, case, stage, **config_of(placement, folder))
                for step in range(2):
                    zoo.run_plan(torn, case, step, rank.rank, [])
                kept = state_of(torn)
                tear(torn, case, rank, how)
                torn.load_full_state(**kept)
                fresh = start(rank, case, stage, **config_of(placement, folder))
                fresh.load_full_state(**kept)
                ends[stage, placement, how] = (end_of(fresh, case, rank), end_of(torn, case, rank))
    return ends


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_torn_engine_goes_on_from_a_loaded_state(tmp_path: Path, world_size: int):
    for ends in ranks.run(tear_and_load, str(tmp_path), world_size=world_size):
        different = [point for point, (fresh, torn) in ends.items() if fresh != torn]
        assert not different


def load_wrongly(rank: ranks.Rank) -> dict[str, str]:
    case = zoo.CASES["blocks"]
    engine = start(rank, case, 2)
    zoo.run_plan(engine, case, 0, rank.rank, [])
    kept = state_of(engine)
    name = next(iter(kept["parameters"]))
    said = {}

    def refuse(key: str, error: type[Exception], state: dict) -> None:
        with pytest.raises(error) as caught:
            engine.load_full_state(**state)
        said[key] = str(caught.value)

    refuse("missing", ConfigError, kept | {"exp_avg": {}})
    refuse("scale", ConfigError, kept | {"loss_scale": {"scale": 2.0, "good_steps": 0}})
    more = {"more.weight": torch.zeros(3)}
    for kind in ("parameters", "exp_avg", "buffers"):
        refuse(f"more {kind}", ConfigError, kept | {kind: kept.get(kind, {}) | more})
    for key, wrong in (("step", 2.5), ("loss_scale", 5), ("param_groups", [{"lr": float("nan")}])):
        refuse(f"{key} of one", ConfigError, kept | ({key: wrong} if rank.rank == 1 else {}))
    refuse("shape", ConfigError, kept | {"parameters": kept["parameters"] | {name: torch.zeros(3)}})
    squares = {name: square.clone() for name, square in kept["exp_avg_sq"].items()}
    next(iter(squares.values())).view(-1)[-1] = -1e-30  # remainders keep a bit in its sign
    refuse("negative", ConfigError, kept | {"exp_avg_sq": squares})
    next(iter(squares.values())).view(-1)[-1] = float("nan")
    refuse("no number", ConfigError, kept | {"exp_avg_sq": squares})
    engine.backward(engine(**case.batch(1, rank.rank, 0)))
    refuse("in a step", StateError, kept)
    engine.step()
    with engine.gather():
        refuse("in a gather", StateError, kept)
    engine.load_full_state(**kept)
    said["steps"] = str(engine.global_steps)
    engine.close()
    return said


def test_what_cannot_be_loaded_is_refused():
    for said in ranks.run(load_wrongly):
        assert "exp_avg" in said["missing"] and "shape (3,)" in said["shape"]
        for text in (said["negative"], said["no number"]):
            assert "exp_avg_sq" in text and "as it was saved" in text
        for kind in ("parameters", "exp_avg", "buffers"):
            assert f"the {kind} to load have 'more.weight', which the model lacks" in said[f"more {kind}"]
        assert "the step to load is 2.5" in said["step of one"]
        assert "only fp16" in said["loss_scale of one"] and "lr nan" in said["param_groups of one"]
        assert "between steps" in said["in a step"] and "leave the block" in said["in a gather"]
        assert said["steps"] == "1" and "fp16" in said["scale"]


def load_without_scale(rank: ranks.Rank) -> tuple[dict, dict]:
    """Return the scale and its count before and after loading a state without them."""
    engine = start(rank, CASES["fp16 whose scale grows next"], 2)
    for step in range(2):
        zoo.run_plan(engine, CASES["blocks"], step, rank.rank, [])
    before, kept = engine.loss_scale_state(), state_of(engine)
    kept.pop("loss_scale")
    engine.load_full_state(**kept)
    after = engine.loss_scale_state()
    for scale, good_steps in ((0.0, 0), (float("nan"), 0), (2.0, -1)):
        with pytest.raises(ConfigError, match="positive"):
            engine.load_full_state(**kept, loss_scale={"scale": scale, "good_steps": good_steps})
    engine.close()
    return before, after


def test_a_scale_that_is_not_given_stays():
    for before, after in ranks.run(load_without_scale):
        assert before == after == {"scale": 2.0**8, "good_steps": 2}


class WithRest(small_models.Chain):
    """Has all that the core does not hold, other values on every rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(2, block=small_models.NormBlock)
        table = torch.full((3,), rank + 1, dtype=torch.int8)
        self.table = torch.nn.Parameter(table, requires_grad=False)
        self.phase = torch.nn.Parameter(torch.full((2,), rank + 1j), requires_grad=False)
        self.register_buffer("scratch", torch.full((2,), float(rank)), persistent=False)
        self.inlet.register_buffer("turned", torch.arange(6).view(2, 3).t() + rank)


def evaluate(engine) -> float:
    engine.eval()
    with torch.no_grad():
        loss = engine(**zoo.points(99, 0)).item()
    engine.train()
    return loss


def go_on_with_the_rest(rank: ranks.Rank) -> list[dict]:
    """Return, by stage, the evaluations before and after, and the values that all ranks now have."""
    ends = []
    case = zoo.Case(lambda: WithRest(rank.rank))
    for stage in STAGES:
        engine = start(rank, case, stage)
        assert engine.module.table.tolist() == [1] * 3 and engine.module.phase.tolist() == [1j] * 2
        for step in range(3):
            zoo.run_plan(engine, case, step, rank.rank, [])
        given = engine.state_dict() | {"table": torch.full((3,), 7 + rank.rank, dtype=torch.int8)}
        kept_norm = given["blocks.1.norm.running_mean"]
        engine.load_state_dict(given)
        assert engine.module.table.tolist() == [7] * 3
        kept = engine.full_state()
        assert kept["buffers"].keys() == {
            *(
                f"blocks.{i}.norm.{n}"
                for i in range(2)
                for n in ("running_mean", "running_var", "num_batches_tracked")
            ),
            *("inlet.turned", "table", "phase"),
        }
        before = evaluate(engine)
        engine.close()
        engine = start(rank, case, stage)
        engine.load_full_state(**{name: value for name, value in kept.items() if name != "buffers"})
        old = evaluate(engine)
        given = kept["buffers"] if rank.rank == 0 else {n: t * 0 for n, t in kept["buffers"].items()}
        engine.load_full_state(**kept | {"buffers": given})
        found = {name: tensor for name, tensor in engine.state_dict().items() if name in kept["buffers"]}
        assert zoo.digest(found) == zoo.digest(kept["buffers"])
        assert engine.module.scratch.tolist() == [0.0] * 2
        assert rank.rank > 0 or torch.equal(kept_norm, found["blocks.1.norm.running_mean"])
        ends.append({"before": before, "old": old, "after": evaluate(engine), "rest": zoo.digest(found)})
        engine.close()
    return ends


@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers_and_other_parameters_are_part_of_a_state(world_size: int):
    by_rank = ranks.run(go_on_with_the_rest, world_size=world_size)
    assert all(ends == by_rank[0] for ends in by_rank)
    for end in by_rank[0]:
        assert end["before"] == end["after"] != end["old"]


class WithNone(WithRest):
    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.none = torch.nn.Parameter(torch.empty(0, dtype=torch.int8), requires_grad=False)


def keep_what_is_each_ranks(rank: ranks.Rank) -> tuple:
    """Buffers that came later: other ones on each rank, in another order, and such as differ where a state has one."""
    engine = start(rank, zoo.Case(lambda: WithNone(rank.rank)), 2)
    model = engine.module
    names = ["images", "texts"] if rank.rank == 0 else ["texts", "images"]
    for name in names:
        model.register_buffer(name, torch.full((2,), float(len(name) + 10 * rank.rank)))
    model.register_buffer("cache", torch.full((4 + rank.rank,), float(rank.rank)), persistent=False)
    model.register_buffer("leaf", torch.ones(2, requires_grad=True))
    model.scratch.fill_(rank.rank)
    engine.load_state_dict(engine.state_dict())
    engine.load_full_state(**engine.full_state())
    shared = {name: model.get_buffer(name).tolist() for name in ("images", "texts")}
    own = (model.scratch.tolist(), model.cache.tolist())
    with engine.gather(modifier_rank=1):
        model.table.fill_(9 + rank.rank)
        model.phase.fill_(2j + rank.rank)
    with engine.gather():
        shared["numbers"] = (model.table.tolist(), model.phase.tolist())
    state = engine.full_state()
    model.register_buffer("mask", torch.zeros(3 + rank.rank))
    said = []
    for call in (engine.full_state, lambda: engine.load_full_state(**state | {"buffers": None})):
        with pytest.raises(ConfigError) as refused:
            call()
        said.append(str(refused.value))
    del model.mask
    zoo.run_plan(engine, zoo.CASES["blocks"], 0, rank.rank, [])
    engine.load_full_state(**state)
    engine.close()
    return shared, own, said


def test_buffers_of_no_state_stay_each_ranks_own():
    for rank, (shared, own, said) in enumerate(ranks.run(keep_what_is_each_ranks)):
        assert shared == {
            "images": [6.0] * 2,
            "texts": [5.0] * 2,
            "numbers": ([10] * 3, [1 + 2j] * 2),
        }
        assert own == ([float(rank)] * 2, [float(rank)] * (4 + rank))
        for text in said:
            assert "rank 1 differ" in text and "'mask' of shape (4,)" in text and "(3,)" in text
            assert "persistent=False" in text


def read_rank_0s_alone(rank: ranks.Rank) -> None:
    case = zoo.CASES["blocks"]
    engine = start(rank, case, 2)
    zoo.run_plan(engine, case, 0, rank.rank, [])
    kept = state_of(engine)
    if rank.rank > 0:
        for square in kept["exp_avg_sq"].values():
            square.fill_(-1.0)
    engine.load_full_state(**kept)
    engine.close()


def test_values_of_other_ranks_are_not_read():
    ranks.run(read_rank_0s_alone)


def refused_by_one(rank: ranks.Rank) -> tuple[str, str, str]:
    """Rank 0 alone has a state, and it is another model's; then it lacks the memory for one. What each rank raised."""
    case = zoo.CASES["blocks"]
    engine = start(rank, case, 3, timeout_s=60.0)
    zoo.run_plan(engine, case, 0, rank.rank, [])
    kept = engine.full_state(rank0_only=True)
    names = list(kept["exp_avg"])
    began = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        engine.load_full_state(**kept | ({"exp_avg": dict.fromkeys(names[1:])} if rank.rank == 0 else {}))
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 0:
            patch.setattr(state_checks, "checked_states", no_memory)
        with pytest.raises((MemoryError, CommunicationError)) as failed:
            engine.load_full_state(**kept)
    assert time.monotonic() - began < 30.0
    engine.load_full_state(**kept)
    zoo.run_plan(engine, case, 1, rank.rank, [])
    engine.close()
    return str(refused.value), str(failed.value), type(failed.value).__name__


def no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("planted")


def test_what_one_rank_refuses_to_load_all_ranks_refuse_and_go_on():
    (said, lacked, kind), (told, heard, other_kind) = ranks.run(refused_by_one)
    assert said.startswith("the exp_avg to load have no '") and told == f"rank 0: {said}"
    assert (lacked, kind) == ("planted", "MemoryError")
    assert (heard, other_kind) == ("rank 0: planted", "CommunicationError")


def state_without_memory(rank: ranks.Rank, stage: int, rank0_only: bool) -> tuple[str, str, float]:
    """Rank 0 runs out of memory while a state is assembled. What each rank raised, its type, and how long that took."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    engine = zerobench.initialize(model, config=rank.config(stage=stage, timeout_s=60.0))
    if rank.rank == 0:
        limit_memory_to(8 << 20)
    began = time.monotonic()
    with pytest.raises((RuntimeError, MemoryError, CommunicationError)) as caught:
        engine.full_state(rank0_only=rank0_only)
        engine(torch.zeros(1, 1024))  # the last parts may have been there
        engine.full_state(rank0_only=rank0_only)
    took_s = time.monotonic() - began
    if rank.rank == 0:
        limit_memory_to(None)
    return type(caught.value).__name__, str(caught.value), took_s


def limit_memory_to(more_bytes: int | None) -> None:
    """Limit private memory to so much beyond what the process has."""
    limit = resource.RLIM_INFINITY
    if more_bytes is not None:
        status = Path("/proc/self/status").read_text()
        limit = int(re.search(r"VmData:\s+(\d+) kB", status).group(1)) * 1024 + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_lacks_memory_for_a_full_state_tells_the_others(stage: int, rank0_only: bool):
    (kind, said, _), (told_kind, told, took_s) = ranks.run(state_without_memory, stage, rank0_only)
    assert kind in ("RuntimeError", "OutOfMemoryError"), said
    assert told_kind == "CommunicationError" and told.startswith("rank 0 aborted: "), told
    assert took_s < 30.0

"""Masters that are kept as remainders of bf16 parameters train, load and change as whole ones do, bit for bit."""

from __future__ import annotations

import pytest
import ranks
import torch
import zoo

import zerobench

STAGES = (0, 1, 2, 3)
WORLD_SIZES = (1, 2)
NAMES = ("bf16", "20 steps", "bf16 batch norm", "bf16 reduced in fp32", "bf16 lora")
CASE = zoo.CASES["bf16"]
POINTS = [(stage, remainders) for stage in STAGES for remainders in (False, True)]

pytestmark = pytest.mark.usefixtures("one_thread")


def train_all(rank: ranks.Rank) -> dict:
    return zoo.train_with_and_without(rank, "store_param_remainders", NAMES)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_trains_as_whole_masters_do(world_size):
    for results in ranks.run(train_all, world_size=world_size):
        for name in NAMES:
            for stage in STAGES:
                whole, remainders = (results[name, stage, kept] for kept in (False, True))
                assert "error" not in remainders, remainders["error"]
                for key in ("digest", "norms", "losses", "served"):
                    assert repr(remainders[key]) == repr(whole[key]), (name, stage, key)


def start(rank: ranks.Rank, stage: int, *, remainders: bool):
    config = zoo.optimizer_config(CASE) | {"store_param_remainders": remainders}
    return zerobench.initialize(zoo.make(CASE), config=rank.config(stage=stage, **config))


def run_steps(engine, rank: ranks.Rank, steps: range) -> None:
    for step in steps:
        zoo.run_plan(engine, CASE, step, rank.rank, [])


def end_of(engine) -> str:
    found = zoo.state_of(engine)
    engine.close()
    return found["digest"] + found["served"]


def move(rank: ranks.Rank) -> dict:
    """Return, by stage and origin of a state, the run that continued and one of the other kind that loaded it."""
    ends = {}
    for stage, remainders in POINTS:
        engine = start(rank, stage, remainders=remainders)
        run_steps(engine, rank, range(3))
        state = engine.full_state()
        run_steps(engine, rank, range(10, 12))
        plain = end_of(engine)
        engine = start(rank, stage, remainders=not remainders)
        run_steps(engine, rank, range(5, 6))
        engine.load_full_state(**state)
        run_steps(engine, rank, range(10, 12))
        ends[stage, remainders] = (plain, end_of(engine))
    return ends


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_state_moves_between_whole_masters_and_remainders(world_size):
    for ends in ranks.run(move, world_size=world_size):
        different = [point for point, (plain, loaded) in ends.items() if plain != loaded]
        assert not different


class Planted(Exception):
    pass


def change(rank: ranks.Rank) -> dict:
    """Parameters written in gathers, nested ones, ones that an error ends, and by load_state_dict."""
    ends = {}
    for stage, remainders in POINTS:
        engine = start(rank, stage, remainders=remainders)
        run_steps(engine, rank, range(2))
        served = engine.state_dict()
        first, second = list(engine.module.parameters())[:2]
        with engine.gather(modifier_rank=0):
            with engine.gather([first], modifier_rank=rank.world_size - 1), torch.no_grad():
                first.view(-1)[::3] = 0.37
            with torch.no_grad():
                second.mul_(1.0 if rank.rank else 1.01)
        run_steps(engine, rank, range(2, 4))
        with pytest.raises(Planted), engine.gather([second], modifier_rank=0):
            with torch.no_grad():
                second.view(-1)[1:5] = -0.11
            raise Planted
        with engine.gather():
            norm = sum(float(p.detach().float().norm()) for p in engine.module.parameters())
        run_steps(engine, rank, range(4, 6))
        masters = engine.full_parameters()
        engine.load_state_dict(served)
        run_steps(engine, rank, range(6, 8))
        ends[stage, remainders] = (norm, zoo.digest(masters), end_of(engine))
    return ends


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_changed_parameters_have_the_masters_of_whole_ones(world_size):
    for ends in ranks.run(change, world_size=world_size):
        assert len(set(ends.values())) == 1, ends


def hold(rank: ranks.Rank) -> dict:
    """Return, by stage, the staging before, in and after a gather that reads and one that may write, and which
    parameters the masters belong to."""
    found = {}
    for stage in STAGES:
        engine = start(rank, stage, remainders=True)
        run_steps(engine, rank, range(1))
        size = "padded_numel" if stage == 0 else "shard_numel"
        own_bytes = 2 * sum(flat[size] for unit in engine.units() for flat in unit["flats"])
        staging = [engine.memory_bytes(peak=False)["device"]["staging"]]
        for modifier_rank in (None, 0):
            with engine.gather(modifier_rank=modifier_rank):
                staging.append(engine.memory_bytes(peak=False)["device"]["staging"])
            staging.append(engine.memory_bytes(peak=False)["device"]["staging"])
        found[stage] = (own_bytes, staging)
        engine.close()
    return found


def test_a_gather_that_may_write_holds_what_masters_belong_to():
    for found in ranks.run(hold, world_size=2):
        for stage, (own_bytes, (before, reading, read, writing, written)) in found.items():
            assert reading == read == written == before, stage
            assert writing - before == (own_bytes if stage < 3 else 0), stage

"""Scripts that change parameters, inside ``engine.gather`` and outside."""

from __future__ import annotations

import pytest
import script_runs
import torch
import zoo
from script_engines import (
    CASE,
    DTYPES,
    NAME,
    PLACES,
    TOLERANCES,
    Plain,
    end,
    expect_close,
    expect_same_everywhere,
    keeps_masters_apart,
    last,
    start,
    train,
)
from torch import nn

from zerobench.errors import StateError


def is_sharded(rank, place):
    """Return whether a script cannot reach parameters between uses."""
    return "3 all" in place or place == "3 nvme" or (PLACES[place]["stage"] == 3 and rank.world_size > 1)


@torch.no_grad()
def add_to_all(model):
    for parameter in model.parameters():
        parameter.add_(1.0)


@torch.no_grad()
def set_one_element(model):
    model.get_parameter(NAME)[3, 5] = 3.0


@torch.no_grad()
def copy_in(model):
    model.outlet.bias.copy_(torch.ones(3))


def zero_data(model):
    model.get_parameter(NAME).data.zero_()


def clamp_data(model):
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def initialise(model):
    nn.init.zeros_(model.blocks[0].down.weight)


IN_PLACE = {"one element": set_one_element, "copy": copy_in, "init": initialise}
BY_DATA = {"data zeroed": zero_data}


def gathering_changes(rank, place, precision):
    """Raise at the end of a gather without modifier_rank for a change inside, and keep what one rank made."""
    engine = start(rank, place, precision=precision)
    model = engine.module
    watches_data = is_sharded(rank, place) or keeps_masters_apart(place, precision)
    for step, (how, change) in enumerate({**IN_PLACE, **(BY_DATA if watches_data else {})}.items()):
        train(engine, rank, [step])
        before = engine.full_parameters()
        with pytest.raises(StateError, match=r"pass modifier_rank to engine\.gather"):
            with engine.gather():
                change(model)
            pytest.fail(f"{how} went unnoticed")
        if is_sharded(rank, place):
            after = engine.full_parameters()
            assert all(torch.equal(after[name], before[name]) for name in before), how
        with engine.gather(model.blocks[2]):  # has nothing to do with it
            pass
        with engine.gather(modifier_rank=0):  # the cure that the error names
            pass
    train(engine, rank, [20])
    for change in (*IN_PLACE.values(), *BY_DATA.values(), add_to_all, clamp_data):
        before = engine.full_parameters()
        with engine.gather(modifier_rank=last(rank)):
            if rank.rank == last(rank):
                change(model)
            expected = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        after = engine.full_parameters()
        if rank.rank == last(rank):
            for name in expected:
                has_changed = not torch.equal(expected[name], before[name].to(DTYPES[precision]).float())
                assert torch.equal(after[name], expected[name] if has_changed else before[name]) or (
                    zoo.relative({name: after[name]}, {name: expected[name]}) < 0.01 and precision != "fp32"
                ), name
        with engine.gather():
            assert all(
                torch.equal(p, after[name].to(DTYPES[precision])) for name, p in model.named_parameters()
            )
    train(engine, rank, [21])
    return zoo.digest(end(engine)["parameters"])


def curing_many(rank, place, precision, how):
    """Settle the changes of many parameters by one gather, as the error says that names the first of them."""
    engine = start(rank, place, precision=precision)
    change = {"in place": add_to_all, "data": clamp_data}[how]
    if how == "data" and not (is_sharded(rank, place) or keeps_masters_apart(place, precision)):
        return
    for step in range(2):
        train(engine, rank, [step])
        before = engine.full_parameters()
        with pytest.raises(StateError, match=r"pass modifier_rank to engine\.gather"), engine.gather():
            change(engine.module)
        with engine.gather(modifier_rank=0):
            found = {name: p.detach().float().clone() for name, p in engine.module.named_parameters()}
        after = engine.full_parameters()
        assert all(zoo.relative({0: after[name]}, {0: found[name]}) < 1e-2 for name in after)
        kept = [torch.equal(after[name], before[name]) for name in after]
        assert all(kept) == is_sharded(rank, place)  # some parameters may lie within what they are clamped to
    train(engine, rank, [2, 3])
    engine.close()


def changing_before_a_gather(rank, place, precision):
    """Raise when a gather begins for a change that was made in place before it, at every step."""
    if is_sharded(rank, place):
        return
    for change in IN_PLACE.values():
        engine = start(rank, place, precision=precision)
        train(engine, rank, range(5))  # beyond those steps that are always looked at
        with torch.no_grad():
            engine(**CASE.batch(0, rank.rank, 0))  # updates have arrived
        change(engine.module)
        with pytest.raises(StateError, match="was changed"), engine.gather(modifier_rank=0):
            pass
        engine.close()


def clamping_data(rank, place, precision):
    """Clamp parameters through `.data` after each step, as WGAN does: right as in plain PyTorch, or an error."""
    engine = start(rank, place, precision=precision)
    model = engine.module
    if is_sharded(rank, place) or keeps_masters_apart(place, precision):
        with pytest.raises((StateError, RuntimeError), match=r"engine\.gather\("):
            for step in range(4):
                train(engine, rank, [step])
                if step == 0 and not is_sharded(rank, place):
                    with torch.no_grad():
                        engine(**CASE.batch(0, rank.rank, 0))  # so that parameters can be read
                clamp_data(model)
        engine.close()
        return None
    plain = Plain(rank.world_size)
    for step in range(5):
        train(engine, rank, [step])
        clamp_data(model)
        plain.backward(step)
        plain.step()
        for parameter in (*plain.masters.parameters(), *plain.model.parameters()):
            parameter.data.clamp_(-0.01, 0.01)
    assert all((value.abs() <= 0.01).all() for value in engine.full_parameters().values())
    found = end(engine)
    expect_close(found, plain.state())
    expect_same_everywhere(("clamped", rank.world_size), place, found["digest"])
    return found["digest"]


def clamping_once_updates_arrived(rank, place, precision, name):
    """Raise StateError on every rank within three steps for a change through `.data` that the engine would undo."""
    if is_sharded(rank, place) or not keeps_masters_apart(place, precision):
        return
    engine = start(rank, place, precision=precision, overlap_updates=False, timeout_s=5.0)
    with pytest.raises(StateError, match=rf"'{name}' was changed through its \.data.*modifier_rank=0"):
        for step in range(4):
            train(engine, rank, [step])
            engine.module.get_parameter(name).data.clamp_(-1e-3, 1e-3)
    engine.close()


def scaling_data(rank, place):
    """Keep what every rank makes of parameters through `.data` right after step(), where they are the masters."""
    if PLACES[place]["stage"] == 3 or keeps_masters_apart(place):
        return None
    engine = start(rank, place)
    for step in range(60):  # a peer that still reads what the step made would see it changed now and then
        train(engine, rank, [step])
        for parameter in engine.module.parameters():
            parameter.data.mul_(0.99)
    own = zoo.digest({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    engine.close()  # before anything is compared: ranks that have drifted apart must not wait for each other
    found = {name: p.detach() for name, p in engine.module.named_parameters()}
    plain = Plain(rank.world_size)
    for step in range(60):
        plain.backward(step)
        plain.step()
        for parameter in plain.masters.parameters():
            parameter.data.mul_(0.99)
        plain.publish()
    distance = zoo.relative(found, plain.state()["parameters"])
    assert distance <= TOLERANCES["fp32"][2], distance  # of the updates: each step shrinks what came before
    expect_same_everywhere(("scaled", rank.world_size), place, own)
    return own


def changing_frozen(rank, place, precision):
    """Keep what a script merges into frozen parameters at stages 0 to 2, as PEFT does, and take it back."""
    if PLACES[place]["stage"] == 3:
        return
    case = zoo.CASES["lora"]
    engine = start(rank, place, case=case, precision=precision)
    model = engine.module
    for step in range(4):
        train(engine, rank, [step], case=case)
        with engine.gather(), torch.no_grad():
            deltas = [block.b.weight @ block.a.weight for block in model.blocks]
            for block, delta in zip(model.blocks, deltas, strict=True):
                block.base.weight.data += delta
        merged = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
        with torch.no_grad():
            engine(**case.batch(step, rank.rank, 0))
        if step < 3:
            with torch.no_grad():
                for block, delta in zip(model.blocks, deltas, strict=True):
                    block.base.weight -= delta
    served = engine.state_dict()
    assert all(torch.equal(served[name], value) for name, value in merged.items())
    full = engine.full_parameters()
    assert all(torch.equal(full[name], value.float()) for name, value in merged.items())
    train(engine, rank, [4], case=case)
    engine.close()


READS = {
    "clone": lambda p: p.detach().clone(),
    "data": lambda p: p.data.clone(),
    "to float64": lambda p: p.detach().to(torch.float64),
    "lerp": lambda p: torch.zeros(p.shape, dtype=p.dtype).lerp_(p.detach(), 1.0),
    "stack": lambda p: torch.stack([p.detach()])[0],
    "copy": lambda p: torch.empty(p.shape, dtype=p.dtype).copy_(p.detach()),
    "multiply": lambda p: p * 1.0,
}


def averaging(rank, place, precision, overlap):
    """Read parameters that a script holds from before initialize right after step(): right values or an error."""
    model = zoo.make(CASE)
    held = dict(model.named_parameters())
    engine = start(rank, place, model=model, precision=precision, overlap_updates=overlap)
    must_read = not overlap and PLACES[place]["stage"] < 3
    for step in range(3):
        train(engine, rank, [step])
        assert sum(p.numel() for p in engine.parameters() if p.requires_grad) == sum(
            p.shape.numel() for p in model.parameters()
        )
        assert all(p.dtype == DTYPES[precision] and p.is_contiguous() for _, p in engine.named_parameters())
        found, refused = {}, 0
        for how, read in READS.items():
            for name, parameter in held.items():
                try:
                    found[how, name] = read(parameter).detach().clone()
                except RuntimeError as error:
                    assert "engine.gather()" in str(error), (how, name, error)
                    refused += 1
        assert not (must_read and refused), (step, refused)
        expected = engine.full_parameters()
        wrong = [
            key
            for key, value in found.items()
            if not torch.equal(value.to(DTYPES[precision]), expected[key[1]].to(DTYPES[precision]))
        ]
        assert not wrong, f"stale right after step {step + 1}: {wrong[:3]}, {len(wrong)} in all"
    # When they can be read.
    if not is_sharded(rank, place):
        with torch.no_grad():
            engine(**CASE.batch(0, rank.rank, 0))
        assert all(torch.equal(p, expected[name].to(DTYPES[precision])) for name, p in held.items())
        train(engine, rank, [3])
        served = engine.state_dict()
        assert all(torch.equal(p, served[name]) for name, p in held.items())
        train(engine, rank, [4])
    with engine.gather():
        read = {name: p.detach().clone() for name, p in held.items()}
    expected = engine.full_parameters()
    assert all(torch.equal(p, expected[name].to(DTYPES[precision])) for name, p in read.items())
    digest = end(engine)["digest"]
    expect_same_everywhere(("read", precision, rank.world_size, is_sharded(rank, place)), place, digest)
    return digest


CHECKS = [
    *((gathering_changes, (place, "fp32")) for place in PLACES),
    *((gathering_changes, (place, "bf16")) for place in PLACES),
    *((curing_many, (place, "fp32", how)) for how in ("in place", "data") for place in PLACES),
    *((curing_many, (place, "bf16", how)) for how in ("in place", "data") for place in ("0", "2", "3")),
    *((changing_before_a_gather, (place, "fp32")) for place in PLACES),
    *((changing_before_a_gather, (place, "bf16")) for place in ("0", "2", "1 host")),
    *((clamping_data, (place, "fp32")) for place in PLACES),
    *((clamping_data, (place, "bf16")) for place in ("0", "1", "2", "3", "2 host", "3 all host")),
    *((clamping_once_updates_arrived, (place, "fp32", NAME)) for place in PLACES),
    *(
        (clamping_once_updates_arrived, (place, "bf16", name))
        for name in (NAME, "inlet.bias", "outlet.weight")
        for place in ("0", "1", "2", "3", "2 host")
    ),
    *((scaling_data, (place,)) for place in ("0", "1", "2")),
    *((changing_frozen, (place, precision)) for precision in ("fp32", "bf16") for place in PLACES),
    *((averaging, (place, "fp32", overlap)) for overlap in (True, False) for place in PLACES),
    *(
        (averaging, (place, "bf16", overlap))
        for overlap in (True, False)
        for place in ("0", "1", "2", "3", "2 host")
    ),
]


RUNS = script_runs.Runs(CHECKS, swapped=(gathering_changes, averaging))


@pytest.mark.parametrize(("world_size", "index"), RUNS.parameters())
def test_scripts_that_change_parameters(tmp_path_factory, world_size, index):
    RUNS.expect_passed(world_size, index, tmp_path_factory)

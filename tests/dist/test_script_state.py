"""Scripts that read ``optimizer.state``."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import script_runs
import zoo
from script_engines import (
    PLACES,
    end,
    start,
    train,
)

from zerobench.errors import StateError


def optimizer_state(rank, place):
    """Serve a mapping of every trained parameter that cannot be read or written, and let torch's own functions be."""
    from torch.distributed.checkpoint import state_dict as torch_state

    engine = start(rank, place, case=zoo.CASES["frozen"])
    case = zoo.CASES["frozen"]
    model, optimizer = engine.module, engine.optimizer
    for step in range(2):
        train(engine, rank, [step], case=case)
        state = optimizer.state
        assert isinstance(state, Mapping) and state and len(state) == len(list(state)) > 0
        assert all(any(p is key for key in state) for p in model.parameters() if p.requires_grad)
        for read in (
            lambda state=state: state[next(iter(state))],
            lambda state=state: dict(state),
            lambda state=state: list(state.values()),
        ):
            with pytest.raises(StateError, match=r"engine\.full_state\(\)"):
                read()
        with pytest.raises(TypeError):
            state[next(iter(state))] = {}
        with pytest.raises(TypeError):
            del state[next(iter(state))]
        rates = [group["lr"] for group in optimizer.param_groups]
        for call in (
            lambda: torch_state.get_optimizer_state_dict(model, optimizer),
            lambda: torch_state.get_state_dict(model, optimizer),
            lambda: torch_state.set_optimizer_state_dict(model, optimizer, {"state": {}, "param_groups": []}),
            optimizer.state_dict,
        ):
            with pytest.raises(Exception) as raised:
                call()
            assert (
                isinstance(raised.value, StateError)
                or "engine.gather" in str(raised.value)
                or ("engine.state_dict" in str(raised.value))
            ), repr(raised.value)
            assert [group["lr"] for group in optimizer.param_groups] == rates
            assert engine.global_steps == step + 1
        with pytest.raises(StateError, match=r"engine\.full_state\(\)"):
            torch_state.get_optimizer_state_dict(model, optimizer)
    train(engine, rank, [2], case=case)
    digest = end(engine)["digest"]
    engine = start(rank, place, case=case)
    train(engine, rank, range(3), case=case)
    assert end(engine)["digest"] == digest
    return digest


CHECKS = [(optimizer_state, (place,)) for place in PLACES]


RUNS = script_runs.Runs(CHECKS)


@pytest.mark.parametrize(("world_size", "index"), RUNS.parameters())
def test_scripts_that_read_optimizer_state(tmp_path_factory, world_size, index):
    RUNS.expect_passed(world_size, index, tmp_path_factory)

"""Scripts that compile blocks, which no later call may compile again."""

from __future__ import annotations

import pytest
import script_runs
import zoo
from script_engines import (
    CASE,
    backward,
    end,
    expect_close,
    plainly,
    start,
    train,
)


def compiled_blocks(rank, place, backend):
    """Compile blocks in the first micro-batch, and nothing in the rest of the window and in the next one."""
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    model = zoo.make(CASE)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=counter)
    engine = start(rank, place, model=model, gradient_accumulation_steps=4)
    backward(engine, rank, 0)
    compiled = counter.frame_count
    assert compiled >= 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        backward(engine, rank, 0, micros=range(1, 4))
        with engine.gradients(None):
            pass
        engine.step()
        backward(engine, rank, 1, micros=range(2))
        engine.zero_grad()
        train(engine, rank, [1], micros=4)
    assert counter.frame_count == compiled
    found = end(engine)
    expect_close(found, plainly(rank.world_size, micros=(4, 4)))


CHECKS = [(compiled_blocks, (place, "aot_eager")) for place in ("0", "1", "2", "3", "2 host", "3 all host")]


RUNS = script_runs.Runs(CHECKS, on_two_places=(compiled_blocks,))


@pytest.mark.parametrize(("world_size", "index"), RUNS.parameters())
def test_scripts_that_compile_blocks(tmp_path_factory, world_size, index):
    RUNS.expect_passed(world_size, index, tmp_path_factory)

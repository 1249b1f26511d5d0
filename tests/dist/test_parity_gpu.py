"""benchmarks/parity_gpu.py beside DDP: what it finds; and that fp16 on CPU ranks has DDP's losses and skipped steps."""

from __future__ import annotations

import math
import os

import parity_gpu
import pytest
import ranks
from parity_gpu import STAGES, Cell, Course, follows, skipped_alone, worst_loss

from zerobench.bench.launch.environments import free_ports

CELL = Cell("tiny", "fp16", "none", clip=True, checkpointing=False)
SEQ_LENGTH = 24
SMALL = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "max_seq_length": SEQ_LENGTH}


def train_all(rank: ranks.Rank, port: int) -> dict[str, Course]:
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank.rank), "WORLD_SIZE": str(rank.world_size)}
    parity_gpu.MODELS, parity_gpu.SEQ_LENGTH = {"tiny": ("tiny", SMALL)}, SEQ_LENGTH
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    found = parity_gpu.courses(CELL, "cpu")
    dist.destroy_process_group()
    return found


def test_fp16_follows_ddp_through_an_overflow_and_growing_scales():
    for found in ranks.run(train_all, free_ports(1)[0]):
        assert {name: course.skipped for name, course in found.items()} == {name: [1] for name in found}
        assert follows(CELL, found), [worst_loss(found[name], found["ddp"]) for name in STAGES]
        assert found["ddp"].losses[-1] < found["ddp"].losses[0]


def alike(**others: Course) -> dict[str, Course]:
    return dict.fromkeys(("ddp", *STAGES), Course([2.0, 1.0], [1])) | others


def test_a_step_that_one_side_skipped_is_named_and_fails():
    assert follows(CELL, alike()) and not skipped_alone(alike())
    found = alike(zero1=Course([2.0, 1.0], [1, 2]))
    assert skipped_alone(found) == ["step 2 was skipped by zero1 and not by ddp"] and not follows(CELL, found)
    found = alike(zero3=Course([2.0, 1.0], []))
    assert skipped_alone(found) == ["step 1 was skipped by ddp and not by zero3"] and not follows(CELL, found)


@pytest.mark.parametrize("losses", [[2.0, 1.01], [math.nan, 1.0], [2.0, math.nan]])
def test_losses_that_leave_ddps_fail(losses):
    assert not follows(CELL, alike(zero2=Course(losses, [1])))

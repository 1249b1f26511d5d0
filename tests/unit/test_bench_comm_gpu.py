"""`bench comm` on GPUs: what it refuses, and the figures that it derives from what ranks measure."""

from __future__ import annotations

from typing import Any

import pytest

from zerobench.errors import ConfigError, Error
from zerobench.host.gpus import Gpu
from zerobench.micro.comm_gpu import comm_row, comm_table
from zerobench.micro.comm_gpu_case import CommGpuOptions
from zerobench.micro.link import Link

LINK = Link(gb_s=[90.0, 100.0, 110.0], is_direct=True)


def options(gpu_num: int = 4, **values: Any) -> CommGpuOptions:
    gpus = tuple(
        Gpu(index=index, name="GPU", uuid=f"{index}", total_bytes=1 << 34, compute_capability=(9, 0))
        for index in range(gpu_num)
    )
    given: dict[str, Any] = {
        "world_sizes": [2],
        "collectives": ["all_gather"],
        "min_bytes": 100,
        "max_bytes": 1600,
        "repeats": 3,
        "timeout_s": 60.0,
        "gpus": gpus,
    }
    return CommGpuOptions(**given | values)


def test_every_shard_is_aligned() -> None:
    chosen = options(world_sizes=[3])
    chosen.check()
    assert chosen.cases(3) == [("all_gather", 144), ("all_gather", 432), ("all_gather", 1632)]
    assert options(min_bytes=1, max_bytes=64).cases(2) == [("all_gather", 32), ("all_gather", 64)]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"world_sizes": [2, 8]}, "--world-size 8 is more than the 4 GPUs"),
        ({"world_sizes": [1]}, "--world-size 1"),
        ({"max_bytes": 1 << 31}, "--max-bytes"),
        ({"collectives": ["all_to_all"]}, "all_to_all"),
        ({"timeout_s": float("nan")}, "--timeout nan"),
        ({"timeout_s": float("inf")}, "--timeout inf"),
        ({"communicator": "shm"}, "--communicator 'shm' is unknown: choose from nccl, peer"),
        ({"communicator": "peer", "symmetric": True}, "--symmetric uses NCCL's windows"),
    ],
    ids=["too many ranks", "one rank", "too large", "unknown", "no time", "endless", "of CPUs", "two kinds"],
)
def test_what_cannot_be_measured_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        options(**values).check()


def answer(nccl_s: list[float], *, wrong: int = 0) -> dict[str, Any]:
    return {
        "times_s": {"zerobench": nccl_s, "torch": [2e-3, 2e-3, 2e-3]},
        "calls": {"zerobench": 5, "torch": 5},
        "wrong": {"zerobench": wrong, "torch": 0},
        "bus_factor": 0.5,
    }


def test_a_sample_is_the_slowest_ranks_and_bandwidths_follow() -> None:
    answers = {0: answer([1e-3, 1e-3, 4e-3]), 1: answer([1e-3, 2e-3, 1e-3], wrong=7)}
    row = comm_row("all_gather", 80_000_000, 2, LINK, answers)
    assert row["samples_us"]["zerobench"]["samples"] == pytest.approx([1000.0, 2000.0, 4000.0])
    assert row["time_us"] == pytest.approx({"zerobench": 2000.0, "torch": 2000.0})
    assert row["algbw_gb_s"] == pytest.approx(40.0)
    assert row["busbw_gb_s"] == pytest.approx(20.0)
    assert row["busbw_of_link"] == pytest.approx(0.2)
    assert row["ratio_to_torch"]["value"] == pytest.approx(1.0)
    assert row["wrong"] == 7 and row["wrong_torch"] == 0
    table = comm_table([row], 2, options(communicator="peer").side)
    assert table.title == "2 GPUs, bfloat16, peer"
    cells = dict(zip(table.columns, table.sections[0][0], strict=True))
    assert cells["collective"] == "all_gather" and cells["size"] == "76.29 MiB" and cells["wrong"] == "7"
    assert cells["of link"] == "0.20" and cells["torch us"] == "2000.0"


def test_a_rank_that_did_not_answer_is_an_error() -> None:
    with pytest.raises(Error, match="only 1 of 2 ranks"):
        comm_row("all_gather", 1024, 2, LINK, {0: answer([1e-3])})

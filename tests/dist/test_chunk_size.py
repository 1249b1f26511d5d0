"""The size of chunks goes by the budget of host memory and changes no bit of what is trained."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import ranks
import torch
import zoo
from hypothesis import given, settings
from hypothesis import strategies as st

import zerobench
from zerobench.errors import OutOfMemoryError

FILES = {"device": "nvme", "io_block_bytes": 4096, "io_depth": 4, "io_allow_fallback": True}
LARGEST = 4 << 20
OFF_DEVICE: dict[str, dict[str, Any]] = {
    "cpu": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "cpu_full": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "nvme": {"stage": 2, "offload_optimizer": FILES},
    "nvme_full": {"stage": 3, "offload_optimizer": FILES, "offload_param": {"device": "nvme"}},
    "nvme, a third": {"stage": 2, "offload_optimizer": FILES | {"ratio": 0.33}},
}

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(rank: ranks.Rank, folder: str, placement: str | None, **section: Any) -> dict[str, Any]:
    """Return the result of three steps, and the memory that the engine took for them."""
    config: dict[str, Any] = {"stage": 2, **(OFF_DEVICE[placement] if placement else {})}
    if placement is not None:
        path = {"nvme_path": folder} if placement.startswith("nvme") else {}
        config["offload_optimizer"] = config["offload_optimizer"] | path | section
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        *(torch.nn.Linear(96, 96) for _ in range(3)), torch.nn.Linear(96, 333), torch.nn.Linear(333, 5)
    )
    engine = zerobench.initialize(
        model,
        config=rank.config(precision="bf16", gradient_clipping=0.1, **config)
        | {"optimizer": {"lr": 1e-2}, "rendezvous": f"{rank.meeting_point}/{placement}"},
    )
    for step in range(3):
        torch.manual_seed(10 * step + rank.rank)
        engine.backward(engine(torch.randn(4, 96)).square().mean())
        engine.step()
    state = {kind: zoo.digest(engine.full_optimizer_state(kind)) for kind in ("exp_avg", "exp_avg_sq")}
    found = {
        "end": state | {"parameters": zoo.digest(engine.full_parameters())},
        "chunk_numel": engine.offload_chunk_numel,
        "requested_bytes": engine.offload_pinned()["requested_bytes"],
        "swapped_bytes": sum(engine.memory_bytes(peak=False).get("nvme", {}).values()),
    }
    engine.close()
    return found


def alone() -> ranks.Rank:
    return ranks.Rank(0, 1, uuid.uuid4().hex)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def on_device(folder: str) -> dict[str, Any]:
    return trained(alone(), folder, None)


@settings(max_examples=30, deadline=None)
@given(placement=st.sampled_from([*OFF_DEVICE]), lines=st.integers(1, 600))
def test_no_bit_depends_on_it(folder: str, on_device: dict, placement: str, lines: int) -> None:
    found = trained(alone(), folder, placement, chunk_numel=64 * lines)
    assert found["end"] == on_device["end"]
    assert found["chunk_numel"] == 64 * lines


def test_nothing_is_said_where_all_is_on_the_device(on_device: dict) -> None:
    assert on_device["chunk_numel"] is None


@pytest.mark.parametrize("placement", OFF_DEVICE)
def test_it_is_the_largest_without_a_budget(folder: str, on_device: dict, placement: str) -> None:
    found = trained(alone(), folder, placement)
    assert found["chunk_numel"] == LARGEST and found["end"] == on_device["end"]


@pytest.mark.parametrize("placement", ["nvme", "nvme_full", "nvme, a third"])
def test_a_small_budget_takes_smaller_chunks(folder: str, on_device: dict, placement: str) -> None:
    """Down to what not even the smallest chunks need, which is an error, and with what is ample all stays."""
    chosen, swapped = [], []
    for budget_bytes in (*range(150_000, 1_500_000, 50_000), 1 << 30):
        try:
            found = trained(alone(), folder, placement, host_memory_bytes=budget_bytes)
        except OutOfMemoryError as error:
            assert not chosen, "a larger budget was refused"
            assert "io_depth" in str(error)
            continue
        assert found["end"] == on_device["end"]
        assert found["requested_bytes"] <= budget_bytes
        chosen.append(found["chunk_numel"])
        swapped.append(found["swapped_bytes"])
    assert chosen[0] < LARGEST and chosen[-1] == LARGEST
    assert swapped[0] > 0 and swapped[-1] == 0
    # Where the largest chunks were forced, the smallest budgets are refused.
    with pytest.raises(OutOfMemoryError, match="leave out chunk_numel"):
        trained(alone(), folder, placement, host_memory_bytes=450_000, chunk_numel=LARGEST)


def within_budgets(rank: ranks.Rank, folder: str) -> list[dict[str, Any]]:
    """Each rank has a budget of its own, so chunks may differ between ranks, too."""
    found = [trained(rank, folder, None)]
    for budget_bytes in (400_000, 700_000, 1 << 30):
        own = budget_bytes if rank.rank == 0 else 2 * budget_bytes
        found.append(trained(rank, folder, "nvme", host_memory_bytes=own))
        found.append(trained(rank, folder, "nvme_full", host_memory_bytes=own))
    return found


def test_ranks_choose_for_themselves(folder: str) -> None:
    by_rank = ranks.run(within_budgets, folder)
    for expected, *others in by_rank:
        assert all(found["end"] == expected["end"] for found in others)
    sizes = [[found["chunk_numel"] for found in others] for _, *others in by_rank]
    assert sizes[0] != sizes[1]

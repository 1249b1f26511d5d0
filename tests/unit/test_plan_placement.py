"""Offload as a dimension of the grid, and what fits where."""

from __future__ import annotations

import pytest
from plan_samples import GPUS, ON_GPUS, SMALL, configuration, verification_model, why_too_large

from zerobench.bench.plan import fit
from zerobench.bench.plan.options import CompareOptions
from zerobench.bench.plan.plan import make_plan
from zerobench.host.machine import cpus_usable

GIB = 1 << 30


def test_the_reference_and_the_floor_stand_under_rows_of_every_placement(tmp_path) -> None:
    found = make_plan(
        CompareOptions(
            **{**SMALL, "strategies": ("single", "compute_only", "zero3")},
            offload=("none", "cpu_optimizer", "nvme"),
            offload_ratio=(None, 0.5),
            optimizer_in_backward=(False, True),
            nvme_paths=(tmp_path,),
            host_memory_gib=2.0,
        )
    ).configurations
    points = [
        (c.strategy, c.settings.offload, c.settings.offload_ratio, c.settings.optimizer_in_backward)
        for c in found
    ]
    assert (
        points.count(("single", "none", None, False))
        == points.count(("compute_only", "none", None, False))
        == 1
    )
    # Without offload a ratio says nothing.
    placed = [point[1:] for point in points if point[0] == "zero3"]
    assert len(placed) == len(set(placed)) == 2 + 2 * 4
    for one in found:
        offloaded = one.settings.offload != "none"
        assert one.settings.host_memory_gib == (2.0 if offloaded else None)
        assert one.settings.nvme_paths == ([str(tmp_path)] if one.settings.offload == "nvme" else [])
    # Placement changes nothing, so it is no part of what rows are compared by.
    assert len({one.reference_group() for one in found if one.strategy == "zero3"}) == 1
    assert len({one.checksum_group() for one in found if one.strategy == "zero3"}) == 1


@pytest.mark.parametrize(
    ("options", "device", "host"),
    [
        ({"offload": ("none",)}, 14, 0),  # masters are remainders
        ({"offload": ("cpu_optimizer",)}, 2, 12),
        ({"offload": ("cpu_optimizer",), "offload_ratio": (0.25,)}, 2 + 9, 3),
        ({"offload": ("cpu_full",)}, 0, 14),
        ({"offload": ("cpu_optimizer",), "offload_ratio": ("auto",)}, 2, 0),
    ],
)
def test_what_cannot_fit_is_known_by_tier(options, device, host) -> None:
    row = configuration(model=("gpt2",), strategies=("zero3",), **{**ON_GPUS, "world_size": (1,)}, **options)
    count = row.settings.parameter_count or 0
    assert fit.least_rank_bytes(row) == fit.Need(device=device * count, host=host * count)
    limited = row.model_copy(
        update={
            "settings": row.settings.model_copy(update={"device_memory_gib": device * count / GIB * 0.99})
        }
    )
    found = why_too_large(limited, gpus=GPUS)
    assert found is not None and found.tier == "device" and "--device-memory-gib" in found.reason
    assert found.reason.startswith("parameters" if device else "the logits")
    limited.settings.device_memory_gib, limited.settings.host_memory_gib = None, host * count / GIB * 0.99
    found = why_too_large(limited, gpus=GPUS)
    assert found is None if host == 0 else (found is not None and found.tier == "host")


def test_state_beside_the_reference_leaves_it_fewer_layers() -> None:
    row = configuration(model=("gpt2",))
    alone = verification_model(row.model, rank_memory_bytes=6 << 30)
    beside = verification_model(row.model, rank_memory_bytes=6 << 30, offloads=True)
    assert alone["num_layers"] == 12 > beside["num_layers"] >= 1


@pytest.mark.parametrize(("clips", "in_backward"), [((None,), True), ((1.0,), False)])
def test_superoffload_updates_in_backward_unless_it_clips(clips, in_backward) -> None:
    for asked in (True, False):
        row = configuration(
            strategies=("deepspeed3_super",), offload=("cpu_optimizer",), clip=clips,
            optimizer_in_backward=(asked,),
        )  # fmt: skip
        assert row.settings.optimizer_in_backward is in_backward


def test_threads_are_shared_by_the_ranks_of_this_machine() -> None:
    cpus = cpus_usable()
    rows = [configuration(world_size=(64,), host_ranks=host_ranks) for host_ranks in (1, 64)]
    assert [row.settings.threads_per_rank for row in rows] == [cpus, max(1, cpus // 64)]
    bound_apart = configuration(world_size=(64,), host_ranks=64, core_ranks=1)
    assert bound_apart.settings.threads_per_rank == cpus

"""Time of a step by phase, from intervals of kernels."""

from __future__ import annotations

import random

import pytest

from zerobench.bench.rank.intervals import (
    Activity,
    Lap,
    is_communication,
    length_within,
    merged,
    split,
    subtracted,
)


def kernel(begin: float, end: float, name: str = "gemm") -> Activity:
    return Activity(name=name, begin=begin, end=end)


def nccl(begin: float, end: float) -> Activity:
    return kernel(begin, end, "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)")


def test_a_union_neither_touches_nor_overlaps() -> None:
    assert merged([(5, 7), (0, 2), (1, 3), (3, 4), (9, 9), (6, 6.5)]) == [(0, 4), (5, 7)]
    assert merged([]) == []


def test_holes_are_cut_out() -> None:
    assert subtracted([(0, 10)], [(2, 3), (5, 12)]) == [(0, 2), (3, 5)]
    assert subtracted([(0, 1), (4, 6)], [(1, 4)]) == [(0, 1), (4, 6)]
    assert subtracted([(0, 4), (5, 9)], [(3, 6)]) == [(0, 3), (6, 9)]
    assert subtracted([(2, 3)], [(0, 9)]) == []


def test_arithmetic_agrees_with_counting_points() -> None:
    generator = random.Random(0)
    for _ in range(200):
        a, b = (
            [tuple(sorted(generator.sample(range(40), 2))) for _ in range(generator.randrange(6))]
            for _ in range(2)
        )
        in_a, in_b = ({at for begin, end in intervals for at in range(begin, end)} for intervals in (a, b))
        assert {at for begin, end in merged(a) for at in range(int(begin), int(end))} == in_a
        difference = subtracted(merged(a), merged(b))
        assert {at for begin, end in difference for at in range(int(begin), int(end))} == in_a - in_b
        assert length_within(difference, 10, 30) == len({at for at in in_a - in_b if 10 <= at < 30})


def test_time_goes_to_phases_exposed_communication_and_the_host() -> None:
    activities = [
        kernel(0, 10),
        nccl(8, 14),  # 10 to 14 nothing hides it
        kernel(12, 13),  # but for this
        kernel(20, 30),  # 14 to 20 nothing runs
        nccl(25, 28),  # hidden
    ]
    laps = [Lap(phase="forward", begin=0, end=11), Lap(phase="backward", begin=11, end=32)]
    phases = split(activities, laps)
    assert phases == {"forward": 10, "backward": 11, "exposed_communication": 1 + 1 + 1, "host_bound": 6 + 2}
    assert sum(phases.values()) == 32


def test_kernels_of_several_streams_count_once_and_outside_ones_not() -> None:
    activities = [kernel(-5, 2), kernel(1, 3), kernel(1, 3), kernel(9, 20)]
    phases = split(activities, [Lap(phase="forward", begin=0, end=10)])
    assert phases == {"forward": 4, "exposed_communication": 0, "host_bound": 6}


def test_laps_of_one_phase_add_up() -> None:
    laps = [Lap(phase="forward", begin=at, end=at + 1) for at in (0, 4)]
    assert split([kernel(0, 10)], laps)["forward"] == 2


def test_an_update_that_runs_alone_is_the_optimizers() -> None:
    adam = (
        "void zb::(anonymous namespace)::adam_kernel<(zb::DType)1, (zb::DType)1, (zb::Masters)1>(zb::Table)"
    )
    activities = [
        kernel(0, 6, adam),
        nccl(5, 8),  # 6 to 8 exposed
        kernel(8, 12),
        kernel(10, 14, adam),  # from 12 on alone
        kernel(15, 20),
    ]
    laps = [Lap(phase="forward", begin=0, end=15), Lap(phase="backward", begin=15, end=20)]
    phases = split(activities, laps)
    assert phases == {
        "forward": 4,
        "optimizer": 6 + 2,
        "backward": 5,
        "exposed_communication": 2,
        "host_bound": 1,
    }
    laps = [Lap(phase="optimizer", begin=0, end=20)]
    assert split(activities, laps)["optimizer"] == 17


def copy(begin: float, end: float, name: str = "Memcpy HtoD (Pinned -> Device)") -> Activity:
    return kernel(begin, end, name)


def test_waits_for_offloaded_state_end_with_a_copy() -> None:
    activities = [
        kernel(0, 10),
        copy(4, 6, "Memcpy DtoH (Device -> Pinned)"),  # hidden
        copy(18, 20),  # 10 to 20 the device waited for what it brings
        kernel(20, 30),
        nccl(30, 34),
        copy(31, 33),  # beside a collective, which is what nothing hides
        kernel(40, 44),  # 34 to 40 no copy ran: the host was late
        copy(44, 50),
    ]
    laps = [Lap(phase="forward", begin=0, end=35), Lap(phase="optimizer", begin=35, end=50)]
    phases = split(activities, laps, offloads=True)
    assert phases == {
        "forward": 20,
        "optimizer": 4,
        "exposed_communication": 4,
        "exposed_offload": 10 + 6,
        "host_bound": 1 + 5,
    }
    assert sum(phases.values()) == 50
    # Where nothing is offloaded, copies are part of what is computed.
    assert split(activities, laps)["forward"] == 20 + 2 + 2
    assert "exposed_offload" not in split(activities, laps)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)", True),
        ("ncclKernel_AllReduce_RING_LL_Sum_float", True),
        ("Memcpy PtoP (Device -> Device)", True),
        ("void zb::(anonymous namespace)::sum_kernel<__nv_bfloat16>(zb::SumArguments)", True),
        ("void at::native::sum_kernel<float>(float*)", False),
        ("Memcpy DtoD (Device -> Device)", False),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", False),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", False),
    ],
)
def test_communication_is_known_by_its_name(name: str, expected: bool) -> None:
    assert is_communication(name) is expected

"""Places of ranks among those of their host or machine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerobench.host.cpu_shares import part_of
from zerobench.host.places import place_among


def places(names: str, told: list[tuple[int, int] | None]) -> list[tuple[int, int]]:
    return [place_among(rank, names, told) for rank in range(len(names))]


def test_numbers_of_a_launcher_that_fit_are_kept() -> None:
    told = [(1, 2), (0, 1), (0, 2)]
    assert places("aba", told) == told


def test_ranks_of_several_launchers_are_numbered_in_their_order() -> None:
    assert places("aab", [(0, 1)] * 3) == [(0, 2), (1, 2), (0, 1)]
    assert places("aaaa", [(0, 3), (1, 3), (2, 3), (0, 1)]) == [(rank, 4) for rank in range(4)]


def test_numbers_that_leave_ranks_out_do_not_count() -> None:
    assert places("aa", [(0, 4), (3, 4)]) == [(0, 2), (1, 2)]
    assert places("aa", [(0, 2), None]) == [(0, 2), (1, 2)]


def test_launchers_started_more_ranks_than_a_part_has() -> None:
    assert place_among(1, "aa", [(0, 4), (3, 4)], is_part=True) == (3, 4)
    assert place_among(1, "aa", [(0, 2), (0, 2)], is_part=True) == (1, 2)


_TOLD = st.none() | st.integers(1, 4).flatmap(lambda size: st.tuples(st.integers(0, size - 1), st.just(size)))


@given(
    ranks=st.lists(st.tuples(st.sampled_from("abc"), _TOLD), min_size=1, max_size=8),
    num_cpus=st.integers(8, 40),
)
def test_ranks_of_a_machine_take_all_of_its_cpus_and_none_twice(ranks, num_cpus) -> None:
    names, told = zip(*ranks, strict=True)
    for name in set(names):
        here = [rank for rank in range(len(names)) if names[rank] == name]
        shares = [part_of(range(num_cpus), *place_among(rank, names, told)) for rank in here]
        assert sorted(cpu for share in shares for cpu in share) == list(range(num_cpus))

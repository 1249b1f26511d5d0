"""Which CPUs each of a host's ranks takes."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zerobench.host.cpu_shares import RankFacts, part_of, share_of_rank

NODES = {0: [0, 1, 2, 3, 8, 9, 10, 11], 1: [4, 5, 6, 7, 12, 13, 14, 15]}
TOGETHER = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
CPU_RANK = RankFacts("all")


def on_gpu(node: int | None, allowed: str = "all") -> RankFacts:
    return RankFacts(allowed, has_gpu=True, gpu_node=node)


def shares(ranks, nodes=NODES, allowed=TOGETHER) -> list[tuple[int, ...]]:
    return [share_of_rank(rank, ranks, nodes, allowed).cpus for rank in range(len(ranks))]


def test_ranks_share_the_node_of_their_gpus() -> None:
    ranks = [on_gpu(1), on_gpu(0), on_gpu(1), on_gpu(1), on_gpu(1)]
    assert shares(ranks) == [(4, 12), tuple(NODES[0]), (5, 13), (6, 14), (7, 15)]
    found = share_of_rank(0, ranks, NODES, TOGETHER)
    assert (found.nodes, str(found)) == ((1,), "node 1: 4,12 (node of its GPU)")


def test_nodes_without_a_gpu_are_not_left_to_nobody() -> None:
    assert shares([on_gpu(1)]) == [tuple(range(16))]
    assert shares([on_gpu(1)] * 2) == [tuple(range(8)), tuple(range(8, 16))]
    assert "some nodes have no rank's GPU" in str(share_of_rank(0, [on_gpu(1)], NODES, TOGETHER))
    # The launcher leaves them out.
    assert shares([on_gpu(1)] * 2, allowed=NODES[1]) == [(4, 5, 6, 7), (12, 13, 14, 15)]


@pytest.mark.parametrize("unknown", [None, 7])
def test_a_gpu_of_no_known_node_makes_the_shares_of_all_ranks_even(unknown) -> None:
    ranks = [on_gpu(1), on_gpu(unknown)]
    assert shares(ranks) == [tuple(range(8)), tuple(range(8, 16))]
    assert str(share_of_rank(0, ranks, NODES, TOGETHER)).startswith("nodes 0-1: 0-7 (even share: not every")


def test_ranks_on_cpus_are_spread_where_they_fill_nodes_evenly() -> None:
    assert shares([CPU_RANK] * 2) == [tuple(NODES[0]), tuple(NODES[1])]
    assert shares([CPU_RANK] * 4)[1:3] == [(2, 3, 10, 11), (4, 5, 12, 13)]
    assert shares([CPU_RANK]) == [tuple(range(16))]
    assert shares([CPU_RANK] * 3)[0] == tuple(range(5))
    # A mask that leaves less of one node than of the other: equal shares matter more to ranks in step.
    assert shares([CPU_RANK] * 2, allowed=[0, 8, 1, 9, 4, 12]) == [(0, 1, 4), (8, 9, 12)]
    assert shares([CPU_RANK, on_gpu(0)])[0] == tuple(range(8))


def test_masks_of_a_launcher_win() -> None:
    of_all = [0, 8, 1, 9]  # one for all ranks, on one node
    assert shares([on_gpu(1)] * 2, allowed=of_all) == [(0, 1), (8, 9)]
    own = [on_gpu(1, "a"), on_gpu(1, "b")]
    found = share_of_rank(0, own, NODES, of_all)
    assert found.cpus == (0, 1, 8, 9) and "launcher" in found.reason
    pairs = [on_gpu(0, "a"), on_gpu(1, "b"), on_gpu(0, "a"), on_gpu(1, "b")]
    assert [share_of_rank(rank, pairs, NODES, of_all).cpus for rank in (0, 2)] == [(0, 1), (8, 9)]


def machines() -> st.SearchStrategy[dict[int, list[int]]]:
    """Nodes that share out some CPUs, in any order of numbers."""

    def cut(drawn: tuple[list[int], list[int]]) -> dict[int, list[int]]:
        cpus, nodes = drawn
        parts = {node: sorted(part_of(cpus, at, len(nodes))) for at, node in enumerate(sorted(nodes))}
        return parts if len(cpus) >= len(nodes) else {nodes[0]: sorted(cpus)}

    return st.tuples(
        st.permutations(range(24)).flatmap(lambda cpus: st.integers(1, 24).map(lambda num: cpus[:num])),
        st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True),
    ).map(cut)


@given(st.data(), machines())
def test_shares_are_of_what_is_allowed_and_share_no_cpu(data, nodes) -> None:
    """Divide among ranks with one mask, whatever is known of their GPUs, and however many they are."""
    cpus = sorted(cpu for its in nodes.values() for cpu in its)
    allowed = data.draw(st.lists(st.sampled_from(cpus), min_size=1, unique=True))
    kinds = st.one_of(
        st.just(CPU_RANK),
        st.sampled_from([*nodes, None, 99]).map(on_gpu),
        st.sampled_from([*nodes]).map(on_gpu),
    )
    usable = [node for node, its in nodes.items() if not set(its).isdisjoint(allowed)]
    on_all_nodes = st.lists(st.sampled_from(usable), max_size=5).flatmap(
        lambda more: st.permutations([on_gpu(node) for node in (*usable, *more)])
    )
    ranks = data.draw(st.one_of(st.lists(kinds, min_size=1, max_size=9), on_all_nodes))
    found = [share_of_rank(rank, ranks, nodes, allowed) for rank in range(len(ranks))]
    assert all(share.cpus and set(share.cpus) <= set(allowed) for share in found)
    for share in found:
        assert set(share.nodes) == {node for node, its in nodes.items() if set(its) & set(share.cpus)}
    by_node = found[0].reason.startswith("node")
    for index, share in enumerate(found):
        rank = ranks[index]
        assert share.reason == found[0].reason, "ranks decided differently"
        if by_node and rank.has_gpu:
            assert share.nodes == (rank.gpu_node,)
    groups = {share.nodes if by_node else None: [] for share in found}
    for share in found:
        groups[share.nodes if by_node else None].append(share.cpus)
    for node, parts in groups.items():
        here = [cpu for cpu in allowed if node is None or cpu in nodes[node[0]]]
        if len(parts) <= len(here):
            assert sorted(cpu for part in parts for cpu in part) == sorted(here)
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
        else:
            assert all(len(part) == 1 for part in parts)


@given(st.data(), st.lists(st.integers(0, 63), min_size=1, unique=True), st.integers(1, 9))
def test_one_node_is_divided_as_it_always_was(data, allowed, rank_num) -> None:
    """Divide by contiguous numbers among ranks of one mask, wherever their GPUs are."""
    nodes = data.draw(st.sampled_from([{}, {0: list(range(64))}]))
    kinds = st.builds(
        RankFacts, st.just("all"), has_gpu=st.booleans(), gpu_node=st.sampled_from([None, 0, 1])
    )
    ranks = data.draw(st.lists(kinds, min_size=rank_num, max_size=rank_num))
    for rank in range(rank_num):
        assert share_of_rank(rank, ranks, nodes, allowed).cpus == tuple(
            part_of(sorted(allowed), rank, rank_num)
        )


@given(st.data(), machines())
def test_masks_of_their_own_keep_ranks_apart(data, nodes) -> None:
    """Ranks whose masks differ take no CPU of each other's, and leave none of their own unused."""
    cpus = sorted(cpu for its in nodes.values() for cpu in its)
    assume(len(cpus) > 1)
    rank_num = data.draw(st.integers(2, len(cpus)))
    masks = [part_of(cpus, rank, rank_num) for rank in range(rank_num)]
    ranks = [on_gpu(data.draw(st.sampled_from([*nodes, None])), str(rank)) for rank in range(rank_num)]
    for rank in range(rank_num):
        assert share_of_rank(rank, ranks, nodes, masks[rank]).cpus == tuple(masks[rank])

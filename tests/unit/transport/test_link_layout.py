"""Which ranks connect: a slice has one connection between each pair of hosts, and both ends agree on it."""

from __future__ import annotations

import itertools

import pytest

from pyhvd.transport.link_layout import Kind, Layout, Role

LAYOUTS = {
    "2x1": [0, 1],
    "2x2": [0, 0, 1, 1],
    "3+1": [0, 0, 0, 1],
    "1+2+4": [0, 1, 1, 2, 2, 2, 2],
    "8x1": list(range(8)),
    "interleaved": [7, 3, 7, 3, 3, 5],
}


@pytest.mark.parametrize("nodes", LAYOUTS.values(), ids=LAYOUTS)
def test_each_connection_has_two_ends_that_name_each_other(nodes: list[int]) -> None:
    layouts = [Layout(rank, nodes, agreement=True) for rank in range(len(nodes))]
    hosts, slices = layouts[0].hosts, layouts[0].slices
    pairs = list(itertools.combinations(range(hosts), 2))
    expected = {Role(Kind.RAIL, k, a, b) for k in range(slices) for a, b in pairs}
    expected |= {Role(Kind.AGREEMENT, 0, a, b) for a, b in pairs}
    assert {role for layout in layouts for role in layout.peers} == expected
    for rank, layout in enumerate(layouts):
        for role, peer in layout.peers.items():
            assert layouts[peer].peers[role] == rank
            assert {layout.host, layouts[peer].host} == {role.low, role.high}
            assert (role in layout.accepts) == (role not in layouts[peer].accepts)
    assert all(rank.local_rank == 0 for rank in layouts for role in rank.peers if role.kind == Kind.AGREEMENT)


def test_slices_of_uneven_hosts_are_spread_over_their_ranks() -> None:
    layouts = [Layout(rank, LAYOUTS["1+2+4"], agreement=False) for rank in range(7)]
    owned = [sorted({role.slice for role in layout.peers}) for layout in layouts]
    assert owned == [[0, 1, 2, 3], [0, 1], [2, 3], [0], [1], [2], [3]]


def test_hosts_are_in_the_order_of_their_lowest_ranks() -> None:
    layouts = [Layout(rank, LAYOUTS["interleaved"], agreement=True) for rank in range(6)]
    assert [layout.host for layout in layouts] == [0, 1, 0, 1, 1, 2]
    assert [layout.local_rank for layout in layouts] == [0, 0, 1, 1, 2, 0]
    assert [layout.local_size for layout in layouts] == [2, 3, 2, 3, 3, 1]
    assert [layout.leader for layout in layouts] == [0, 1, 0, 1, 1, 5]

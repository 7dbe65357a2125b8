"""Which ranks connect: a slice has one connection between each pair of hosts, and both ends agree on it."""

from __future__ import annotations

import itertools

import pytest

from pyhvd.transport.link_layout import Kind, Layout, LinkRole, parents_of
from pyhvd.transport.tree import Tree

LAYOUTS = {
    "2x1": [0, 1],
    "2x2": [0, 0, 1, 1],
    "3+1": [0, 0, 0, 1],
    "1+2+4": [0, 1, 1, 2, 2, 2, 2],
    "8x1": list(range(8)),
    "interleaved": [7, 3, 7, 3, 3, 5],
    "10x1, 1x2": [*range(10), 10, 10],
    "20x1": list(range(20)),
}


@pytest.mark.parametrize("nodes", LAYOUTS.values(), ids=LAYOUTS)
def test_each_connection_has_two_ends_that_name_each_other(nodes: list[int]) -> None:
    layouts = [Layout(rank, nodes, agreement=True) for rank in range(len(nodes))]
    hosts, slices = layouts[0].hosts, layouts[0].slices
    pairs = list(itertools.combinations(range(hosts), 2))
    expected = {LinkRole(Kind.RAIL, k, a, b) for k in range(slices) for a, b in pairs}
    parents = parents_of(hosts)
    near = [(a, b) for a, b in pairs if parents[b] == a or parents[a] == parents[b] == -1]
    expected |= {LinkRole(Kind.AGREEMENT, 0, a, b) for a, b in near}
    trees = [Tree.of(rank, [nodes.index(node) for node in nodes]) for rank in range(len(nodes))]
    above = [(layouts[tree.parent].host, layouts[tree.rank].host) for tree in trees if tree.parent >= 0]
    expected |= {LinkRole(Kind.CONTROL, 0, a, b) for a, b in above if a != b}
    assert {role for layout in layouts for role in layout.peers} == expected
    for rank, layout in enumerate(layouts):
        for role, peer in layout.peers.items():
            assert layouts[peer].peers[role] == rank
            assert {layout.host, layouts[peer].host} == {role.low, role.high}
            assert (role in layout.accepts) == (role not in layouts[peer].accepts)
    assert all(rank.local_rank == 0 for rank in layouts for role in rank.peers if role.kind != Kind.RAIL)


def test_ranks_have_control_connections_to_their_neighbours_in_the_tree_of_messages() -> None:
    for nodes in LAYOUTS.values():
        for rank in range(len(nodes)):
            layout = Layout(rank, nodes, agreement=True)
            near = Tree.of(rank, [nodes.index(node) for node in nodes]).neighbours
            peers = {peer for role, peer in layout.peers.items() if role.kind == Kind.CONTROL}
            assert peers == {each for each in near if nodes[each] != nodes[rank]}
    assert {role.kind for role in Layout(0, LAYOUTS["2x2"], agreement=False).peers} == {Kind.RAIL}


def test_neighbours_share_agreement_connections() -> None:
    for nodes in LAYOUTS.values():
        layouts = [Layout(rank, nodes, agreement=True) for rank in range(len(nodes))]
        for layout in layouts:
            leader = layouts[layout.leader]
            ends = [role for role in leader.peers if role.kind == Kind.AGREEMENT]
            assert layout.neighbours == [role.low + role.high - layout.host for role in ends]
    assert Layout(0, LAYOUTS["2x2"], agreement=False).neighbours == []


def test_the_tree_of_hosts() -> None:
    assert [parents_of(hosts) for hosts in (1, 2, 8)] == [[-1], [-1] * 2, [-1] * 8]
    assert parents_of(9) == [-1] * 3 + [0, 0, 1, 1, 2, 2]
    assert parents_of(11) == [-1] * 4 + [0, 0, 1, 1, 2, 2, 3]
    assert parents_of(64) == [-1] * 8 + [top for top in range(8) for _ in range(7)]


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

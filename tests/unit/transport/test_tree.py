"""The tree of messages: every rank below rank 0 once, hosts kept together, few children."""

from __future__ import annotations

from hypothesis import given, strategies as st

from pyhvd.transport.tree import FAN_OUT, Tree


def lowest_of(hosts: list[int]) -> list[int]:
    """Return, by rank, the lowest rank of its host."""
    return [hosts.index(host) for host in hosts]


def test_on_one_host_all_ranks_send_to_rank_0() -> None:
    assert Tree.of(0, [0, 0, 0]) == Tree(0, -1, {1: 0b010, 2: 0b100})
    assert Tree.of(2, [0, 0, 0]) == Tree(2, 0, {})
    assert not any(Tree.of(rank, [0, 0, 0]).merges for rank in range(3))


def test_two_hosts() -> None:
    trees = [Tree.of(rank, [0, 0, 2, 2]) for rank in range(4)]
    assert trees == [
        Tree(0, -1, {1: 0b0010, 2: 0b1100}, frozenset({2})),
        Tree(1, 0, {}),
        Tree(2, 0, {3: 0b1000}),
        Tree(3, 2, {}),
    ]
    assert [tree.merges for tree in trees] == [False, False, True, False]
    assert [tree.neighbours for tree in trees] == [[1, 2], [0], [3, 0], [2]]


def test_beyond_17_hosts_there_is_a_second_level() -> None:
    hosts = [rank - rank % 2 for rank in range(2 * (FAN_OUT + 3))]
    root, second = Tree.of(0, hosts), Tree.of(2, hosts)
    assert list(root.children) == [1, *range(2, 2 * FAN_OUT + 2, 2)]
    assert list(second.children) == [3, 2 * FAN_OUT + 2, 2 * FAN_OUT + 4]
    assert root.children[2] == second.branch


@given(hosts=st.lists(st.integers(0, 12), min_size=1, max_size=40), fan_out=st.integers(1, 4))
def test_any_layout(hosts: list[int], fan_out: int) -> None:
    leaders = lowest_of(hosts)
    trees = [Tree.of(rank, leaders, fan_out) for rank in range(len(hosts))]
    assert trees[0].parent == -1
    below = [1 << rank for rank in range(len(hosts))]
    for rank in reversed(range(len(hosts))):  # a parent is lower than its children
        tree = trees[rank]
        assert tree.parent < rank
        assert all(trees[child].parent == rank for child in tree.children)
        assert all(ranks == below[child] for child, ranks in tree.children.items())
        below[rank] = tree.branch
        assert len([child for child in tree.children if hosts[child] != hosts[rank]]) <= fan_out
        assert leaders[rank] in (rank, tree.parent)
    assert below[0] == (1 << len(hosts)) - 1

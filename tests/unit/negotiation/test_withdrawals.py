"""Tensors that are given back: their ranks submit them again, and the others never hear of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from pyhvd.negotiation.messages import GLOBAL_SET, ErrorInfo, ErrorKind, Request
from tests.thinning import examples
from tests.unit.native.fast_path_simulation import FastPathNetwork
from tests.unit.negotiation.simulation import Done, Network, TreeNetwork, allreduce, grouped

pytestmark = pytest.mark.timeout(600)

ERROR = ErrorInfo(ErrorKind.WITHDRAWN, "submit it again")
UNITS: tuple[list[Request], ...] = (
    [allreduce("r: a")],
    grouped("r: g", [(2,), (3,)]),
    [allreduce("m")],
    [allreduce("r: b")],
)


class Program:
    """Ranks that submit the units of some rounds in orders of their own, and what they get back again."""

    def __init__(self, network: Network, rounds: int) -> None:
        self.network = network
        self.left = [[unit for _ in range(rounds) for unit in UNITS] for _ in range(network.size)]
        self.open: list[list[tuple[list[Request], list[Done]]]] = [[] for _ in range(network.size)]
        self.given_back = 0

    def submit(self, rank: int, choice: int) -> bool:
        """Submit one of the rank's units, unless all of them are in flight; return whether so."""
        self._collect(rank)
        flying = [unit for unit, _ in self.open[rank]]
        can = [unit for unit in self.left[rank] if unit not in flying]
        if not can:
            return False
        unit = can[choice % len(can)]
        self.left[rank].remove(unit)
        ends = self.network.submit(rank, unit)
        assert ends is not None
        self.open[rank].append((unit, ends))
        return True

    def _collect(self, rank: int) -> None:
        for unit, ends in [each for each in self.open[rank] if len(each[1]) == len(each[0])]:
            self.open[rank].remove((unit, ends))
            kinds = {done.response.error and done.response.error.kind for done in ends}
            assert len(kinds) == 1, "a group is given back as a whole"
            if kinds != {None}:
                assert kinds == {ErrorKind.WITHDRAWN}
                assert unit[0].name.startswith("r: ")
                self.given_back += 1
                self.left[rank].append(unit)

    def finish(self) -> None:
        """Submit and deliver until nothing is left."""
        for _ in range(1000):
            self.network.settle()
            if not any(self.submit(rank, 0) for rank in range(self.network.size)):
                return
        raise AssertionError(f"{self.left} is left")


def make(kind: str, size: int, capacity: int) -> Network:
    if kind == "tree":
        return TreeNetwork(size, capacity, (), [rank - rank % 2 for rank in range(size)], 2)
    return FastPathNetwork(size, capacity) if kind == "fast path" else Network(size, capacity)


@given(st.data())
@settings(max_examples=examples(2000, longest=True), deadline=None)
@pytest.mark.parametrize("kind", ["flat", "tree", "fast path"])
def test_every_tensor_is_reduced_at_last(kind: str, data: st.DataObject) -> None:
    size, capacity = data.draw(st.integers(2, 4)), data.draw(st.sampled_from([0, 3, 16]))
    network = make(kind, size, capacity)
    program = Program(network, rounds=4)
    for rank, choice, action in data.draw(
        st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 9), st.integers(0, 9)), max_size=120)
    ):
        if action < 5:
            program.submit(rank, choice)
        elif action < 9:
            if can := network.moves():
                can[choice % len(can)]()
            network.respond()
        else:
            network.coordinator.withdraw(GLOBAL_SET, "r: ", ERROR)
            network.validate()
    program.finish()
    network.check_all()


def test_only_the_ranks_that_have_submitted_get_the_error() -> None:
    network = Network(3)
    for _ in range(2):  # the second time by cache bits
        ends = [network.submit(rank, UNITS[1]) for rank in (0, 2)]
        network.settle()
        network.coordinator.withdraw(GLOBAL_SET, "r: ", ERROR)
        network.settle()
        assert [[done.response.error for done in each or ()] for each in ends] == [[ERROR, ERROR]] * 2
        done = network.everywhere(UNITS[1])
        assert all(each.response.error is None for ends in done for each in ends)
    network.check_all()

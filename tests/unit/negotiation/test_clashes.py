"""Tensors that some ranks submit as a group, and others alone or in a larger group: all ranks get errors.

``g`` is a group, and ``g_1of2`` the name that its first tensor has; nothing stops a rank from giving that
name to a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations

import pytest
from hypothesis import given, settings, strategies as st

from pyhvd.negotiation.messages import ErrorKind, Request
from tests.thinning import examples
from tests.unit.native.fast_path_simulation import FastPathNetwork
from tests.unit.negotiation.simulation import Done, Network, allreduce, grouped

SHAPES = [(1,), (2,), (3,)]
PAIR, TRIPLE = grouped("g", SHAPES[:2]), grouped("g", SHAPES)
ALONE = [allreduce(each.name, each.shape) for each in PAIR]
REFUSED, REFUSED_ALONE = "the group, refused", "the first member, refused"

Unit = Sequence[Request] | str
"""What a rank submits as one: requests, or a refusal."""


class Clash:
    """Calls that ranks submit one after the other on a network, and the end of each."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.ends: list[tuple[int, Sequence[Request], list[Done]]] = []

    def submit(self, rank: int, unit: Unit) -> list[Done] | None:
        if isinstance(unit, str):
            self.network.refuse(rank, PAIR[0] if unit == REFUSED else ALONE[0])
            return None
        ends = self.network.submit(rank, unit)
        assert ends is not None
        self.ends.append((rank, unit, ends))
        return ends

    def check_told(self) -> None:
        """Check that every rank got one error for each tensor, and for a group in one response list."""
        for rank, unit, ends in self.ends:
            names = [end.response.request.name for end in ends]
            assert sorted(names) == sorted(each.name for each in unit), (rank, names)
            assert len({end.seq for end in ends}) == 1, (rank, "a group is answered as one unit")
            for end in ends:
                error = end.response.error
                assert error is not None
                assert error.kind in (ErrorKind.MISMATCH, ErrorKind.RANK_FAILED)

    def check_retry(self, retry: Sequence[Request]) -> None:
        """Check that the next calls succeed, by messages and from the cache, and leave no state."""
        for _ in range(3):
            for ends in self.network.everywhere(retry):
                assert [end.response.error for end in ends] == [None] * len(retry)
        self.network.check_all()


def send(network: Network, rank: int) -> None:
    """Send a rank's new requests to the coordinator as one message."""
    if network.ranks[rank].fresh:
        network.send(rank)
        network.deliver_up(rank)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("alone", [{1}, {0, 2}, {2}])
def test_a_member_by_itself(order: Sequence[int], alone: set[int], member: int, cached: bool) -> None:
    clash = Clash(Network(3))
    if cached:
        clash.network.everywhere(PAIR)
    for rank in order:
        clash.submit(rank, [ALONE[member]] if rank in alone else PAIR)
        send(clash.network, rank)
    clash.network.settle()
    clash.check_told()
    for _, unit, ends in clash.ends:
        for end in ends:
            error = end.response.error
            assert error is not None
            assert error.kind == ErrorKind.MISMATCH
            assert sorted(error.per_rank) == [0, 1, 2]
            assert f"allreduce {ALONE[member].name!r}" in error.message
            assert f"Its group failed with {ALONE[member].name!r}: " in error.message or (
                end.response.request.name == ALONE[member].name
            ), unit
    clash.check_retry(PAIR)


@pytest.mark.parametrize("grouped_first", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_members_by_themselves_are_all_told(grouped_first: bool, at_once: bool) -> None:
    """Tensors that a rank submits after it could know that the group failed get the error too."""
    clash = Clash(Network(2))
    if grouped_first:
        clash.submit(0, PAIR)
        clash.network.settle()
    for each in ALONE:
        clash.submit(1, [each])
        if not at_once:
            clash.network.settle()
    send(clash.network, 1)
    if not grouped_first:
        clash.submit(0, PAIR)
    clash.network.settle()
    clash.check_told()
    clash.network.check_no_residue()
    clash.check_retry(PAIR)


def test_a_rank_that_goes_on_by_itself_has_moved_on() -> None:
    """After the error, all ranks submit the tensors without a group, and succeed."""
    clash = Clash(Network(2))
    clash.submit(0, PAIR)
    clash.submit(1, [ALONE[0]])
    clash.network.settle()
    clash.check_told()
    for _ in range(2):
        for each in ALONE:
            for ends in clash.network.everywhere([each]):
                assert [end.response.error for end in ends] == [None]
    clash.network.check_all()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_pair_here_and_a_triple_and_a_member_there(order: Sequence[int]) -> None:
    clash = Clash(Network(3))
    units = (PAIR, TRIPLE, [ALONE[0]])
    for rank in order:
        clash.submit(rank, units[rank])
        clash.network.settle()
    clash.check_told()
    sizes = [end.response.error for end in clash.ends[order.index(1)][2]]
    assert sizes[0] is not None
    assert sizes[0].per_rank == {0: "2 tensors", 1: "3 tensors"}
    clash.check_retry(PAIR)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_member_refused_alone_fails_the_group(order: Sequence[int], cached: bool) -> None:
    clash = Clash(Network(3, capacity=1 if cached else 8))
    if cached:
        clash.network.everywhere(PAIR)
    for rank in order:
        clash.submit(rank, REFUSED_ALONE if rank == 1 else PAIR)
        clash.network.settle()
    clash.check_told()
    assert {end.response.error.rank for _, _, ends in clash.ends for end in ends if end.response.error} == {1}
    clash.check_retry(PAIR)


# -- any of it, in any order -----------------------------------------------------------------------------

PROGRAMS: list[list[Unit]] = [
    [PAIR],
    [TRIPLE],
    [ALONE[:1]],
    [ALONE[1:]],
    [ALONE[:1], ALONE[1:]],
    [ALONE[1:], ALONE[:1]],
    [REFUSED],
    [REFUSED_ALONE],
    [REFUSED_ALONE, ALONE[1:]],
]
"""What a rank may take the others to do."""


def is_clash(programs: Sequence[list[Unit]]) -> bool:
    """Return whether the coordinator can tell from these calls alone that the ranks disagree.

    Ranks that submit different members alone wait for each other, because the other members may yet come. The
    stall inspector reports them. Ranks that refuse in different ways mean different calls.
    """
    units = [unit for program in programs for unit in program]
    refused = {unit for unit in units if isinstance(unit, str)}
    if PAIR not in units or len(refused) > 1 or (refused and TRIPLE in units):
        return False
    names = [{r.name for unit in each if not isinstance(unit, str) for r in unit} for each in programs]
    common = set.intersection(*names) and any(program != [PAIR] for program in programs)
    return bool(refused) or TRIPLE in units or bool(common)


@dataclass
class Player:
    """One rank: the calls that it has yet to submit, and the lists that get their ends."""

    rank: int
    todo: list[Unit]
    retry: Sequence[Request]
    ends: list[tuple[int, list[Done]]] = field(default_factory=list)
    again: list[Done] | None = None

    def may(self) -> bool:
        """Return whether the rank can submit: the last call waits for the ends of all others."""
        return bool(self.todo) or (self.again is None and all(len(ends) == n for n, ends in self.ends))

    def play(self, clash: Clash) -> None:
        """Submit the next call."""
        if not self.todo:
            self.again = clash.network.submit(self.rank, self.retry)
            return
        unit = self.todo.pop(0)
        if (ends := clash.submit(self.rank, unit)) is not None:
            self.ends.append((len(unit), ends))


def play(clash: Clash, players: Sequence[Player], choices: Sequence[int]) -> None:
    """Let ranks submit and messages move in the chosen order; then take all steps that are left."""
    remaining = iter(choices)
    network = clash.network
    while True:
        can: list[Callable[[], object]] = [partial(each.play, clash) for each in players if each.may()]
        can += network.moves()
        choice = next(remaining, None)
        if choice is not None:
            can.append(network.respond)
            can[choice % len(can)]()
        elif can:
            can[0]()
        elif network.respond() is None:
            return


@settings(max_examples=examples(1500, longest=True))
@given(
    programs=st.lists(st.sampled_from(PROGRAMS), min_size=2, max_size=4).filter(is_clash),
    capacity=st.sampled_from([8, 8, 1, 0]),
    warm=st.sampled_from([None, PAIR, TRIPLE, ALONE[:1], ALONE[1:]]),
    lane=st.booleans(),
    choices=st.lists(st.integers(0, 12), max_size=40),
    retry=st.sampled_from([PAIR, PAIR, TRIPLE]),
)
def test_everybody_is_told_in_every_order(
    programs: list[list[Unit]],
    capacity: int,
    warm: Sequence[Request] | None,
    lane: bool,
    choices: list[int],
    retry: Sequence[Request],
) -> None:
    if any(isinstance(unit, str) for program in programs for unit in program):
        # The next call of a rank that refuses may arrive before the others' first call. The two must differ
        # in size, or in all tensors if these arrive in order and not half of them as bits.
        retry, capacity = PAIR, 8 if capacity else 0
    network = (FastPathNetwork if lane else Network)(len(programs), capacity)
    if warm is not None:
        network.everywhere(warm)
    clash = Clash(network)
    players = [Player(rank, list(program), retry) for rank, program in enumerate(programs)]
    play(clash, players, choices)
    clash.check_told()
    for player in players:
        assert player.again is not None
        assert [end.response.error for end in player.again] == [None] * len(retry), player.rank
    clash.check_retry(retry)

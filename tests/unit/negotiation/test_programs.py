"""Random programs of several ranks, with random orders in which their messages travel.

A program is a list of steps that all ranks carry out. The k-th submission of a tensor, or of a grouped call,
on one rank belongs together with the k-th one on every other rank. How these submissions must end follows
from their requests alone, not from the order of the messages; ``verdict`` says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import given, settings, strategies as st
from msgspec import structs

from pyhvd.dtypes import Code
from pyhvd.negotiation.messages import FOUNDING, GLOBAL_SET, ErrorKind, Request, RequestType
from tests.thinning import examples
from tests.unit.native.fast_path_simulation import FastPathNetwork
from tests.unit.negotiation.simulation import Done, Network, Ranks, TreeNetwork, allreduce, tensor

pytestmark = pytest.mark.timeout(600)  # long searches: 3,000 programs each

KINDS = (
    *(RequestType.ALLREDUCE, RequestType.ALLGATHER, RequestType.REDUCESCATTER),
    *(RequestType.ADASUM, RequestType.BROADCAST, RequestType.ALLTOALL, RequestType.BARRIER),
)
GROUPABLE = 4
UNITS = (*((name, 0) for name in "abcde"), ("g", 2), ("i", 3), ("h", 2), ("k", 1))
"""Names of tensors, with size 0, and of grouped calls, with their sizes."""
ROWS_DIFFER = (RequestType.ALLGATHER, RequestType.ALLTOALL)
NEEDS_ALL = (RequestType.ALLTOALL, RequestType.BARRIER)


@dataclass(frozen=True)
class Call:
    """One call, which every member of a process set makes.

    ``odd`` has, by rank, the fault of a rank that makes the call differently, or refuses it. An ``impatient``
    call is made even while its name is in flight, so that it can be a duplicate. ``shared`` has the ranks
    whose arrays are in shared memory.
    """

    set: int
    unit: int
    kind: int
    shape: int
    odd: dict[int, str]
    impatient: bool
    shared: frozenset[int] = frozenset()

    def names(self) -> list[str]:
        name, size = UNITS[self.unit]
        return [f"{name}_{i + 1}of{size}" for i in range(size)] if size else [name]

    def requests(self, rank: int, members: Ranks) -> list[Request]:
        """Return the requests that a rank submits."""
        group, size = UNITS[self.unit]
        kind = KINDS[self.kind % GROUPABLE if size else self.kind]
        made = [self._request(kind, name, rank, members) for name in self.names()]
        if size:
            made = [structs.replace(r, group=group, group_size=size) for r in made]
        if rank in self.shared:
            made[-1] = structs.replace(made[-1], window=True)
        odd = self.odd.get(rank)
        if odd == "shape":
            made[0] = structs.replace(made[0], shape=(*made[0].shape, 5))
        elif odd == "dtype":
            made[-1] = structs.replace(made[-1], dtype=Code.FLOAT64)
        elif odd == "scale":
            made[-1] = structs.replace(made[-1], prescale=0.5)
        return made

    def _request(self, kind: RequestType, name: str, rank: int, members: Ranks) -> Request:
        if kind is RequestType.BARRIER:
            return Request(kind, name)
        if kind in ROWS_DIFFER:
            return tensor(kind, name, ((rank + self.shape) % 3, 4))
        root = members[self.shape % len(members)] if kind is RequestType.BROADCAST else -1
        op = -1 if kind is RequestType.BROADCAST else 1
        return structs.replace(allreduce(name, (self.shape + 1, 4)), type=kind, root=root, op=op)


@dataclass(frozen=True)
class Window:
    """Calls that each rank makes in any order; with ``wait`` it then waits for all calls that it has made."""

    calls: list[Call]
    wait: bool


@dataclass(frozen=True)
class Join:
    """Rank r makes the first ``leave[r]`` calls, and then joins."""

    calls: list[Call]
    leave: list[int]


@dataclass(frozen=True)
class Add:
    """Every rank adds a process set, or only its members ``found`` it."""

    ranks: frozenset[int]
    found: bool
    number: int = 0


@dataclass(frozen=True)
class Remove:
    """Who has made a process set removes it; rank r has made its calls except the first ``skip[r]``."""

    set: int
    calls: list[Call]
    skip: dict[int, int]


Step = Window | Join | Add | Remove
small = st.integers(0, 3)
calls = st.builds(
    Call,
    set=small,
    unit=st.integers(0, len(UNITS) - 1),
    kind=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5, 6]),
    shape=st.integers(0, 2),
    odd=st.dictionaries(small, st.sampled_from(["shape", "dtype", "scale", "refuse", "refuse"]), max_size=2)
    | st.just({}),
    impatient=st.booleans(),
)
some_calls = st.lists(calls, max_size=6)
windows = st.builds(Window, some_calls, st.booleans())
steps = st.lists(
    windows
    | windows
    | st.builds(Join, some_calls, st.lists(st.integers(0, 6), min_size=4, max_size=4))
    | st.builds(Add, st.frozensets(small, min_size=1), st.booleans())
    | st.builds(Remove, small, some_calls, st.dictionaries(small, st.integers(0, 6))),
    max_size=6,
)
subsets = st.lists(st.frozensets(small, min_size=1), max_size=2)


@dataclass
class Submission:
    """One submission of one rank; ``requests`` is None if the rank refused the call."""

    requests: list[Request] | None
    ends: list[Done]


@dataclass
class Player:
    """One rank, and what it has left of the program: the steps, and the calls of the first step."""

    rank: int
    steps: list[Step]
    ids: dict[int, int]
    todo: list[Call] | None = None
    pending: list[tuple[int, list[Done]]] = field(default_factory=list)
    change: list[Done] | None = None


Unit = tuple[int, int, int]


class Program:
    """A program on a network; process sets are numbered in the order of addition, and no number is reused."""

    def __init__(
        self,
        size: int,
        capacity: int,
        sets: Sequence[frozenset[int]],
        steps: list[Step],
        network: Callable[[int, int, list[Ranks]], Network] = Network,
    ) -> None:
        world = tuple(range(size))
        static = [ranks for s in sets if (ranks := _within(s, size)) != world]
        self.members: list[Ranks] = [world, *static]
        self.live = list(range(len(self.members)))
        self.founded: set[int] = set()
        self.network = network(size, capacity, static)
        self.submissions: dict[Unit, dict[int, list[Submission]]] = {}
        self.removed: set[tuple[int, int]] = set()
        ids = {number: number for number in self.live}
        resolved = [new for step in steps for new in self._resolve(step)]
        self.players = [Player(rank, list(resolved), dict(ids)) for rank in world]
        self._responded_to = 0

    def _resolve(self, step: Step) -> Iterator[Step]:
        """Yield the step with its random numbers mapped to existing sets; yield nothing if none fits."""
        if isinstance(step, Add):
            self.members.append(_within(step.ranks, len(self.members[GLOBAL_SET])))
            number = len(self.members) - 1
            self.live.append(number)
            if step.found:
                self.founded.add(number)
            yield replace(step, number=number)
        elif isinstance(step, Remove):
            if len(self.live) > 1:
                gone = self.live.pop(1 + step.set % (len(self.live) - 1))
                pending = [replace(call, set=gone, impatient=True) for call in step.calls]
                yield replace(step, set=gone, calls=pending)
        else:
            named = [replace(call, set=self.live[call.set % len(self.live)]) for call in step.calls]
            yield replace(step, calls=named)

    # -- running -------------------------------------------------------------------------------------------

    def run(self, choices: Sequence[int]) -> None:
        """Make the chosen moves; then, until none is left, the first possible one."""
        remaining = iter(choices)
        while moves := self._moves():
            moves[next(remaining, 0) % len(moves)]()
        for player in self.players:
            assert not player.steps, (
                f"rank {player.rank} hangs: {player}, {self.network.coordinator.stalled()}"
            )

    def _moves(self) -> list[Callable[[], object]]:
        moves = self.network.moves()
        if self.network.received != self._responded_to:
            moves.append(self._respond)
        for player in self.players:
            moves += self._player_moves(player)
        return moves

    def _respond(self) -> None:
        self._responded_to = self.network.received
        self.network.respond()

    def _player_moves(self, player: Player) -> list[Callable[[], object]]:
        while player.steps:
            step = player.steps[0]
            if player.todo is None:
                player.todo = self._own_calls(player, step)
            if player.todo:
                # Any call may come next, but calls of one name keep their order.
                firsts = {(call.set, call.unit): call for call in reversed(player.todo)}
                may = [call for call in firsts.values() if self._may(player, call)]
                return [partial(self._call, player, call) for call in reversed(may)]
            takes_part = self._takes_part(player, step)
            if takes_part and player.change is None:
                return [partial(self._make_change, player, step)]
            if self._waits(player, step):
                return []
            if isinstance(step, Add) and player.change:
                player.ids[step.number] = player.change[0].response.value
            player.steps.pop(0)
            player.todo = player.change = None
        return []

    def _takes_part(self, player: Player, step: Step) -> bool:
        """Return whether a step is, for this rank, a join or a change of the process sets."""
        if isinstance(step, (Add, Remove)):
            number = step.number if isinstance(step, Add) else step.set
            return number not in self.founded or player.rank in self.members[number]
        return isinstance(step, Join)

    def _waits(self, player: Player, step: Step) -> bool:
        if player.change is not None:
            return not player.change
        if isinstance(step, Window) and step.wait:
            player.pending = [(n, ends) for n, ends in player.pending if len(ends) < n]
            return bool(player.pending)
        return False

    def _own_calls(self, player: Player, step: Step) -> list[Call]:
        if isinstance(step, Add):
            return []
        made = list(step.calls)
        if isinstance(step, Remove):
            made = made[step.skip.get(player.rank, 0) :]
        if isinstance(step, Join):
            made = made[: step.leave[player.rank]]
        return [call for call in made if player.rank in self.members[call.set]]

    def _may(self, player: Player, call: Call) -> bool:
        here = self.network.ranks[player.rank]
        return call.impatient or not any(
            (player.ids[call.set], name) in here.in_flight for name in call.names()
        )

    def _call(self, player: Player, call: Call) -> None:
        assert player.todo is not None
        del player.todo[next(i for i, c in enumerate(player.todo) if c is call)]
        requests = call.requests(player.rank, self.members[call.set])
        set_id = player.ids[call.set]
        unit = (call.set, self.network.ranks[player.rank].epoch, call.unit)
        record = self.submissions.setdefault(unit, {}).setdefault(player.rank, [])
        if call.odd.get(player.rank) == "refuse":
            self.network.refuse(player.rank, requests[0], set_id)
            record.append(Submission(None, []))
            return
        ends = self.network.submit(player.rank, requests, set_id)
        record.append(Submission(None, []) if ends is None else Submission(requests, ends))
        if ends is not None and not isinstance(player.steps[0], Remove):
            player.pending.append((len(requests), ends))

    def _make_change(self, player: Player, step: Step) -> None:
        number, where = len(player.steps), GLOBAL_SET
        if isinstance(step, Join):
            request = Request(RequestType.JOIN, "join.noname")
        elif isinstance(step, Add):
            ranks = _within(step.ranks, self.network.size)
            request = Request(RequestType.ADD_PROCESS_SET, f"add.{number}", ranks=ranks)
            where = FOUNDING if step.found else GLOBAL_SET
        else:
            assert isinstance(step, Remove)
            ids = (player.ids[step.set],)
            self.removed.add((step.set, self.network.ranks[player.rank].epoch))
            request = Request(RequestType.REMOVE_PROCESS_SET, f"remove.{number}", ranks=ids)
            where = ids[0] if step.set in self.founded else GLOBAL_SET
        player.change = self.network.submit(player.rank, [request], where)

    # -- judging -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare the end of every submission with the verdict, and the results of the joins."""
        for (number, epoch, _), by_rank in self.submissions.items():
            for k in range(max(len(each) for each in by_rank.values())):
                together = {rank: each[k] for rank, each in by_rank.items() if k < len(each)}
                _check_together(together, self.members[number], (number, epoch) in self.removed)
        joins = [r.value for _, r in self.network.ranks[0].history if r.request.type == RequestType.JOIN]
        size = self.network.size
        assert joins == self.network.join_order[size - 1 :: size]


def _within(ranks: frozenset[int], size: int) -> Ranks:
    return tuple(sorted({rank % size for rank in ranks}))


def _check_together(subs: dict[int, Submission], members: Ranks, removed: bool) -> None:
    """Compare how submissions that belong together ended with how they must end."""
    absent = [rank for rank in members if rank not in subs]
    made = {rank: sub.requests for rank, sub in subs.items() if sub.requests is not None}
    expected = verdict(made, len(made) < len(subs), absent, removed)
    for rank, requests in made.items():
        ends = subs[rank].ends
        assert sorted(e.response.request.name for e in ends) == sorted(r.name for r in requests), (rank, subs)
        assert len({end.seq for end in ends}) == 1, "a group is answered as one unit"
        kinds = {None if e.response.error is None else e.response.error.kind for e in ends}
        assert kinds == {expected}, (rank, subs)
        for end in ends:
            assert end.response.error is not None or [members[i] for i in end.response.joined] == absent
    if made and expected is None:
        agreed = [[(end.seq, end.response) for end in subs[rank].ends] for rank in made]
        assert all(each == agreed[0] for each in agreed)
        for _, response in agreed[0]:
            shared = [r.window for rs in made.values() for r in rs if r.name == response.request.name]
            assert response.direct == (response.slot >= 0 and all(shared))
            if response.request.type in ROWS_DIFFER:
                own = {
                    rank: r.shape[0]
                    for rank, rs in made.items()
                    for r in rs
                    if r.name == response.request.name
                }
                assert response.dims == tuple(own.get(rank, 0) for rank in members)


def verdict(
    made: dict[int, list[Request]], refused: bool, absent: Sequence[int], removed: bool
) -> ErrorKind | None:
    """Return the kind of error with which submissions that belong together must end, or None for a result.

    Parameters
    ----------
    made : dict of int to list of Request
        The requests of each rank that has submitted the call.
    refused : bool
        Whether some rank has refused the call.
    absent : sequence of int
        Members of the set that have not made the call.
    removed : bool
        Whether the set was removed before the next join ended; else the absent members have joined.
    """
    if refused:
        return ErrorKind.RANK_FAILED
    if absent and removed:
        return ErrorKind.SHUT_DOWN
    first = next(iter(made.values()))
    meant = [[_meaning(r) for r in requests] for requests in made.values()]
    if any(each != meant[0] for each in meant):
        return ErrorKind.MISMATCH
    if absent and any(r.type in NEEDS_ALL or r.root in absent for r in first):
        return ErrorKind.MISMATCH
    return None


def _meaning(r: Request) -> tuple[object, ...]:
    shape = (len(r.shape), *r.shape[1:]) if r.type in ROWS_DIFFER else r.shape
    if r.type == RequestType.BARRIER:
        shape = ()
    return (r.type, r.name, r.dtype, shape, r.op, r.prescale, r.postscale, r.root, r.group, r.group_size)


def _one(steps: list[Step]) -> Step:
    return steps[0] if steps else Window([], True)


@settings(max_examples=examples(3000, longest=True))
@given(
    size=st.integers(2, 4),
    capacity=st.sampled_from([8, 3, 2, 1, 0]),
    sets=subsets,
    steps=steps,
    choices=st.lists(st.integers(0, 12), max_size=120),
)
def test_program_ends_the_same_in_every_order(
    size: int, capacity: int, sets: list[frozenset[int]], steps: list[Step], choices: list[int]
) -> None:
    program = Program(size, capacity, sets, steps)
    program.run(choices)
    program.check()
    program.network.check_all()


repetitive = st.builds(
    Call,
    set=st.integers(0, 1),
    unit=st.sampled_from([0, 0, 0, 1, 5, 5, 7]),
    kind=st.sampled_from([0, 0, 0, 0, 0, 0, 1, 3]),
    shape=st.sampled_from([0, 0, 0, 0, 1]),
    odd=st.just({})
    | st.just({})
    | st.dictionaries(small, st.sampled_from(["shape", "refuse", "refuse"]), max_size=1),
    impatient=st.booleans(),
    shared=st.just(frozenset()) | st.sampled_from([frozenset({0}), frozenset({1}), frozenset(range(4))]),
)
"""Calls many of which repeat an earlier call exactly, so that they are cached and use the ready table."""


@settings(max_examples=examples(800, longest=True))
@given(
    size=st.integers(2, 4),
    capacity=st.sampled_from([8, 8, 3, 2]),
    sets=subsets,
    steps=st.lists(
        st.builds(Window, st.lists(repetitive, min_size=2, max_size=8), st.booleans()) | steps.map(_one),
        min_size=2,
        max_size=8,
    ),
    choices=st.lists(st.integers(0, 12), max_size=200),
)
def test_program_ends_the_same_with_a_fast_path(
    size: int, capacity: int, sets: list[frozenset[int]], steps: list[Step], choices: list[int]
) -> None:
    program = Program(size, capacity, sets, steps, FastPathNetwork)
    program.run(choices)
    program.check()
    program.network.check_all()


HOSTS = ([0, 0, 2, 2], [0, 1, 1, 1], [0, 0, 2, 3], [0, 1, 2, 3], [0, 1, 0, 1])
"""Layouts: by rank, the lowest rank of its host."""


@settings(max_examples=examples(3000, longest=True))
@given(
    size=st.integers(2, 4),
    capacity=st.sampled_from([8, 3, 2, 1, 0]),
    sets=subsets,
    steps=st.lists(
        st.builds(Window, st.lists(repetitive, min_size=2, max_size=8), st.booleans()) | steps.map(_one),
        max_size=8,
    ),
    choices=st.lists(st.integers(0, 12), max_size=200),
    hosts=st.sampled_from(HOSTS),
    fan_out=st.integers(1, 2),
)
def test_program_ends_the_same_if_leaders_merge_messages(
    size: int,
    capacity: int,
    sets: list[frozenset[int]],
    steps: list[Step],
    choices: list[int],
    hosts: list[int],
    fan_out: int,
) -> None:
    def network(size: int, capacity: int, sets: list[Ranks]) -> Network:
        return TreeNetwork(size, capacity, sets, hosts[:size], fan_out)

    program = Program(size, capacity, sets, steps, network)
    program.run(choices)
    program.check()
    program.network.check_all()


@settings(max_examples=examples(1500, longest=True))
@given(
    size=st.integers(2, 3),
    fast_lane=st.booleans(),
    sets=subsets,
    calls=st.lists(repetitive, min_size=1, max_size=2),
    leave=st.lists(st.sampled_from([2, 2, 2, 1]), min_size=3, max_size=3),
    choices=st.lists(st.integers(0, 12), min_size=100, max_size=200),
)
def test_joins_between_cached_calls(
    size: int,
    fast_lane: bool,
    sets: list[frozenset[int]],
    calls: list[Call],
    leave: list[int],
    choices: list[int],
) -> None:
    """Each rank joins after it has repeated all or some of the calls that all ranks have cached."""
    same = [replace(call, odd={}, impatient=False) for call in calls]
    steps: list[Step] = [Window(same, True), Join(same, leave), Window(same, True)]
    program = Program(size, 8, sets, [*steps, *steps], FastPathNetwork if fast_lane else Network)
    program.run(choices)
    program.check()
    program.network.check_all()

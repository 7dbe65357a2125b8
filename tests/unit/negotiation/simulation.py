"""A simulated network: n workers, one coordinator, and the messages between them, for tests of the machines.

There is no clock and no thread: a test chooses, step by step, which message moves next. Every message goes
through its wire form. The network plays the runtime's part (queue, duplicates, plan). It fails at once if a
rank gets a response that it cannot carry out, or if the caches of two ranks differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pyhvd.controller import Coordinator, Worker
from pyhvd.dtypes import Code, ReduceOp
from pyhvd.negotiation.fusion import plan
from pyhvd.negotiation.leader import Leader
from pyhvd.negotiation.message_table import MessageTable
from pyhvd.negotiation.messages import (
    GLOBAL_SET,
    UNNAMED,
    MergedList,
    Request,
    RequestList,
    RequestType,
    Response,
    ResponseList,
    decode_merged,
    decode_requests,
    decode_responses,
    encode,
    iter_bits,
    unpack_ranks,
)
from pyhvd.negotiation.response_cache import Group, group_of
from pyhvd.transport.tree import Tree

Key = tuple[int, str]
Ranks = tuple[int, ...]
Instance = tuple[int, int]
"""A process set: its id, which may be used again, and the response list that announced it."""

THRESHOLD = 100
"""Fusion threshold (bytes) of the plans: small, so that the look-ahead matters."""


def allreduce(name: str, shape: Ranks = (2,), **options: Any) -> Request:
    """Return a request for an allreduce, by default a float32 sum."""
    fields: dict[str, Any] = {"dtype": Code.FLOAT32, "shape": shape, "op": ReduceOp.SUM}
    return Request(RequestType.ALLREDUCE, name, **{**fields, **options})


def tensor(kind: RequestType, name: str, shape: Ranks = (2,), **options: Any) -> Request:
    """Return a float32 request of a kind that does not reduce."""
    return Request(kind, name, **{"dtype": Code.FLOAT32, "shape": shape, **options})


def grouped(name: str, shapes: Sequence[Ranks], **options: Any) -> list[Request]:
    """Return the requests of a grouped allreduce, with the names that a grouped call gives its tensors."""
    size = len(shapes)
    return [
        allreduce(f"{name}_{i}of{size}", shape, group=name, group_size=size, **options)
        for i, shape in enumerate(shapes, 1)
    ]


def refusal(request: Request, text: str = "ValueError: no") -> Request:
    """Return the request with an error that a rank sends in place of a tensor or a group that it refused."""
    return Request(
        request.type,
        request.group or request.name,
        group=request.group,
        group_size=request.group_size,
        error=text,
    )


def by_request(requests: Sequence[Request] | Mapping[int, Request]) -> dict[Request, int]:
    """Return the ranks of each distinct request, as bit vectors; ``requests`` has each rank's."""
    found: dict[Request, int] = {}
    for rank, request in requests.items() if isinstance(requests, Mapping) else enumerate(requests):
        found[request] = found.get(request, 0) | 1 << rank
    return found


@dataclass
class Done:
    """How one submitted tensor ended on one rank: number of the response list, and the response."""

    seq: int
    response: Response


@dataclass
class Rank:
    """One rank's state in the network."""

    worker: Worker
    fresh: list[tuple[int, Request]] = field(default_factory=list)
    in_flight: dict[Key, list[Done]] = field(default_factory=dict)
    history: list[tuple[int, Response]] = field(default_factory=list)
    batches: list[tuple[int, Instance, tuple[str, ...]]] = field(default_factory=list)
    born: dict[int, int] = field(default_factory=dict)
    joining: bool = False
    epoch: int = 0


class Network:
    """See the module's docstring; ``up`` and ``down`` hold the messages under way, by rank."""

    def __init__(self, size: int, capacity: int = 8, sets: Sequence[Ranks] = ()) -> None:
        self.size = size
        self.coordinator = Coordinator(size, capacity, sets)
        self.ranks = [Rank(Worker(rank, size, sets)) for rank in range(size)]
        self.up: list[deque[bytes]] = [deque() for _ in range(size)]
        self.down: list[deque[bytes]] = [deque() for _ in range(size)]
        self.join_order: list[int] = []
        self.received = 0
        self.sent: list[RequestList] = []
        self.answered: list[ResponseList] = []
        self.members: dict[Instance, Ranks] = {
            (i, 0): ranks for i, ranks in enumerate([tuple(range(size)), *sets])
        }
        self._caches: dict[tuple[int, int], Any] = {}

    # -- what a rank's threads do ----------------------------------------------------------------------

    def submit(self, rank: int, requests: Iterable[Request], set_id: int = GLOBAL_SET) -> list[Done] | None:
        """Submit requests as one call; return the list of their ends, or None if one is a duplicate."""
        here = self.ranks[rank]
        members = list(requests)
        if any((set_id, r.name) in here.in_flight for r in members):
            self.refuse(rank, members[0], set_id, "DuplicateNameError: in flight")
            return None
        ends: list[Done] = []
        for request in members:
            here.in_flight[set_id, request.name] = ends
            here.fresh.append((set_id, request))
            here.joining |= request.type == RequestType.JOIN
        return ends

    def refuse(
        self, rank: int, request: Request, set_id: int = GLOBAL_SET, text: str = "ValueError: no"
    ) -> None:
        """Announce that a rank refused a tensor, or the tensor's group."""
        self.ranks[rank].fresh.append((set_id, refusal(request, text)))

    # -- what the messages do --------------------------------------------------------------------------

    def send(self, rank: int) -> RequestList:
        """Send a rank's new requests as one message."""
        here = self.ranks[rank]
        fresh, here.fresh = here.fresh, []
        message = here.worker.compose(fresh)
        self.sent.append(message)
        self.up[rank].append(encode(message))
        return message

    def deliver_up(self, rank: int, now: float = 0.0) -> None:
        """Deliver a rank's oldest message to the coordinator."""
        self.arrive(MergedList.of(rank, decode_requests(self.up[rank].popleft(), 7)), now)

    def arrive(self, message: MergedList, now: float = 0.0) -> None:
        """Let the coordinator take a message."""
        for part in message.parts:
            joins = [r for _, r in part.message.requests if r.type == RequestType.JOIN and not r.error]
            ranks = sorted(iter_bits(unpack_ranks(part.ranks)), key=lambda rank: rank == part.last)
            self.join_order += ranks * len(joins)
        self.received += 1
        self.coordinator.receive(message, now)
        self.validate()

    def respond(self) -> ResponseList | None:
        """Let the coordinator send a response list, if it has responses."""
        message = self.coordinator.respond()
        self.validate()
        if message is not None:
            self.answered.append(message)
            for rank in iter_bits(self.coordinator.audience(message)):
                self.down[rank].append(encode(message))
        return message

    def deliver_down(self, rank: int) -> list[Response]:
        """Let a rank process the oldest response list under way to it, and complete its tensors."""
        here = self.ranks[rank]
        message = decode_responses(self.down[rank].popleft(), 7)
        todo = here.worker.process(message)
        self._follow(rank, todo)
        for batch in plan(todo, THRESHOLD):
            if batch[0].error is None:
                names = tuple(response.request.name for response in batch)
                set_id = batch[0].process_set
                here.batches.append((message.seq, (set_id, here.born.get(set_id, 0)), names))
        for response in todo:
            self._complete(rank, message.seq, response)
        here.worker.carried_out()
        self._compare_caches(rank, message.seq)
        return todo

    def _follow(self, rank: int, todo: list[Response]) -> None:
        """Prepare a rank for the responses of a list; subclasses override it."""

    def _complete(self, rank: int, seq: int, response: Response) -> None:
        here = self.ranks[rank]
        request = response.request
        here.history.append((seq, response))
        ends = here.in_flight.pop((response.process_set, request.name), None)
        if ends is None:
            members = here.worker.sets[response.process_set]
            joined = [members[i] for i in response.joined]
            assert response.error is None, f"rank {rank} is told of an error of {request.name!r}: {response}"
            assert here.joining, f"rank {rank} is to run {request.name!r}, which is not in flight there"
            assert rank in joined, f"rank {rank} is not among the joined ranks {joined} of {request.name!r}"
        else:
            ends.append(Done(seq, response))
        if request.type == RequestType.JOIN and response.error is None:
            here.joining = False
            here.epoch += 1
        if request.type == RequestType.ADD_PROCESS_SET and response.error is None:
            here.born[response.value] = seq
            self.members[response.value, seq] = request.ranks
        if request.type == RequestType.REMOVE_PROCESS_SET and response.error is None:
            lost = [key for key in here.in_flight if key[0] == request.ranks[0]]
            for key in lost:
                here.in_flight.pop(key).append(Done(seq, response))

    # -- all of it ---------------------------------------------------------------------------------------

    def moves(self) -> list[Callable[[], object]]:
        """Return the steps that are possible next, the simplest first."""
        ranks = range(self.size)
        can: list[Callable[[], object]] = [partial(self.deliver_up, r) for r in ranks if self.up[r]]
        can += [partial(self.deliver_down, r) for r in ranks if self.down[r]]
        can += [partial(self.send, r) for r in ranks if self.ranks[r].fresh]
        return can

    def settle(self) -> None:
        """Take all possible steps, rank by rank, until none is left."""
        while True:
            while can := self.moves():
                can[0]()
            if self.respond() is None:
                return

    def everywhere(self, requests: Iterable[Request], set_id: int = GLOBAL_SET) -> list[list[Done]]:
        """Submit the same requests on every rank of a set, and settle; return their ends by rank."""
        members = list(requests)
        ends = [self.submit(rank, members, set_id) for rank in self.ranks[0].worker.sets[set_id]]
        self.settle()
        assert None not in ends
        return [end for end in ends if end is not None]

    def each(
        self, requests: Sequence[Request | Sequence[Request]], set_id: int = GLOBAL_SET
    ) -> list[list[Done]]:
        """Submit one request, or one group, per rank of the world, and settle."""
        ends = []
        for rank, request in enumerate(requests):
            ends.append(self.submit(rank, [request] if isinstance(request, Request) else request, set_id))
        self.settle()
        return [end for end in ends if end is not None]

    # -- what must hold ----------------------------------------------------------------------------------

    def _compare_caches(self, rank: int, seq: int) -> None:
        """Check that all ranks have the same caches after the same response list."""
        for set_id, cache in self.ranks[rank].worker._caches.items():
            mine = {slot: response for slot, (response, _) in cache._slots.items()}
            assert cache._by_name == {response.request.name: slot for slot, response in mine.items()}
            assert self._caches.setdefault((seq, set_id), mine) == mine, f"rank {rank}, set {set_id}, {seq}"

    def validate(self) -> None:
        """Check the invariants of every message table; runs after each event."""
        for table in self.coordinator._sets.values():
            check_invariants(table)

    def check_slots(self) -> None:
        """Check that the coordinator's slots equal the ranks' slots when no message is under way."""
        for set_id, table in self.coordinator._sets.items():
            for rank in table.ranks:
                own = {s: q for s, (_, q) in self.ranks[rank].worker._caches[set_id]._slots.items()}
                slots = table.cache._slots.items()
                meant = {
                    number: [q for q, ranks in s.requests.items() if ranks >> rank & 1] for number, s in slots
                }
                assert {number: [request] for number, request in own.items()} == meant

    def check_same_order(self) -> None:
        """Check that any two ranks carried out the same responses, in the same batches and the same order."""
        for a in self.ranks:
            for b in self.ranks:
                both = {a.worker.rank, b.worker.rank}
                common = {instance for instance, ranks in self.members.items() if both <= {*ranks}}
                assert [x for x in a.batches if x[1] in common] == [x for x in b.batches if x[1] in common]

    def check_no_residue(self) -> None:
        """Check that nothing is in flight, and that only the cache remembers anything."""
        assert not self.coordinator.stalled()
        assert not self.coordinator._founding
        assert not self.coordinator._waiting
        for rank in self.ranks:
            assert not rank.in_flight
            assert not rank.worker._in_flight
        for each in self.coordinator._sets.values():
            left = (each._entries, each._failed.by_key, each._groups, each._group_ready, each._hits._since)
            assert not any((*left, each.joined, each._responses, each._hits.anyone())), f"set {each.set_id}"
            each.cache.forget(self.coordinator._seen.by_all(each.members))

    def check_nothing_retired(self) -> None:
        """Check that no slot's history is kept once every rank has sent a message after the last change."""
        self.everywhere([Request(RequestType.BARRIER, f"{UNNAMED}.0")])  # never cached
        self.everywhere([Request(RequestType.BARRIER, f"{UNNAMED}.0")])  # never cached
        for set_id in self.ranks[0].worker.sets:
            table = self.coordinator._sets[set_id]
            table.cache.forget(self.coordinator._seen.by_all(table.members))
            assert not table.cache._retired

    def check_all(self) -> None:
        """Check everything that must hold at the end of a program."""
        self.check_no_residue()
        self.check_slots()
        self.check_same_order()
        self.check_nothing_retired()


class TreeNetwork(Network):
    """A network of several hosts, whose leaders merge messages; ``hosts`` has each rank's leader.

    A leader may send at any time, as if its patience were over.
    """

    def __init__(
        self, size: int, capacity: int, sets: Sequence[Ranks], hosts: Sequence[int], fan_out: int
    ) -> None:
        super().__init__(size, capacity, sets)
        self.trees = [Tree.of(rank, hosts, fan_out) for rank in range(size)]
        self.leaders = {
            tree.rank: Leader(tree.branch, self.ranks[tree.rank].worker.sets)
            for tree in self.trees
            if tree.merges
        }

    def send(self, rank: int) -> RequestList:
        """Send a rank's new requests as one message; a leader merges its own."""
        message = super().send(rank)
        if rank in self.leaders:
            self.leaders[rank].take(
                rank, MergedList.of(rank, decode_requests(self.up[rank].pop(), 7)).parts, 0.0
            )
        return message

    def deliver_up(self, rank: int, now: float = 0.0) -> None:
        """Deliver a rank's oldest message to the rank above it."""
        parent = self.trees[rank].parent
        if parent < 0:
            super().deliver_up(rank, now)
            return
        payload = self.up[rank].popleft()
        merged = rank in self.trees[parent].leaders
        message = decode_merged(payload, 7) if merged else MergedList.of(rank, decode_requests(payload, 7))
        if parent in self.leaders:
            self.leaders[parent].take(rank, message.parts, now)
        else:
            self.arrive(message, now)

    def flush(self, leader: int) -> None:
        """Let a leader send what it has merged."""
        self.up[leader].append(encode(self.leaders[leader].flush()))

    def moves(self) -> list[Callable[[], object]]:
        """Return the steps that are possible next, the simplest first."""
        due = [rank for rank, leader in self.leaders.items() if leader.due is not None]
        return [*super().moves(), *(partial(self.flush, rank) for rank in due)]


def check_invariants(table: MessageTable) -> None:
    """Raise AssertionError if an invariant of :mod:`pyhvd.negotiation.message_table` does not hold."""
    hits = table._hits.anyone()
    delegated = table._delegation.delegated if table._delegation is not None else 0
    for slot in iter_bits(hits | delegated):
        assert table._is_untouched(table.cache[slot].first), f"1, 2, 3: {table.cache[slot].name}"
    assert not hits & delegated, "2"
    listed: dict[Group, set[str]] = {}
    for name, entry in table._entries.items():
        assert entry.ranks, f"4: {name} has no request"
        assert sorted(rank for rank, _ in entry.by_rank()) == iter_bits(entry.ranks), f"4: {name}"
        assert all(ranks and not ranks & ~entry.ranks for ranks, _ in entry.deferred), f"4: {name}"
        assert all(entry.requests.values()), f"4: {name}"
        for request in entry.requests:
            if group := group_of(request):
                listed.setdefault(group, set()).add(name)
        is_ready = any(name in names for names in table._group_ready.values())
        assert is_ready == (not table.live & ~entry.ranks), f"6, 7: {name}"
    assert table._groups == listed, "5"
    for group, ready in table._group_ready.items():
        assert 0 < len(ready) < group[1], f"6: {group}"
        assert ready <= listed[group], f"6: {group}"
    assert not table.live & ~table.members, "8"
    assert table.live or table.set_id != GLOBAL_SET, "8"
    assert not (table.joined and (hits or delegated)), "3"
    for calls in table._failed.by_key.values():
        for failed in calls.values():
            assert failed.is_open(), "9"
            assert all(failed.number in table._failed.by_key[key] for key in failed.found_by()), "9"

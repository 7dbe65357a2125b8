"""The simulated network with a fast path: a ready table, and one log for batches and response lists.

The ready table and the C half of the fast path are simulated, step by step like the messages. The
coordinator's delegation and the Python half (:mod:`pyhvd.engine.fast_path`) are real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np

from pyhvd.controller import Coordinator
from pyhvd.engine.fast_path import FastPathAdapter
from pyhvd.engine.plans import Plan
from pyhvd.negotiation.delegation import is_delegated
from pyhvd.negotiation.messages import (
    GLOBAL_SET,
    Request,
    RequestList,
    RequestType,
    Response,
    ResponseList,
    encode,
    iter_bits,
)
from pyhvd.observe.metrics import Meter
from pyhvd.queue import TensorEntry
from tests.unit.negotiation.simulation import Done, Key, Network, Ranks

SIZED = (RequestType.ALLGATHER, RequestType.ALLTOALL)
"""Verbs whose meaning depends on the other ranks' sizes."""

BATCHES = 1_000_000
"""Added to a batch's log position, which so differs from every response list's number."""


@dataclass
class Decision:
    """An entry of the log: a batch of slots, or a response list."""

    audience: Ranks
    set_id: int = -1
    slots: tuple[int, ...] = ()
    number: int = 0


class FakeReadyTable:
    """The ready table: delegated slots, marks, and the ready log."""

    slots = 64
    turns = 0

    def __init__(self) -> None:
        self.members: dict[int, Ranks] = {}
        self.delegated: dict[tuple[int, int], int] = {}
        self.frozen: set[tuple[int, int]] = set()
        self.posted: dict[tuple[int, int], set[int]] = {}
        self.used: dict[int, int] = {}
        self.log: list[Decision] = []

    partial = False

    def serves(self, set_id: int, ranks: Iterable[int]) -> bool:
        return set_id < 3

    def open_ready_set(self, set_id: int, ranks: Iterable[int]) -> None:
        assert not [slot for slot in self.posted if slot[0] == set_id], "posts of a set that has gone"
        self.members[set_id] = tuple(ranks)

    def delegate(self, set_id: int, slot: int, since: int) -> None:
        assert (set_id, slot) not in self.delegated
        assert not self.posted.get((set_id, slot))
        self.delegated[set_id, slot] = since

    def recall(self, set_id: int, bits: int) -> dict[int, int]:
        by_rank: dict[int, int] = {}
        for slot in range(self.slots):
            if bits >> slot & 1:
                self.delegated.pop((set_id, slot), None)
                self.frozen.discard((set_id, slot))
                for rank in self.posted.pop((set_id, slot), ()):
                    by_rank[rank] = by_rank.get(rank, 0) | 1 << slot
        return by_rank

    def delegate_turns(self, set_id: int, bits: int, version: int) -> None:
        raise AssertionError

    def recall_turns(self, set_id: int, bits: int) -> None:
        raise AssertionError

    def look(self, set_id: int) -> tuple[dict[int, int], int]:
        by_rank: dict[int, int] = {}
        for (each, slot), ranks in self.posted.items():
            for rank in ranks if each == set_id else ():
                by_rank[rank] = by_rank.get(rank, 0) | 1 << slot
        return by_rank, self.used.pop(set_id, 0)

    def freeze(self, set_id: int, slot: int) -> None:
        if (set_id, slot) in self.delegated:
            self.frozen.add((set_id, slot))

    def post(self, rank: int, set_id: int, slots: Sequence[tuple[int, int]]) -> bool:
        keys = [(set_id, slot) for slot, _ in slots]
        if any(self.delegated.get((set_id, slot)) != since for slot, since in slots) or self.frozen & {*keys}:
            return False
        for key in keys:
            self.posted.setdefault(key, set()).add(rank)
        ready = sorted(
            slot
            for (each, slot), ranks in self.posted.items()
            if each == set_id and {*self.members[set_id]} <= ranks and (each, slot) not in self.frozen
        )
        if ready:
            for slot in ready:
                del self.posted[set_id, slot]
                self.used[set_id] = self.used.get(set_id, 0) | 1 << slot
            self.log.append(Decision(self.members[set_id], set_id, tuple(ready)))
        return True


@dataclass(eq=False)
class FakeCall:
    """A cached call: (request, slot, version) of each tensor."""

    set_id: int
    name: str
    parts: list[tuple[Request, int, int]]
    state: str = "idle"
    left: int = 0
    retired: bool = False
    has_turn = False
    site = None

    def in_flight(self) -> bool:
        return self.left > 0

    def take(self) -> tuple[bool, list[tuple[Any, Any, Any, tuple[int, ...]]]] | None:
        if not self.left or self.state == "taken":
            return None
        was, self.state = self.state, "taken"
        nothing = np.empty(0, np.float32)
        return was == "posted", [(request, nothing, nothing, ()) for request, _, _ in self.parts]

    def settle(self, k: int, result: Any, error: BaseException | None) -> None:
        assert self.state == "taken"
        self.left -= 1


@dataclass
class FakeFastPath:
    """One rank's fast path, as :class:`pyhvd.engine.fast_path.FastPathAdapter` and the network use it."""

    rank: int
    ready_table: FakeReadyTable
    sets: set[int] = field(default_factory=set)
    units: dict[Key, FakeCall] = field(default_factory=dict)
    parts: dict[Key, tuple[Request, int, int]] = field(default_factory=dict)
    held: list[FakeCall] = field(default_factory=list)
    cursor: int = 0

    partial: ClassVar[bool] = False

    @property
    def slots(self) -> int:
        return self.ready_table.slots

    def attach(self, entries: Any, groups: Any, refusals: Any, on_wait: object) -> None:
        self.refusals: dict[Key, int] = refusals

    def has_set(self, set_id: int) -> bool:
        return set_id in self.sets

    def find(self, set_id: int, name: str) -> FakeCall | None:
        unit = self.units.get((set_id, name))
        return unit if unit is not None and unit.in_flight() else None

    def in_flight(self, set_id: int | None = None) -> list[FakeCall]:
        every = self.units.items()
        units = {id(u): u for (each, _), u in every if set_id in (None, each) and u.in_flight()}
        return list(units.values())

    def retire_set(self, set_id: int) -> None:
        for (each, _), unit in self.units.items():
            if each == set_id:
                unit.retired = True

    def close_set(self, set_id: int) -> None:
        self.sets.discard(set_id)
        for table in (self.units, self.parts):
            for key in [key for key in table if key[0] == set_id]:
                del table[key]

    def install(
        self,
        set_id: int,
        slot: int,
        request: Request,
        since: int,
        op: int,
        scale: float,
        direct: bool,
        plan: Plan,
    ) -> None:
        assert is_delegated(request), "the fast path has no such verb"
        key = (set_id, request.name)
        before, unit = self.parts.get(key), self.units.get(key)
        self.parts[key] = (request, slot, since)
        if before is not None and before[:2] == (request, slot) and unit is not None and not unit.retired:
            unit.parts = [self.parts[set_id, part.name] for part, _, _ in unit.parts]
            return
        names = [request.name]
        if n := request.group_size:
            names = [f"{request.group}_{i}of{n}" for i in range(1, n + 1)]
        if all((set_id, name) in self.parts for name in names):
            unit = FakeCall(set_id, request.group or request.name, [self.parts[set_id, n] for n in names])
            for name in names:
                self.units[set_id, name] = unit

    def retire(self, set_id: int, slot: int, request: Request, version: int) -> FakeCall | None:
        for key, (old, place, since) in list(self.parts.items()):
            other = old != request or (old.type in SIZED and since != version)
            if key[0] == set_id and place == slot and other:
                del self.parts[key]
                unit = self.units.get(key)
                if unit is None:
                    return None
                unit.retired = True
                for member in [k for k, u in self.units.items() if u is unit]:
                    del self.units[member]
                return unit if unit.in_flight() else None
        return None

    def refused(self) -> FakeCall | None:
        return next((unit for unit in self.held if unit.state == "refused"), None)

    def freeze(self, set_id: int, slot: int) -> None:
        self.ready_table.freeze(set_id, slot)

    def hold(self, set_id: int, requests: Sequence[Request]) -> bool:
        """Submit and hold the requests of a cached call; return False if no cached call has them."""
        unit = self.units.get((set_id, requests[0].name))
        if unit is None or [part[0] for part in unit.parts] != list(requests) or unit.in_flight():
            return False
        if any(key in self.refusals for key in ((set_id, unit.name), (set_id, requests[0].name))):
            return False
        unit.state, unit.left = "held", len(unit.parts)
        self.held.append(unit)
        return True

    def mark_ready(self) -> None:
        """Mark the slots of all held calls."""
        self.held = [unit for unit in self.held if unit.state in ("held", "refused")]
        for unit in self.held:
            if unit.state == "held":
                slots = [(slot, since) for _, slot, since in unit.parts]
                posted = not unit.retired and self.ready_table.post(self.rank, unit.set_id, slots)
                unit.state = "posted" if posted else "refused"

    def next(self) -> Decision | None:
        """Return the decision at the cursor that concerns this rank."""
        while self.cursor < len(self.ready_table.log):
            decision = self.ready_table.log[self.cursor]
            if self.rank in decision.audience:
                return decision
            self.cursor += 1
        return None


class FakeQueue:
    """The part of the queue that the adapter uses."""

    def __init__(self) -> None:
        self.entries: dict[Key, TensorEntry] = {}
        self.groups: dict[Key, int] = {}
        self.refusals: dict[Key, int] = {}

    def flush(self) -> None:
        raise AssertionError("nobody waits here")

    def adopt(self, entries: Sequence[TensorEntry]) -> None:
        for entry in entries:
            key = (entry.process_set, entry.request.name)
            assert key not in self.entries
            self.entries[key] = entry


class FastPathNetwork(Network):
    """See the module's docstring."""

    def __init__(self, size: int, capacity: int = 8, sets: Sequence[Ranks] = ()) -> None:
        super().__init__(size, capacity, sets)
        self.ready_table = FakeReadyTable()
        self.coordinator = Coordinator(size, capacity, sets, self.ready_table)
        self.fast_paths = [FakeFastPath(rank, self.ready_table) for rank in range(size)]
        self.queues = [FakeQueue() for _ in range(size)]
        self.halves = [
            FastPathAdapter(
                cast(Any, self.fast_paths[r]),
                None,
                cast(Any, None),
                self.ranks[r].worker,
                cast(Any, self.queues[r]),
                Meter(r, size, timed=False),
            )
            for r in range(size)
        ]
        for set_id, ranks in enumerate([tuple(range(size)), *sets]):
            for rank in ranks if set_id < 3 else ():
                self.fast_paths[rank].sets.add(set_id)

    def submit(self, rank: int, requests: Iterable[Request], set_id: int = GLOBAL_SET) -> list[Done] | None:
        members = list(requests)
        here = self.ranks[rank]
        if any((set_id, r.name) in here.in_flight for r in members):
            return super().submit(rank, members, set_id)
        if (
            set_id in self.fast_paths[rank].sets
            and not here.joining
            and self.fast_paths[rank].hold(set_id, members)
        ):
            ends: list[Done] = []
            here.in_flight.update(((set_id, r.name), ends) for r in members)
            return ends
        return super().submit(rank, members, set_id)

    def refuse(
        self, rank: int, request: Request, set_id: int = GLOBAL_SET, text: str = "ValueError: no"
    ) -> None:
        key = (set_id, request.group or request.name)
        self.queues[rank].refusals[key] = self.queues[rank].refusals.get(key, 0) + 1
        super().refuse(rank, request, set_id, text)

    def send(self, rank: int) -> RequestList:
        here = self.ranks[rank]
        here.fresh = self.halves[rank].before_sending(here.fresh)
        refusals = self.queues[rank].refusals
        for set_id, request in here.fresh:
            if request.error:
                refusals[set_id, request.name] -= 1
                if not refusals[set_id, request.name]:
                    del refusals[set_id, request.name]
        return super().send(rank)

    def respond(self) -> ResponseList | None:
        message = self.coordinator.respond()
        self.validate()
        if message is not None:
            self.answered.append(message)
            audience = tuple(iter_bits(self.coordinator.audience(message)))
            self.ready_table.log.append(Decision(audience, number=message.seq))
            for rank in audience:
                self.down[rank].append(encode(message))
        return message

    def deliver_down(self, rank: int) -> list[Response]:
        fast_path, half = self.fast_paths[rank], self.halves[rank]
        number = self.ready_table.log[fast_path.cursor].number
        message = next(m for m in self.answered if m.seq == number)
        half.prepare(message)
        todo = super().deliver_down(rank)
        for response in todo:
            if response.request.type == RequestType.ALLTOALL and half.wants_splits(response):
                size = len(self.ranks[rank].worker.sets[response.process_set])
                half.learn_splits(response, np.zeros((size, size), np.int64))
        half.install(todo)
        fast_path.cursor += 1
        return todo

    def _follow(self, rank: int, todo: list[Response]) -> None:
        self.halves[rank].follow(todo)

    def run_batch(self, rank: int) -> None:
        """Let a rank carry out the batch at its cursor."""
        fast_path, here = self.fast_paths[rank], self.ranks[rank]
        decision = self.ready_table.log[fast_path.cursor]
        set_id = decision.set_id
        cached = here.worker._caches[set_id]._slots
        for slot in decision.slots:
            response, own = cached[slot]
            unit = fast_path.units[set_id, own.name]
            assert unit.state == "posted", f"rank {rank} is to run {own.name!r}, which it has not posted"
            unit.left -= 1
            name = (own.name,)
            here.batches.append((BATCHES + fast_path.cursor, (set_id, here.born.get(set_id, 0)), name))
            self._complete(rank, BATCHES + fast_path.cursor, response)
        fast_path.cursor += 1

    def _complete(self, rank: int, seq: int, response: Response) -> None:
        super()._complete(rank, seq, response)
        request = response.request
        queue = self.queues[rank]
        entry = queue.entries.pop((response.process_set, request.name), None)
        if entry is not None:
            entry.done(None, None)
        if response.error is not None:
            return
        if request.type == RequestType.ADD_PROCESS_SET and rank in request.ranks and response.value < 3:
            self.fast_paths[rank].sets.add(response.value)
        if request.type == RequestType.REMOVE_PROCESS_SET:
            gone = request.ranks[0]
            self.halves[rank].close_set(gone)
            for key in [key for key in queue.entries if key[0] == gone]:
                del queue.entries[key]

    def moves(self) -> list[Callable[[], object]]:
        ranks = range(self.size)
        can: list[Callable[[], object]] = [partial(self.deliver_up, r) for r in ranks if self.up[r]]
        for r in ranks:
            decision = self.fast_paths[r].next()
            if decision is not None and decision.slots:
                can.append(partial(self.run_batch, r))
            elif decision is not None and self.down[r]:
                can.append(partial(self.deliver_down, r))
        can += [
            partial(self.send, r)
            for r in ranks
            if self.ranks[r].fresh or self.fast_paths[r].refused() or self.halves[r]._unsent
        ]
        can += [
            partial(fast_path.mark_ready)
            for fast_path in map(self.fast_paths.__getitem__, ranks)
            if any(u.state == "held" for u in fast_path.held)
        ]
        return can

    def check_slots(self) -> None:
        """Check that every rank has installed each delegated slot with the same version."""
        super().check_slots()
        for (set_id, slot), since in self.ready_table.delegated.items():
            for rank in self.ready_table.members[set_id]:
                parts = self.fast_paths[rank].parts.items()
                known = [part[2] for key, part in parts if key[0] == set_id and part[1] == slot]
                assert known == [since], f"rank {rank}, set {set_id}, slot {slot}"

    def check_no_residue(self) -> None:
        super().check_no_residue()
        assert not any(self.ready_table.posted.values())
        for fast_path, queue in zip(self.fast_paths, self.queues, strict=True):
            assert not any(unit.in_flight() for unit in fast_path.units.values())
            assert not queue.entries
            assert not queue.refusals

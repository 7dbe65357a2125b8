"""The coordinator's state of one process set: which rank has submitted which tensor, and what is ready.

Owns: the message table, pending cache hits, groups, joined ranks, who was last (:class:`StragglerStats`) and
which line submitted what (:class:`CallSites`). Pure: no I/O, no clock, no threads. Ranks are global.

Ranks that submit the same are one bit vector, named ``ranks``, and one step for all of them. Only failures,
refusals and groups of several sizes are handled rank by rank.

A tensor is in one of these states; the label of an arrow is the function that makes the transition:

      _hold_hits                _spill_slot                   _settle
    +------------> PENDING HIT ------------> +-> IN TABLE -------------> READY IN ITS GROUP
    |                |  ^                    |      | | ^                     |        |
    |      take_hits |  | recall        _add |      | | | _withdraw           |        |
    |                v  |                    |      | +-+ (one rank's)        |        |
  IDLE <-------------+  +-- DELEGATED        |      |                         |        |
    | |  ^                     ^             |      | _answer                 |_answer |
    | |  +---------------------|-------------|------+-------------------------+        |
    | +---- delegate ----------+             |      | _fail_with_group                 |
    +----------------------------------------+      v                                  |
                                                  FAILED <-----------------------------+

- PENDING HIT: some ranks have sent the tensor's cache bit. The AND over the ranks decides.
- IN TABLE: some ranks have sent full requests.
- READY IN ITS GROUP: all ranks have sent full requests; other tensors of the group are not ready.
- DELEGATED: the ranks of a node agree on the tensor in shared memory, without the coordinator.
- FAILED: some rank has not submitted the tensor yet; it gets the error when it does (:class:`FailedCalls`).

:meth:`MessageTable.withdraw` brings a tensor from every state but FAILED to IDLE: the ranks that have
submitted it get an error, and the others hear nothing of it.

Invariants between two events (the tests' ``check_invariants`` checks them):

1. A tensor with a pending hit is not in the table, and no call of its group's name is.
2. No slot is both delegated and a pending hit, and no delegated tensor is in the table.
3. While a member has joined, there are no pending hits and nothing is delegated.
4. Each entry has a request, and one request per rank. A rank with a deferred request has one of them.
5. ``_groups`` lists, by group, the tensors of the table with a request of that group; no list is empty.
6. ``_group_ready`` is the part of ``_groups`` that every live rank has submitted; it is never a whole group.
7. Each other tensor in the table lacks the request of a live rank.
8. ``live`` holds members only; in the set of all ranks it is never empty.
9. Each failed call waits for some rank, and is found by each of its tensors and by its group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from pyhvd.common.text import describe_values
from pyhvd.negotiation.delegation import Delegation, ReadyTable
from pyhvd.negotiation.failed_calls import FailedCall, FailedCalls
from pyhvd.negotiation.messages import (
    UNNAMED,
    ErrorInfo,
    ErrorKind,
    Request,
    RequestType,
    Response,
    bits_of,
    iter_bits,
    lowest_bit,
    verb,
)
from pyhvd.negotiation.response_cache import Group, PendingHits, SlotHolders, SlotTable, group_of
from pyhvd.negotiation.validation import check, sizes_differ

_NEVER_CACHED = (RequestType.ADD_PROCESS_SET, RequestType.REMOVE_PROCESS_SET)

MAX_SITES = 4096
"""Tensors of a process set whose lines are kept; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class Senders:
    """The ranks that submit the same, as a bit vector, and the one whose message came last."""

    ranks: int
    last: int

    @classmethod
    def of(cls, rank: int) -> Senders:
        """Return one rank as the sender."""
        return cls(1 << rank, rank)

    @classmethod
    def of_ranks(cls, ranks: int) -> Senders:
        """Return ranks of which none is known to be last."""
        return cls(ranks, lowest_bit(ranks))

    def only(self, ranks: int) -> Senders:
        """Return those of the senders that are in ``ranks``."""
        ranks &= self.ranks
        return Senders(ranks, self.last if ranks >> self.last & 1 else lowest_bit(ranks))


@dataclass(slots=True)
class Entry:
    """One tensor of the message table.

    Attributes
    ----------
    since : float
        When (s) a rank first submitted the tensor.
    ranks : int
        The ranks that have submitted the tensor.
    requests : dict of Request to int
        The ranks of each distinct request.
    deferred : list of (int, Request)
        Further requests of ranks in ``ranks``, oldest first.
    """

    since: float
    ranks: int = 0
    requests: dict[Request, int] = field(default_factory=dict)
    deferred: list[tuple[int, Request]] = field(default_factory=list)

    @property
    def first(self) -> Request:
        """The request of the lowest rank."""
        return min(self.requests, key=lambda request: lowest_bit(self.requests[request]))

    def request_of(self, rank: int) -> Request:
        """Return the request of a rank that has one."""
        return next(request for request, ranks in self.requests.items() if ranks >> rank & 1)

    def by_rank(self) -> Iterator[tuple[int, Request]]:
        """Yield each rank's request."""
        for request, ranks in self.requests.items():
            for rank in iter_bits(ranks):
                yield rank, request


class StragglerStats:
    """Count, by rank, how often and for how long the other ranks waited for it.

    Covers what is agreed by message; ``charge()`` in ``ready_table.c`` covers the shared-memory path.
    Overlapping waits of one process set count once.

    Parameters
    ----------
    size : int
        Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._tensors = [0] * size
        self._seconds = [0.0] * size
        self._counted_until: dict[int, float] = {}

    def count(self, process_set: int, rank: int, since: float, now: float, tensors: int = 1) -> None:
        """Count a rank as the last one to submit tensors that others have waited for since then (s)."""
        since = max(since, self._counted_until.get(process_set, since))
        self._tensors[rank] += tensors
        if now > since:
            self._seconds[rank] += now - since
            self._counted_until[process_set] = now

    def totals(self) -> list[tuple[int, float]]:
        """Return, for each rank, the tensors that it submitted last, and the seconds that others waited."""
        return list(zip(self._tensors, self._seconds, strict=True))


class CallSites:
    """Remember at which line each rank submitted a tensor, for the text of a mismatch.

    A line travels with a full request only. A cached tensor keeps the line of its last full request.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[str, dict[str, int]] = OrderedDict()  # the ranks of each line, by tensor

    def note(self, name: str, ranks: int, site: str) -> None:
        """Remember the line of some ranks; an empty ``site`` is unknown."""
        if not site:
            return
        if name not in self._lines and len(self._lines) >= MAX_SITES:
            self._lines.popitem(last=False)
        before = self._lines.get(name, {})
        lines = {line: others for line, known in before.items() if (others := known & ~ranks)}
        lines[site] = lines.get(site, 0) | ranks
        self._lines[name] = lines

    def forget(self, name: str) -> None:
        """Drop the lines of an answered tensor that is not cached."""
        self._lines.pop(name, None)

    def add_to(self, error: ErrorInfo, *names: str) -> ErrorInfo:
        """Return a mismatch with the lines that submitted these tensors."""
        known: dict[int, str] = {}
        for name in names:
            for line, ranks in self._lines.get(name, {}).items():
                known.update(dict.fromkeys(iter_bits(ranks), line))
        sites = {rank: known[rank] for rank in sorted(error.per_rank) if rank in known}
        if not sites:
            return error
        return replace(error, message=f"{error.message} Submitted at: {describe_values(sites)}.", sites=sites)


class MessageTable:
    """Decide what one process set does next. See the module's docstring for states and invariants.

    Parameters
    ----------
    set_id : int
        Id of the process set.
    ranks : tuple of int
        Its members, as sorted global ranks.
    capacity : int
        Slots of its response cache.
    version : int
        Number of the response list that announces the set; 0 for sets that exist from the start.
    ready_table : ReadyTable, optional
        Where the ranks of a node agree on cached tensors without messages.
    stragglers : StragglerStats, optional
        Counts who submits a tensor last.

    Attributes
    ----------
    cache : SlotTable
        What each cache slot means.
    members, live : int
        Its members, and those that have not joined, as bit vectors.
    last_submission : float
        When (s) a rank last submitted anything, a join included.
    """

    def __init__(
        self,
        set_id: int,
        ranks: tuple[int, ...],
        capacity: int,
        version: int = 0,
        ready_table: ReadyTable | None = None,
        stragglers: StragglerStats | None = None,
    ) -> None:
        self.set_id = set_id
        self.ranks = ranks
        self.members = self.live = bits_of(ranks)
        self.version = version
        self.cache = SlotTable(capacity)
        self.sites = CallSites()
        self.last_submission = 0.0
        self._hits = PendingHits()
        self._entries: dict[str, Entry] = {}
        self._groups: dict[Group, set[str]] = {}
        self._group_ready: dict[Group, set[str]] = {}
        self._failed = FailedCalls()
        self._delegation: Delegation | None = None
        self._first_turn = 0 if ready_table is None else ready_table.slots
        if ready_table is not None and ready_table.serves(set_id, ranks):
            self._delegation = Delegation(set_id, ranks, self.cache, ready_table, version)
        self._stragglers = stragglers if len(ranks) > 1 else None
        self._responses: list[Response] = []
        self._answered_slots = 0
        self._list_number = 0

    @property
    def is_idle(self) -> bool:
        """Whether no rank has submitted anything that is not answered, and no failure waits for a rank."""
        return not (self._entries or self._failed.by_key or self._responses)

    @property
    def has_pending(self) -> bool:
        """Whether a tensor waits for a rank by message; the ready table may have marks besides."""
        return bool(self._entries or self._hits.by_ranks)

    @property
    def is_delegating(self) -> bool:
        """Whether the ranks may agree on cached tensors in the ready table."""
        return self._delegation is not None

    @property
    def joined(self) -> int:
        """The members that have joined, as a bit vector."""
        return self.members & ~self.live

    # -- events: what ranks send ---------------------------------------------------------------------

    def submit(self, senders: Senders, request: Request, list_number: int, now: float) -> None:
        """Take one full request of some ranks while the response list ``list_number`` is built."""
        self._list_number, self.last_submission = list_number, now
        self._take(senders, request, now)
        if self._failed.by_key:
            self._failed.excuse(iter_bits(self.joined))

    def submit_hits(self, senders: Senders, bits: int, seen: int, list_number: int, now: float) -> None:
        """Take the cached tensors that ranks submit again; they have processed response list ``seen``."""
        self._list_number, self.last_submission = list_number, now
        rivals = self.cache.rivals(bits)
        self.recall(bits | rivals)
        # A pending call of the same group name and another size is a mismatch: only full requests find it.
        clash = bool(rivals & self._hits.anyone())
        only_hits = not (clash or self._entries or self._failed.by_key or self.joined)
        if only_hits and seen >= self.cache.last_change:
            self._hold_hits(senders, bits, now)
            return
        for slot in iter_bits(bits):
            meant = self.cache.meaning(slot, seen)
            assert meant is not None, f"{senders} sent slot {slot}, which was empty in list {seen}"
            current = self.cache.slot_of(meant.name) == slot and self.cache[slot] is meant
            if current and not clash and self._is_untouched(meant.first):
                self._hold_hits(senders, 1 << slot, now)
                continue
            for request, ranks in meant.requests.items():
                if ranks & senders.ranks:
                    self.submit(senders.only(ranks), request, list_number, now)

    def join(self, ranks: int, list_number: int, now: float) -> None:
        """Count members as ready for every tensor, because they have joined."""
        self._list_number, self.last_submission = list_number, now
        self.recall()
        # Before the ranks count as joined: some of the hits may be their own.
        for slot in iter_bits(self._hits.anyone()):
            self._spill_slot(slot, now)
        self.live &= ~ranks
        for name, entry in list(self._entries.items()):
            if self._entries.get(name) is entry:
                self._settle(name, entry)
        if self._failed.by_key:
            self._failed.excuse(iter_bits(self.joined))

    def wait_no_longer(self, ranks: int) -> None:
        """Let only those ranks be members that have submitted something, and these, which are about to."""
        for entry in self._entries.values():
            ranks |= entry.ranks
        self.members = self.live = ranks

    def end_join(self) -> None:
        """Wait for every member again, because all ranks of the job have joined."""
        self.live = self.members

    # -- events: answers to the ranks -------------------------------------------------------------

    def take_hits(self) -> int:
        """Remove and return the slots that every rank has submitted; a group only as a whole."""
        ready = self._hits.held_by(self.members)
        if not ready:
            return 0
        for slot in iter_bits(ready):
            group = self.cache[slot].group
            if group is not None:
                members = self.cache.group_bits(group) & ready
                # The cache may have lost a member, or hold one of an earlier call of this name.
                if members.bit_count() != group[1]:
                    ready &= ~members
        self._hits.drop(ready)
        self._answered_slots |= ready
        return ready

    def take_responses(self) -> list[Response]:
        """Remove and return the responses that are due, in the order that binds every rank."""
        responses, self._responses = self._responses, []
        return responses

    def delegate(self) -> None:
        """Let the ranks agree by themselves on the slots that the finished response list has answered.

        Of the calls of one group name only those of one size are delegated, so that a mismatch is found here.
        """
        answered, self._answered_slots = self._answered_slots, 0
        if self._delegation is None:
            return
        turns = self._delegation.turns
        if turns.delegated != turns.every and not (self.joined or self._failed.by_key):
            turns.delegate(self._open_names())
        if not answered:
            return
        self.recall(self.cache.rivals(answered & ~self._delegation.delegated))
        for slot in iter_bits(answered & ~self._delegation.delegated & ~self._hits.anyone()):
            if self._is_untouched(self.cache[slot].first):
                self._delegation.delegate(slot)

    def abort(self, error: ErrorInfo) -> list[Response]:
        """Fail everything that is pending, for a set that is being removed; return the responses."""
        self.recall()
        for slot in iter_bits(self._hits.anyone()):
            self._spill_slot(slot, 0.0)
        for entry in self._entries.values():
            self._fail(entry, error)
        self._entries.clear()
        return self.take_responses()

    def withdraw(self, prefix: str, error: ErrorInfo) -> None:
        """Give the tensors whose names begin so back to the ranks that have submitted them, with an error.

        The other ranks may submit them later, and then these must again.
        """
        self.recall()
        for slot in iter_bits(self._hits.anyone()):
            if self.cache[slot].name.startswith(prefix):
                self._spill_slot(slot, self.last_submission)
        names = [name for name in self._entries if name.startswith(prefix)]
        for name in names:
            entry = self._entries[name]
            self._fail(entry, error)
            for request in entry.requests:
                if group := group_of(request):
                    _discard(self._group_ready, group, name)
        self._drop(names)

    # -- reports -------------------------------------------------------------------------------------

    def pending(self, now: float) -> list[tuple[str, float, int, int]]:
        """Return (name, first submission, ranks that have submitted, ranks that have not), oldest first.

        The ranks are bit vectors. A joined rank is in neither, unless it submitted before. A delegated tensor
        counts from when its mark was first seen here. With several hosts, one that a second look still finds
        marked is recalled.
        """
        waiting = [
            (name, entry.since, entry.ranks, self.live & ~entry.ranks)
            for name, entry in self._entries.items()
            if not all(request.unattended for request in entry.requests)
        ]
        for slot in iter_bits(self._hits.anyone()):
            since, holders = self._hits.since(slot, 0.0), self._hits.holders(slot)
            waiting.append((self.cache[slot].name, since, holders, self.members & ~holders))
        if self._delegation is not None:
            marks = SlotHolders()
            for rank, slots in self._delegation.look(now).items():
                marks.hold(1 << rank, slots)
            for slot in iter_bits(marks.anyone()):
                since, holders = self._delegation.since(slot, now), marks.holders(slot)
                waiting.append((self.cache[slot].name, since, holders, self.members & ~holders))
            # The ranks then submit by message, and the next look finds all of them.
            self.recall(self._delegation.overdue(now))
            self._delegation.turns.recall(self._delegation.turns.overdue(now))
        return sorted((each for each in waiting if each[3]), key=lambda each: each[1])

    def _open_names(self) -> Iterator[str]:
        """Yield the names of all tensors and groups in the table."""
        yield from self._entries
        for name, _ in self._groups:
            yield name

    def _is_untouched(self, request: Request) -> bool:
        """Return whether no join, no failure and no full request concerns a tensor."""
        if self.joined or request.name in self._entries:
            return False
        if self._failed.by_key and self._failed.touches(request):
            return False
        return not (request.group and any(name == request.group for name, _ in self._groups))

    # -- DELEGATED -> PENDING HIT --------------------------------------------------------------------

    def recall(self, slots: int = -1) -> None:
        """Take slots back from the ready table; -1: all slots.

        A message concerns their tensors, or their ranks shall submit them by message. The turn slots come
        after the cache slots.
        """
        if self._delegation is None:
            return
        if turns := slots >> self._first_turn & self._delegation.turns.delegated:
            self._delegation.turns.recall(turns)
        if not slots & self._delegation.delegated:
            return
        for rank, marked in self._delegation.recall(slots).items():
            for slot in iter_bits(marked):
                since = self._delegation.since(slot, self.last_submission)
                self._hold_hits(Senders.of(rank), 1 << slot, since)

    def _recall_for(self, request: Request) -> None:
        slot = self.cache.slot_of(request.name)
        slots = 1 << slot if slot >= 0 else 0
        if request.group:
            slots |= self.cache.group_bits((request.group, 0))
        self.recall(slots)
        if self._delegation is not None and request.name.startswith(UNNAMED):
            self._delegation.turns.recall_for(request.group or request.name)

    def _make_room(self, name: str) -> None:
        """Recall the slot that a new tensor would get, and prefer one that is neither marked nor recent."""
        if self._delegation is None or self.cache.victim(name, 0) < 0:
            return
        if self.cache.must_look(name):
            self._delegation.look(self.last_submission)
        while (slot := self.cache.victim(name, self._hits.anyone())) >= 0:
            if not self._delegation.delegated >> slot & 1:
                return
            self.recall(1 << slot)

    # -- IDLE -> PENDING HIT -> IN TABLE -------------------------------------------------------------

    def _hold_hits(self, senders: Senders, bits: int, now: float) -> None:
        self.cache.touch(iter_bits(bits))
        self._hits.hold_since(senders.ranks, bits, now)
        if self._stragglers is not None and (complete := self._hits.held_by(self.members) & bits):
            since = min(self._hits.since(slot, now) for slot in iter_bits(complete))
            self._stragglers.count(self.set_id, senders.last, since, now, complete.bit_count())

    def _spill(self, request: Request, now: float) -> None:
        """Turn the hits of a tensor, and of its group, into requests: one rank submits it in full."""
        pending = self._hits.anyone()
        if not pending:
            return
        slot = self.cache.slot_of(request.name)
        slots = self.cache.group_bits(group_of(request))
        if slot >= 0:
            slots |= 1 << slot | self.cache.group_bits(self.cache[slot].group)
        for each in iter_bits(slots & pending):
            self._spill_slot(each, now)

    def _spill_slot(self, slot: int, now: float) -> None:
        meant = self.cache[slot]
        since, holders = self._hits.since(slot, now), self._hits.holders(slot)
        self._hits.drop(1 << slot)
        for request, ranks in meant.requests.items():
            if ranks & holders:
                self._add(Senders.of_ranks(ranks & holders), request, since)

    # -- IDLE -> IN TABLE ----------------------------------------------------------------------------

    def _take(self, senders: Senders, request: Request, now: float) -> None:
        self._recall_for(request)
        self._spill(request, now)
        if not (request.error or self._failed.by_key or self._has_rivals(request)):
            self._add(senders, request, now)
            return
        for rank in iter_bits(senders.ranks):
            self._take_alone(rank, request, now)

    def _take_alone(self, rank: int, request: Request, now: float) -> None:
        """Take one rank's request, which may fail, or belong to a failed call."""
        if self._answer_failed(rank, request):
            return
        if request.group and not request.error and self._check_group_size(rank, request, now):
            self._answer_failed(rank, request)
            return
        if request.error:
            self._take_refusal(rank, request)
        else:
            self._add(Senders.of(rank), request, now)

    def _add(self, senders: Senders, request: Request, now: float) -> None:
        entry = self._entries.get(request.name)
        if entry is None:
            entry = self._entries[request.name] = Entry(now)
        if again := senders.ranks & entry.ranks:
            entry.deferred.append((again, request))
        if not (new := senders.ranks & ~again):
            return
        entry.ranks |= new
        entry.requests[request] = entry.requests.get(request, 0) | new
        if group := group_of(request):
            self._groups.setdefault(group, set()).add(request.name)
        if not self.live & ~entry.ranks:
            if self._stragglers is not None:
                self._stragglers.count(self.set_id, senders.last, entry.since, now)
            self._settle(request.name, entry)

    # -- IN TABLE -> READY IN ITS GROUP -> IDLE ------------------------------------------------------

    def _settle(self, name: str, entry: Entry) -> None:
        """Answer or fail a tensor if every rank that has not joined has submitted it."""
        if self.live & ~entry.ranks:
            return
        missing = self.members & ~entry.ranks
        if missing or len(entry.requests) > 1:
            error = check(entry.requests, missing)
            if error is not None:
                failed = FailedCall(self.sites.add_to(error, name), _founders_without(entry), origin=name)
                self._fail_with_group(name, failed)
                return
        group = group_of(entry.first)
        if group is None:
            self._answer(name)
            self._drop((name,))
            return
        ready = self._group_ready.setdefault(group, set())
        ready.add(name)
        if len(ready) == group[1]:
            del self._group_ready[group]
            # The table keeps the order in which the group was first submitted.
            members = [n for n in self._entries if n in ready]
            for member in members:
                self._answer(member)
            self._drop(members)

    def _answer(self, name: str) -> None:
        entry = self._entries[name]
        first = entry.first
        missing = set(iter_bits(self.members & ~entry.ranks))
        joined = tuple(i for i, rank in enumerate(self.ranks) if rank in missing) if missing else ()
        dims: tuple[int, ...] = ()
        if first.type in (RequestType.ALLGATHER, RequestType.ALLTOALL):
            rows = {rank: request.shape[0] for rank, request in entry.by_rank()}
            dims = tuple(rows.get(rank, 0) for rank in self.ranks)
        slot, version = -1, 0
        # An unnamed tensor's name never comes again.
        again = first.type not in _NEVER_CACHED and not name.startswith(f"{UNNAMED}.")
        if again and not joined and self.cache.capacity:
            self._make_room(name)
            slot = self.cache.assign(entry.requests, self._hits.anyone(), self._list_number)
        if slot >= 0:
            self._answered_slots |= 1 << slot
            version = self.cache[slot].version
        else:
            self.sites.forget(name)
        direct = slot >= 0 and all(request.window for request in entry.requests)
        self._responses.append(
            Response(first, self.set_id, slot, dims, joined, direct=direct, version=version)
        )

    def _drop(self, names: Iterable[str]) -> None:
        """Take settled tensors out of the table, then take the requests that were deferred behind them."""
        gone = [self._entries.pop(name) for name in names]
        for entry in gone:
            for request in entry.requests:
                _discard(self._groups, group_of(request), request.name)
        for entry in gone:
            for ranks, request in entry.deferred:
                self._take(Senders.of_ranks(ranks), request, entry.since)

    # -- IN TABLE, READY IN ITS GROUP -> FAILED ------------------------------------------------------

    def _fail(self, entry: Entry, error: ErrorInfo) -> None:
        ranks = tuple(iter_bits(entry.ranks))
        self._responses.append(Response(entry.first, self.set_id, error=error, only=ranks))

    def _fail_with_group(self, name: str, failed: FailedCall) -> None:
        """Fail a tensor, and every tensor of every grouped call that holds it: a group is one unit.

        The tensors that ranks have not submitted yet fail when they come.
        """
        groups = {group for r in self._entries[name].requests if (group := group_of(r))}
        names = {name}.union(*(self._groups.get(group, ()) for group in groups))
        members = [n for n in self._entries if n in names]
        for member in members:
            entry = self._entries[member]
            self._fail(entry, failed.error_for(member))
            for rank, request in entry.by_rank():
                failed.count(rank, request)
        for group in groups:
            self._group_ready.pop(group, None)
        self._failed.add(failed)
        self._drop(members)

    def _has_rivals(self, request: Request) -> bool:
        """Return whether a grouped call of the same name and another size is pending."""
        group = group_of(request)
        if group is None:
            return False
        rivals = self.cache.group_bits((group[0], 0)) & ~self.cache.group_bits(group)
        return bool(rivals & self._hits.anyone()) or any(
            name == group[0] and size != group[1] for name, size in self._groups
        )

    def _check_group_size(self, rank: int, request: Request, now: float) -> bool:
        """Fail calls of one group name if ranks submit them with different sizes; return whether any failed.

        Such calls have no tensor in common, so each rank would wait for the others for ever.
        """
        if held := self._hits.anyone():
            others = self.cache.group_bits((request.group, 0)) & ~self.cache.group_bits(group_of(request))
            for slot in iter_bits(others & held):
                self._spill_slot(slot, now)
        for group in [g for g in self._groups if g[0] == request.group and g[1] != request.group_size]:
            names = self._groups[group]
            requests = [item for name in names for item in self._entries[name].by_rank()]
            sizes = {r: group[1] for r, each in requests if group_of(each) == group}
            if rank in sizes:
                continue
            error = sizes_differ(request, {**sizes, rank: request.group_size})
            error = self.sites.add_to(error, *names, request.name)
            absent = [r for r in iter_bits(self.live) if r not in sizes]
            failed = FailedCall(error, set(absent), group=request.group)
            self._fail_with_group(min(names), failed)
            return True
        return False

    def _take_refusal(self, rank: int, request: Request) -> None:
        """Fail, on every rank, a tensor or a group that one rank has refused."""
        names = self._refused_names(request)
        entries = [entry for name, entry in self._entries.items() if name in names]
        mine = [entry for entry in entries if entry.ranks >> rank & 1]
        if mine:
            mine[-1].deferred.append((1 << rank, request))
            return
        error = ErrorInfo(
            ErrorKind.RANK_FAILED,
            f"{verb(request.type)} {request.name!r} cannot run: rank {rank} refused it: {request.error}",
            rank,
            traceback=request.traceback,
        )
        failed = FailedCall.by(rank, request, error, [r for r in self.ranks if r != rank])
        if entries:
            self._fail_with_group(entries[0].first.name, failed)
        else:
            self._failed.add(failed)

    def _refused_names(self, request: Request) -> set[str]:
        """Return the tensors in the table that a rank's refusal concerns."""
        if not request.group:
            return {request.name}
        for (group, size), names in self._groups.items():
            if group == request.group and request.group_size in (0, size):
                return set(names)
        return set()

    # -- FAILED -> IDLE ------------------------------------------------------------------------------

    def _answer_failed(self, rank: int, request: Request) -> bool:
        """Return whether a request belongs to a failed call; if so, answer it and the rest of its group."""
        if not self._failed.by_key:
            return False
        failed, is_new = self._failed.answer(rank, request)
        if failed is not None and not request.error:
            self._respond_to(rank, request, failed)
            if is_new and (group := group_of(request)):
                self._withdraw_group(rank, group, failed)
        return failed is not None

    def _withdraw_group(self, rank: int, group: Group, failed: FailedCall) -> None:
        """Fail a rank's requests of a failed group, and other ranks' ungrouped requests for its tensors."""
        own = [entry.request_of(rank) for entry in self._entries.values() if entry.ranks >> rank & 1]
        gone = [(rank, request) for request in own if group_of(request) == group]
        for _, request in gone:
            failed.answer(rank, request)
        # The names of the group's tensors are complete only now.
        named = [entry for name, entry in self._entries.items() if name in failed.names]
        pending = [each for entry in named for each in entry.by_rank()]
        gone += [(r, q) for r, q in pending if not q.group and failed.expects(r, q.name)]
        for other, request in gone:
            if not request.group:
                failed.answer(other, request)
        self._failed.update(failed)
        behind = [(r, *each) for r, request in gone for each in self._withdraw(r, request, failed)]
        for other, request, since in behind:
            self._take(Senders.of(other), request, since)

    def _withdraw(self, rank: int, request: Request, failed: FailedCall) -> list[tuple[Request, float]]:
        """Fail one rank's request in the table; return its deferred requests, each with the entry's time."""
        self._respond_to(rank, request, failed)
        entry, bit = self._entries[request.name], 1 << rank
        entry.ranks &= ~bit
        entry.requests[request] &= ~bit
        if not entry.requests[request]:
            del entry.requests[request]
        if group := group_of(request):
            _discard(self._group_ready, group, request.name)
            if all(group_of(each) != group for each in entry.requests):
                _discard(self._groups, group, request.name)
        if not entry.requests:
            del self._entries[request.name]
        behind = [(each, entry.since) for ranks, each in entry.deferred if ranks & bit]
        entry.deferred = [(left, each) for ranks, each in entry.deferred if (left := ranks & ~bit)]
        return behind

    def _respond_to(self, rank: int, request: Request, failed: FailedCall) -> None:
        error = failed.error_for(request.name)
        only: tuple[int, ...] = (rank,)
        last = self._responses[-1] if self._responses else None
        if last is not None and last.request is request and last.error is error and last.only[-1] < rank:
            only = (*self._responses.pop().only, rank)  # one response for the ranks of one message
        self._responses.append(Response(request, self.set_id, error=error, only=only))


def _discard(groups: dict[Group, set[str]], group: Group | None, name: str) -> None:
    if group in groups:
        groups[group].discard(name)
        if not groups[group]:
            del groups[group]


def _founders_without(entry: Entry) -> set[int]:
    """Return the members of a set to add that have not submitted it: they get the error when they do."""
    if entry.first.type != RequestType.ADD_PROCESS_SET:
        return set()
    named = {rank for request in entry.requests for rank in request.ranks}
    return named - set(iter_bits(entry.ranks))

"""The coordinator's state of one process set: who has submitted what, and what is ready everywhere.

Owns: the message table, the bits of cached tensors, groups, joined ranks, and refusals (a rank could not
submit what the others wait for). Pure: no I/O, no clock of its own, no threads. Works in global ranks.

Two ways to readiness. A tensor that every rank submits exactly as the cache remembers it is one bit per
rank; the AND over the ranks decides. Anything else is a full request in the table. The two never hold the
same tensor: as soon as one rank sends a full request for a cached tensor (or for a member of its group),
the bits of the other ranks are turned back into the requests that they stand for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pyhvd.negotiation.call_sites import CallSites
from pyhvd.negotiation.delegation import Board, Delegation
from pyhvd.negotiation.failed_calls import FailedCall, FailedCalls
from pyhvd.negotiation.messages import (
    JOIN_NAME,
    UNNAMED,
    ErrorInfo,
    ErrorKind,
    Request,
    RequestType,
    Response,
    iter_bits,
)
from pyhvd.negotiation.response_cache import Group, PendingHits, Slot, SlotTable, group_of
from pyhvd.negotiation.stragglers import StragglerStats
from pyhvd.negotiation.validation import check, sizes_differ, verb

_CACHED = frozenset(
    (
        RequestType.ALLREDUCE,
        RequestType.ADASUM,
        RequestType.ALLGATHER,
        RequestType.ALLTOALL,
        RequestType.BROADCAST,
        RequestType.REDUCESCATTER,
    )
)


def _discard(groups: dict[Group, set[str]], group: Group | None, name: str) -> None:
    if group in groups:
        groups[group].discard(name)
        if not groups[group]:
            del groups[group]


@dataclass(slots=True)
class Entry:
    """One tensor of the message table."""

    since: float
    requests: dict[int, Request] = field(default_factory=dict)
    deferred: list[tuple[int, Request]] = field(default_factory=list)


class MessageTable:
    """What the coordinator knows of one process set.

    Parameters
    ----------
    set_id : int
        Id of the process set.
    ranks : tuple of int
        Its members, as sorted global ranks.
    capacity : int
        Slots of its response cache.
    since : int
        Number of the response list that announces the set; 0 for sets that exist from the start.
    board : Board, optional
        Where ranks agree on cached tensors by themselves.
    lateness : StragglerStats, optional
        Told who submits a tensor last.
    """

    def __init__(
        self,
        set_id: int,
        ranks: tuple[int, ...],
        capacity: int,
        since: int = 0,
        board: Board | None = None,
        lateness: StragglerStats | None = None,
    ) -> None:
        self.set_id = set_id
        self.ranks = ranks
        self.since = since
        self.cache = SlotTable(capacity)
        self._loans = Delegation(set_id, ranks, self.cache, board)
        self._lateness = lateness if len(ranks) > 1 else None
        self.sites = CallSites()
        self.joined: list[int] = []
        self.responses: list[Response] = []
        self._members = frozenset(ranks)
        self._table: dict[str, Entry] = {}
        self._group_ready: dict[Group, set[str]] = {}
        self._groups: dict[Group, set[str]] = {}
        self._refusals = FailedCalls()
        self._bits = PendingHits(ranks)
        self._seq = 0
        self._now = 0.0

    # -- what a rank says ----------------------------------------------------------------------------

    def submit(self, rank: int, request: Request, seq: int, now: float) -> None:
        """Take one full request of a rank; ``seq`` is the number of the list being built."""
        self._seq, self._now = seq, now
        self._take(rank, request, now)
        self._refusals.excuse(self.joined)

    def _take(self, rank: int, request: Request, now: float) -> None:
        self._recall_for(request)
        if request.type == RequestType.JOIN:
            # A join that was refused is none, and can be called again.
            if not request.error:
                self._join(rank, now)
            return
        self._spill(request, now)
        if self._told_of_refusal(rank, request):
            return
        if request.group and not request.error and self._check_group_size(rank, request, now):
            self._told_of_refusal(rank, request)
            return
        if request.error:
            self._refuse(rank, request)
        else:
            self._add(rank, request, now)

    def submit_bits(self, rank: int, bits: int, seen: int, seq: int, now: float) -> None:
        """Take the cached tensors that a rank submits again; ``seen`` says what its bits mean."""
        self._seq, self._now = seq, now
        self._recall(bits | (rivals := self.cache.rivals(bits)))
        clash = bool(rivals & self._bits.anyone())  # who is ready with another size must be heard of
        if seen >= self.cache.last_change and not (clash or self._table or self._refusals or self.joined):
            self._hold_bits(rank, bits, now)
            return
        for slot in iter_bits(bits):
            meant = self.cache.meaning(slot, seen)
            assert meant is not None, f"rank {rank} sent slot {slot}, which held nothing as of list {seen}"
            request = meant.requests[self.ranks.index(rank)]
            current = self.cache.slot_of(request.name) == slot and self.cache[slot] is meant
            refused = self._refusals.touch(request)
            if clash or not current or self.joined or refused or self._is_tabled(request):
                self.submit(rank, request, seq, now)
            else:
                self._hold_bits(rank, 1 << slot, now)

    # -- what is ready -------------------------------------------------------------------------------

    def take_bits(self) -> int:
        """Return, and forget, the cached tensors that every rank has submitted; groups only as a whole."""
        ready = self._bits.everyone()
        if not ready:
            return 0
        for slot in iter_bits(ready):
            group = self.cache[slot].group
            if group is not None:
                members = self.cache.group_bits(group) & ready
                # The cache may have lost a member, or hold one of an earlier call of this name.
                if members.bit_count() != group[1]:
                    ready &= ~members
        self._bits.drop(ready)
        self.cache.touch(iter_bits(ready))
        self._loans.answered(ready)
        return ready

    def take_responses(self) -> list[Response]:
        """Return, and forget, the responses that have become due, in the order that binds every rank."""
        responses, self.responses = self.responses, []
        return responses

    def lend(self) -> None:
        """The response list is complete: let the ranks agree by themselves on what it has answered.

        Of grouped calls of one name only one size is lent: who submits another must be heard of here.
        """
        for name in self._loans.answered_groups():
            self._recall(self.cache.group_bits((name, 0)))
        held = self._bits.anyone()

        def is_free(meant: Slot, slot: int) -> bool:
            request = meant.requests[0]
            refused = self._refusals.touch(request)
            return not (held >> slot & 1 or refused or self.joined or self._is_tabled(request))

        self._loans.lend(is_free)

    # -- ends ----------------------------------------------------------------------------------------

    def abort(self, error: ErrorInfo) -> list[Response]:
        """Fail everything that is pending, for a set that is being removed."""
        self._hold_recalled(self._loans.recall_all())
        for slot in iter_bits(self._bits.anyone()):
            self._spill_slot(slot, 0.0)
        for entry in list(self._table.values()):
            self._fail(entry, error)
        self._table.clear()
        return self.take_responses()

    @property
    def last_submission(self) -> float:
        """When (s) a rank last submitted anything, a join included."""
        return self._now

    def pending(self, now: float) -> list[tuple[str, float, tuple[int, ...], tuple[int, ...]]]:
        """Return (name, first submission, who has submitted, who has not) of what waits, oldest first.

        Ranks that have joined are in neither list, unless they submitted before. A post on the board counts
        from when it was first seen here.
        """
        waiting = [
            (name, entry.since, {r: r in entry.requests for r in self.ranks if self._counts(r, entry)})
            for name, entry in self._table.items()
        ]
        for slot in iter_bits(self._bits.anyone()):
            has = {r: bool(self._bits.by_rank[r] >> slot & 1) for r in self.ranks}
            waiting.append((self.cache[slot].name, self._bits.since(slot, 0.0), has))
        posted = self._loans.look(now)
        for slot in {slot for bits in posted.values() for slot in iter_bits(bits)}:
            has = {r: bool(posted.get(r, 0) >> slot & 1) for r in self.ranks}
            waiting.append((self.cache[slot].name, self._loans.since(slot, now), has))
        listed = [
            (name, since, tuple(r for r in has if has[r]), tuple(r for r in has if not has[r]))
            for name, since, has in waiting
        ]
        return sorted((each for each in listed if each[3]), key=lambda each: each[1])

    def _counts(self, rank: int, entry: Entry) -> bool:
        return rank in entry.requests or rank not in self.joined

    # -- the board -----------------------------------------------------------------------------------

    def _recall(self, bits: int) -> None:
        """Take slots back from the board: a message speaks of their tensors."""
        self._hold_recalled(self._loans.recall(bits))

    def _recall_for(self, request: Request) -> None:
        if request.type == RequestType.JOIN:
            self._hold_recalled(self._loans.recall_all())
            return
        slot = self.cache.slot_of(request.name)
        bits = 1 << slot if slot >= 0 else 0
        if request.group:
            bits |= self.cache.group_bits((request.group, 0))
        self._recall(bits)

    def _hold_recalled(self, posted: dict[int, int]) -> None:
        for rank, bits in posted.items():
            for slot in iter_bits(bits):
                self._hold_bits(rank, 1 << slot, self._loans.since(slot, self._now))

    def _make_room(self, name: str) -> None:
        """See that the slot that a new tensor gets is one that nobody has posted, nor used of late."""
        if self.cache.victim(name, 0) < 0:
            return
        self._loans.look(self._now)
        while (slot := self.cache.victim(name, self._bits.anyone())) >= 0 and self._loans.has(slot):
            self._recall(1 << slot)

    # -- bits ----------------------------------------------------------------------------------------

    def _hold_bits(self, rank: int, bits: int, now: float) -> None:
        self._bits.hold(rank, bits, now)
        if self._lateness is not None and (complete := self._bits.everyone(bits)):
            since = min(self._bits.since(slot, now) for slot in iter_bits(complete))
            self._lateness.count(self.set_id, rank, since, now, complete.bit_count())

    def _is_tabled(self, request: Request) -> bool:
        """Return whether a tensor, or a grouped call of its group's name, is in the table."""
        grouped = bool(request.group) and any(name == request.group for name, _ in self._groups)
        return grouped or request.name in self._table

    def _spill(self, request: Request, now: float) -> None:
        """Turn bits back into requests for a tensor that one rank submits in full, and for its group."""
        slot = self.cache.slot_of(request.name)
        slots = self.cache.group_bits(group_of(request))
        if slot >= 0:
            slots |= 1 << slot | self.cache.group_bits(self.cache[slot].group)
        for each in iter_bits(slots & self._bits.anyone()):
            self._spill_slot(each, now)

    def _spill_slot(self, slot: int, now: float) -> None:
        meant = self.cache[slot]
        since, holders = self._bits.since(slot, now), self._bits.holders(slot)
        self._bits.drop(1 << slot)
        for rank in holders:
            self._add(rank, meant.requests[self.ranks.index(rank)], since)

    # -- the table -----------------------------------------------------------------------------------

    def _add(self, rank: int, request: Request, now: float) -> None:
        entry = self._table.get(request.name)
        if entry is None:
            entry = self._table[request.name] = Entry(now)
        if rank in entry.requests:
            entry.deferred.append((rank, request))
            return
        entry.requests[rank] = request
        if group := group_of(request):
            self._groups.setdefault(group, set()).add(request.name)
        if len(entry.requests) + len(self.joined) >= len(self.ranks):
            if self._lateness is not None:
                self._lateness.count(self.set_id, rank, entry.since, now)
            self._settle(request.name, entry)

    def _settle(self, name: str, entry: Entry) -> None:
        """Respond to a tensor once every rank that has not joined has submitted it."""
        if not self._members <= (entry.requests.keys() | set(self.joined)):
            return
        joined = [r for r in self.joined if r not in entry.requests]
        error = check(entry.requests, joined)
        if error is not None:
            self._fail_with_group(name, FailedCall(self.sites.add_to(error, name), origin=name))
            return
        group = group_of(self._first(entry))
        if group is None:
            self._answer(name)
            self._drop((name,))
            return
        ready = self._group_ready.setdefault(group, set())
        ready.add(name)
        if len(ready) == group[1]:
            del self._group_ready[group]
            # The table keeps the order in which the group was first submitted.
            members = [n for n in self._table if n in ready]
            for member in members:
                self._answer(member)
            self._drop(members)

    def _first(self, entry: Entry) -> Request:
        return entry.requests[min(entry.requests)]

    def _answer(self, name: str) -> None:
        entry = self._table[name]
        first = self._first(entry)
        joined = tuple(i for i, r in enumerate(self.ranks) if r not in entry.requests)
        dims: tuple[int, ...] = ()
        if first.type in (RequestType.ALLGATHER, RequestType.ALLTOALL):
            dims = tuple(entry.requests[r].shape[0] if r in entry.requests else 0 for r in self.ranks)
        slot = -1
        # An unnamed tensor's name never comes again.
        again = first.type in _CACHED and not name.startswith(f"{UNNAMED}.")
        if again and not joined and self.cache.capacity:
            mine = tuple(entry.requests[r] for r in self.ranks)
            self._make_room(name)
            slot = self.cache.assign(mine, self._bits.anyone(), self._seq)
            self._loans.answered(1 << slot if slot >= 0 else 0)
        if slot < 0:
            self.sites.forget(name)
        direct = slot >= 0 and all(request.window for request in entry.requests.values())
        since = self.cache[slot].since if slot >= 0 else 0
        self.responses.append(Response(first, self.set_id, slot, dims, joined, direct=direct, since=since))

    def _drop(self, names: Iterable[str]) -> None:
        """Take settled tensors out of the table, then let in what came behind them under the same names."""
        gone = [self._table.pop(name) for name in names]
        for entry in gone:
            for request in entry.requests.values():
                _discard(self._groups, group_of(request), request.name)
        for entry in gone:
            for rank, request in entry.deferred:
                self._take(rank, request, entry.since)

    # -- errors --------------------------------------------------------------------------------------

    def _fail(self, entry: Entry, error: ErrorInfo) -> None:
        for_ranks = tuple(sorted(entry.requests))
        self.responses.append(Response(self._first(entry), self.set_id, error=error, only=for_ranks))

    def _fail_with_group(self, name: str, refusal: FailedCall) -> None:
        """Fail a tensor and every tensor of every grouped call that holds it: a group is one unit.

        What the ranks have yet to submit of it fails as it comes.
        """
        groups = {group for r in self._table[name].requests.values() if (group := group_of(r))}
        names = {name}.union(*(self._groups.get(group, ()) for group in groups))
        failed = [n for n in self._table if n in names]
        for member in failed:
            entry = self._table[member]
            self._fail(entry, refusal.error_for(member))
            for rank, request in entry.requests.items():
                refusal.count(rank, request)
        for group in groups:
            self._group_ready.pop(group, None)
        self._refusals.add(refusal)
        self._drop(failed)

    def _check_group_size(self, rank: int, request: Request, now: float) -> bool:
        """Fail grouped calls of one name that are of one size here and of another there; return if any did.

        They have no tensor in common, so each rank would wait for the others' for ever.
        """
        if held := self._bits.anyone():
            others = self.cache.group_bits((request.group, 0)) & ~self.cache.group_bits(group_of(request))
            for slot in iter_bits(others & held):
                self._spill_slot(slot, now)
        for group in [g for g in self._groups if g[0] == request.group and g[1] != request.group_size]:
            names = self._groups[group]
            requests = [item for name in names for item in self._table[name].requests.items()]
            sizes = {r: group[1] for r, each in requests if group_of(each) == group}
            if rank in sizes:
                continue
            error = sizes_differ(request, {**sizes, rank: request.group_size})
            error = self.sites.add_to(error, *names, request.name)
            waiting = dict.fromkeys(self._members - sizes.keys() - set(self.joined), -1)
            self._fail_with_group(min(names), FailedCall(error, waiting, group=request.group))
            return True
        return False

    def _refuse(self, rank: int, request: Request) -> None:
        """A rank refused what the others submit, or will submit, under this name: tell them at once."""
        names = self._names_of(request)
        entries = [self._table[n] for n in self._table if n in names]
        mine = [entry for entry in entries if rank in entry.requests]
        if mine:
            mine[-1].deferred.append((rank, request))
            return
        error = ErrorInfo(
            ErrorKind.RANK_FAILED,
            f"{verb(request.type)} {request.name!r} cannot run: rank {rank} refused it: {request.error}",
            rank,
            traceback=request.traceback,
        )
        refusal = FailedCall.by(rank, request, error, self._members - {rank})
        if entries:
            self._fail_with_group(self._first(entries[0]).name, refusal)
        else:
            self._refusals.add(refusal)

    def _names_of(self, refusal: Request) -> set[str]:
        """Return the tensors in the table that a refusal is about."""
        if not refusal.group:
            return {refusal.name}
        for (group, size), names in self._groups.items():
            if group == refusal.group and refusal.group_size in (0, size):
                return set(names)
        return set()

    def _told_of_refusal(self, rank: int, request: Request) -> bool:
        """Answer a rank's request for what has failed before, and what belongs to it in the table."""
        refusal, news = self._refusals.tell(rank, request)
        if refusal is not None and not request.error:
            self._respond_to(rank, request, refusal)
            if news and (group := group_of(request)):
                self._withdraw_group(rank, group, refusal)
        return refusal is not None

    def _withdraw_group(self, rank: int, group: Group, refusal: FailedCall) -> None:
        """Fail what a rank has in the table of a group that has failed, and what others have of it alone."""
        pending = [(r, q) for entry in self._table.values() for r, q in entry.requests.items()]
        gone = [(r, q) for r, q in pending if r == rank and group_of(q) == group]
        for _, request in gone:
            refusal.tell(rank, request)
        # Only now is it known that these names are of the group.
        gone += [(r, q) for r, q in pending if not q.group and refusal.expects(r, q.name)]
        for other, request in gone:
            if not request.group:
                refusal.tell(other, request)
        self._refusals.update(refusal)
        behind = [each for r, request in gone for each in self._withdraw(r, request, refusal)]
        for other, request, since in behind:
            self._take(other, request, since)

    def _respond_to(self, rank: int, request: Request, refusal: FailedCall) -> None:
        error = refusal.error_for(request.name)
        self.responses.append(Response(request, self.set_id, error=error, only=(rank,)))

    def _withdraw(self, rank: int, request: Request, refusal: FailedCall) -> list[tuple[int, Request, float]]:
        """Fail one rank's request in the table alone; return what came behind it, and since when it waits."""
        self._respond_to(rank, request, refusal)
        entry = self._table[request.name]
        del entry.requests[rank]
        if group := group_of(request):
            _discard(self._group_ready, group, request.name)
            if all(group_of(each) != group for each in entry.requests.values()):
                _discard(self._groups, group, request.name)
        if not entry.requests:
            del self._table[request.name]
        behind = [each for each in entry.deferred if each[0] == rank]
        entry.deferred = [each for each in entry.deferred if each[0] != rank]
        return [(*each, entry.since) for each in behind]

    # -- join ----------------------------------------------------------------------------------------

    def _join(self, rank: int, now: float) -> None:
        # Before this rank is excused: it may be among those that hold a bit.
        for slot in iter_bits(self._bits.anyone()):
            self._spill_slot(slot, now)
        self.joined.append(rank)
        for name, entry in list(self._table.items()):
            if self._table.get(name) is entry:
                self._settle(name, entry)
        self._refusals.excuse(self.joined)
        if len(self.joined) == len(self.ranks):
            last, self.joined = self.joined[-1], []
            self.responses.append(Response(Request(RequestType.JOIN, JOIN_NAME), self.set_id, value=last))

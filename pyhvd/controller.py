"""The two state machines of the negotiation: :class:`Coordinator` (rank 0) and :class:`Worker` (every rank).

Pure: they take and return messages, without I/O, clock or threads, so that tests can play any interleaving.
One coordinator serves all process sets. Its order binds every rank, and with one total order overlapping
process sets cannot wait for each other in a circle.

A worker packs new submissions into one message. The coordinator answers with one response list as soon as a
tensor is ready on every rank of its set. No message passes while there is nothing new.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pyhvd.errors import InternalError
from pyhvd.negotiation.delegation import ReadyTable
from pyhvd.negotiation.message_table import MessageTable, Senders, StragglerStats
from pyhvd.negotiation.messages import (
    GLOBAL_SET,
    JOIN_NAME,
    PROTOCOL_VERSION,
    ErrorInfo,
    ErrorKind,
    MergedList,
    Request,
    RequestList,
    RequestType,
    Response,
    ResponseList,
    StillWaiting,
    TimelineOrder,
    Tuning,
    bits_of,
    bits_to_bytes,
    bytes_to_bits,
    iter_bits,
    unpack_ranks,
)
from pyhvd.negotiation.response_cache import WorkerCache


@dataclass(frozen=True, slots=True)
class Stalled:
    """A tensor that some ranks have submitted and others have not (bit vectors of global ranks; seconds)."""

    process_set: int
    name: str
    since: float
    submitted: int
    missing: int


@functools.lru_cache(maxsize=8)
def _everyone(size: int) -> tuple[int, ...]:
    """Return the ranks of a job: one object for all of its machines in a process."""
    return tuple(range(size))


class SeenLists:
    """Which response lists the ranks have processed: at least up to a number, by rank.

    Ranks with the same number are one bit vector.
    """

    def __init__(self, size: int) -> None:
        self._ranks = {0: (1 << size) - 1}

    def note(self, ranks: int, seen: int) -> None:
        """Note that each of these ranks has processed list ``seen``."""
        for before in [number for number, there in self._ranks.items() if number < seen and there & ranks]:
            there = self._ranks.pop(before)
            self._ranks[seen] = self._ranks.get(seen, 0) | there & ranks
            if left := there & ~ranks:
                self._ranks[before] = left

    def by_all(self, ranks: int) -> int:
        """Return the number of the last list that each of these ranks has processed."""
        return min(number for number, there in self._ranks.items() if there & ranks)


class Coordinator:
    """Rank 0's state machine: decide which tensors run, and in which order, for every process set.

    Parameters
    ----------
    size : int
        Number of ranks.
    capacity : int
        Slots of each process set's response cache; 0 turns it off.
    sets : sequence of tuple of int
        Members of the process sets that exist from the start; they get the ids 1, 2, ...
    ready_table : ReadyTable, optional
        Where the ranks of a node agree on cached tensors without messages.
    """

    def __init__(
        self,
        size: int,
        capacity: int,
        sets: Sequence[tuple[int, ...]] = (),
        ready_table: ReadyTable | None = None,
    ) -> None:
        self.stragglers = StragglerStats(size)
        self._capacity = capacity
        self._ready_table = ready_table
        self._sequence = 0
        self._seen = SeenLists(size)
        self._changed = False  # something was received or ordered since respond() last had nothing to say
        self._ended = False
        self._stop: ErrorInfo | None = None
        self._tuning: Tuning | None = None
        self._timeline: TimelineOrder | None = None
        self._removed: set[int] = set()  # by the list that is being built: their ids are not free yet
        self._sets: dict[int, MessageTable] = {}
        for set_id, ranks in enumerate([_everyone(size), *sets]):
            self._add_set(set_id, ranks, 0)

    def _add_set(self, set_id: int, ranks: tuple[int, ...], version: int) -> None:
        self._sets[set_id] = MessageTable(
            set_id, ranks, self._capacity, version, self._ready_table, self.stragglers
        )

    def receive(self, message: MergedList, now: float = 0.0) -> None:
        """Take a message of one or several ranks; ``now`` (s, of any clock) is for the time tensors wait."""
        for part in message.parts:
            self._receive(Senders(unpack_ranks(part.ranks), part.last), part.message, now)

    def _receive(self, senders: Senders, message: RequestList, now: float) -> None:
        following = self._sequence + 1
        self._seen.note(senders.ranks, message.seen)
        self._changed = True
        # Bits come first: within a message, a rank's full request for a tensor is newer than its bit.
        for set_id, data in message.bits.items():
            if table := self._table(set_id, message.seen):
                table.submit_hits(senders, bytes_to_bits(data), message.seen, following, now)
        for index, (set_id, request) in enumerate(message.requests):
            if table := self._table(set_id, message.seen):
                if message.sites:
                    table.sites.note(request.name, senders.ranks, message.sites[index])
                table.submit(senders, request, following, now)
        if message.stop is not None and self._stop is None:
            self._stop = message.stop

    def recall(self, message: StillWaiting) -> None:
        """Let the ranks submit by message the cached tensors for which a rank has long waited."""
        for set_id, data in message.slots.items():
            if set_id in self._sets:
                self._sets[set_id].recall(bytes_to_bits(data))

    def tune(self, tuning: Tuning) -> None:
        """Send these knobs to every rank with the next response list; they hold from that list on."""
        self._tuning = tuning
        self._changed = True

    def order_timeline(self, order: TimelineOrder) -> None:
        """Send an order to begin or end a recording to every rank with the next response list."""
        self._timeline = order
        self._changed = True

    def requests_of(self, message: RequestList) -> list[tuple[int, Request]]:
        """Return the tensors that a worker's message submits, with a bit as rank 0's request of its slot."""
        submitted = [(set_id, request) for set_id, request in message.requests if not request.error]
        for set_id, data in message.bits.items():
            if table := self._table(set_id, message.seen):
                slots = iter_bits(bytes_to_bits(data))
                meanings = [table.cache.meaning(slot, message.seen) for slot in slots]
                submitted += [(set_id, meant.first) for meant in meanings if meant is not None]
        return submitted

    def respond(self) -> ResponseList | None:
        """Return the next response list, or None while nothing is ready.

        A list with a stop is the last one, even if several ranks ask for a stop: no rank receives more.
        """
        if self._ended or not self._changed:
            return None
        cached: dict[int, bytes] = {}
        responses: list[Response] = []
        self._removed.clear()
        for set_id in sorted(self._sets):
            table = self._sets.get(set_id)
            if table is None:
                continue
            # Only members count: other ranks never send bits of this set, and may stay silent for ever.
            table.cache.forget(self._seen.by_all(table.members))
            if bits := table.take_hits():
                cached[set_id] = bits_to_bytes(bits)
            for response in table.take_responses():
                responses.extend(self._with_sets(response))
        if not (cached or responses or self._stop or self._tuning or self._timeline):
            self._changed = False
            return None
        for table in self._sets.values():
            table.delegate()
        self._sequence += 1
        self._ended = self._stop is not None
        stop, self._stop = self._stop, None
        tuning, self._tuning = self._tuning, None
        order, self._timeline = self._timeline, None
        return ResponseList(PROTOCOL_VERSION, self._sequence, cached, responses, stop, tuning, order)

    def audience(self, message: ResponseList) -> int:
        """Return the ranks that need a response list, as a bit vector.

        Messages for a busy rank pile up in MPI, so it must not get the lists of sets that it is no member of.
        The meaning of a slot goes to all members of its set, so a rank that misses other sets' lists still
        sends the right bits.
        """
        sets = {*message.cached, *(response.process_set for response in message.responses)}
        for_all = message.stop is not None or message.tuning is not None or message.timeline is not None
        if for_all or not sets <= self._sets.keys():
            sets.add(GLOBAL_SET)
        ranks = 0
        for set_id in sets & self._sets.keys():
            ranks |= self._sets[set_id].members
        return ranks

    def stalled(self, now: float = 0.0) -> list[Stalled]:
        """Return the tensors that wait for some rank, by set, oldest first; nothing after a stop.

        A join() waits while the other ranks work, so it is listed only if no tensor waits, and its time
        counts from the last submission.
        """
        if self._ended:
            return []
        tensors = [
            Stalled(i, name, since, submitted, missing)
            for i, each in sorted(self._sets.items())
            for name, since, submitted, missing in each.pending(now)
        ]
        return tensors or self._open_join()

    def _open_join(self) -> list[Stalled]:
        everyone = self._sets[GLOBAL_SET]
        if not everyone.joined:
            return []
        since = max(each.last_submission for each in self._sets.values())
        return [Stalled(GLOBAL_SET, JOIN_NAME, since, bits_of(everyone.joined), everyone.live)]

    def _table(self, set_id: int, seen: int) -> MessageTable | None:
        """Return a set's table; None if the rank means a removed set, whose id may be in use again."""
        table = self._sets.get(set_id)
        return table if table is not None and table.version <= seen else None

    def _with_sets(self, response: Response) -> list[Response]:
        """Carry out an agreed change of the process sets; return the responses that follow from it."""
        request = response.request
        if response.error is not None:
            return [response]
        if request.type == RequestType.ADD_PROCESS_SET:
            set_id = next(i for i in itertools.count(1) if i not in self._sets and i not in self._removed)
            self._add_set(set_id, request.ranks, self._sequence + 1)
            return [Response(request, GLOBAL_SET, value=set_id)]
        if request.type == RequestType.REMOVE_PROCESS_SET:
            removed = self._sets.pop(request.ranks[0], None)
            if removed is None:
                raise InternalError(f"process set {request.ranks[0]} was removed twice")
            self._removed.add(removed.set_id)
            gone = ErrorInfo(ErrorKind.SHUT_DOWN, f"process set {removed.set_id} has been removed")
            return [*removed.take_responses(), *removed.abort(gone), response]
        return [response]


class Worker:
    """Every rank's state machine: compose messages, and apply the coordinator's answers to this rank.

    Parameters
    ----------
    rank : int
        This rank.
    size : int
        Number of ranks.
    sets : sequence of tuple of int
        As for :class:`Coordinator`.
    """

    def __init__(self, rank: int, size: int, sets: Sequence[tuple[int, ...]] = ()) -> None:
        self.rank = rank
        self.sets: dict[int, tuple[int, ...]] = dict(enumerate([_everyone(size), *sets]))
        self._caches = {i: WorkerCache() for i, ranks in self.sets.items() if rank in ranks}
        self._in_flight: dict[tuple[int, str], Request] = {}
        self._removed: list[int] = []
        self._seen = 0

    def compose(
        self,
        submitted: Iterable[tuple[int, Request]],
        stop: ErrorInfo | None = None,
        site_of: Callable[[int, str], str] | None = None,
    ) -> RequestList:
        """Pack new submissions, in order: a bit for a tensor that the cache holds, else the full request.

        ``site_of(set_id, name)`` returns the line that submitted a tensor; called for full requests only.
        """
        bits: dict[int, int] = {}
        requests: list[tuple[int, Request]] = []
        refused: set[int] = set()
        for set_id, request in submitted:
            key = (set_id, request.name)
            if request.error:
                refused.add(set_id)
                requests.append((set_id, request))
                continue
            slot = self._caches[set_id].hit(request) if set_id in self._caches else -1
            # Behind a refusal full requests follow in the same message, as the coordinator reads bits first.
            if slot >= 0 and set_id not in refused:
                bits[set_id] = bits.get(set_id, 0) | 1 << slot
            else:
                requests.append((set_id, request))
            if request.type != RequestType.JOIN:
                self._in_flight[key] = request
        packed = {set_id: bits_to_bytes(b) for set_id, b in bits.items()}
        sites = [
            "" if site_of is None or request.error else site_of(set_id, request.name)
            for set_id, request in requests
        ]
        return RequestList(PROTOCOL_VERSION, self._seen, packed, requests, stop, sites)

    def adopt(self, set_id: int, request: Request) -> None:
        """Take over a tensor that this rank has submitted without a message."""
        self._in_flight[set_id, request.name] = request

    def request_of(self, set_id: int, slot: int) -> Request:
        """Return this rank's request of a cache slot."""
        return self._caches[set_id][slot]

    def slots_of(self, set_id: int, name: str) -> list[int]:
        """Return the cache slots of a tensor, or of all grouped calls, of this name."""
        return self._caches[set_id].slots_of(name) if set_id in self._caches else []

    def process(self, message: ResponseList) -> list[Response]:
        """Return this rank's responses, in order, and update its caches.

        Call :meth:`carried_out` when the responses have been carried out.
        """
        if message.seq <= self._seen:
            raise InternalError(f"rank {self.rank} got response list {message.seq} after {self._seen}")
        self._seen = message.seq
        todo: list[Response] = []
        for set_id in sorted(message.cached):
            if cache := self._caches.get(set_id):
                for response in cache.expand(bytes_to_bits(message.cached[set_id])):
                    self._in_flight.pop((set_id, response.request.name), None)
                    todo.append(response)
        for response in message.responses:
            if response.process_set not in self._caches or (response.only and self.rank not in response.only):
                continue
            request = self._in_flight.pop((response.process_set, response.request.name), None)
            if response.error is None:
                self._apply(response, request)
            todo.append(response)
        return todo

    def carried_out(self) -> None:
        """Forget the sets that the last list removed; its earlier responses needed them until now."""
        for set_id in self._removed:
            self.sets.pop(set_id, None)
            self._caches.pop(set_id, None)
        self._removed.clear()

    def _apply(self, response: Response, request: Request | None) -> None:
        if response.slot >= 0:
            if request is None:
                raise InternalError(f"cannot cache {response.request.name!r}: this rank has not submitted it")
            self._caches[response.process_set].put(response, request)
        if response.request.type == RequestType.ADD_PROCESS_SET:
            self.sets[response.value] = response.request.ranks
            if self.rank in response.request.ranks:
                self._caches[response.value] = WorkerCache()
        elif response.request.type == RequestType.REMOVE_PROCESS_SET:
            removed = response.request.ranks[0]
            self._removed.append(removed)
            for key in [k for k in self._in_flight if k[0] == removed]:
                del self._in_flight[key]

"""The two machines of the negotiation: :class:`Coordinator` (on rank 0) and :class:`Worker` (on every rank).

Pure: they take messages and give messages; no I/O, no clock of their own, no threads, so that any
interleaving can be tested without a network. One coordinator serves all process sets, because its order
binds everyone: with one total order, overlapping sets cannot wait for each other in a circle.

A worker sends what is new as one packed message; the coordinator answers with one response list to all
ranks as soon as anything has become ready everywhere. Nothing is sent while nothing is new.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pyhvd.errors import InternalError
from pyhvd.negotiation.delegation import Board
from pyhvd.negotiation.message_table import MessageTable
from pyhvd.negotiation.messages import (
    GLOBAL_SET,
    JOIN_NAME,
    PROTOCOL_VERSION,
    ErrorInfo,
    ErrorKind,
    Request,
    RequestList,
    RequestType,
    Response,
    ResponseList,
    TimelineOrder,
    Tuning,
    bits_to_bytes,
    bytes_to_bits,
    iter_bits,
)
from pyhvd.negotiation.response_cache import WorkerCache
from pyhvd.negotiation.stragglers import StragglerStats


@dataclass(frozen=True, slots=True)
class Stalled:
    """A tensor that some ranks wait for and others have not submitted (global ranks; seconds)."""

    process_set: int
    name: str
    since: float
    submitted: tuple[int, ...]
    missing: tuple[int, ...]


class Coordinator:
    """Rank 0's machine: decides what runs, and in which order, for every process set.

    Parameters
    ----------
    size : int
        Number of ranks.
    capacity : int
        Slots of each process set's response cache; 0 turns it off.
    sets : sequence of tuple of int
        Members of the process sets that exist from the start; they get the ids 1, 2, ...
    board : Board, optional
        Where ranks agree on cached tensors by themselves.
    """

    def __init__(
        self, size: int, capacity: int, sets: Sequence[tuple[int, ...]] = (), board: Board | None = None
    ) -> None:
        self._capacity = capacity
        self._board = board
        self._sequence = 0
        self._seen = [0] * size
        self._stop: ErrorInfo | None = None
        self._tuning: Tuning | None = None
        self.lateness = StragglerStats(size)
        self._ended = False
        self._timeline: TimelineOrder | None = None
        self._removed: set[int] = set()  # by the list that is being built: their ids are not free yet
        members = [tuple(range(size)), *sets]
        self._sets = {
            i: MessageTable(i, ranks, capacity, 0, board, self.lateness) for i, ranks in enumerate(members)
        }

    def receive(self, rank: int, message: RequestList, now: float = 0.0) -> None:
        """Take one worker's message; ``now`` is any clock in seconds, used to tell how long tensors wait."""
        following = self._sequence + 1
        self._seen[rank] = message.seen
        # Bits come first: what a rank submits again in full, it submits behind its bits.
        for set_id, data in message.bits.items():
            if negotiation := self._live(set_id, message.seen):
                negotiation.submit_bits(rank, bytes_to_bits(data), message.seen, following, now)
        for index, (set_id, request) in enumerate(message.requests):
            if negotiation := self._live(set_id, message.seen):
                if message.sites:
                    negotiation.sites.note(request.name, rank, message.sites[index])
                negotiation.submit(rank, request, following, now)
        if message.stop is not None and self._stop is None:
            self._stop = message.stop

    def tune(self, tuning: Tuning) -> None:
        """Let these knobs hold from the next response list on, which goes to every rank."""
        self._tuning = tuning

    def order_timeline(self, order: TimelineOrder) -> None:
        """Let the next response list tell every rank to begin or end a recording."""
        self._timeline = order

    def requests_of(self, message: RequestList) -> list[tuple[int, Request]]:
        """Return what a worker's message submits, bits as the requests they stand for: for who watches."""
        told = [(set_id, request) for set_id, request in message.requests if not request.error]
        for set_id, data in message.bits.items():
            if negotiation := self._live(set_id, message.seen):
                slots = iter_bits(bytes_to_bits(data))
                meanings = [negotiation.cache.meaning(slot, message.seen) for slot in slots]
                told += [(set_id, meant.requests[0]) for meant in meanings if meant is not None]
        return told

    def respond(self) -> ResponseList | None:
        """Return what every rank is to do next, or None while nothing is ready.

        Nothing follows a stop, though several ranks may ask for one: nobody would be there to receive it.
        """
        if self._ended:
            return None
        cached: dict[int, bytes] = {}
        responses: list[Response] = []
        self._removed.clear()
        for set_id in sorted(self._sets):
            negotiation = self._sets.get(set_id)
            if negotiation is None:
                continue
            # Other ranks never send bits of this set, and may stay silent for ever.
            negotiation.cache.forget(min(self._seen[rank] for rank in negotiation.ranks))
            if bits := negotiation.take_bits():
                cached[set_id] = bits_to_bytes(bits)
            for response in negotiation.take_responses():
                responses.extend(self._with_sets(response))
        if not (cached or responses or self._stop or self._tuning or self._timeline):
            return None
        for negotiation in self._sets.values():
            negotiation.lend()
        self._sequence += 1
        self._ended = self._stop is not None
        stop, self._stop = self._stop, None
        tuning, self._tuning = self._tuning, None
        order, self._timeline = self._timeline, None
        return ResponseList(PROTOCOL_VERSION, self._sequence, cached, responses, stop, tuning, order)

    def audience(self, message: ResponseList) -> list[int]:
        """Return the ranks whom a response list concerns.

        A rank that is busy must not hold up sets that it is no member of, and it does if messages for it
        pile up in MPI. What a slot means is told to all members of its set, so the bits of a rank that has
        not seen the other sets' lists still mean what it thinks.
        """
        sets = {*message.cached, *(response.process_set for response in message.responses)}
        for_all = message.stop is not None or message.tuning is not None or message.timeline is not None
        if for_all or not sets <= self._sets.keys():
            sets.add(GLOBAL_SET)
        return sorted({rank for set_id in sets if set_id in self._sets for rank in self._sets[set_id].ranks})

    def stalled(self, now: float = 0.0) -> list[Stalled]:
        """Return what is waiting, set by set, oldest first; nothing once the end has been told.

        A join() waits while the other ranks work, so it is listed only where nothing else waits, and its time
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
        missing = tuple(rank for rank in everyone.ranks if rank not in everyone.joined)
        return [Stalled(GLOBAL_SET, JOIN_NAME, since, tuple(sorted(everyone.joined)), missing)]

    def _live(self, set_id: int, seen: int) -> MessageTable | None:
        """Return a set's state, unless the rank speaks of a removed set (whose id may be in use again)."""
        negotiation = self._sets.get(set_id)
        return negotiation if negotiation is not None and negotiation.since <= seen else None

    def _with_sets(self, response: Response) -> list[Response]:
        """Carry out an agreed change of the process sets, as part of the order that binds every rank."""
        request = response.request
        if response.error is not None:
            return [response]
        if request.type == RequestType.ADD_PROCESS_SET:
            set_id = next(i for i in itertools.count(1) if i not in self._sets and i not in self._removed)
            self._sets[set_id] = MessageTable(
                set_id, request.ranks, self._capacity, self._sequence + 1, self._board, self.lateness
            )
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
    """Every rank's machine: what to send, and what the coordinator's answers mean for this rank.

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
        self.sets: dict[int, tuple[int, ...]] = dict(enumerate([tuple(range(size)), *sets]))
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
        """Pack newly submitted tensors, in order: a bit for what the cache holds, else the full request.

        ``site_of(set_id, name)`` says where a tensor was submitted; asked only for full requests.
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
            # Behind a refusal in the same message come full requests, as bits are read first.
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
        """Take note of a tensor that this rank has submitted past its messages."""
        self._in_flight[set_id, request.name] = request

    def own(self, set_id: int, slot: int) -> Request:
        """Return this rank's own request of a cache slot."""
        return self._caches[set_id][slot]

    def slots_of(self, set_id: int, name: str) -> list[int]:
        """Return the cache slots of a tensor, or of all grouped calls, of this name."""
        return self._caches[set_id].slots_of(name) if set_id in self._caches else []

    def process(self, message: ResponseList) -> list[Response]:
        """Return what this rank is to do, in order, and bring its caches up to date.

        Once that has been done, :meth:`carried_out` is to be called.
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
            own = self._in_flight.pop((response.process_set, response.request.name), None)
            if response.error is None:
                self._follow(response, own)
            todo.append(response)
        return todo

    def carried_out(self) -> None:
        """Forget the sets that the last list has removed; what it answered before needed them until now."""
        for set_id in self._removed:
            self.sets.pop(set_id, None)
            self._caches.pop(set_id, None)
        self._removed.clear()

    def _follow(self, response: Response, own: Request | None) -> None:
        if response.slot >= 0:
            if own is None:
                raise InternalError(f"{response.request.name!r} is to be cached, but was not submitted here")
            self._caches[response.process_set].put(response, own)
        if response.request.type == RequestType.ADD_PROCESS_SET:
            self.sets[response.value] = response.request.ranks
            if self.rank in response.request.ranks:
                self._caches[response.value] = WorkerCache()
        elif response.request.type == RequestType.REMOVE_PROCESS_SET:
            removed = response.request.ranks[0]
            self._removed.append(removed)
            for key in [k for k in self._in_flight if k[0] == removed]:
                del self._in_flight[key]

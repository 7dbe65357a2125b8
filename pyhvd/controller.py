"""The machines of the negotiation: :class:`Coordinator` on rank 0, :class:`Worker` and :class:`Node` on all.

Pure: they take and return messages, without I/O, clock or threads, so that tests can play any interleaving.
One coordinator serves all process sets. Its order binds every rank, and with one total order overlapping
process sets cannot wait for each other in a circle. A rank that has joined counts as ready in all its sets.

A worker packs new submissions into one message. The coordinator answers with one response list as soon as a
tensor is ready on every rank of its set. No message passes while there is nothing new.

A node is one rank's place in the tree of messages. :mod:`pyhvd.engine.runtime` drives it with threads, and
:mod:`pyhvd.simulation.ranks` with virtual time.
"""

from __future__ import annotations

import functools
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pyhvd.errors import InternalError
from pyhvd.negotiation.delegation import ReadyTable
from pyhvd.negotiation.leader import Leader
from pyhvd.negotiation.message_table import MessageTable, Senders, StragglerStats
from pyhvd.negotiation.messages import (
    FOUNDING,
    GLOBAL_SET,
    JOIN_NAME,
    PROTOCOL_VERSION,
    Aside,
    ErrorInfo,
    ErrorKind,
    MergedList,
    OutOfBand,
    RelayedList,
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
    decode_merged,
    decode_out_of_band,
    decode_relayed,
    decode_requests,
    decode_responses,
    encode,
    is_out_of_band,
    iter_bits,
    pack_ranks,
    unpack_ranks,
)
from pyhvd.negotiation.response_cache import WorkerCache

if TYPE_CHECKING:
    from pyhvd.transport.control import Sending
    from pyhvd.transport.tree import Tree

LAST_LIST_SECONDS = 0.2
"""Time limit (s) for the delivery of the last list, whose receiver may be dead or stopped."""


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


class SetIds:
    """The ids of process sets: a new set gets the lowest free one.

    ``used`` is the number of ids, from 0 on, that are in use.
    """

    def __init__(self, used: int) -> None:
        self._next = used
        self._free: list[int] = []  # a heap

    def take(self) -> int:
        """Return an id for a new set."""
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, set_id: int) -> None:
        """Free the id of a removed set."""
        heapq.heappush(self._free, set_id)


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
        # The members of sets that the last list has removed: their ids become free with the next list.
        self._removed: dict[int, int] = {}
        self._last_joined = -1  # the rank, when all ranks have joined and the next list tells them
        self._sets: dict[int, MessageTable] = {}
        self._founding: dict[str, MessageTable] = {}  # sets that their members make, by name
        # A list costs nothing for idle sets. Sets that something was received for since the last look for
        # answers, and since the last list; and those in which a tensor may wait.
        self._touched: set[int] = set()
        self._undelegated: set[int] = set()
        self._waiting: set[int] = set()
        self._touched_founding: dict[str, None] = {}  # in order
        self._agreeing: set[int] = set()  # sets whose ranks may mark slots without a message
        self._wanted_slots = 0
        self._last_submission = 0.0
        self._ids = SetIds(1 + len(sets))
        for set_id, ranks in enumerate([_everyone(size), *sets]):
            self._add_set(set_id, ranks, 0)

    def _add_set(self, set_id: int, ranks: tuple[int, ...], version: int) -> MessageTable:
        table = self._sets[set_id] = MessageTable(
            set_id, ranks, self._capacity, version, self._ready_table, self.stragglers
        )
        if table.is_delegating:
            self._agreeing.add(set_id)
        return table

    def _remove_set(self, set_id: int) -> MessageTable:
        removed = self._sets.pop(set_id, None)
        if removed is None:
            raise InternalError(f"process set {set_id} was removed twice")
        self._removed[set_id] = removed.members
        for sets in (self._touched, self._undelegated, self._waiting, self._agreeing):
            sets.discard(set_id)
        return removed

    def _founding_of(self, request: Request, senders: Senders) -> MessageTable | None:
        """Return the table in which the members of a set agree to make it; None for a refusal of nothing.

        If they do not agree on who they are, nobody waits for the others.
        """
        table = self._founding.get(request.name)
        if table is None and request.error:
            return None
        if table is None:
            table = MessageTable(FOUNDING, request.ranks, 0, stragglers=self.stragglers)
            table.live &= self._sets[GLOBAL_SET].live
            self._founding[request.name] = table
        elif request.ranks != table.ranks and not request.error:
            table.wait_no_longer(senders.ranks)
        return table

    def receive(self, message: MergedList, now: float = 0.0) -> None:
        """Take a message of one or several ranks; ``now`` (s, of any clock) is for the time tensors wait."""
        for part in message.parts:
            self._receive(Senders(unpack_ranks(part.ranks), part.last), part.message, now)

    def _receive(self, senders: Senders, message: RequestList, now: float) -> None:
        following = self._sequence + 1
        self._seen.note(senders.ranks, message.seen)
        self._changed = True
        if message.bits or message.requests:
            self._last_submission = now
        # Bits come first: within a message, a rank's full request for a tensor is newer than its bit.
        for set_id, data in message.bits.items():
            if table := self._table(set_id, message.seen):
                self._touched.add(set_id)
                table.submit_hits(senders, bytes_to_bits(data), message.seen, following, now)
        for index, (set_id, request) in enumerate(message.requests):
            site = message.sites[index] if message.sites else ""
            if request.type != RequestType.JOIN:
                self._submit(senders, set_id, request, site, message.seen, now)
            elif not request.error:  # a refused join does not count; the rank can call it again
                self._join(senders, following, now)
        if message.stop is not None and self._stop is None:
            self._stop = message.stop

    def _submit(
        self, senders: Senders, set_id: int, request: Request, site: str, seen: int, now: float
    ) -> None:
        table = self._founding_of(request, senders) if set_id == FOUNDING else self._table(set_id, seen)
        if table is None:
            return
        if set_id == FOUNDING:
            self._touched_founding[request.name] = None
        else:
            self._touched.add(set_id)
        table.sites.note(request.name, senders.ranks, site)
        table.submit(senders, request, self._sequence + 1, now)

    def _join(self, senders: Senders, following: int, now: float) -> None:
        """Count ranks as ready in each of their sets, until all ranks have joined."""
        self._touched.update(self._sets)
        self._touched_founding.update(dict.fromkeys(self._founding))
        for table in (*self._sets.values(), *self._founding.values()):
            if ranks := senders.ranks & table.members:
                table.join(ranks, following, now)
        if not self._sets[GLOBAL_SET].live:
            self._last_joined = senders.last
            for table in self._sets.values():
                table.end_join()

    def recall(self, message: StillWaiting) -> None:
        """Let the ranks submit by message the cached tensors for which a rank has long waited."""
        for set_id, data in message.slots.items():
            if set_id in self._sets:
                self._touched.add(set_id)
                self._sets[set_id].recall(bytes_to_bits(data))

    def recall_all(self) -> None:
        """Let the ranks submit by message all cached tensors that they submit or have submitted."""
        self._touched.update(self._agreeing)
        for set_id in self._agreeing:
            self._sets[set_id].recall()

    def withdraw(self, process_set: int, prefix: str, error: ErrorInfo) -> None:
        """Give the tensors whose names begin so back to the ranks that have submitted them, with an error."""
        if table := self._sets.get(process_set):
            table.withdraw(prefix, error)
            self._touched.add(process_set)
            self._changed = True

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

    def wanted_slots(self) -> int:
        """Return how many slots a response cache needs that has too few for the tensors of a step; or 0."""
        return self._wanted_slots

    def respond(self) -> ResponseList | None:
        """Return the next response list, or None while nothing is ready.

        A list with a stop is the last one, even if several ranks ask for a stop: no rank receives more.
        """
        if self._ended or not self._changed:
            return None
        cached: dict[int, bytes] = {}
        responses: list[Response] = []
        for set_id in self._removed:
            self._ids.give_back(set_id)
        self._removed.clear()
        touched, self._touched = self._touched, set()
        self._undelegated |= touched
        for set_id in sorted(touched):
            if table := self._sets.get(set_id):  # an earlier response may have removed it
                if bits := self._look_for_hits(table):
                    cached[set_id] = bits_to_bytes(bits)
                responses += self._responses_of(table)
        founding, self._touched_founding = self._touched_founding, {}
        for name in founding:
            responses += self._responses_of(self._founding[name])
            if self._founding[name].is_idle:
                del self._founding[name]
        if self._last_joined >= 0:  # behind all calls that ranks take part in while they have joined
            responses.append(Response(Request(RequestType.JOIN, JOIN_NAME), value=self._last_joined))
            self._last_joined = -1
        if not (cached or responses or self._stop or self._tuning or self._timeline):
            self._changed = False
            return None
        for set_id in sorted(self._undelegated & self._sets.keys()):
            self._sets[set_id].delegate()
        self._undelegated.clear()
        self._sequence += 1
        self._ended = self._stop is not None
        stop, self._stop = self._stop, None
        tuning, self._tuning = self._tuning, None
        order, self._timeline = self._timeline, None
        return ResponseList(PROTOCOL_VERSION, self._sequence, cached, responses, stop, tuning, order)

    def _look_for_hits(self, table: MessageTable) -> int:
        # Only members count: other ranks never send bits of this set, and may stay silent for ever.
        table.cache.forget(self._seen.by_all(table.members))
        self._wanted_slots = max(self._wanted_slots, table.cache.wanted)
        return table.take_hits()

    def _responses_of(self, table: MessageTable) -> list[Response]:
        """Return the responses of a table that are due; note whether a tensor of its set still waits."""
        due = [each for response in table.take_responses() for each in self._with_sets(response)]
        if table.has_pending and table.set_id in self._sets:
            self._waiting.add(table.set_id)
        else:
            self._waiting.discard(table.set_id)
        return due

    def audience(self, message: ResponseList) -> int:
        """Return the ranks that need the response list that was built last, as a bit vector.

        Messages for a busy rank pile up in MPI, so it must not get the lists of sets that it is no member of.
        The meaning of a slot goes to all members of its set, so a rank that misses other sets' lists still
        sends the right bits.
        """
        sets = {*message.cached, *(response.process_set for response in message.responses)}
        for_all = message.stop is not None or message.tuning is not None or message.timeline is not None
        if for_all:
            sets.add(GLOBAL_SET)
        ranks = 0
        for set_id in sets - {FOUNDING}:
            table = self._sets.get(set_id)
            ranks |= self._removed[set_id] if table is None else table.members
        for response in message.responses if FOUNDING in sets else ():
            ranks |= bits_of(response.only)
        return ranks

    def stalled(self, now: float = 0.0) -> list[Stalled]:
        """Return the tensors that wait for some rank, by set, oldest first; nothing after a stop.

        A join() waits while the other ranks work, so it is listed only if no tensor waits, and its time
        counts from the last submission.
        """
        if self._ended:
            return []
        may_wait = sorted((self._touched | self._waiting | self._agreeing) & self._sets.keys())
        # A look may recall turn slots.
        self._undelegated |= self._agreeing
        founding = [(GLOBAL_SET, each) for each in self._founding.values()]
        tensors = [
            Stalled(i, name, since, submitted, missing)
            for i, each in [*((i, self._sets[i]) for i in may_wait), *founding]
            for name, since, submitted, missing in each.pending(now)
        ]
        return tensors or self._open_join()

    def _open_join(self) -> list[Stalled]:
        everyone = self._sets[GLOBAL_SET]
        if not everyone.joined:
            return []
        return [Stalled(GLOBAL_SET, JOIN_NAME, self._last_submission, everyone.joined, everyone.live)]

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
            set_id = self._ids.take()
            added = self._add_set(set_id, request.ranks, self._sequence + 1)
            added.live &= self._sets[GLOBAL_SET].live  # a rank may have submitted the addition, then joined
            founders = request.ranks if response.process_set == FOUNDING else ()
            return [Response(request, response.process_set, value=set_id, only=founders)]
        if request.type == RequestType.REMOVE_PROCESS_SET:
            removed = self._remove_set(request.ranks[0])
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
        self._caches[FOUNDING] = WorkerCache()
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

    @property
    def seen(self) -> int:
        """Number of the last response list that this rank has processed."""
        return self._seen

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


class RequestHooks(Protocol):
    """See :class:`pyhvd.observe.hooks.Instruments`."""

    @property
    def active(self) -> Sequence[object]:
        """The instruments, which may change at any time."""

    @property
    def requested(self) -> Callable[[int, list[tuple[int, Request]]], object]:
        """Notifies the instruments that requests of a rank arrived."""


@dataclass(eq=False)
class Node:
    """One rank in the tree of messages: send requests up, pass response lists down, keep the lists' order.

    Only one thread uses it. Times (s) are of any clock.

    A rank runs a list only after this list and all earlier lists have left for all ranks below it. The
    reason: MPI does not progress a queued send while its sender waits outside MPI, as in shared memory. The
    rank would wait for its peers in shared memory, and they for their list, or for ranks that wait for an
    earlier list. The wait is finite because no rank waits for later lists: the others can run all earlier
    lists, and then receive this one and pass it on.

    Parameters
    ----------
    tree : Tree
        The rank's place.
    worker : Worker
        The rank's worker.
    coordinator : Coordinator or None
        On rank 0.
    send : callable
        ``send(rank, payload)`` starts sending a message; messages to one rank arrive in order.
    announce : callable
        ``announce(number, ranks)`` gives a list for these ranks its place in the ready log; False if full.
    take_aside : callable
        ``take_aside(source, message, now)`` takes an out-of-band message about rounds or stacks.
    hooks : RequestHooks, optional
        Notified of the requests that the coordinator is about to receive.

    Attributes
    ----------
    leader : Leader or None
        Merges the requests of the ranks below, on a leader other than rank 0.
    held : ResponseList or None
        The coordinator's next list, for which the ready log had no room.
    """

    tree: Tree
    worker: Worker
    coordinator: Coordinator | None
    send: Callable[[int, bytes], Sending]
    announce: Callable[[int, int], bool]
    take_aside: Callable[[int, Aside, float], object]
    hooks: RequestHooks | None = None
    held: ResponseList | None = None
    _lists: deque[tuple[ResponseList, list[Sending], float]] = field(default_factory=deque)
    # Known sends, including those of lists for other ranks only.
    _under_way: list[Sending] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leader = Leader(self.tree.branch, self.worker.sets) if self.tree.merges else None

    def take(self, source: int, payload: bytes | bytearray, now: float) -> None:
        """Take a message of another rank."""
        if is_out_of_band(payload):
            self._take_out_of_band(source, decode_out_of_band(payload, source), now)
        elif source == self.tree.parent:
            self._take_list(source, payload, now)
        elif source in self.tree.leaders:
            self._receive(source, decode_merged(payload, source), now)
        else:
            self._receive(source, MergedList.of(source, decode_requests(payload, source)), now)

    # -- requests, and what is told to rank 0

    def submit(self, message: RequestList, now: float) -> None:
        """Send this rank's own message towards the coordinator."""
        if self.leader is None and self.coordinator is None:
            self.send(self.tree.parent, encode(message))
        else:
            self._receive(self.tree.rank, MergedList.of(self.tree.rank, message), now)

    def stop(self, cause: ErrorInfo, now: float) -> None:
        """Ask the coordinator to end the job."""
        self.submit(self.worker.compose([], cause), now)

    def flush(self, now: float) -> bool:
        """Send what the leader has merged, if that is due; return whether it was."""
        if self.leader is None or self.leader.due is None or now < self.leader.due:
            return False
        self.send(self.tree.parent, encode(self.leader.flush()))
        return True

    def tell_rank_0(self, message: OutOfBand, now: float) -> None:
        """Send rank 0 an out-of-band message, or take it on rank 0."""
        if self.coordinator is not None:
            self._take_out_of_band(self.tree.rank, message, now)
        else:
            self.send(0, encode(message))

    def _receive(self, source: int, message: MergedList, now: float) -> None:
        """Take a message from below, or this rank's own: merge it, or give it to the coordinator."""
        if self.leader is not None:
            self.leader.take(source, message.parts, now)
        elif self.coordinator is not None:
            if self.hooks is not None and self.hooks.active:
                for part in message.parts:
                    requests = self.coordinator.requests_of(part.message)
                    for rank in iter_bits(unpack_ranks(part.ranks)):
                        self.hooks.requested(rank, requests)
            self.coordinator.receive(message, now)

    def _take_out_of_band(self, source: int, message: OutOfBand, now: float) -> None:
        if not isinstance(message, StillWaiting):
            self.take_aside(source, message, now)
        elif self.coordinator is not None:
            self.coordinator.recall(message)

    # -- response lists

    def respond(self, now: float) -> bool:
        """Send the coordinator's next list to the ranks that it concerns; return whether one has left."""
        if self.coordinator is None:
            return False
        responses = self.held = self.held or self.coordinator.respond()
        if responses is None:
            return False
        audience = self.coordinator.audience(responses)
        if not self.announce(responses.seq, audience):
            return False
        self.held = None
        self._pass_on(encode(responses), audience)
        if audience & 1:
            self._append(responses, now)
        return True

    def first(self, now: float) -> ResponseList | None:
        """Return the next list if this rank may run it now."""
        if not self._lists:
            return None
        responses, sendings, until = self._lists[0]
        if all(sending.gone() for sending in sendings):
            return responses
        return responses if responses.stop is not None and now >= until else None

    def pop(self) -> ResponseList:
        """Remove and return the first list."""
        return self._lists.popleft()[0]

    def has_ended(self) -> bool:
        """Return whether the last list has arrived."""
        return bool(self._lists) and self._lists[-1][0].stop is not None

    def due(self, now: float) -> float | None:
        """Return when to :meth:`flush`, or to look at the first list, without a message; None for never."""
        due = None if self.leader is None else self.leader.due
        if self._lists and self._lists[0][0].stop is not None and self.first(now) is None:
            return self._lists[0][2] if due is None else min(due, self._lists[0][2])
        return due

    def _take_list(self, source: int, payload: bytes | bytearray, now: float) -> None:
        """Append a list that has arrived from above, and pass it on."""
        if not self.tree.children:
            self._append(decode_responses(payload, source), now)
            return
        relayed = decode_relayed(payload, source)
        audience = unpack_ranks(relayed.ranks)
        self._pass_on(relayed.payload, audience)
        if audience >> self.tree.rank & 1:
            self._append(decode_responses(relayed.payload, source), now)

    def _pass_on(self, payload: bytes, audience: int) -> None:
        self._under_way = [sending for sending in self._under_way if not sending.gone()]
        for child, below in self.tree.children.items():
            if ranks := below & audience:
                told = payload
                if child in self.tree.leaders:
                    told = encode(RelayedList(PROTOCOL_VERSION, pack_ranks(ranks), payload))
                self._under_way.append(self.send(child, told))

    def _append(self, responses: ResponseList, now: float) -> None:
        self._lists.append((responses, list(self._under_way), now + LAST_LIST_SECONDS))

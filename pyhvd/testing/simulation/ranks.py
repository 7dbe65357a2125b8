"""One simulated rank: its program, and the engine around the real machines of the negotiation.

The engine is that of :mod:`pyhvd.engine.runtime`, with virtual time in the place of threads: requests go up
the tree, leaders merge them, rank 0's coordinator answers, lists go down, and each rank carries out its lists
and batches in order. A batch ends on all ranks together, after the time that the data path's model says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyhvd.controller import Coordinator, Worker
from pyhvd.negotiation.fusion import plan, response_bytes
from pyhvd.negotiation.leader import Leader
from pyhvd.negotiation.messages import (
    GLOBAL_SET,
    PROTOCOL_VERSION,
    ErrorInfo,
    MergedList,
    RelayedList,
    Request,
    RequestType,
    Response,
    ResponseList,
    decode_merged,
    decode_relayed,
    decode_requests,
    decode_responses,
    encode,
    iter_bits,
    pack_ranks,
    unpack_ranks,
)
from pyhvd.testing.simulation.agreement import MARK_S
from pyhvd.testing.simulation.program import AddSet, Compute, Hang, StepEnd, Submit, Wait, request_of
from pyhvd.transport.tree import Tree

if TYPE_CHECKING:
    from pyhvd.testing.simulation.agreement import CoordinatorTable, HostTable
    from pyhvd.testing.simulation.stalls import Stalls
    from pyhvd.testing.simulation.world import World

_AGAIN_S = 1e-3
"""After so long rank 0 tries again to announce a list for which there was no room."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What the ranks of a process set do together.

    Attributes
    ----------
    key : hashable
        The same on all of them.
    process_set : int
        The set.
    kind : RequestType
        The collective.
    nbytes, tensors : int
        Bytes and number of its tensors.
    error : ErrorInfo or None
        The error with which they fail.
    """

    key: object
    process_set: int
    kind: RequestType
    nbytes: int
    tensors: int
    error: ErrorInfo | None = None


def batch_of(place: object, responses: Sequence[Response]) -> Batch:
    """Return the batch of responses, which is at some place of the order."""
    first = responses[0]
    kind = RequestType(first.request.type)
    key = place, first.process_set, first.request.name
    nbytes = sum(map(response_bytes, responses))
    return Batch(key, first.process_set, kind, nbytes, len(responses), first.error)


class Rank:
    """One rank.

    Parameters
    ----------
    world : World
        The simulated cluster.
    tree : Tree
        The rank's place in the tree of messages.
    table : HostTable or None
        Its host's ready table, if cached tensors are agreed on there.
    """

    def __init__(self, world: World, tree: Tree, table: HostTable | None) -> None:
        self.rank = tree.rank
        self.host = world.host_of(self.rank)
        self.process = world.make_process(self._settle)
        self.worker = Worker(self.rank, world.size)
        self.leader = Leader(tree.branch, self.worker.sets) if tree.merges else None
        self.coordinator: Coordinator | None = None
        self.coordinator_table: CoordinatorTable | None = None
        self.stalls: Stalls | None = None
        self.done = False
        self.error = ""
        self.carried_out: list[object] = []
        self._world = world
        self._tree = tree
        self._table = table
        self._program = world.program(self.rank, world.size)
        self._fresh: list[tuple[int, Request]] = []
        self._in_flight = 0
        self._waits = False
        self._cached: dict[int, Response] = {}  # what the slots mean, if there is a table
        self._lists: deque[ResponseList] = deque()
        self._log_at = 0
        self._batches: deque[Batch] = deque()
        self._running: Batch | None = None
        self._list: tuple[ResponseList, list[Response]] | None = None
        self._outgoing: ResponseList | None = None
        self._timer = -1.0

    # -- the program's thread

    def advance(self) -> None:
        """Go on with the program."""
        now = self._world.clock.now
        for action in self._program:
            if isinstance(action, Hang):
                return
            if isinstance(action, Compute):
                self._world.clock.at(now + action.seconds, self.advance)
                return
            if isinstance(action, Submit):
                self._submit([(action.process_set, request_of(tensor)) for tensor in action.tensors])
            elif isinstance(action, StepEnd):
                self._world.note_step(self.rank)
            elif isinstance(action, AddSet):
                name = f"add.{len(self.worker.sets)}"
                request = Request(RequestType.ADD_PROCESS_SET, name, ranks=action.ranks)
                self._submit([(GLOBAL_SET, request)])
            if isinstance(action, Wait | AddSet) and self._in_flight:
                self._waits = True
                self._world.note_wait(self.rank)
                self._flush()
                return
        self.done = True

    def _submit(self, requests: Sequence[tuple[int, Request]]) -> None:
        if not self._fresh:
            self._world.clock.at(self._world.clock.now + self._world.cycle, self._flush)
        self._fresh += requests
        self._in_flight += len(requests)

    def _flush(self) -> None:
        """Mark cached tensors ready, and let the background thread send requests for the others."""
        fresh, self._fresh = self._fresh, []
        marked, left = self._split(fresh)
        if marked and self._table is not None:
            self._table.process.call(self._table.mark, self.rank, marked)
        if left:
            now = self._world.clock.now
            self._world.clock.at(now + self._world.network.wake, self.process.call, self._send_requests, left)

    def _split(self, fresh: Sequence[tuple[int, Request]]) -> tuple[int, list[tuple[int, Request]]]:
        """Return the slots to mark ready, and the requests to send."""
        if self._table is None:
            return 0, list(fresh)
        marked, left = 0, []
        for set_id, request in fresh:
            slots = self.worker.slots_of(set_id, request.name) if set_id == GLOBAL_SET else []
            slot = slots[0] if slots and self.worker.request_of(set_id, slots[0]) == request else -1
            # The program may be ahead of the background thread, which knows a slot when its list has ended.
            cached = self._cached.get(slot)
            if cached is not None and self._table.delegated.get(slot) == cached.version:
                marked |= 1 << slot
            else:
                left.append((set_id, request))
        return marked, left

    # -- the background thread: messages

    def _send_requests(self, fresh: list[tuple[int, Request]]) -> None:
        if self.error:
            return
        message = self.worker.compose(fresh)
        if self.leader is None and self.coordinator is None:
            self._send(self._tree.parent, encode(message))
        else:
            self._receive(MergedList.of(self.rank, message), self.rank)

    def stop(self, error: ErrorInfo) -> None:
        """Let rank 0 end the job for all ranks, with a cause."""
        assert self.coordinator is not None
        self.coordinator.receive(MergedList.of(0, self.worker.compose([], error)), self.process.now)

    def _send(self, target: int, payload: bytes) -> None:
        self.process.spend(self._world.network.message_cpu)
        other = self._world.ranks[target]
        self._world.wires.send(
            (self.rank, target), (self.host, other.host), len(payload), self.process.now,
            other.arrive, self.rank, payload,
        )  # fmt: skip

    def arrive(self, source: int, payload: bytes) -> None:
        """Take a message that has arrived."""
        wake = self._world.network.wake
        self._world.clock.at(self._world.clock.now + wake, self.process.call, self._take, source, payload)

    def _take(self, source: int, payload: bytes) -> None:
        self.process.spend(self._world.network.message_cpu)
        if source == self._tree.parent:
            self._hear(payload)
        elif source in self._tree.leaders:
            self._receive(decode_merged(payload), source)
        else:
            self._receive(MergedList.of(source, decode_requests(payload)), source)

    def _receive(self, message: MergedList, source: int) -> None:
        if self.leader is not None:
            self.leader.take(source, message.parts, self.process.now)
        elif self.coordinator is not None:
            self.coordinator.receive(message, self.process.now)

    def _hear(self, payload: bytes) -> None:
        if not self._tree.children:
            self._lists.append(decode_responses(payload))
            return
        relayed = decode_relayed(payload)
        audience = unpack_ranks(relayed.ranks)
        self._pass_on(relayed.payload, audience)
        if audience >> self.rank & 1:
            self._lists.append(decode_responses(relayed.payload))

    def _pass_on(self, payload: bytes, audience: int) -> None:
        for child, below in self._tree.children.items():
            if not (ranks := below & audience):
                continue
            if child in self._tree.leaders:
                payload_below = encode(RelayedList(PROTOCOL_VERSION, pack_ranks(ranks), payload))
                self._send(child, payload_below)
            else:
                self._send(child, payload)

    def _settle(self) -> None:
        """Do what follows from what has come."""
        if self.error:
            return
        if self.leader is not None and self.leader.due is not None:
            if self.leader.due <= self.process.now:
                self._send(self._tree.parent, encode(self.leader.flush()))
            elif self._timer != self.leader.due:
                self._timer = self.leader.due
                self._world.clock.at(self.leader.due, self.process.call, _nothing)
        if self.stalls is not None:
            self.stalls.look()
        if self.coordinator is not None:
            self._respond(self.coordinator)
        self.run_lists()

    def _respond(self, coordinator: Coordinator) -> None:
        while (responses := self._outgoing or coordinator.respond()) is not None:
            self._outgoing = responses
            audience = coordinator.audience(responses)
            self._world.note_list(responses, audience)
            table = self.coordinator_table
            if table is not None and not table.announce(responses.seq, iter_bits(audience)):
                self._world.clock.at(self.process.now + _AGAIN_S, self.process.call, _nothing)
                return
            self._outgoing = None
            self._pass_on(encode(responses), audience)
            if audience & 1:
                self._lists.append(responses)

    # -- the background thread: what was agreed

    def look_at_log(self) -> None:
        """See :class:`~pyhvd.testing.simulation.agreement.Member`."""
        self._world.clock.at(self._world.clock.now, self.process.call, _nothing)

    def take_back(self, bits: int) -> None:
        """See :class:`~pyhvd.testing.simulation.agreement.Member`."""
        again = [(GLOBAL_SET, self.worker.request_of(GLOBAL_SET, slot)) for slot in iter_bits(bits)]
        self.process.call(self._send_requests, again)

    def run_lists(self) -> None:
        """Carry out lists and batches as far as their turns have come."""
        while not self.process.blocked and not self.error:
            if self._batches:
                self._begin(self._batches.popleft())
            elif self._list is not None:
                self._end_list(*self._list)
            elif not self._take_next():
                return

    def _take_next(self) -> bool:
        """Take the next list, or the next batch of the ready log; return whether there was one."""
        if self._table is None:
            if self._lists:
                self._begin_list(self._lists.popleft())
                return True
            return False
        if self._log_at == len(self._table.log):
            return False
        entry = self._table.log[self._log_at]
        if not entry.number:
            responses = [self._cached[slot] for slot in iter_bits(entry.bits)]
            self._batches.extend(self._world.batches_of(self._log_at, responses))
            self.process.spend(MARK_S * entry.bits.bit_count())
        elif self._world.audience_of(entry.number) >> self.rank & 1:
            if not self._lists:
                return False
            self._begin_list(self._lists.popleft())
        self._log_at += 1
        return True

    def _begin_list(self, responses: ResponseList) -> None:
        todo = self.worker.process(responses)
        for batch in plan(todo, self._world.fusion_threshold):
            self._batches.append(batch_of(responses.seq, batch))
        self._list = responses, todo

    def _end_list(self, responses: ResponseList, todo: Sequence[Response]) -> None:
        self._list = None
        self.worker.carried_out()
        if self._table is not None:
            for response in todo:
                if response.slot >= 0 and response.process_set == GLOBAL_SET:
                    self._cached[response.slot] = response
        if responses.stop is not None:
            self._world.end(self, responses.stop.message)

    def _begin(self, batch: Batch) -> None:
        self._running = batch
        if batch.error is None:
            self.process.blocked = True
            self._world.enter(self, batch)
        else:
            self.finish(self.process.now)

    def finish(self, now: float) -> None:
        """End the batch that is running."""
        assert self._running is not None
        batch, self._running = self._running, None
        self.carried_out.append(batch.key if batch.error is None else (batch.key, batch.error.message))
        self._in_flight -= batch.tensors
        if self._waits and not self._in_flight:
            self._waits = False
            wake = self._world.network.wake if self._table is None else 0.0
            self._world.clock.at(now + wake, self.advance)


def _nothing() -> None:
    """Make a process settle."""

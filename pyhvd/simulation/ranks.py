"""One simulated rank: its program, and its tree node.

This drives :class:`pyhvd.controller.Node` as :mod:`pyhvd.engine.runtime` does, with virtual time in the place
of threads. A rank carries out its lists and batches in order. A batch ends on all ranks together, after the
time that the data path's model says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyhvd.controller import Coordinator, Node, Worker
from pyhvd.negotiation.fusion import plan, response_bytes
from pyhvd.negotiation.messages import (
    GLOBAL_SET,
    Aside,
    ErrorInfo,
    Request,
    RequestType,
    Response,
    ResponseList,
    iter_bits,
)
from pyhvd.simulation.agreement import MARK_S
from pyhvd.simulation.program import AddSet, Compute, Hang, StepEnd, Submit, Wait, request_of
from pyhvd.transport.control import Delivered
from pyhvd.transport.tree import Tree

if TYPE_CHECKING:
    from pyhvd.simulation.stalls import Stalls
    from pyhvd.simulation.world import SimulatedWorld

_AGAIN_S = 1e-3
"""After so long rank 0 tries again to announce a list for which there was no room."""


@dataclass(frozen=True, slots=True)
class SimulatedBatch:
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


def batch_of(place: object, responses: Sequence[Response]) -> SimulatedBatch:
    """Return the batch of responses, which is at some place of the order."""
    first = responses[0]
    kind = RequestType(first.request.type)
    key = place, first.process_set, first.request.name
    nbytes = sum(map(response_bytes, responses))
    return SimulatedBatch(key, first.process_set, kind, nbytes, len(responses), first.error)


class SimulatedRank:
    """One rank.

    Parameters
    ----------
    world : SimulatedWorld
        The simulated cluster.
    tree : Tree
        The rank's place in the tree of messages.
    coordinator : Coordinator or None
        On rank 0.
    """

    def __init__(self, world: SimulatedWorld, tree: Tree, coordinator: Coordinator | None) -> None:
        self.rank = tree.rank
        self.host = world.host_of(self.rank)
        self.process = world.make_process(self._settle)
        self.worker = Worker(self.rank, world.size)
        self.node = Node(tree, self.worker, coordinator, self.send, world.announce, self._take_aside)
        self.stalls: Stalls | None = None
        self.done = False
        self.error = ""
        self.carried_out: list[object] = []
        self._world = world
        # Its host's ready table, if cached tensors are agreed on there.
        self._table = world.tables[self.host] if world.tables else None
        self._program = world.program(self.rank, world.size)
        self._fresh: list[tuple[int, Request]] = []
        self._in_flight = 0
        self._waits = False
        self._cached: dict[int, Response] = {}  # what the slots mean, if there is a table
        self._log_at = 0
        self._batches: deque[SimulatedBatch] = deque()
        self._running: SimulatedBatch | None = None
        self._list: tuple[ResponseList, list[Response]] | None = None
        self._timer = -1.0

    # -- the program's thread

    def advance(self) -> None:
        """Go on with the program."""
        for action in self._program:
            if isinstance(action, Hang):
                return
            if isinstance(action, Compute):
                self._world.clock.after(action.seconds, self.advance)
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
            self._world.clock.after(self._world.cycle, self._flush)
        self._fresh += requests
        self._in_flight += len(requests)

    def _flush(self) -> None:
        """Mark cached tensors ready, and let the background thread send requests for the others."""
        fresh, self._fresh = self._fresh, []
        marked, left = self._split(fresh)
        if marked and self._table is not None:
            self._table.process.call(self._table.mark, self.rank, marked)
        if left:
            wake = self._world.network.wake
            self._world.clock.after(wake, self.process.call, self._send_requests, left)

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
        if not self.error:
            self.node.submit(self.worker.compose(fresh), self.process.now)

    def send(self, target: int, payload: bytes) -> Delivered:
        """Send a message to another rank."""
        self.process.spend(self._world.network.message_cpu)
        other = self._world.ranks[target]
        self._world.wires.send(
            (self.rank, target), (self.host, other.host), len(payload), self.process.now,
            other.arrive, self.rank, payload,
        )  # fmt: skip
        return Delivered()

    def arrive(self, source: int, payload: bytes) -> None:
        """Take a message that has arrived."""
        self._world.clock.after(self._world.network.wake, self.process.call, self._take, source, payload)

    def _take(self, source: int, payload: bytes) -> None:
        self.process.spend(self._world.network.message_cpu)
        self.node.take(source, payload, self.process.now)

    def _take_aside(self, source: int, message: Aside, _: float) -> None:
        stalls = self._world.ranks[0].stalls
        if stalls is not None and not self.error:
            stalls.take(source, self, message)

    def _settle(self) -> None:
        """Do what follows from what has come."""
        if self.error:
            return
        self.node.flush(self.process.now)
        due = self.node.due(self.process.now)
        if due is not None and due != self._timer:
            self._timer = due
            self._world.clock.at(due, self.process.wake)
        if self.stalls is not None:
            self.stalls.look()
        while self.node.respond(self.process.now):
            pass
        if self.node.held is not None:
            self._world.clock.at(self.process.now + _AGAIN_S, self.process.wake)
        self.run_lists()

    # -- the background thread: what was agreed

    def look_at_log(self) -> None:
        """Note, at any time, that the log of the host's table has grown."""
        self._world.clock.after(0.0, self.process.wake)

    def take_back(self, bits: int) -> None:
        """Note, at any time, that marks of these slots are void: their tensors are to be submitted again."""
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
            return self._take_list()
        if self._log_at == len(self._table.log):
            return False
        entry = self._table.log[self._log_at]
        if not entry.number:
            responses = [self._cached[slot] for slot in iter_bits(entry.bits)]
            self._batches.extend(self._world.batches_of(self._log_at, responses))
            self.process.spend(MARK_S * entry.bits.bit_count())
        elif self._world.audience_of(entry.number) >> self.rank & 1 and not self._take_list():
            return False
        self._log_at += 1
        return True

    def _take_list(self) -> bool:
        if self.node.first(self.process.now) is None:
            return False
        responses = self.node.pop()
        todo = self.worker.process(responses)
        for batch in plan(todo, self._world.fusion_threshold):
            self._batches.append(batch_of(responses.seq, batch))
        self._list = responses, todo
        return True

    def _end_list(self, responses: ResponseList, todo: Sequence[Response]) -> None:
        self._list = None
        self.worker.carried_out()
        if self._table is not None:
            for response in todo:
                if response.slot >= 0 and response.process_set == GLOBAL_SET:
                    self._cached[response.slot] = response
        if responses.stop is not None:
            self._world.end(self, responses.stop.message)

    def _begin(self, batch: SimulatedBatch) -> None:
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

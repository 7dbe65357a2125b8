"""The background thread: gather, negotiate, plan, run, complete. A rank may have a watchdog thread besides.

Events drive the thread. With nothing to do it sleeps in the transport and uses no CPU. It wakes when a thread
submits or waits, or when a message arrives. Submissions gather for at most the cycle time, or until a thread
waits.

Shutdown: the coordinator passes one rank's ``stop`` to all ranks. By then every rank has run the same
responses. It fails the remaining tensors with the cause, says goodbye to rank 0, and frees its communicators
together with the others. If the thread itself breaks, it fails all tensors, tells the coordinator if
possible, and does not free communicators.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pyhvd.backends.base import Pieces
from pyhvd.backends.host import HostBackend
from pyhvd.config import Config
from pyhvd.controller import Coordinator, Worker
from pyhvd.engine.autotuner import Tuner, tuning_of
from pyhvd.engine.error_mapping import error_of_thread, exception_of, info_of
from pyhvd.engine.executor import Executor
from pyhvd.engine.shutdown import GOODBYE, ShutdownBarrier
from pyhvd.engine.watchdog import ProgressProbe, give_up_time, make_watch
from pyhvd.errors import HorovodInternalError, ShutDownError
from pyhvd.native.shared_memory import FastPath
from pyhvd.negotiation.fusion import plan
from pyhvd.negotiation.leader import Leader
from pyhvd.negotiation.messages import (
    PROTOCOL_VERSION,
    ErrorInfo,
    ErrorKind,
    MergedList,
    OutOfBand,
    RelayedList,
    Request,
    RequestList,
    Response,
    ResponseList,
    StillWaiting,
    TimelineOrder,
    Tuning,
    decode_merged,
    decode_out_of_band,
    decode_relayed,
    decode_requests,
    decode_responses,
    encode,
    encode_out_of_band,
    is_out_of_band,
    iter_bits,
    pack_ranks,
    unpack_ranks,
)
from pyhvd.observe.hang_reporter import RankLocations, make_reporter, take_aside
from pyhvd.observe.hooks import Instruments
from pyhvd.observe.host_meter import HostMeter
from pyhvd.observe.metrics import Meter
from pyhvd.observe.stall_inspector import ANSWER_SECONDS
from pyhvd.observe.timeline import Recorder
from pyhvd.queue import TensorEntry, TensorQueue
from pyhvd.transport.fabric import Fabric

if TYPE_CHECKING:
    from pyhvd.transport.control import ControlTransport, Sending

_log = logging.getLogger("pyhvd")

_LAST_LIST_SECONDS = 0.2
"""Time limit (s) for the delivery of the last list, whose receiver may be dead or stopped."""


class NoFastPath:
    """A fast path that is off: every call goes by message.

    :class:`pyhvd.engine.fast_path.FastPathAdapter` overrides each method for a fast path that exists.

    Attributes
    ----------
    across : bool
        Whether the ranks are on several hosts.
    holds_back : bool
        Whether a request is held back: look again soon.
    """

    across = False
    holds_back = False

    def open_set(self, set_id: int, backend: HostBackend) -> None:
        """Let a process set's allreduces use the fast path, if its ranks share a window."""

    def close_set(self, set_id: int) -> list[TensorEntry]:  # noqa: ARG002
        """Forget a process set; return its tensors in flight."""
        return []

    def close(self, stuck: bool = False) -> list[TensorEntry]:  # noqa: ARG002
        """Accept no further calls; return the tensors in flight. ``stuck``: the thread is blocked."""
        return []

    def forget(self, keep: bool = False) -> None:
        """Release the handles' arrays; with ``keep``, only those that no other rank can reach."""

    def look(self) -> tuple[list[str], bool, int]:
        """Return the names in flight, whether a batch is running, and the position. From any thread."""
        return [], False, 0

    def flush(self) -> None:
        """Mark held calls as ready: a thread waits."""

    def before_sending(self, fresh: list[tuple[int, Request]]) -> list[tuple[int, Request]]:
        """Return the requests to send."""
        return fresh

    def announce(self, number: int, ranks: int) -> bool:  # noqa: ARG002
        """Give a list for these ranks its place in the ready log; return False if the log is full.

        Number 0 is no list: only recalls and delegations become known to other hosts.
        """
        return True

    def enter(self, number: int) -> bool:  # noqa: ARG002
        """Return whether it is a response list's turn; True holds the progress lock until :meth:`leave`."""
        return True

    def leave(self) -> None:
        """Release the progress lock, if :meth:`enter` took it."""

    def waiting(self, patience: float) -> dict[int, bytes]:  # noqa: ARG002
        """Return, by process set, the slots that this rank marked so long (s) ago; rank 0 may not see it."""
        return {}

    def to_recall(self) -> dict[int, bytes]:
        """Return, by process set, the slots that the coordinator must recall for what is held back; once."""
        return {}

    def tune(self, threshold: int, cycle: float) -> None:
        """Use another fusion threshold (bytes) and cycle time (s)."""

    def prepare(self, message: ResponseList) -> None:
        """Take back the calls that a response list answers."""

    def follow(self, todo: Iterable[Response]) -> None:
        """Take back the calls whose cache slots a response list reassigns."""

    def install(self, todo: Sequence[Response]) -> None:
        """Accept the calls that a response list has put into the cache, once it is carried out."""


class ResponseQueue:
    """The response lists that this rank has yet to run, in order, and their delivery to the ranks below.

    Only the runtime's thread uses it. A rank runs a list only after this list and all earlier lists have left
    for all ranks below it. The reason: MPI does not progress a queued send while its sender waits outside
    MPI, as in shared memory. The rank would wait for its peers in shared memory, and they for their list, or
    for ranks that wait for an earlier list. The wait is finite because no rank waits for later lists: the
    others can run all earlier lists, and then receive this one and pass it on.

    Parameters
    ----------
    control : ControlTransport
        Carries the lists down the tree.
    """

    def __init__(self, control: ControlTransport) -> None:
        self._control = control
        self._lists: deque[tuple[ResponseList, list[Sending], float]] = deque()
        self._under_way: list[Sending] = []  # known sends, including those of lists for other ranks only

    def hear(self, payload: bytes | bytearray) -> None:
        """Append a list that has arrived from above, and pass it on."""
        if not self._control.tree.children:
            self._append(decode_responses(payload))
            return
        relayed = decode_relayed(payload)
        audience = unpack_ranks(relayed.ranks)
        self._pass_on(relayed.payload, audience)
        if audience >> self._control.rank & 1:
            self._append(decode_responses(relayed.payload))

    def publish(self, responses: ResponseList, audience: int) -> None:
        """Send a list to the ranks that it concerns, a bit vector; on rank 0, which may be one of them."""
        self._pass_on(encode(responses), audience)
        if audience >> self._control.rank & 1:
            self._append(responses)

    def _pass_on(self, payload: bytes, audience: int) -> None:
        tree, send = self._control.tree, self._control.send
        self._under_way = [sending for sending in self._under_way if not sending.gone()]
        for child, below in tree.children.items():
            ranks = below & audience
            if ranks and child in tree.leaders:
                relayed = RelayedList(PROTOCOL_VERSION, pack_ranks(ranks), payload)
                self._under_way.append(send(child, encode(relayed)))
            elif ranks:
                self._under_way.append(send(child, payload))

    def _append(self, responses: ResponseList) -> None:
        self._lists.append((responses, list(self._under_way), time.monotonic() + _LAST_LIST_SECONDS))

    def has_ended(self) -> bool:
        """Return whether the last list has arrived."""
        return bool(self._lists) and self._lists[-1][0].stop is not None

    def first(self) -> ResponseList | None:
        """Return the next list if this rank may run it now."""
        if not self._lists:
            return None
        responses, sendings, until = self._lists[0]
        if all(sending.gone() for sending in sendings):
            return responses
        return responses if responses.stop is not None and time.monotonic() >= until else None

    def pop(self) -> ResponseList:
        """Remove and return the first list."""
        return self._lists.popleft()[0]

    def look_at(self) -> float | None:
        """Return when to check the first list again without an event; None for never."""
        if not self._lists or self._lists[0][0].stop is None or self.first() is not None:
            return None
        return self._lists[0][2]


@dataclass(slots=True, kw_only=True)
class RuntimeParts:
    """Objects that a runtime uses besides its transport and backends.

    Attributes
    ----------
    where : RankLocations
        Locations of the ranks.
    hooks : Instruments
        The instruments to notify.
    recorder : Recorder
        Starts and stops timelines.
    fast_path : FastPath or None
        The fast path; the thread makes progress on it while no other thread waits, and sleeps on it.
    make_adapter : callable or None
        ``make_adapter(worker, queue, meter)`` returns the fast path as the runtime sees it.
    surroundings : callable
        A context manager that the background thread enters; callbacks of handles run in it.
    tuner : Tuner or None
        The autotuner, on rank 0 of a tuned job; the runtime closes it.
    between : HostMeter or None
        Counts what crosses to other hosts.
    generation : int or None
        The generation of this rank, in an elastic job.
    """

    where: RankLocations
    hooks: Instruments
    recorder: Recorder
    fast_path: FastPath | None = None
    make_adapter: Callable[[Worker, TensorQueue, Meter], NoFastPath] | None = None
    surroundings: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    tuner: Tuner | None = None
    between: HostMeter | None = None
    generation: int | None = None


class Runtime:
    """One rank's engine: its background thread and the state of that thread.

    Parameters
    ----------
    control : ControlTransport
        Carries messages; the runtime closes it.
    backends : dict of int to HostBackend
        Backends by process set id; the runtime closes them.
    sets : sequence of tuple of int
        Members of the static process sets 1, 2, ...
    config : Config
        This rank's configuration, with rank 0's values of the shared knobs.
    make_backend : callable
        Returns the backend of a new set, from its fabric and its ranks.
    parts : RuntimeParts
        All other objects that the runtime works with.
    """

    def __init__(
        self,
        control: ControlTransport,
        backends: dict[int, HostBackend],
        sets: Sequence[tuple[int, ...]],
        config: Config,
        make_backend: Callable[[Fabric, tuple[int, ...]], HostBackend],
        parts: RuntimeParts,
    ) -> None:
        self._control, self._config = control, config
        fast_path = parts.fast_path
        self._fit(parts)
        self.tuning = tuning_of(config)
        self._queue = TensorQueue(control.wake, config.cycle_time_ms / 1000, fast_path)
        self._worker = Worker(control.rank, control.size, sets)
        self._coordinator = (
            Coordinator(control.size, config.cache_capacity, sets, fast_path) if control.rank == 0 else None
        )
        self._leader = Leader(control.tree.branch, self._worker.sets) if control.tree.merges else None
        self.meter = self._make_meter(parts)
        self._fast_path = NoFastPath()
        if parts.make_adapter is not None:
            self._fast_path = parts.make_adapter(self._worker, self._queue, self.meter)
        self._hangs = make_reporter(
            config, self._where, control.send, self._coordinator, fast_path is not None, self.meter
        )
        self._executor = Executor(
            control.rank,
            self._queue,
            backends,
            self._worker.sets,
            make_backend,
            self.meter,
            self._where.places,
            self._fast_path.open_set,
            self._fast_path.close_set,
            self._hooks,
            config,
        )
        self._recorder.members = self._worker.sets
        self._shutdown_barrier = ShutdownBarrier(control)
        self._outgoing: ResponseList | None = None
        self._lists = ResponseQueue(control)
        self._abandoned = self.broken = False
        # Any thread writes it before wake(); the runtime's thread reads it after it has woken.
        self._stop: ErrorInfo | None = None
        self._stop_sent = self._recalls_due = False
        self._waiting_due = 0.0
        # As _stop, but written by the watchdog: the reason why this rank gives up.
        self._verdict: HorovodInternalError | None = None
        self._over = threading.Event()
        self._probe = ProgressProbe(
            self._where, self._queue, self._executor, self._fast_path.look, self._recorder
        )
        self._watch = make_watch(config, control.rank, self._probe, self._give_up)
        self.ended: HorovodInternalError | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name=f"pyhvd-{control.rank}", daemon=True)

    def _make_meter(self, parts: RuntimeParts) -> Meter:
        return Meter(
            self._control.rank,
            self._control.size,
            self._config.metrics_timed,
            parts.fast_path,
            self._coordinator.stragglers if self._coordinator is not None else None,
            parts.between,
            parts.generation,
        )

    def _fit(self, parts: RuntimeParts) -> None:
        self._tuner, self._where = parts.tuner, parts.where
        self._hooks, self._recorder = parts.hooks, parts.recorder
        self._surroundings = parts.surroundings
        if parts.tuner is not None and parts.fast_path is not None:
            parts.fast_path.measure(parts.tuner.sampler)

    # -- for any thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the background thread."""
        self._thread.start()
        if self._watch is not None:
            self._watch.start()

    def submit(self, entries: Sequence[TensorEntry]) -> None:
        """Submit the tensors of one call; see :meth:`pyhvd.queue.TensorQueue.add`."""
        if self._hooks.active:
            self._hooks.queued(entries)
        self._queue.add(entries)

    def check_joined(self, process_set: int, request: Request) -> None:
        """See :meth:`pyhvd.queue.TensorQueue.check_joined`."""
        self._queue.check_joined(process_set, request)

    def record(self, order: TimelineOrder) -> None:
        """Start or stop a timeline on all ranks; return when this rank has. On rank 0 only."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of a handle must not start or stop the timeline: that waits")
        future = self._recorder.ask(order)
        self._control.wake()
        future.result()

    def announce(self, process_set: int, refusal: Request) -> None:
        """Announce to the other ranks that this rank rejected a tensor."""
        self._queue.announce(process_set, refusal)

    def flush(self) -> None:
        """Send the gathered submissions: a thread waits."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a callback of a handle must not wait: it runs on the thread that would end it"
            )
        if self.is_forked():
            raise RuntimeError("this process was forked from one that uses pyhvd; only the parent can wait")
        self._queue.flush()
        self._fast_path.flush()

    def is_forked(self) -> bool:
        """Return whether this is a forked child of the rank, which has none of its threads."""
        return os.getpid() != self._pid

    def is_here(self) -> bool:
        """Return whether the calling thread is one of the runtime's own, which cannot wait for its end."""
        here = threading.current_thread()
        return here is self._thread or (self._watch is not None and self._watch.is_here())

    def stop(self, reason: ErrorInfo) -> None:
        """Stop every rank's runtime, and wait for the end of this rank's."""
        if self._stop is None:
            self._stop = reason
        self._control.wake()
        self.join()

    def join(self) -> None:
        """Wait until the background thread has ended, or has been abandoned."""
        if self.is_here():
            return
        limit = give_up_time(self._config)
        if not self._over.wait(limit or None):
            _log.error("%s", self._probe.late_end(limit))
            self.broken = True
        elif not self._abandoned:
            self._thread.join()
            if self._watch is not None:
                self._watch.join()

    # -- the thread ----------------------------------------------------------------------------------

    def _main(self) -> None:
        with self._surroundings():
            self._live()

    def _live(self) -> None:
        try:
            stop = self._loop()
            self._end(exception_of(stop))
            if stop.kind == ErrorKind.HOST_LOST:  # its ranks say no goodbye
                self.broken = True
                self._recorder.finish(None)
                return
            self._shutdown_barrier.say()
            # A rank with a broken engine does not take part in measuring clocks.
            self._recorder.finish(self._executor.fabric if stop.kind == ErrorKind.SHUT_DOWN else None)
            self._executor.close(stop)
            self._control.close()
        except BaseException as exc:
            self._break(exc)
        finally:
            if self._watch is not None:
                self._watch.stop()
            self._over.set()

    def _loop(self) -> ErrorInfo:
        while True:
            active = self._communicate()
            while (responses := self._next_list()) is not None:
                active = True
                self._carry_out(responses)
                if responses.stop is not None:
                    return responses.stop
                self._fast_path.leave()
            if not active:
                self._sleep()

    def _communicate(self) -> bool:
        """Send new messages, take arrived ones; return whether there were any."""
        active = self._send_requests()
        for source, payload in self._control.receive():
            active = True
            if not payload:
                self._shutdown_barrier.hear(source)
            elif is_out_of_band(payload):
                self._take_out_of_band(source, decode_out_of_band(payload))
            elif source == self._control.tree.parent:
                self._lists.hear(payload)
            else:
                self._receive(source, self._decode(source, payload))
        if self._leader is not None and self._leader.due is not None and time.monotonic() >= self._leader.due:
            active = True
            self._control.send(self._control.tree.parent, encode(self._leader.flush()))
        if self._coordinator is not None and self._outgoing is None:
            if self._tuner is not None:
                self._look_at_samples(self._tuner, self._coordinator)
            if self._recorder.asked and (order := self._recorder.next_order()) is not None:
                self._coordinator.order_timeline(order)
            self._outgoing = self._coordinator.respond()
        if self._outgoing is None:
            self._announce_recalls()
        return self._publish() or active

    def _announce_recalls(self) -> None:
        """Tell the other hosts which slots the coordinator has recalled, before the next list does."""
        if self._coordinator is not None and self._fast_path.across:
            self._recalls_due = not self._fast_path.announce(0, 0)

    def _take_out_of_band(self, source: int, message: OutOfBand) -> None:
        if not isinstance(message, StillWaiting):
            take_aside(message, source, self._where, self._hangs, self._control.send)
        elif self._coordinator is not None:
            self._coordinator.recall(message)

    def _look_at_samples(self, tuner: Tuner, coordinator: Coordinator) -> None:
        if (tuning := tuner.look()) is not None:
            coordinator.tune(tuning)
        elif tuner.done:
            tuner.close()
            self._tuner = None

    def _decode(self, source: int, payload: bytes | bytearray) -> MergedList:
        """Read a message from below."""
        if source in self._control.tree.leaders:
            return decode_merged(payload)
        return MergedList.of(source, decode_requests(payload))

    def _receive(self, source: int, message: MergedList) -> None:
        """Take a message from below, or this rank's own: merge it, or give it to the coordinator."""
        if self._leader is not None:
            self._leader.take(source, message.parts, time.monotonic())
        elif self._coordinator is not None:
            if self._hooks.active:
                for part in message.parts:
                    requests = self._coordinator.requests_of(part.message)
                    for rank in iter_bits(unpack_ranks(part.ranks)):
                        self._hooks.requested(rank, requests)
            self._coordinator.receive(message, time.monotonic())

    def _send_up(self, message: RequestList) -> None:
        """Send this rank's own message towards the coordinator."""
        if self._leader is None and self._coordinator is None:
            self._control.send(self._control.tree.parent, encode(message))
        else:
            self._receive(self._control.rank, MergedList.of(self._control.rank, message))

    def _publish(self) -> bool:
        """Send the coordinator's response list, at its place in the ready log."""
        responses = self._outgoing
        if responses is None or self._coordinator is None:
            return False
        audience = self._coordinator.audience(responses)
        if not self._fast_path.announce(responses.seq, audience):
            return False  # the log is full because a rank is far behind: try again later
        self._outgoing = None
        self._lists.publish(responses, audience)
        return True

    def _next_list(self) -> ResponseList | None:
        """Return the next response list if its turn has come."""
        if self._verdict is not None:
            raise self._verdict
        if (responses := self._lists.first()) is None:
            return None
        return self._lists.pop() if self._fast_path.enter(responses.seq) else None

    def _carry_out(self, responses: ResponseList) -> None:
        if responses.tuning is not None:
            self._tune(responses.tuning)
        self._fast_path.prepare(responses)
        todo = self._worker.process(responses)
        if self._hooks.active:
            self._hooks.list_taken(responses.seq, todo)
        self._fast_path.follow(todo)
        for batch in [todo] if len(todo) == 1 else self._plan(todo):
            self._executor.run(batch)
            if self._tuner is not None:
                self._tuner.count(batch)
        self._worker.carried_out()
        self._fast_path.install(todo)
        if responses.timeline is not None:
            self._recorder.follow(responses.timeline, self._executor.fabric)

    def _plan(self, todo: Sequence[Response]) -> list[list[Response]]:
        return plan(todo, self.tuning.fusion_threshold, self._config.disable_group_fusion)

    def _tune(self, tuning: Tuning) -> None:
        """Change the knobs, at the same place in the order of responses on every rank.

        No batch runs meanwhile: this thread holds the progress lock of the fast path, if there is one.
        """
        if "cycle_time_ms" in self._config.given:  # local to this rank
            tuning = msgspec.structs.replace(tuning, cycle_time_ms=self._config.cycle_time_ms)
        self.tuning = tuning
        self._executor.resize(Pieces(tuning.chunk_size, tuning.staging_size))
        self._queue.gather_for(tuning.cycle_time_ms / 1000)
        self._fast_path.tune(tuning.fusion_threshold, tuning.cycle_time_ms / 1000)
        if self._tuner is not None:
            self._tuner.applied()

    def _send_requests(self) -> bool:
        stop = None if self._stop_sent else self._stop
        fresh = self._fast_path.before_sending(self._queue.take(time.monotonic()))
        for process_set, request in fresh:
            if request.error:
                self._queue.refusal_sent(process_set, request.name)
        fresh = [each for each in fresh if self._is_known(*each)]
        if slots := self._fast_path.to_recall():
            self._have_recalled(slots)
        if not fresh and stop is None:
            return False
        self._stop_sent = self._stop_sent or stop is not None
        message = self._worker.compose(fresh, stop, self._queue.site_of)
        if now := self.meter.sent(message):
            self._queue.stamp([(set_id, request.name) for set_id, request in fresh], now)
        self._send_up(message)
        return True

    def _have_recalled(self, slots: dict[int, bytes]) -> None:
        """Let the ranks submit by message the tensors of these slots, by process set."""
        message = StillWaiting(PROTOCOL_VERSION, slots)
        if self._coordinator is not None:
            self._coordinator.recall(message)
        else:
            self._control.send(0, encode_out_of_band(message))

    def _is_known(self, process_set: int, request: Request) -> bool:
        """Return whether a set still exists; a thread may submit to a set during its removal."""
        if process_set in self._worker.sets:
            return True
        if not request.error and (entry := self._queue.pop(process_set, request.name)) is not None:
            text = f"{request.name!r}: process set {process_set} has been removed"
            entry.done(None, ShutDownError(text))
        return False

    def _sleep(self) -> None:
        due = self._queue.sleep_until()
        now = time.monotonic()
        look = self._inspect(now)
        again = self._outgoing is not None or self._recalls_due or self._fast_path.holds_back
        retry = now + 1e-3 if again else None
        drain = self._executor.look(now)
        merged = self._leader.due if self._leader is not None else None
        times = [
            t
            for t in (due, look, retry, drain, merged, self._lists.look_at(), self._tell_waiting(now))
            if t is not None
        ]
        until = min(times, default=math.inf)
        if until > now:
            self._control.wait(until - now if until < math.inf else None)
            woken = time.monotonic()
            if self._hangs is not None and woken - until > self._hangs.oversleep:
                self._hangs.resumed(woken)
        self._queue.awake()

    def _tell_waiting(self, now: float) -> float | None:
        """Tell rank 0 of cached tensors that wait for long; return the time of the next look."""
        period = self._config.stall_check_time_seconds / 2
        unused = self._coordinator is not None or not self._fast_path.across
        if unused or not period or self._config.stall_check_disable:
            return None
        if now >= self._waiting_due:
            self._waiting_due = now + period
            if slots := self._fast_path.waiting(period):
                self._have_recalled(slots)
        return self._waiting_due

    def _inspect(self, now: float) -> float | None:
        """Look for stalled tensors if a look is due; return the time of the next look."""
        if self._coordinator is None or self._hangs is None:
            return None
        if now < self._hangs.due:
            return self._hangs.due
        look, error = self._hangs.inspect(now)
        self._announce_recalls()
        if error is not None:
            self._coordinator.receive(MergedList.of(0, self._worker.compose([], error)), now)
        return look

    # -- for the watchdog -------------------------------------------------------------------------------

    def _give_up(self, passed: float) -> None:
        """Make the background thread end this rank; if it is inside a collective, end the rank here."""
        self._verdict = error = self._probe.error(passed)
        self._executor.abort(info_of(error, self._control.rank))
        self._control.wake()
        if self._over.wait(ANSWER_SECONDS) or self.ended is not None:
            return
        self._abandoned = self.broken = True
        self.ended = error
        _log.error("rank %d: %s", self._control.rank, error)
        # The thread may still complete them later; the first completion counts.
        left = [*self._executor.running, *self._queue.close(error), *self._fast_path.close(stuck=True)]
        for entry in left:
            if entry is not None:
                entry.done(None, error)
        self._recorder.abandon(error)
        self._fast_path.forget(keep=True)
        self._over.set()

    # -- shutdown -------------------------------------------------------------------------------------

    def _end(self, error: HorovodInternalError) -> None:
        self.ended = error
        if self._tuner is not None:
            self._tuner.close()
        self._recorder.close(error)
        for entry in [*self._queue.close(error), *self._fast_path.close()]:
            entry.done(None, error)
        self._fast_path.forget()

    def _break(self, exc: BaseException) -> None:
        """Announce that this thread has failed, to all callers and ranks that can be reached."""
        rank, error, info = self._control.rank, error_of_thread(exc), info_of(exc, self._control.rank)
        with contextlib.suppress(Exception):  # callers must get their error even if a step fails
            self._executor.abort(info)
        if self._abandoned:
            return
        first = info.rank == rank  # otherwise another rank reports the failure, and ends the job
        # The ranks of a lost host cannot end the job: every rank that hears of it does.
        self.broken = self.broken or first or info.kind == ErrorKind.HOST_LOST
        if self.ended is not None:
            _log.error("shutting down did not end well: %s", error)
            return
        if first:
            _log.error("rank %d: %s", rank, error, exc_info=None if self._verdict is not None else exc)
        with contextlib.suppress(Exception):
            self._send_up(RequestList(PROTOCOL_VERSION, 0, stop=info))
            if self._coordinator is not None:
                self._publish_end(self._coordinator)
            else:
                self._pass_on_end()
                self._control.send(self._control.tree.parent, GOODBYE)
            self._control.drain(1.0)
        self._end(error)
        self._recorder.finish(None)

    def _pass_on_end(self) -> None:
        """Pass lists on to the ranks below until the last one, for a short time only."""
        if self._leader is not None:
            self._control.send(self._control.tree.parent, encode(self._leader.flush()))
        until = time.monotonic() + 1.0
        while self._leader is not None and not self._lists.has_ended() and time.monotonic() < until:
            for source, payload in self._control.receive():
                if payload and source == self._control.tree.parent and not is_out_of_band(payload):
                    self._lists.hear(payload)
            self._control.wait(0.01)

    def _publish_end(self, coordinator: Coordinator) -> None:
        """Send the lists that were held back, then the last one; each at its place in the ready log."""
        until = time.monotonic() + 1.0
        for _ in range(2):
            if self._outgoing is None:
                self._outgoing = coordinator.respond()
            while self._outgoing is not None and not self._publish() and time.monotonic() < until:
                time.sleep(1e-3)

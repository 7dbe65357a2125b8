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
import functools
import itertools
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pyhvd import arrays
from pyhvd.backends.base import Pieces
from pyhvd.config import Config
from pyhvd.controller import Coordinator, Node, Worker
from pyhvd.devices.pending import DeviceWaits, PendingArray
from pyhvd.engine.autotuner import Tuner, tuning_of
from pyhvd.engine.error_mapping import error_of_thread, exception_of, info_of
from pyhvd.engine.executor import Executor
from pyhvd.engine.fast_path import FastPathAdapter
from pyhvd.engine.rounds import RoundKeeper
from pyhvd.engine.set_backends import SetBackends
from pyhvd.engine.shutdown import ShutdownBarrier, end_early
from pyhvd.engine.watchdog import HostClaim, ProgressProbe, give_up_time, make_watch
from pyhvd.errors import HorovodInternalError, ShutDownError
from pyhvd.native.shared_memory import FastPath, close_pool, open_pool, tidy_pool
from pyhvd.negotiation.fusion import plan
from pyhvd.negotiation.message_table import StragglerStats
from pyhvd.negotiation.messages import (
    FOUNDING,
    GLOBAL_SET,
    PROTOCOL_VERSION,
    Aside,
    ErrorInfo,
    ErrorKind,
    Request,
    Response,
    ResponseList,
    StackReport,
    StackRequest,
    StillInRound,
    StillWaiting,
    TimelineOrder,
    Tuning,
    WaitAnswer,
    WaitQuestion,
)
from pyhvd.observe.hang_reporter import RankLocations, make_reporter, take_aside
from pyhvd.observe.hooks import Instruments
from pyhvd.observe.metrics import Meter
from pyhvd.observe.stall_inspector import ANSWER_SECONDS
from pyhvd.observe.timeline import Recorder
from pyhvd.queue import TensorEntry, TensorQueue
from pyhvd.transport.arena import Arena

if TYPE_CHECKING:
    from pyhvd.transport.control import ControlTransport

_log = logging.getLogger("pyhvd")


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
    make_meter : callable
        Returns the rank's counters, from the coordinator's stragglers on rank 0.
    fast_path : FastPath or None
        The fast path; the thread makes progress on it while no other thread waits, and sleeps on it.
    arena : Arena or None
        Shared memory of arrays that the fast path need not copy.
    surroundings : callable
        A context manager that the background thread enters; callbacks of handles run in it.
    tuner : Tuner or None
        The autotuner, on rank 0 of a tuned job; the runtime closes it.
    """

    where: RankLocations
    hooks: Instruments
    recorder: Recorder
    make_meter: Callable[[StragglerStats | None], Meter]
    fast_path: FastPath | None = None
    arena: Arena | None = None
    surroundings: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    tuner: Tuner | None = None


class Runtime:
    """One rank's engine: its background thread and the state of that thread.

    Parameters
    ----------
    control : ControlTransport
        Carries messages; the runtime closes it.
    backends : SetBackends
        The backends of this rank's process sets; the runtime makes and closes them.
    sets : sequence of tuple of int
        Members of the static process sets 1, 2, ...
    config : Config
        This rank's configuration, with rank 0's values of the shared knobs.
    parts : RuntimeParts
        All other objects that the runtime works with.
    """

    def __init__(
        self,
        control: ControlTransport,
        backends: SetBackends,
        sets: Sequence[tuple[int, ...]],
        config: Config,
        parts: RuntimeParts,
    ) -> None:
        self._control, self._config = control, config
        self._tuner, self.where = parts.tuner, parts.where
        self._hooks, self._recorder = parts.hooks, parts.recorder
        self._surroundings, self._arena = parts.surroundings, parts.arena
        rank, size, fast_path = control.rank, control.size, parts.fast_path
        if self._tuner is not None and fast_path is not None:
            fast_path.measure(self._tuner.sampler)
        self.tuning = tuning_of(config)
        self.queue = TensorQueue(control.wake, config.cycle_time_ms / 1000, fast_path)
        worker = Worker(rank, size, sets)
        coordinator = None if rank else Coordinator(size, config.cache_capacity, sets, fast_path)
        self.meter = parts.make_meter(None if coordinator is None else coordinator.stragglers)
        self._hangs = make_reporter(
            config, self.where, self._send_aside, coordinator, self.meter, unannounced=fast_path is not None
        )
        self._rounds = None if coordinator is None else RoundKeeper(coordinator, self.where, control.send)
        self._node = Node(
            control.tree, worker, coordinator, control.send, self._announce, self._take_aside, self._hooks
        )
        self._fast_path: FastPathAdapter | None = None
        if fast_path is not None:
            fabric = backends[GLOBAL_SET].fabric
            self._fast_path = FastPathAdapter(fast_path, parts.arena, fabric, worker, self.queue, self.meter)
        self._executor = Executor(
            self.where, self.queue, backends, worker.sets, self.meter, self._fast_path, self._hooks, config
        )
        self._recorder.members = worker.sets
        self._shutdown_barrier = ShutdownBarrier(control)
        self._abandoned = self.broken = False
        # Any thread writes it before wake(); the runtime's thread reads it after it has woken.
        self._stop: ErrorInfo | None = None
        # Any thread appends before wake(); the runtime's thread takes them after it has woken.
        self._to_tell: deque[StillInRound | StackRequest | WaitQuestion] = deque()
        # Any thread adds a queue for the answer to its question; the runtime's thread takes it away.
        self._questions: dict[int, queue.SimpleQueue[str]] = {}
        self._question_numbers = itertools.count(1)
        # The watchdog clears it, and asks; the runtime's thread sets it when rank 0 answers, and at its end.
        self._answered = threading.Event()
        self._stop_sent = self._recalls_due = self._knows_capacity = False
        self._waiting_due = 0.0
        # As _stop, but written by the watchdog: the reason why this rank gives up.
        self._verdict: HorovodInternalError | None = None
        self._over = threading.Event()
        self._probe = ProgressProbe(
            self.where, self.queue, self._executor, self._fast_path, self._recorder, self._rank_0_answers,
            HostClaim(f"pyhvd-watch-{self.where.job}"),
        )  # fmt: skip
        self._watch = make_watch(config, rank, self._probe, self._give_up)
        self.ended: HorovodInternalError | None = None
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name=f"pyhvd-{rank}", daemon=True)

    # -- for any thread ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the background thread."""
        open_pool(self._config.pool_size)
        if self._arena is not None:
            self._arena.keep_results(self._config.pool_size, self._control.wake)
        self._thread.start()
        if self._watch is not None:
            self._watch.start()

    def submit(self, entries: Sequence[TensorEntry]) -> None:
        """Submit the tensors of one call; see :meth:`pyhvd.queue.TensorQueue.add`."""
        if self._hooks.active:
            self._hooks.queued(entries)
        self.queue.add(entries)

    def record(self, order: TimelineOrder) -> None:
        """Start or stop a timeline on all ranks; return when this rank has. On rank 0 only."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a callback of a handle must not start or stop the timeline: that waits")
        future = self._recorder.ask(order)
        self._control.wake()
        future.result()

    @property
    def thread_id(self) -> int:
        """Identifier of the runtime's thread, which has started."""
        return self._thread.ident or 0

    def check_may_wait(self) -> None:
        """Raise RuntimeError on the runtime's thread, as in a callback of a handle."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a callback of a handle must not wait: it runs on the thread that would end it"
            )

    def flush(self) -> None:
        """Send the gathered submissions: a thread waits."""
        self.check_may_wait()
        if self.is_forked():
            raise RuntimeError("this process was forked from one that uses pyhvd; only the parent can wait")
        self.queue.flush()
        if self._fast_path is not None:
            self._fast_path.path.flush()

    def synchronize_device(self, timeout: float) -> None:
        """Wait for this rank's device; see :meth:`DeviceExecutor.synchronize`."""
        self.check_may_wait()
        self._executor.devices.synchronize(timeout)

    @functools.cached_property
    def device_waits(self) -> DeviceWaits:
        """What handles of device arrays can ask."""
        by_host = self._config.device_wait == "host"
        return DeviceWaits(self._executor.devices.check_aborted, self._await_device if by_host else None)

    def _await_device(self, results: Sequence[PendingArray], timeout: float) -> None:
        """Wait for results; callbacks, on the runtime's own threads, do not."""
        if not self.is_here():
            self._executor.devices.await_all(results, timeout)

    def tell_round(self, process_set: int, prefix: str) -> None:
        """Tell rank 0 that a thread has long waited in the round of a backward pass."""
        self._to_tell.append(StillInRound(PROTOCOL_VERSION, process_set, prefix))
        self._control.wake()

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
            self._answered.set()
            close_pool()
            if self._arena is not None:
                self._arena.keep_results(0)
            self._over.set()

    def _loop(self) -> ErrorInfo:
        while True:
            active = self._communicate()
            while (responses := self._next_list()) is not None:
                active = True
                self._carry_out(responses)
                if responses.stop is not None:
                    return responses.stop
                if self._fast_path is not None:
                    self._fast_path.leave()
            if not active:
                self._sleep()

    def _communicate(self) -> bool:
        """Send new messages, take arrived ones; return whether there were any."""
        active = self._send_requests()
        arrived = self._control.receive()
        now = time.monotonic()
        while self._to_tell:
            self._node.tell_rank_0(self._to_tell.popleft(), now)
        for source, payload in arrived:
            active = True
            if payload:
                self._node.take(source, payload, now)
            else:
                self._shutdown_barrier.hear(source)
        if self._node.flush(time.monotonic()):
            active = True
        coordinator = self._node.coordinator
        if coordinator is None:
            return active
        if self._node.held is None:
            self._give_orders(coordinator)
        if self._node.respond(now):
            self._look_at_cache(coordinator)
            return True
        if self._node.held is None:
            self._announce_recalls()
        return active

    def _look_at_cache(self, coordinator: Coordinator) -> None:
        """Say once if the response cache has too few slots for the tensors of a step."""
        if self._knows_capacity or not (wanted := coordinator.wanted_slots()):
            return
        self._knows_capacity = True
        _log.warning(
            "%d tensors come again and again, but the response cache has %d slots: the ranks negotiate the"
            " others in full each time. Set PYHVD_CACHE_CAPACITY=%d or more (pyhvdrun --cache-capacity)",
            wanted,
            self._config.cache_capacity,
            wanted,
        )

    def _give_orders(self, coordinator: Coordinator) -> None:
        """Let the next list carry knobs, or an order about timelines, if there are new ones."""
        if self._tuner is not None:
            if (tuning := self._tuner.look()) is not None:
                coordinator.tune(tuning)
            elif self._tuner.done:
                self._tuner.close()
                self._tuner = None
        if self._recorder.asked and (order := self._recorder.next_order()) is not None:
            coordinator.order_timeline(order)

    def _announce(self, number: int, ranks: int) -> bool:
        """Give a list for these ranks (bits) its place in the ready log; return False if there is no room."""
        return self._fast_path is None or self._fast_path.path.announce(number, ranks)

    def _announce_recalls(self) -> None:
        """Tell the other hosts which slots the coordinator has recalled, before the next list does."""
        if self._fast_path is not None and self._fast_path.across:
            self._recalls_due = not self._fast_path.path.announce(0, 0)

    def _take_aside(self, source: int, message: Aside, now: float) -> None:
        if isinstance(message, WaitAnswer):
            if (asked := self._questions.pop(message.number, None)) is not None:
                asked.put(message.text)
        elif isinstance(message, StackRequest | StackReport | WaitQuestion):
            take_aside(message, source, self.where, self._hangs, self._send_aside, now)
        elif isinstance(message, StillInRound) and self._rounds is not None:
            self._rounds.hear(message, now)
        if isinstance(message, StackReport) and self._rounds is not None:
            self._rounds.take(source, message, now)
        elif isinstance(message, StackReport):
            self._answered.set()

    def _send_aside(self, rank: int, payload: bytes) -> None:
        """Send an out-of-band message to a rank, or take it here if it is for this one."""
        if rank == self._control.rank:
            self._node.take(rank, payload, time.monotonic())
        else:
            self._control.send(rank, payload)

    def _next_list(self) -> ResponseList | None:
        """Return the next response list if its turn has come."""
        if self._verdict is not None:
            raise self._verdict
        responses = self._node.first(time.monotonic())
        if responses is None or (self._fast_path is not None and not self._fast_path.enter(responses.seq)):
            return None
        return self._node.pop()

    def _carry_out(self, responses: ResponseList) -> None:
        if responses.tuning is not None:
            self._tune(responses.tuning)
        fast_path, worker = self._fast_path, self._node.worker
        if fast_path is not None:
            fast_path.prepare(responses)
        todo = worker.process(responses)
        if self._hooks.active:
            self._hooks.list_taken(responses.seq, todo)
        if fast_path is not None:
            fast_path.follow(todo)
        for batch in [todo] if len(todo) == 1 else self._plan(todo):
            self._executor.run(batch)
            if self._tuner is not None:
                self._tuner.count(batch)
        worker.carried_out()
        if fast_path is not None:
            fast_path.install(todo)
        if responses.timeline is not None:
            self._recorder.follow(responses.timeline, self._executor.fabric)

    def _plan(self, todo: Sequence[Response]) -> list[list[Response]]:
        return plan(
            todo,
            self.tuning.fusion_threshold,
            groups_alone=self._config.disable_group_fusion,
            device_calls_alone=self._config.device_fusion == "call",
        )

    def _tune(self, tuning: Tuning) -> None:
        """Change the knobs, at the same place in the order of responses on every rank.

        No batch runs meanwhile: this thread holds the progress lock of the fast path, if there is one.
        """
        if "cycle_time_ms" in self._config.given:  # local to this rank
            tuning = msgspec.structs.replace(tuning, cycle_time_ms=self._config.cycle_time_ms)
        self.tuning = tuning
        self._executor.resize(Pieces(tuning.chunk_size, tuning.staging_size))
        self.queue.gather_for(tuning.cycle_time_ms / 1000)
        if self._fast_path is not None:
            self._fast_path.path.tune(tuning.fusion_threshold, tuning.cycle_time_ms / 1000)
        if self._tuner is not None:
            self._tuner.applied()

    def _send_requests(self) -> bool:
        stop = None if self._stop_sent else self._stop
        fresh = self.queue.take(time.monotonic())
        if self._fast_path is not None:
            fresh = self._fast_path.before_sending(fresh)
        for process_set, request in fresh:
            if request.error:
                self.queue.refusal_sent(process_set, request.name)
        fresh = [each for each in fresh if self._is_known(*each)]
        if self._fast_path is not None and (slots := self._fast_path.to_recall()):
            self._node.tell_rank_0(StillWaiting(PROTOCOL_VERSION, slots), time.monotonic())
        if not fresh and stop is None:
            return False
        self._stop_sent = self._stop_sent or stop is not None
        message = self._node.worker.compose(fresh, stop, self.queue.site_of)
        if now := self.meter.sent(message):
            self.queue.stamp([(set_id, request.name) for set_id, request in fresh], now)
        self._node.submit(message, time.monotonic())
        return True

    def _is_known(self, process_set: int, request: Request) -> bool:
        """Return whether a set still exists; a thread may submit to a set during its removal."""
        if process_set == FOUNDING or process_set in self._node.worker.sets:
            return True
        if not request.error and (entry := self.queue.pop(process_set, request.name)) is not None:
            text = f"{request.name!r}: process set {process_set} has been removed"
            entry.done(None, ShutDownError(text))
        return False

    def _sleep(self) -> None:
        due = self.queue.sleep_until()
        now = time.monotonic()
        look = self._inspect(now)
        again = self._node.held is not None or self._recalls_due
        again = again or (self._fast_path is not None and self._fast_path.holds_back)
        retry = now + 1e-3 if again else None
        drain = self._executor.look(now)
        times = (due, look, retry, drain, self._node.due(now), self._tell_waiting(now), self._tidy())
        until = min((each for each in times if each is not None), default=math.inf)
        if until > now:
            self._control.wait(until - now if until < math.inf else None)
            woken = time.monotonic()
            if self._hangs is not None and woken - until > self._hangs.inspector.oversleep:
                self._hangs.resumed(woken)
        self.queue.awake()

    def _tidy(self) -> float | None:
        """Free memory of results that nobody has used for long; return the time of the next look.

        With a fast path, the thread does so where it sleeps, except for results in the arena.
        """
        if self._fast_path is not None:
            return None if self._arena is None else self._arena.tidy(time.monotonic())
        return tidy_pool(time.monotonic_ns()) / 1e9 or None if arrays.pool_used else None

    def _tell_waiting(self, now: float) -> float | None:
        """Tell rank 0 of cached tensors that wait for long; return the time of the next look."""
        period = self._config.stall_check_time_seconds / 2
        fast_path = self._fast_path
        if self._node.coordinator is not None or fast_path is None or not fast_path.across:
            return None
        if not period or self._config.stall_check_disable:
            return None
        if now >= self._waiting_due:
            self._waiting_due = now + period
            if slots := fast_path.waiting(period):
                self._node.tell_rank_0(StillWaiting(PROTOCOL_VERSION, slots), now)
        return self._waiting_due

    def _inspect(self, now: float) -> float | None:
        """Look for stalled tensors if a look is due; return the time of the next look."""
        if self._hangs is None:
            return None
        if now < self._hangs.due:
            return self._hangs.due
        look, error = self._hangs.inspect(now)
        self._announce_recalls()
        if error is not None:
            self._node.stop(error, now)
        return look

    # -- for a thread that gives up waiting ----------------------------------------------------------------

    def explain_wait(self, seconds: float, waits_in: str = "", missing: Sequence[int] = ()) -> str:
        """Return what waits for which ranks, and where they stand; of a thread that has waited so long.

        Rank 0 knows it, except for a wait that is no collective: ``waits_in`` and ``missing`` describe that.
        If it does not answer, the text tells which processes are stopped or have ended.
        """
        number = next(self._question_numbers)
        answer: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._questions[number] = answer
        self._to_tell.append(WaitQuestion(PROTOCOL_VERSION, number, waits_in, seconds, [*missing]))
        self._control.wake()
        try:
            text = answer.get(timeout=2 * ANSWER_SECONDS)
        except queue.Empty:
            text = ""
        return text or self._probe.explain(seconds)

    # -- for the watchdog -------------------------------------------------------------------------------

    def _rank_0_answers(self) -> bool:
        """Return whether rank 0 answers a question; True also if this rank's thread has not sent it."""
        self._answered.clear()
        self._to_tell.append(StackRequest(PROTOCOL_VERSION, 0))
        self._control.wake()
        return self._answered.wait(ANSWER_SECONDS) or bool(self._to_tell)

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
        self._fail_all(error, stuck=True)
        self._recorder.abandon(error)
        self._over.set()

    # -- shutdown -------------------------------------------------------------------------------------

    def _end(self, error: HorovodInternalError) -> None:
        self.ended = error
        if self._tuner is not None:
            self._tuner.close()
        self._recorder.close(error)
        self._fail_all(error)

    def _fail_all(self, error: HorovodInternalError, *, stuck: bool = False) -> None:
        """Fail all tensors in flight. ``stuck``: the thread may still complete some; the first end counts."""
        left = [*(self._executor.running if stuck else ()), *self.queue.close(error)]
        if self._fast_path is not None:
            left += self._fast_path.close(stuck=stuck)
        for entry in left:
            if entry is not None:
                entry.done(None, error)
        if self._fast_path is not None:
            self._fast_path.path.forget(keep=stuck)

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
            end_early(self._control, self._node, info)
        self._end(error)
        self._recorder.finish(None)

"""The agent of a job: it registers with the driver, starts ranks, and supervises them to their end.

A task of Spark is the agent of one rank, in Spark's Python worker, which later runs other tasks. A host has
one agent for all its ranks (:mod:`pyhvd.job.agent.host_agent`). An agent runs no code of the user, loads no
MPI, and leaves nothing behind.
"""

from __future__ import annotations

import errno
import math
import selectors
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyhvd.job.agent.prober import Prober
from pyhvd.job.agent.rank_process import RankEvents, RankProcess
from pyhvd.job.commits.vault import LOST_OTHERS
from pyhvd.job.connections import BEAT_S, DRIVER_SILENT_S, ELASTIC_BEAT_S, Standstill
from pyhvd.job.messages import (
    OUTPUT_CREDIT,
    RESULT_CREDIT,
    Again,
    Answered,
    Beat,
    CodePart,
    DaemonEnded,
    DaemonOutput,
    Dial,
    EndDaemon,
    Ended,
    EnteringInit,
    Exit,
    Failed,
    FromAgent,
    FromDriver,
    Input,
    InputAck,
    Leave,
    Listen,
    Logged,
    Member,
    NextCall,
    OutputAck,
    Pmi,
    PmiValues,
    RankOutput,
    Remark,
    Restore,
    ResultAck,
    ResultPart,
    Signal,
    Start,
    StartDaemon,
    Stop,
    decode_from_driver,
    encode,
    parts,
)
from pyhvd.job.mpi.openmpi.daemon import Daemon, DaemonError
from pyhvd.job.mpi.pmi import answer_get, name_of_world
from pyhvd.job.process import segments
from pyhvd.job.process.exit_report import EXIT, ExitReport
from pyhvd.job.process.signals import ENDING, PAUSING
from pyhvd.job.spec import DRIVER_TIMEOUT
from pyhvd.transport.tcp.connection import Connection
from pyhvd.transport.tcp.session import ChannelError

if TYPE_CHECKING:  # tasks of Spark do not need it
    from pyhvd.job.agent.elastic_host import ElasticHost

# How long to wait for the driver to end the job after a failure. The agent of an elastic job does not end
# then: it holds the state, and the driver may be suspended.
_DRIVER_ANSWER_S = 5.0
# Time for the failure callbacks of ranks of an elastic job, before the ranks are killed.
_FAILURE_CALLBACKS_S = 0.25
LAST_MESSAGES_S = 5.0
"""How long an agent waits at its end for the driver to receive the last messages."""

_TOO_LARGE = ". Its environment is too large: send less of it (--no-env), or raise 'ulimit -s' on its host"


class AgentStoppedError(RuntimeError):
    """An agent ended without the results of its ranks; the driver's error says more."""


class Dismissed(Exception):
    """The driver has ended the job, and needs no results."""


class DriverSilence:
    """For how long an agent has heard nothing from its driver, and what follows.

    A driver that was stopped goes on, and finds its ranks and their state again. So silence is only told,
    until it has lasted for the driver's :data:`~pyhvd.job.spec.DRIVER_TIMEOUT`. That the channel is closed
    says that the driver is gone.

    Parameters
    ----------
    driver : Connection
        The channel.

    Attributes
    ----------
    patience : float
        The seconds of silence after which the agent ends.
    paused : bool
        Whether the driver has said that it stops, by Ctrl-Z.
    """

    def __init__(self, driver: Connection) -> None:
        self.patience = DRIVER_TIMEOUT.default
        self.paused = False
        self._driver = driver
        self._standstill = Standstill(2 * BEAT_S)
        self._since = self._standstill.at  # not silent from an earlier time
        self._told = False

    def hear(self, beat: Beat) -> None:
        """Note the patience that the driver asks for."""
        self.patience = beat.patience or self.patience

    def pause(self, *, paused: bool) -> None:
        """Note that the driver will say nothing, or speak again."""
        self.paused = paused
        self._since = time.monotonic()

    def check(self) -> str:
        """Return a line for the user, once, if the driver is silent; call after what has arrived is read.

        Raises
        ------
        AgentStoppedError
            The driver has been silent for too long.
        """
        if self._standstill.look():
            self._since = self._standstill.at  # this process was suspended: messages may wait unread
        silent = 0.0 if self.paused else self._standstill.at - max(self._driver.heard, self._since)
        if silent > self.patience:
            variable = f"PYHVD_{DRIVER_TIMEOUT.suffix}"
            raise AgentStoppedError(f"the driver has been silent for {self.patience:g} s ({variable})")
        told, self._told = self._told, silent > DRIVER_SILENT_S
        if told or not self._told:
            return ""
        return f"its agent has heard nothing from the launcher for {DRIVER_SILENT_S:g} s, and its ranks go on"


MakeRank = Callable[[Start, bytes, RankEvents], RankProcess]
"""Starts the process of a rank; the bytes are those of :attr:`pyhvd.job.spec.JobSpec.code`."""


@dataclass
class _Owned:
    """A rank of this agent; the counts are of bytes that the driver has not acknowledged."""

    process: RankProcess
    output: int = 0
    result: int = 0
    told_end: bool = False


@dataclass
class Agent:
    """Starts and supervises the ranks that the driver gives it, in the thread that calls :meth:`run`.

    Parameters
    ----------
    driver : Connection
        Authenticated; it stays the caller's.
    make_rank : callable
        See :data:`MakeRank`.
    host : ElasticHost, optional
        What the host keeps of an elastic job.
    silence : DriverSilence, optional
        What is known of the driver's silence; by default nothing.

    Attributes
    ----------
    again : bool
        Whether the driver has begun the next job before this one was over here.
    """

    driver: Connection
    make_rank: MakeRank
    host: ElasticHost | None = None
    silence: DriverSilence | None = None
    again: bool = False
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _code: list[bytes] = field(default_factory=list)
    _ranks: dict[int, _Owned] = field(default_factory=dict)
    _daemon: Daemon | None = None
    _prober: Prober | None = None
    _pmi_values: PmiValues = PmiValues("", {})  # noqa: RUF009 - it is frozen
    _world: str = ""  # the name of the ranks' world
    _slots: int = 0
    _failed: int | None = None  # the rank that failed first
    _failed_at: float = math.inf
    _next_beat: float = 0.0
    _end_at: float = math.inf  # the ranks are ended then, for the next job

    def __post_init__(self) -> None:
        self._silence = self.silence or DriverSilence(self.driver)

    def run(self, registration: Member) -> dict[int, bytes]:
        """Register, and return the pickled result of each rank, if it was not sent to the driver.

        Raises
        ------
        AgentStoppedError
            A rank failed, the driver is gone, or the driver refused this agent.
        Dismissed
            The driver has ended the job, and needs no results.
        ChannelError
            The driver broke the protocol.
        """
        self._slots = registration.slots
        self._send(registration)
        self._selector.register(self.driver, selectors.EVENT_READ, self._receive)
        if self.host is not None:
            self._selector.register(self.host.notice, selectors.EVENT_READ, self._wake)
        while not self._is_over():
            self._turn()
            if self.again and self._daemon is None:
                self._end_ranks(time.monotonic())
                continue
            for rank, owned in self._ranks.items():
                self._follow(rank, owned)
            if self.host is None and self._has_no_answer(time.monotonic()):
                raise AgentStoppedError(f"rank {self._failed} failed")
        return {rank: owned.process.result or b"" for rank, owned in self._ranks.items()}

    def _has_no_answer(self, now: float) -> bool:
        """Return whether the driver speaks, but has not ended the job after a failure."""
        if self._failed is not None and now > self.driver.heard + 2 * BEAT_S:
            self._failed_at = now  # it stands still; what it shall hear waits for it
        return now > self._failed_at + _DRIVER_ANSWER_S

    def close(self) -> None:
        """Close everything but the connection, even if one part raises."""
        with ExitStack() as stack:
            if self._world and not self._is_over():  # else MPI has removed its own
                stack.callback(segments.sweep)
                stack.callback(segments.remove_of_world, self._world)  # after all ranks have ended
            stack.callback(self._selector.close)
            stack.callback(self._end_probe)
            if self._daemon is not None:
                stack.callback(self._daemon.close)
            for owned in self._ranks.values():
                stack.callback(owned.process.close)
            for owned in self._ranks.values():  # all end at the same time, and are then waited for in turn
                stack.callback(owned.process.end)

    def _is_over(self) -> bool:
        """Return whether all ranks ended without error; mpiexec's daemon serves other hosts' ranks too."""
        all_ended = len(self._ranks) == self._slots and all(owned.told_end for owned in self._ranks.values())
        return all_ended and self._failed is None and (self._daemon is None or self._daemon.ended)

    def _begin_again(self) -> None:
        """Let the ranks that are left call their failure callbacks; they are ended soon."""
        self.again = True
        self._end_at = time.monotonic()
        if self.host is not None and self.host.vault.has_callbacks:
            self._pass_on(LOST_OTHERS)
            self._end_at += _FAILURE_CALLBACKS_S

    def _end_ranks(self, now: float) -> None:
        """End the ranks that are left, for the next job; pass on all that they have written."""
        if now >= self._end_at:
            self._end_at = math.inf
            for owned in self._ranks.values():
                owned.process.end()
        if self._end_at == math.inf and all(owned.process.ended for owned in self._ranks.values()):
            raise Dismissed

    def _follow(self, rank: int, owned: _Owned) -> None:
        """Report how a rank has ended."""
        process = owned.process
        process.check(time.monotonic())
        if owned.told_end:
            return
        if process.failure is not None:
            owned.told_end = True
            self._fail(process.failure)
        elif process.ended and process.result is not None:
            owned.told_end = True
            self._send(Ended(rank, left=self.host is not None and self.host.vault.left > 0))

    def _turn(self) -> None:
        """Wait for events, at most half a beat, and handle them."""
        before = time.monotonic()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.driver.wants_write else 0)
        self._selector.modify(self.driver, wanted, self._receive)
        for owned in self._ranks.values():
            owned.process.hold_output(held=owned.output >= OUTPUT_CREDIT or self.driver.full)
            owned.process.hold_result(held=owned.result >= RESULT_CREDIT or self.driver.full)
        if self._daemon is not None:
            self._daemon.hold_output(held=self.driver.full)
        beat_s = BEAT_S if self.host is None else ELASTIC_BEAT_S
        wait = min(beat_s / 2, self._next_beat - before, self._end_at - before)
        for key, _ in self._selector.select(max(0.0, wait)):
            key.data()
        now = time.monotonic()
        if self.host is not None:
            self._check_children(self.host, now)
        if now >= self._next_beat:
            self._next_beat = now + beat_s
            self._send(Beat() if self.host is None else Beat(self.host.vault.commit, self.host.notice.why))
        if remark := self._silence.check():
            self._send(Remark(remark))

    def _check_children(self, host: ElasticHost, now: float) -> None:
        """Look at the processes that an elastic job has on this host besides its ranks."""
        host.notice.check(now)
        if (restored := host.store.check(now)) is not None:
            self._send(restored)
        for remarks in (host.notice.remarks, host.store.remarks):
            while remarks:
                self._send(Remark(remarks.pop(0)))

    def _wake(self) -> None:
        """Tell the driver of a notice at once."""
        assert self.host is not None
        self.host.notice.clear()
        self._next_beat = 0.0

    def _receive(self) -> None:
        self.driver.pump_out()
        for record in self.driver.pump_in():
            self._handle(decode_from_driver(record))
        if not self.driver.open:
            raise AgentStoppedError("the driver is gone")

    def _handle(self, message: FromDriver) -> None:
        if isinstance(message, Stop):
            if message.quietly:
                raise Dismissed
            raise AgentStoppedError(f"the driver has ended this task: {message.reason}")
        if isinstance(message, Beat):
            self._silence.hear(message)
        elif isinstance(message, CodePart):
            self._code.append(message.part)
        elif isinstance(message, Pmi | PmiValues):
            self._hear_pmi(message)
        elif isinstance(message, OutputAck | ResultAck | Input):
            self._hear_for_rank(message)
        elif isinstance(message, NextCall):
            self._call(message)
        elif isinstance(message, Signal):
            self._pass_on(message.number)
        elif isinstance(message, Exit) and self._daemon is not None:
            self._daemon.server.tell_all(message)
        elif isinstance(message, EndDaemon | Again) and self._daemon is not None:
            self._daemon.end()
            self.again = isinstance(message, Again)
        elif isinstance(message, Again):
            self._begin_again()
        elif isinstance(message, Leave) and self.host is not None:
            self.host.vault.suspends = message.suspends
            self.host.vault.wished = message.generation
        else:
            self._hear_in_start(message)

    def _hear_in_start(self, message: FromDriver) -> None:
        if isinstance(message, Listen | Dial):
            self._probe(message)
        elif isinstance(message, Restore) and self.host is not None:
            self.host.store.restore()
        elif isinstance(message, Start):
            self._end_probe()
            self._start_rank(message)
        elif isinstance(message, StartDaemon):
            self._start_daemon(message)

    def _hear_for_rank(self, message: OutputAck | ResultAck | Input) -> None:
        owned = self._ranks.get(0 if isinstance(message, Input) else message.rank)
        if owned is None:
            return
        if isinstance(message, Input):
            owned.process.feed(message.data)
        elif isinstance(message, OutputAck):
            owned.output -= message.count
        else:
            owned.result -= message.count

    def _call(self, message: NextCall) -> None:
        """Pass on a call to living ranks."""
        code = b"".join(self._code)
        self._code.clear()
        for rank in message.ranks:
            if rank in self._ranks:  # else it could not be started, as its failure says
                self._ranks[rank].process.call(code)

    def _take_pmi(self, rank: int, line: str) -> None:
        """Answer a rank's line of PMI-1 by a value that is here, or pass it on to the driver."""
        answer = answer_get(line, self._pmi_values.world, self._pmi_values.values)
        if answer is None:
            self._send(Pmi(rank, line))
        else:
            self._ranks[rank].process.answer_pmi(answer)

    def _hear_pmi(self, message: Pmi | PmiValues) -> None:
        """Pass on an answer to a rank, or keep values by which to answer ranks here."""
        if isinstance(message, PmiValues):
            if message.world == self._pmi_values.world:
                message = PmiValues(message.world, self._pmi_values.values | message.values)
            self._pmi_values = message
        elif message.rank in self._ranks:
            self._world = name_of_world(message.line) or self._world
            self._ranks[message.rank].process.answer_pmi(message.line)

    def _pass_on(self, number: int) -> None:
        if number in PAUSING:  # the driver stops too, and sends no beats
            self._silence.pause(paused=number == signal.SIGTSTP)
        if self.host is not None and number in ENDING:
            self.host.vault.ending = 1
        for owned in self._ranks.values():
            owned.process.signal(number)

    def _probe(self, message: Listen | Dial) -> None:
        """Find out which other hosts this one reaches."""
        if isinstance(message, Listen):
            self._end_probe()
            self._prober = Prober(message, self._selector, self._send)
        elif self._prober is not None:
            self._prober.dial(message)

    def _end_probe(self) -> None:
        if self._prober is not None:
            self._prober.close()
            self._prober = None

    def _start_rank(self, start: Start) -> None:
        if start.rank in self._ranks or len(self._ranks) >= self._slots:
            raise ChannelError(f"the driver started rank {start.rank} twice, or too many ranks")
        rank = start.rank
        self._code = [b"".join(self._code)]
        events = RankEvents(
            on_pmi=lambda line: self._take_pmi(rank, line),
            on_enter=lambda: self._send(EnteringInit(rank)),
            on_output=lambda stream, data: self._send_output(rank, stream, data),
            on_taken=lambda count: self._send(InputAck(count)),
            on_result=lambda data: self._send_result(rank, data),
            on_answer=lambda: self._send(Answered(rank)),
            on_logged=lambda data: self._send(Logged(rank, data)),
        )
        try:
            process = self.make_rank(start, self._code[0], events)
        except (OSError, ValueError) as exc:
            hint = _TOO_LARGE if isinstance(exc, OSError) and exc.errno == errno.E2BIG else ""
            self._fail(Failed(ExitReport(rank, EXIT, 1, f"could not be started: {exc}{hint}")))
            return
        self._ranks[rank] = _Owned(process)
        process.register(self._selector)
        if len(self._ranks) == self._slots:
            self._code.clear()

    def _start_daemon(self, wanted: StartDaemon) -> None:
        if self._daemon is not None:
            raise ChannelError("the driver started mpiexec's daemon twice")
        try:
            self._daemon = Daemon(
                wanted,
                self._send,
                lambda data: self._send(DaemonOutput(data)),
                lambda code: self._send(DaemonEnded(code)),
            )
        except (DaemonError, OSError, ValueError) as exc:
            self._send(DaemonOutput(f"{exc}\n".encode()))
            self._send(DaemonEnded(127))
        else:
            self._daemon.register(self._selector)

    def _fail(self, failure: Failed) -> None:
        """Report a rank's failure to the driver, which then ends the job."""
        if self._failed is None:
            self._failed_at = time.monotonic()
            self._failed = failure.report.rank
        self._send(failure)

    def _send_output(self, rank: int, stream: int, data: bytes) -> None:
        self._ranks[rank].output += len(data)
        for part in parts(data):
            self._send(RankOutput(rank, stream, part))

    def _send_result(self, rank: int, data: bytes) -> None:
        self._ranks[rank].result += len(data)
        for part in parts(data):
            self._send(ResultPart(rank, part))

    def _send(self, message: FromAgent) -> None:
        if self.driver.open:
            self.driver.send(encode(message))

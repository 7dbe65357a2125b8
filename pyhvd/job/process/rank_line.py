"""The line from a rank's process to the process that watches it: the supervisor, or the agent of its host.

A message is a line of JSON, ``[what, value]``:

=========  =============================================================================================
ENTERING   whether the rank is about to call MPI_Init, where it waits for the other ranks; or has returned
UP         whether pyhvd is up in the rank
TENTATIVE  the text to show if the rank ends without a report; an empty text withdraws it
SEGMENTS   the files of MPI's shared memory that the rank has: a list of names
REPORT     how the rank fails: an :class:`ExitReport`, and the pickled exception in base64, if it is sent
RESULT     the number of bytes that follow: what the rank's function returned. It is the last message
ANSWER     the number of bytes that follow: what a call of a living rank returned
LOGGED     a value that a living rank hands to the driver, pickled, in base64
=========  =============================================================================================

An agent first sends its rank what to run, the other way: the length (:data:`LENGTH`), and that many bytes. A
living rank gets its further calls in the same way.

After MPI_Init, a rank that crashes writes its Python stack last, which is no message (:func:`tell_crashes`).

The watcher makes the line for a rank that it starts, and unpickles nothing. :class:`Entrance` keeps what the
lines of all ranks tell about MPI_Init; the launcher on one host needs it without the import of msgspec.
"""

from __future__ import annotations

import base64
import json
import math
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pyhvd.common.text import describe_ranks
from pyhvd.job.process.exit_report import ExitReport

ENTERING = "entering"
UP = "up"
TENTATIVE = "tentative"
SEGMENTS = "segments"
REPORT = "report"
RESULT = "result"
ANSWER = "answer"
LOGGED = "logged"
LENGTH = struct.Struct("!Q")
EXIT_HANDLERS_S = 0.5
"""After reporting a failure, a rank that runs a program has this long for its exit handlers."""
CRASH = b"Fatal Python error: "
"""The text of faulthandler begins so."""
CALLED: dict[int, bytes] = {
    signal.SIGSEGV: b"Segmentation fault",
    signal.SIGABRT: b"Aborted",
    signal.SIGBUS: b"Bus error",
    signal.SIGFPE: b"Floating",
    signal.SIGILL: b"Illegal instruction",
}
"""The signals that faulthandler catches, and how its names of them begin, which follow :data:`CRASH`."""
MAX_LINE = 1 << 26
"""Most bytes of a line: a report has a text and a traceback, and an exception."""
GOES_ON = "; the job goes on, as no start timeout was given that would end it"
"""Follows the text about a late rank that does not end the job."""


_telling = threading.Lock()


def dump_message(what: str, value: object) -> bytes:
    """Return a message's line."""
    return json.dumps([what, value]).encode() + b"\n"


def take_messages(received: bytearray) -> Iterator[tuple[str, Any]]:
    """Take the complete messages from the bytes that have arrived; yield what and value of each.

    A rank's last text about a crash stays.

    Raises
    ------
    ValueError
        The bytes are no messages.
    """
    while not received.startswith(CRASH) and (end := received.find(b"\n")) >= 0:
        line = bytes(received[:end])
        del received[: end + 1]
        try:
            what, value = json.loads(line)
        except ValueError:
            if (torn := line.find(CRASH)) < 0:
                raise
            received[:0] = line[torn:] + b"\n"  # one thread crashed while another one sent a message
            return
        yield what, value
    if len(received) > MAX_LINE:
        raise ValueError(f"a line of more than {MAX_LINE} bytes")


def tell(fd: int, what: str, value: object, *pieces: bytes | memoryview) -> None:
    """Send a message, and the bytes that follow a result; any thread may call."""
    with _telling:
        for piece in (dump_message(what, value), *pieces):
            left = memoryview(piece)
            while left:
                left = left[os.write(fd, left) :]


def tell_report(fd: int, report: ExitReport, exception: bytes = b"") -> None:
    """Send how this rank fails, and the pickled exception."""
    tell(fd, REPORT, [asdict(report), base64.b64encode(exception).decode()])


def tell_crashes(fd: int) -> None:
    """Let a signal that kills this process first write the line of the program at which it is.

    Only where nobody else catches one of the signals: Open MPI and UCX print a stack of their own, and would
    not know the address at fault if faulthandler passed the signal on; and a program that survives a signal
    has more to tell. A forked child writes nothing.
    """
    if _is_caught(*CALLED):
        return
    import faulthandler

    faulthandler.enable(fd, all_threads=False)
    os.register_at_fork(after_in_child=lambda: _point_nowhere(fd))


def _is_caught(*numbers: int) -> bool:
    """Return whether this process has a handler for one of these signals, from C too; True if unknown."""
    try:
        with open("/proc/self/status") as status:
            [caught] = [int(line.split()[1], 16) for line in status if line.startswith("SigCgt:")]
    except (OSError, ValueError):
        return True
    return any(caught >> (number - 1) & 1 for number in numbers)


def _point_nowhere(fd: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)


def read_code(control: socket.socket) -> bytearray:
    """Return the code that the rank's agent sends next."""
    (length,) = LENGTH.unpack(_read_exactly(control, LENGTH.size))
    return _read_exactly(control, length)


def _read_exactly(control: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = control.recv_into(view)
        if not count:
            raise EOFError("the task is gone")
        view = view[count:]
    return data


@dataclass(eq=False)
class RankLine:
    """The watcher's end: it keeps what the rank has told.

    Attributes
    ----------
    on_enter : callable
        Called with the value of each ENTERING.
    on_report : callable
        Called with a report, and the pickled exception.
    on_result : callable
        Called with each part of a result or answer; with an empty part if it is empty. A rank that runs a
        program has none.
    on_answer : callable
        Called after the last part of an answer.
    on_logged : callable
        Called with each pickled value that a living rank logs.
    tentative : str
        The last tentative text.
    up : bool
        Whether pyhvd is up in the rank.
    segments : sequence of str
        The files of MPI's shared memory that the rank had when MPI_Init returned.
    left : int or None
        The bytes of the result or answer that have not arrived; None before it begins.
    answers : bool
        Whether they are an answer's, after which messages follow.
    """

    on_enter: Callable[[bool], None]
    on_report: Callable[[ExitReport, bytes], None]
    on_result: Callable[[bytes], None] = lambda _: None
    on_answer: Callable[[], None] = lambda: None
    on_logged: Callable[[bytes], None] = lambda _: None
    tentative: str = ""
    up: bool = False
    segments: Sequence[str] = ()
    left: int | None = None
    answers: bool = False
    _received: bytearray = field(default_factory=bytearray)

    @property
    def crash(self) -> bytes:
        """What the rank wrote about a signal that killed it; empty if it wrote nothing."""
        return bytes(self._received) if self._received.startswith(CRASH) else b""

    def feed(self, data: bytes) -> None:
        """Take in bytes that have arrived; raise ValueError if they are no messages."""
        while True:
            if self.left is None:
                self._received += data
                data = self._take()
            if self.left is None:
                return
            part, data = data[: self.left], data[self.left :]
            self.left -= len(part)
            self.on_result(part)
            if self.left or not self.answers:
                return
            self.left, self.answers = None, False
            self.on_answer()

    def _take(self) -> bytes:
        """Handle the complete messages; return the bytes that follow a result or answer that has begun."""
        for what, value in take_messages(self._received):
            if what in (RESULT, ANSWER):
                self.left, self.answers = int(value), what == ANSWER
                rest = bytes(self._received)
                self._received.clear()
                return rest
            if what == LOGGED:
                self.on_logged(base64.b64decode(value))
            elif what == TENTATIVE:
                self.tentative = value
            elif what == UP:
                self.up = value
            elif what == SEGMENTS:
                self.segments = value
            elif what == ENTERING:
                self.on_enter(value)
            elif what == REPORT:
                fields, exception = value
                self.on_report(ExitReport(**fields), base64.b64decode(exception))
        return b""


class Entrance:
    """The ranks of a job that have called MPI_Init, by their ENTERING, and those that have ended. Pure.

    Parameters
    ----------
    size : int
        The number of ranks.
    start_timeout : float
        How long (s) ranks may wait for others before these are late.

    Attributes
    ----------
    late_at : float
        When :meth:`late` will name ranks; infinity if it will not.
    """

    def __init__(self, size: int, start_timeout: float) -> None:
        self._size = size
        self._start_timeout = start_timeout
        self._entered: dict[int, None] = {}  # in the order of their calls
        self._ended: set[int] = set()
        self.late_at = math.inf
        self._returned = False

    @property
    def entered(self) -> frozenset[int]:
        """The ranks that have called MPI_Init."""
        return frozenset(self._entered)

    def enter(self, rank: int, now: float) -> None:
        """Note that a rank calls MPI_Init."""
        if not self._entered:
            self.late_at = now + self._start_timeout
        self._entered[rank] = None
        if len(self._entered) == self._size:
            self.note_return()

    def end(self, rank: int) -> None:
        """Note that a rank has ended without error."""
        self._ended.add(rank)

    def note_return(self) -> None:
        """Note that MPI_Init returns in a rank: so all ranks have called it, and none waits."""
        self._returned = True
        self.late_at = math.inf

    def absent(self) -> tuple[int, str] | None:
        """Return a rank that has ended while others wait for it in MPI_Init, and the text of its failure."""
        absent = self._ended - self._entered.keys()
        waiting = self._waiting()
        if not absent or not waiting:
            return None
        return min(absent), (
            f"ended without calling init(), and {_ranks_wait(waiting)} for it there: every rank must call"
            " pyhvd.init(), or none"
        )

    def late(self, now: float) -> tuple[int, str] | None:
        """Return a rank for which others have waited too long, and the text of its failure; only once."""
        if now < self.late_at:
            return None
        self.late_at = math.inf
        late = set(range(self._size)) - self._entered.keys() - self._ended
        waiting = self._waiting()
        if not late or not waiting:
            return None
        first, *more = sorted(late)
        others = f", nor {'has' if len(more) == 1 else 'have'} {describe_ranks(more)}" if more else ""
        return first, (
            f"has not called init() within the start timeout of {self._start_timeout:g} s{others}, and"
            f" {_ranks_wait(waiting)} for it there"
        )

    def _waiting(self) -> list[int]:
        return [] if self._returned else [rank for rank in self._entered if rank not in self._ended]


def _ranks_wait(waiting: list[int]) -> str:
    return f"{describe_ranks(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"

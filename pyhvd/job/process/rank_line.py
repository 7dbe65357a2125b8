"""The line from a rank's process to the process that watches it: the supervisor, or the agent of its host.

A message is a line of JSON, ``[what, value]``:

=========  =============================================================================================
ENTERING   whether the rank is about to call MPI_Init, where it waits for the other ranks; or has returned
UP         whether pyhvd is up in the rank
TENTATIVE  the text to show if the rank ends without a report; an empty text withdraws it
SEGMENTS   the files of MPI's shared memory that the rank has: a list of names
REPORT     how the rank fails: an :class:`ExitReport`, and the pickled exception in base64, if it is sent
RESULT     the number of bytes that follow: what the rank's function returned. It is the last message
=========  =============================================================================================

An agent first sends its rank what to run, the other way: the length (:data:`LENGTH`), and that many bytes.

After MPI_Init, a rank that crashes writes its Python stack last, which is no message (:func:`tell_crashes`).

The watcher makes the line for a rank that it starts, and unpickles nothing.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pyhvd.job.process.exit_report import ExitReport

ENTERING = "entering"
UP = "up"
TENTATIVE = "tentative"
SEGMENTS = "segments"
REPORT = "report"
RESULT = "result"
LENGTH = struct.Struct("!Q")
EXIT_HANDLERS_S = 0.5
"""After reporting a failure, a rank that runs a program has this long for its exit handlers."""
CRASH = b"Fatal Python error: "
"""The text of faulthandler begins so."""
MAX_LINE = 1 << 26
"""Most bytes of a line: a report has a text and a traceback, and an exception."""


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
    """Send a message, and the bytes that follow a result."""
    for piece in (dump_message(what, value), *pieces):
        left = memoryview(piece)
        while left:
            left = left[os.write(fd, left) :]


def tell_report(fd: int, report: ExitReport, exception: bytes = b"") -> None:
    """Send how this rank fails, and the pickled exception."""
    tell(fd, REPORT, [asdict(report), base64.b64encode(exception).decode()])


def tell_crashes(fd: int) -> None:
    """Let a signal that kills this process first write the line of the program at which it is.

    Only where nobody else catches the signals: Open MPI and UCX print a stack of their own, and would not
    know the address at fault if faulthandler passed the signal on. A forked child writes nothing.
    """
    if _is_caught(signal.SIGSEGV):
        return
    import faulthandler

    faulthandler.enable(fd, all_threads=False)
    os.register_at_fork(after_in_child=lambda: _silence(fd))


def _is_caught(number: int) -> bool:
    """Return whether this process has a handler for a signal, from C too; True if that is not known."""
    try:
        with open("/proc/self/status") as status:
            [caught] = [int(line.split()[1], 16) for line in status if line.startswith("SigCgt:")]
    except (OSError, ValueError):
        return True
    return bool(caught >> (number - 1) & 1)


def _silence(fd: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd, inheritable=False)
    os.close(nowhere)


def read_code(control: socket.socket) -> bytearray:
    """Return the code that the rank's agent sends first."""
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
        Called with each part of the result; with an empty part if the result is empty. A rank that runs a
        program has none.
    tentative : str
        The last tentative text.
    up : bool
        Whether pyhvd is up in the rank.
    segments : sequence of str
        The files of MPI's shared memory that the rank had when MPI_Init returned.
    left : int or None
        The bytes of the result that have not arrived; None before it begins.
    """

    on_enter: Callable[[bool], None]
    on_report: Callable[[ExitReport, bytes], None]
    on_result: Callable[[bytes], None] = lambda _: None
    tentative: str = ""
    up: bool = False
    segments: Sequence[str] = ()
    left: int | None = None
    _received: bytearray = field(default_factory=bytearray)

    @property
    def crash(self) -> bytes:
        """What the rank wrote about a signal that killed it; empty if it wrote nothing."""
        return bytes(self._received) if self._received.startswith(CRASH) else b""

    def feed(self, data: bytes) -> None:
        """Take in bytes that have arrived; raise ValueError if they are no messages."""
        if self.left is None:
            self._received += data
            data = self._take()
        if self.left is not None:
            part = data[: self.left]
            self.left -= len(part)
            self.on_result(part)

    def _take(self) -> bytes:
        """Handle the complete messages; return the bytes of a result that has begun."""
        for what, value in take_messages(self._received):
            if what == RESULT:
                self.left = int(value)
                return bytes(self._received)
            if what == TENTATIVE:
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

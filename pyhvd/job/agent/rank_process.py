"""A rank's process as its agent sees it: the lines to it, and how it ended.

Owns the rank's control socket and its line to PMI-1. Knows neither Spark nor the driver.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pyhvd.job.messages import Failed, Start
from pyhvd.job.mpi.pmi import MAX_LINE
from pyhvd.job.mpi.rank_env import OF_RANKS, own_environment, without
from pyhvd.job.process.exit_report import EXIT, LOST, ExitReport, describe_unreported
from pyhvd.job.process.rank_line import LENGTH, RankLine
from pyhvd.job.process.signals import describe_exit
from pyhvd.job.process.supervised import GuardianCommand, SupervisedProcess, read_some

_CHUNK = 1 << 16
_BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE
RANK_OF_FUNCTION = "pyhvd.job.rank.rank"
"""The module whose ``run_rank`` runs a function."""
RANK_OF_CALLS = "pyhvd.job.rank.living"
"""The module whose ``run_rank`` runs one function after the other."""
# A socket holds little less than this.
_ANSWER_CHUNK = 1 << 18


class Program(msgspec.Struct, frozen=True):
    """What all ranks of a job run; the driver sends it as the job's code.

    Attributes
    ----------
    module : str
        Its ``run_rank`` runs in the rank; see :mod:`pyhvd.job.process.guardian`.
    arguments : list of str
        A script, ``-m module`` or ``-c code``, with its arguments.
    directory : str
        Where the ranks run.
    env : list of (bytes, bytes)
        Variables that replace those of the hosts; they may be no UTF-8.
    preload : list of str
        Modules that a zygote imports besides those at the program's top.
    """

    module: str
    arguments: list[str]
    directory: str
    env: list[tuple[bytes, bytes]]
    preload: list[str] = []

    def dump(self) -> bytes:
        """Return the program as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def load(cls, data: bytes) -> Program:
        """Return the program that :meth:`dump` wrote; raise ValueError if it is none."""
        return msgspec.msgpack.decode(data, type=cls)


def rank_environment(
    environ: Mapping[str, str], start: Start, program: Program | None = None
) -> dict[str, str]:
    """Return the environment of a rank.

    A rank of a Spark task has the task's variables, and then its own. A rank on a host of the job has the
    job's defaults, the host's variables, the program's, and then its own.
    """
    if program is None:
        return own_environment(environ) | start.env | pmi_variables(start)
    given = {os.fsdecode(name): os.fsdecode(value) for name, value in program.env}
    return start.defaults | without(environ, *OF_RANKS) | given | start.env | pmi_variables(start)


def pmi_variables(start: Start) -> dict[str, str]:
    """Return the variables of Hydra that a rank of PMI-1 needs, without its descriptor."""
    if not start.pmi:
        return {}
    return {
        "PMI_RANK": str(start.rank),
        "PMI_SIZE": str(start.size),
        "PMI_SPAWNED": "0",
        "MPI_LOCALRANKID": str(start.local_rank),
        "MPI_LOCALNRANKS": str(start.local_size),
    }


@dataclass(frozen=True)
class RankEvents:
    """What the owner of a rank's process is told, by calls.

    Attributes
    ----------
    on_pmi : callable
        Called with each line that the rank sends to its PMI server.
    on_enter : callable
        Called when the rank is about to call MPI_Init.
    on_output : callable
        Called with 1 or 2 and what the rank has written there.
    on_taken : callable
        Called with how many bytes of its stdin the rank has taken, if it has one.
    on_result : callable
        Called with parts of the result or answer, if it does not become the attribute `result`.
    on_answer : callable
        Called after the last part of a living rank's answer.
    on_logged : callable
        Called with each pickled value that a living rank logs.
    """

    on_pmi: Callable[[str], None]
    on_enter: Callable[[], None]
    on_output: Callable[[int, bytes], None]
    on_taken: Callable[[int], None]
    on_result: Callable[[bytes], None]
    on_answer: Callable[[], None]
    on_logged: Callable[[bytes], None]


class RankProcess(SupervisedProcess):
    """A rank's process.

    Parameters
    ----------
    start : Start
        Which rank it is.
    code : bytes or memoryview
        The pickled function, args and kwargs.
    events : RankEvents
        The owner's.
    files : mapping of str to int
        Descriptors that the rank inherits; variables of these names hold their numbers.
    env : mapping of str to str
        The rank's variables, in addition to those of `start`.
    program : Program or None
        What runs on a host of the job; None for the function of a Spark task.
    stdin
        See :class:`GuardianCommand`.
    popen : callable
        See :class:`SupervisedProcess`.

    Attributes
    ----------
    failure : Failed or None
        How the rank failed, by its own report or by its exit code.
    result : bytes or None
        The result, as :mod:`pyhvd.job.rank.pickles` has it; empty if its parts were passed on.
    """

    def __init__(
        self,
        start: Start,
        code: bytes | memoryview,
        events: RankEvents,
        files: Mapping[str, int] = {},
        env: Mapping[str, str] = {},
        program: Program | None = None,
        stdin: int = subprocess.DEVNULL,
        popen: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        self.failure: Failed | None = None
        self.result: bytes | None = None
        self._rank = start.rank
        self._directory = "" if program is None else program.directory
        self._events = events
        self._to_rank = memoryview(b"".join((LENGTH.pack(len(code)), code)))
        self._line = RankLine(
            *(self._take_entering, self._take_report, self._take_result, events.on_answer, events.on_logged)
        )
        self._result = bytearray()
        self._pmi_line = b""
        self._control, control = socket.socketpair()
        self._pmi, pmi = socket.socketpair()
        variables = {**rank_environment(os.environ, start, program), **env}
        if start.pmi:
            variables["PMI_FD"] = str(pmi.fileno())
        variables |= {name: str(number) for name, number in files.items()}
        try:
            command = GuardianCommand(
                "pyhvd.job.process.guardian",
                [str(control.fileno()), RANK_OF_FUNCTION if program is None else program.module],
                variables,
                descriptors=(control.fileno(), pmi.fileno(), *files.values()),
                python=start.executable,
                # The guardian must not import what the directory has.
                flags=() if program is None else ("-P",),
                directory=None if program is None else program.directory,
                stdin=stdin,
            )
            super().__init__(command, events.on_output, self._note_rank_end, popen=popen)
        except (OSError, ValueError):  # ValueError: an invalid name or value of a variable
            self._control.close()
            self._pmi.close()
            raise
        finally:
            control.close()
            pmi.close()
        self._control.setblocking(False)
        self._pmi.setblocking(False)

    def call(self, code: bytes) -> None:
        """Let a living rank make another call; see :data:`RANK_OF_CALLS`. Empty code ends the rank."""
        self._to_rank = memoryview(b"".join((self._to_rank, LENGTH.pack(len(code)), code)))
        if self._control in self._selector.get_map():  # else the rank is gone, or its answer is held
            self._selector.modify(self._control, _BOTH, self._talk)

    def feed(self, data: bytes) -> None:
        """Pass bytes on to the rank's stdin, and its end for none; without effect if it has /dev/null."""

    def hold_result(self, *, held: bool) -> None:
        """Stop passing on the result, or go on; without effect if it becomes the attribute `result`."""

    def check(self, now: float) -> None:
        """Do what is due at this time (time.monotonic); the agent calls it in each turn."""

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register this object's callbacks, as the data of the selector's keys."""
        selector.register(self._control, _BOTH, self._talk)
        selector.register(self._pmi, selectors.EVENT_READ, self._read_pmi)
        super().register(selector)

    def answer_pmi(self, line: str) -> None:
        """Pass on the PMI server's answer; lines are short, and the rank waits for each."""
        with contextlib.suppress(OSError):
            self._pmi.sendall(line.encode())

    def close(self) -> None:
        """End the rank and all that it started, and close every descriptor."""
        super().close()
        self._control.close()
        self._pmi.close()

    def _talk(self) -> None:
        """Send the rank its code, as fast as it receives it, and receive its answer."""
        if self._to_rank:
            self._send_code()
        self._receive()

    def _send_code(self) -> None:
        try:
            sent = self._control.send(self._to_rank[:_CHUNK])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            sent = len(self._to_rank)  # the rank receives no more, but its answer may wait
        self._to_rank = self._to_rank[sent:]
        if not self._to_rank:
            self._selector.modify(self._control, selectors.EVENT_READ, self._talk)

    def _receive(self) -> bool:
        """Receive what the rank has sent; return whether there may be more."""
        data = read_some(self._control.fileno(), _ANSWER_CHUNK)
        if data:
            self._line.feed(data)
        elif data is not None:
            self._forget(self._control)
        return bool(data)

    def _take_entering(self, begins: bool) -> None:  # noqa: FBT001 - a message has one value
        if begins:
            self._events.on_enter()

    def _take_report(self, report: ExitReport, exception: bytes) -> None:
        self.failure = Failed(report, exception=exception)

    def _take_result(self, part: bytes) -> None:
        self._result += part
        if not self._line.left:
            self.result = bytes(self._result)

    def _read_pmi(self) -> None:
        data = read_some(self._pmi.fileno())
        if data is None:
            return
        if not data:
            self._forget(self._pmi)
            return
        *lines, self._pmi_line = (self._pmi_line + data).split(b"\n")
        if max(map(len, [*lines, self._pmi_line])) > 2 * MAX_LINE:
            self.failure = self._failed(EXIT, 1, "wrote to the descriptor of its PMI server")
            return
        for line in lines:
            self._events.on_pmi(line.decode(errors="replace"))

    def _note_rank_end(self) -> None:
        while self._receive():
            pass
        if self.failure is None:
            self.failure = self._failure_by_exit()

    def _failure_by_exit(self) -> Failed | None:
        """Return how a rank failed that reported no failure; None if it did not fail."""
        code = self.code
        guardian = self.guardian_code
        if code is None and guardian is not None and guardian > 0:
            how = describe_exit(guardian)
            if self.began:
                return self._failed(LOST, 1, f"was killed, as its guardian {how}")
            return self._failed(
                EXIT, guardian, f"could not be started: its Python {how}, and says why on stderr"
            )
        if code is None:
            return self._failed(LOST, 1, "and its guardian were killed")
        if code < 0:
            return self._failed(*describe_unreported(code, "", self._describe_crash(code)))
        if self.result is None:
            text = f"{describe_exit(code)} before the function returned"
            return self._failed(EXIT, code or 1, text, silent=code != 0)
        if code:
            return self._failed(EXIT, code, f"{describe_exit(code)} after the function returned")
        return None

    def _describe_crash(self, code: int) -> tuple[str, str]:
        from pyhvd.job.process.crash import describe_crash

        return describe_crash(-code, self.pid, self._line.crash, self._last, self._directory)

    def _failed(self, kind: str, code: int, text: str, *, silent: bool = False) -> Failed:
        return Failed(ExitReport(self._rank, kind, code, text), silent)

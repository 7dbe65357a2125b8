"""A rank's process that runs a program, as the agent of its host sees it.

The agent sends it the program's arguments first.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pyhvd.job.agent.rank_process import Program, RankEvents, RankProcess
from pyhvd.job.messages import Failed, Start
from pyhvd.job.process.exit_report import EXIT, ExitReport, describe_unreported
from pyhvd.job.process.rank_line import EXIT_HANDLERS_S


class _Stdin:
    """The pipe to a rank's stdin; what the rank does not take yet waits here. If not `wanted`, /dev/null."""

    def __init__(self, on_taken: Callable[[int], None], *, wanted: bool) -> None:
        self.selector: selectors.BaseSelector | None = None
        self.reader, self._writer = os.pipe() if wanted else (subprocess.DEVNULL, -1)
        if wanted:
            os.set_blocking(self._writer, False)
        self._on_taken = on_taken
        self._waiting = bytearray()
        self._ending = False
        self._listens = False

    def add(self, data: bytes) -> None:
        """Pass on bytes, and the end for none."""
        self._waiting += data
        self._ending = self._ending or not data
        self._pump()

    def hand_over(self) -> None:
        """Leave the reading end to the rank."""
        if self.reader >= 0:
            os.close(self.reader)

    def close(self) -> None:
        """Close the pipe; drop what waits."""
        self._listen(wanted=False)
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def _pump(self) -> None:
        taken = 0
        try:
            while self._waiting and self._writer >= 0:
                count = os.write(self._writer, self._waiting)
                del self._waiting[:count]
                taken += count
        except BlockingIOError:
            pass
        except OSError:  # the rank has closed its stdin
            self.close()
        if self._writer < 0:
            taken += len(self._waiting)
            self._waiting.clear()
        if taken:
            self._on_taken(taken)
        self._listen(wanted=bool(self._waiting))
        if self._ending and not self._waiting:
            self.close()

    def _listen(self, *, wanted: bool) -> None:
        if self.selector is None or wanted == self._listens:
            return
        self._listens = wanted
        if wanted:
            self.selector.register(self._writer, selectors.EVENT_WRITE, self._pump)
        else:
            with contextlib.suppress(KeyError, ValueError, RuntimeError):  # the selector may be closed
                self.selector.unregister(self._writer)


class ProgramProcess(RankProcess):
    """A rank's process that runs a program; `code` is a :class:`Program`. See :class:`RankProcess`.

    In an elastic job `files` are those of the vault, and `popen` may fork the rank from a zygote.
    """

    def __init__(
        self,
        start: Start,
        code: bytes,
        events: RankEvents,
        files: Mapping[str, int] = {},
        popen: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        self._stdin = _Stdin(events.on_taken, wanted=start.rank == 0)
        self._size = start.size
        self._report: ExitReport | None = None
        self._leave_at = math.inf
        program = Program.load(code)
        arguments, stdin = msgspec.msgpack.encode(program.arguments), self._stdin.reader
        try:
            super().__init__(start, arguments, events, files, program=program, stdin=stdin, popen=popen)
        except (OSError, ValueError):
            self._stdin.close()
            raise
        finally:
            self._stdin.hand_over()

    def register(self, selector: selectors.BaseSelector) -> None:
        """See :meth:`RankProcess.register`."""
        super().register(selector)
        self._stdin.selector = selector

    def feed(self, data: bytes) -> None:
        """See :meth:`RankProcess.feed`."""
        self._stdin.add(data)

    def close(self) -> None:
        """See :meth:`RankProcess.close`."""
        super().close()
        self._stdin.close()

    def check(self, now: float) -> None:
        """Let a failed rank run its exit handlers, but not for long."""
        if now > self._leave_at and self._report is not None and self.failure is None:
            self.failure = Failed(self._report)

    def _take_report(self, report: ExitReport, exception: bytes) -> None:  # noqa: ARG002 - it is shown
        self._report = report
        self._leave_at = time.monotonic() + EXIT_HANDLERS_S

    def _failure_by_exit(self) -> Failed | None:
        if self._report is not None:
            return Failed(self._report)
        if self.code is None:
            return super()._failure_by_exit()
        if self.code == 0 and not self._line.up:
            self.result = b""
            return None
        crash = self._describe_crash(self.code)
        kind, code, text = describe_unreported(self.code, self._line.tentative, crash)
        who = f"rank {self._rank} of {self._size} on host {socket.gethostname()} (pid {self.pid})"
        report = ExitReport(self._rank, kind, code, f"pyhvd: {who} {text}", titled=True)
        return Failed(report, silent=kind == EXIT and self.code != 0)

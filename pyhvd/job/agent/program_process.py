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

from pyhvd.job.agent.rank_process import RankEvents, RankProcess, pmi_variables
from pyhvd.job.commits.vault import Vault
from pyhvd.job.messages import Failed, Start
from pyhvd.job.mpi.rank_env import OF_RANKS, without
from pyhvd.job.process.exit_report import EXIT, ExitReport, describe_unreported
from pyhvd.job.process.rank_line import EXIT_HANDLERS_S


class Program(msgspec.Struct, frozen=True):
    """What all ranks of a job run; the driver sends it as the job's code.

    Attributes
    ----------
    module : str
        The guardian's program, which runs the arguments in the rank.
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


def program_environment(environ: Mapping[str, str], program: Program, start: Start) -> dict[str, str]:
    """Return a rank's environment: the job's defaults, the host's, the program's, then the rank's own."""
    given = {os.fsdecode(name): os.fsdecode(value) for name, value in program.env}
    return start.defaults | without(environ, *OF_RANKS) | given | start.env | pmi_variables(start)


class _Stdin:
    """The pipe to a rank's stdin; what the rank does not take yet waits here."""

    def __init__(self, on_taken: Callable[[int], None]) -> None:
        self.selector: selectors.BaseSelector | None = None
        self.reader, self._writer = os.pipe()
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

    def close(self) -> None:
        """Close the pipe; drop what waits."""
        self._listen(False)
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
        self._listen(bool(self._waiting))
        if self._ending and not self._waiting:
            self.close()

    def _listen(self, wanted: bool) -> None:
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

    In an elastic job the rank commits to `vault`, and `popen` may fork it from a zygote.
    """

    def __init__(
        self,
        start: Start,
        code: bytes,
        events: RankEvents,
        vault: Vault | None = None,
        popen: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        self._stdin = _Stdin(events.on_taken) if start.rank == 0 else None
        self._program = Program.load(code)
        self._size = start.size
        self._report: ExitReport | None = None
        self._leave_at = math.inf
        try:
            super().__init__(
                start,
                msgspec.msgpack.encode(self._program.arguments),
                events,
                files={} if vault is None else vault.files,
                module=self._program.module,
                flags=("-P",),  # the guardian must not import what the directory has
                directory=self._program.directory,
                stdin=subprocess.DEVNULL if self._stdin is None else self._stdin.reader,
                popen=popen,
            )
        except (OSError, ValueError):
            if self._stdin is not None:
                self._stdin.close()
            raise
        finally:
            if self._stdin is not None:
                os.close(self._stdin.reader)

    def register(self, selector: selectors.BaseSelector) -> None:
        """See :meth:`RankProcess.register`."""
        super().register(selector)
        if self._stdin is not None:
            self._stdin.selector = selector

    def feed(self, data: bytes) -> None:
        """See :meth:`RankProcess.feed`."""
        if self._stdin is not None:
            self._stdin.add(data)

    def close(self) -> None:
        """See :meth:`RankProcess.close`."""
        super().close()
        if self._stdin is not None:
            self._stdin.close()

    def check(self, now: float) -> None:
        """Let a failed rank run its exit handlers, but not for long."""
        if now > self._leave_at and self._report is not None and self.failure is None:
            self.failure = Failed(self._report)

    def _environment(self, start: Start) -> dict[str, str]:
        return program_environment(os.environ, self._program, start)

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
        kind, code, text = describe_unreported(self.code, self._line.tentative)
        who = f"rank {self._rank} of {self._size} on host {socket.gethostname()} (pid {self.pid})"
        report = ExitReport(self._rank, kind, code, f"pyhvd: {who} {text}", titled=True)
        return Failed(report, silent=kind == EXIT and self.code != 0)

"""The agent's end of the process that stores commits; see :mod:`pyhvd.job.commits.store_process`."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from functools import partial

import msgspec

from pyhvd.job.commits.store_process import RESTORE, WRITE
from pyhvd.job.commits.vault import Vault
from pyhvd.job.messages import Restored, StoreOrder
from pyhvd.job.process.guardian import die_with_parent

_MODULE = "pyhvd.job.commits.store_process"
# The first restart of a process that ended waits 1 s, each next one twice as long, but at most one minute.
# The same line is told again after one minute, too.
_AGAIN_S = 1.0
_LATEST_S = 60.0
# A mark greater than that of any commit.
_ALL = (1 << 63) - 1


class StoreChild:
    """Starts the process, and starts it again if it ends.

    Parameters
    ----------
    vault : Vault
        Whose commits are stored.

    Attributes
    ----------
    remarks : list of str
        Lines for the user; the agent sends them to the driver.
    """

    def __init__(self, vault: Vault) -> None:
        self.remarks: list[str] = []
        self._vault = vault
        self._order: StoreOrder | None = None
        self._writer: _ChildProcess | None = None
        self._reader: _ChildProcess | None = None
        self._next, self._pause = 0.0, _AGAIN_S
        self._told: dict[str, float] = {}

    def use(self, order: StoreOrder | None) -> None:
        """Store commits as ordered from now on; None: another host does. Give up :meth:`restore`."""
        self._end_reader()
        if order != self._order:
            self._end_writer()
            self._order, self._next, self._pause = order, 0.0, _AGAIN_S

    def restore(self) -> None:
        """Begin to bring the newest stored commit into the vault; :meth:`check` returns how it ended."""
        assert self._order is not None
        self._reader = _ChildProcess(RESTORE, self._order, self._vault)

    def check(self, now: float) -> Restored | None:
        """Do what is due; return the end of :meth:`restore`, once."""
        if self._order is not None and self._writer is None and now >= self._next:
            self._begin_writer(self._order, now)
        if self._writer is not None:
            self._follow_writer(self._writer, now)
        if self._reader is None:
            return None
        _, ended = self._reader.read()
        if not ended:
            return None
        answer = self._reader.last
        self._end_reader()
        try:
            return msgspec.json.decode(answer, type=Restored)
        except msgspec.MsgspecError:
            return Restored(0, "the process that reads the store has ended")

    def close(self) -> None:
        """End the processes."""
        self._end_writer()
        self._end_reader()

    def _begin_writer(self, order: StoreOrder, now: float) -> None:
        try:
            self._writer = _ChildProcess(WRITE, order, self._vault)
        except OSError as exc:  # too many processes: try again later
            self._vault.store_failure = _ALL, f"the process that stores commits cannot be started: {exc}"
            self._next, self._pause = now + self._pause, min(2 * self._pause, _LATEST_S)

    def _follow_writer(self, writer: _ChildProcess, now: float) -> None:
        lines, ended = writer.read()
        for line in lines:
            if now >= self._told.get(line, -math.inf) + _LATEST_S:
                self._told[line] = now
                self.remarks.append(line)
        if ended:
            self._end_writer()
            self._vault.store_failure = _ALL, writer.last or "the process that stores commits has ended"
            self._next, self._pause = now + self._pause, min(2 * self._pause, _LATEST_S)

    def _end_reader(self) -> None:
        if self._reader is not None:
            self._reader.end()
            self._reader = None

    def _end_writer(self) -> None:
        if self._writer is not None:
            self._writer.end()
            self._writer = None


class _ChildProcess:
    """A process that prints lines; `last` is the last of them."""

    def __init__(self, mode: str, order: StoreOrder, vault: Vault) -> None:
        given = {os.fsdecode(name): os.fsdecode(value) for name, value in order.env}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, mode, *map(str, vault.descriptors)],
            env=dict(os.environ) | given,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=vault.descriptors,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGKILL, os.getpid()),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._rest = b""
        self.last = ""
        with self._process.stdin as stdin:  # less than a pipe holds
            stdin.write(msgspec.msgpack.encode(order))

    def read(self) -> tuple[list[str], bool]:
        """Return the lines that it has printed since, and whether it has ended."""
        ended = self._process.poll() is not None
        self._rest += self._output.read() or b""
        *lines, self._rest = self._rest.split(b"\n")
        texts = [line.decode(errors="replace") for line in lines]
        self.last = texts[-1] if texts else self.last
        return texts, ended

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.wait()
        self._output.close()

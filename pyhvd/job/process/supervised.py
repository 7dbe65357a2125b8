"""A process under a guardian, as its owner sees it: the lifetime line, its output, and how it ended."""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyhvd.job.process.guardian import signal_group
from pyhvd.job.process.output import KEPT
from pyhvd.job.process.signals import PAUSING

_CHUNK = 1 << 16
# After the process has ended, at most this many chunks are read: its children may go on writing.
_LAST_CHUNKS = 64


@dataclass(frozen=True)
class GuardianCommand:
    """What a guardian runs.

    Attributes
    ----------
    module : str
        Its program: the first argument is the descriptor of the lifetime line.
    arguments : sequence of str
        The other arguments.
    env : mapping of str to str
        The process's environment.
    descriptors : sequence of int
        The process inherits them; the caller closes them here.
    python : str, optional
        The guardian's Python; this one by default.
    flags : sequence of str
        Options of the guardian's Python.
    directory : str, optional
        Where the process runs; by default in this one's working directory.
    stdin : int
        The process's stdin, by default /dev/null; the caller closes it here.
    """

    module: str
    arguments: Sequence[str]
    env: Mapping[str, str]
    descriptors: Sequence[int] = ()
    python: str | None = None
    flags: Sequence[str] = ()
    directory: str | None = None
    stdin: int = subprocess.DEVNULL


class SupervisedProcess:
    """A process that ends together with this one, and so does all that it starts.

    Parameters
    ----------
    command : GuardianCommand
        What its guardian runs.
    on_output : callable
        Called with 1 or 2 and what the process has written there.
    on_end : callable
        Called when the process has ended and its output has been read.
    kill_s : float
        How long to wait for the process after it was killed.
    popen : callable
        Starts the guardian, as :class:`subprocess.Popen` does.

    Attributes
    ----------
    ended : bool
        Whether the process has ended.
    code : int or None
        Its exit code, or the negative number of the signal that killed it. None while it runs, and if its
        guardian was killed.
    guardian_code : int or None
        The same for the guardian. It is above 0 if the guardian's Python did not start, or failed.
    """

    def __init__(
        self,
        command: GuardianCommand,
        on_output: Callable[[int, bytes], None],
        on_end: Callable[[], None],
        kill_s: float = 2.0,
        popen: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        self.ended = False
        self.code: int | None = None
        self.guardian_code: int | None = None
        self._on_output = on_output
        self._on_end = on_end
        self._kill_s = kill_s
        self._last = b""  # of what has arrived on stderr
        self._told = b""  # by the guardian: the process's id, then its exit code
        self._held = False
        self._life, life = socket.socketpair()
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        python = command.python or sys.executable
        try:
            self._process = popen(
                [python, *command.flags, "-m", command.module, str(life.fileno()), *command.arguments],
                env=command.env,
                cwd=command.directory,
                stdin=command.stdin,
                stdout=out,
                stderr=err,
                pass_fds=(life.fileno(), *command.descriptors),
                start_new_session=True,
            )
        except (OSError, ValueError):  # ValueError: an invalid name or value of a variable
            self._close_ends()
            raise
        finally:
            life.close()
            os.close(out)
            os.close(err)
        self._life.setblocking(False)
        os.set_blocking(self._out, False)
        os.set_blocking(self._err, False)

    @property
    def began(self) -> bool:
        """Whether the guardian has told the process's id."""
        return b"\n" in self._told

    @property
    def pid(self) -> int:
        """The process's id; 0 until the guardian has told it."""
        pid = self._told.partition(b"\n")[0]
        return int(pid) if self.began and pid.isdigit() else 0

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register this object's callbacks, as the data of the selector's keys."""
        self._selector = selector
        selector.register(self._life, selectors.EVENT_READ, self._read_life)
        self._outputs = {1: self._out, 2: self._err}  # those that have not ended
        self._listen()

    def hold_output(self, *, held: bool) -> None:
        """Stop reading the process's output, so that its writes block; or read it again."""
        if held == self._held:
            return
        self._held = held
        if not held:
            self._listen()
        else:
            for fd in self._outputs.values():
                self._selector.unregister(fd)

    def end(self) -> None:
        """Make the guardian end the process and all that it started; do not wait."""
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has not begun or is over.

        Ctrl-Z stops its group: a process that no shell controls ignores SIGTSTP.
        """
        if self.pid and not self.ended and number in PAUSING:
            signal_group(self.pid, signal.SIGSTOP if number == signal.SIGTSTP else signal.SIGCONT)
        elif self.pid and not self.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def close(self) -> None:
        """End the process and all that it started, wait for it, and close every descriptor."""
        if not self.ended:
            self._life.close()
            self._reap()
            self.ended = True
        self._close_ends()

    def _close_ends(self) -> None:
        self._life.close()
        for fd in (self._out, self._err):
            with contextlib.suppress(OSError):
                os.close(fd)

    def _listen(self) -> None:
        for stream, fd in self._outputs.items():
            call = functools.partial(self._read_output, stream, fd)
            self._selector.register(fd, selectors.EVENT_READ, call)

    def _forget(self, source: int | socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def _read_output(self, stream: int, fd: int) -> bool:
        data = read_some(fd)
        if data:
            if stream == 2:
                self._last = (self._last + data)[-KEPT:]
            self._on_output(stream, data)
        elif data is not None:
            self._forget(fd)
            self._outputs.pop(stream, None)
        return bool(data)

    def _read_life(self) -> None:
        """Handle the lifetime line: the process's id, its exit code, or the guardian's death."""
        data = read_some(self._life.fileno())
        if data is None:
            return
        self._told += data
        if data and self._told.count(b"\n") < 2:
            return
        if not data and self.pid:
            # The guardian was killed, and the process with it: kill what that has started. The group keeps
            # the process's id as its number as long as any member of the group lives.
            signal_group(self.pid, signal.SIGKILL)
        for stream, fd in ((1, self._out), (2, self._err)):
            for _ in range(_LAST_CHUNKS):
                if not self._read_output(stream, fd):
                    break
        self._reap()
        self.ended = True
        self._forget(self._life)
        numbers = self._told.split()
        self.code = int(numbers[1]) if len(numbers) > 1 else None
        self._on_end()

    def _reap(self) -> None:
        """Wait for the guardian; kill it if it does not end: the kernel then kills the process."""
        try:
            self._process.wait(self._kill_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(self._kill_s)
        self.guardian_code = self._process.returncode


def read_some(fd: int, size: int = _CHUNK) -> bytes | None:
    """Return what has arrived, at most `size` bytes; None if nothing has, and empty at the end."""
    try:
        return os.read(fd, size)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""

"""A process under a keeper, as its owner sees it: the lifetime line, its output, and how it ended."""

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

_CHUNK = 1 << 16
# What an ended process's children still write is not waited for beyond this many chunks.
_LAST_CHUNKS = 64


class SupervisedProcess:
    """A process that ends with this one, and all that it starts with it.

    Parameters
    ----------
    module : str
        What the keeper runs: its first argument is the descriptor of the lifetime line.
    arguments : sequence of str
        The others.
    env : mapping of str to str
        The process's environment.
    on_output : callable
        Called with 1 or 2 and what the process has written there.
    on_end : callable
        Called when it has ended and its output has been read.
    descriptors : sequence of int
        What it inherits; the caller closes them here.
    python : str, optional
        The keeper's Python; this one by default.
    kill_s : float
        Killed, it is gone within so many seconds, or never will be (it waits for a disk).

    Attributes
    ----------
    ended : bool
        Whether the process is gone.
    code : int or None
        How it ended: its exit code, or the negative number of the signal that killed it. None while it
        runs, and when its keeper was killed.
    keeper_code : int or None
        The same for the keeper. It is above 0 when the keeper's Python could not begin, or broke.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        on_output: Callable[[int, bytes], None],
        on_end: Callable[[], None],
        descriptors: Sequence[int] = (),
        python: str | None = None,
        kill_s: float = 2.0,
    ) -> None:
        self.ended = False
        self.code: int | None = None
        self.keeper_code: int | None = None
        self._on_output = on_output
        self._on_end = on_end
        self._kill_s = kill_s
        self._said = b""  # by the keeper: the process's id, then how it ended
        self._held = False
        self._life, life = socket.socketpair()
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        try:
            self._process = subprocess.Popen(
                [python or sys.executable, "-m", module, str(life.fileno()), *arguments],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=(life.fileno(), *descriptors),
                start_new_session=True,
            )
        except (OSError, ValueError):  # ValueError: a name or value that no environment can have
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
        """Whether the keeper has said who the process is."""
        return b"\n" in self._said

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have a selector call this object's methods: its keys' data."""
        self._selector = selector
        selector.register(self._life, selectors.EVENT_READ, lambda: self._read_life())
        self._outputs = {1: self._out, 2: self._err}  # that have not come to their end
        self._listen()

    def hold_output(self, held: bool) -> None:
        """Have the process wait when it writes, or no longer."""
        if held == self._held:
            return
        self._held = held
        if not held:
            self._listen()
            return
        for fd in self._outputs.values():
            self._selector.unregister(fd)

    def let_go(self) -> None:
        """Have the keeper end the process and all that it has started; does not wait for it."""
        with contextlib.suppress(OSError):
            self._life.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """End the process and all that it has started, and wait until they are gone."""
        if self.ended:
            return
        self._life.close()
        self._reap()
        self.ended = True

    def close(self) -> None:
        """Kill what is left, and close every descriptor."""
        self.kill()
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
        try:
            data = os.read(fd, _CHUNK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._forget(fd)
            self._outputs.pop(stream, None)
            return False
        self._on_output(stream, data)
        return True

    def _read_life(self) -> None:
        """The keeper has said who the process is, or how it ended, or is gone."""
        try:
            data = self._life.recv(64)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._said += data
        if data and self._said.count(b"\n") < 2:
            return
        if not data:
            self._kill_group()
        for stream, fd in ((1, self._out), (2, self._err)):
            for _ in range(_LAST_CHUNKS):
                if not self._read_output(stream, fd):
                    break
        self._reap()
        self.ended = True
        self._forget(self._life)
        numbers = self._said.split()
        self.code = int(numbers[1]) if len(numbers) > 1 else None
        self._on_end()

    def _reap(self) -> None:
        """Wait for the keeper; should it not do its work, the kernel ends the process with it."""
        try:
            self._process.wait(self._kill_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(self._kill_s)
        self.keeper_code = self._process.returncode

    def _kill_group(self) -> None:
        """The keeper was killed, and the process with it: kill what the process had started.

        Its process id is that of the group still, as long as there is anything left of the group.
        """
        pid = self._said.partition(b"\n")[0]
        if pid.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(pid), signal.SIGKILL)

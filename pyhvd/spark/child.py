"""The rank as its task sees it: a child process, the pipes to it, and how it ended.

Owns: the process and its descriptors. Knows nothing of Spark, nor of the driver.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

from pyhvd.net.session import ChannelError
from pyhvd.run.report import EXIT, LOST, SIGNAL
from pyhvd.run.supervisor import describe_signal
from pyhvd.spark.messages import Failed, Start, decode_from_task
from pyhvd.spark.pmi import MAX_LINE
from pyhvd.spark.rank import FAILURE, LENGTH, RESULT

_CHUNK = 1 << 16
# A rank that was killed is gone by then, or never will be (it waits for a disk).
_KILL_S = 2.0
# What an ended rank's children still write is not waited for beyond this many chunks.
_LAST_CHUNKS = 64


def rank_environment(environ: Mapping[str, str], start: Start) -> dict[str, str]:
    """Return the environment of a rank: the task's, the job's, and its place as Hydra announces it."""
    foreign = ("PMI_", "PMIX_", "OMPI_", "MPI_LOCAL", "SLURM_", "HYDRA_", "HYDI_")
    env = {name: value for name, value in environ.items() if not name.startswith(foreign)}
    env["PYTHONPATH"] = os.pathsep.join(_own_paths(environ.get("PYTHONPATH", "")))
    env |= start.env
    return env | {
        "PMI_RANK": str(start.rank),
        "PMI_SIZE": str(start.size),
        "PMI_SPAWNED": "0",
        "MPI_LOCALRANKID": str(start.local_rank),
        "MPI_LOCALNRANKS": str(start.local_size),
    }


def _own_paths(given: str) -> list[str]:
    """Where the task finds its modules, files that Spark has distributed too, but for those of its Python.

    These the rank finds by itself, and its Python may be another one.
    """
    wanted = set(given.split(os.pathsep))
    installed = tuple(os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))
    return [path for path in sys.path if path and (path in wanted or not path.startswith(installed))]


class Child:
    """A rank's process.

    Parameters
    ----------
    start : Start
        Which rank it is.
    code : bytes
        The pickled function, args and kwargs.
    on_pmi : callable
        Called with each line that the rank says to its PMI server.
    on_output : callable
        Called with 1 or 2 and what the rank has written there.
    files : mapping of str to int
        Descriptors that the rank inherits; variables of these names tell it their numbers.

    Attributes
    ----------
    failure : Failed or None
        What the rank has said of its failure, or what is known of its end; None while it is well.
    result : bytes or None
        The pickled result.
    ended : bool
        Whether the process is gone.
    """

    def __init__(
        self,
        start: Start,
        code: bytes,
        on_pmi: Callable[[str], None],
        on_output: Callable[[int, bytes], None],
        files: Mapping[str, int],
    ) -> None:
        self.failure: Failed | None = None
        self.result: bytes | None = None
        self.ended = False
        self._on_pmi = on_pmi
        self._on_output = on_output
        self._to_rank = memoryview(LENGTH.pack(len(code)) + code)
        self._answer = bytearray()
        self._pmi_line = b""
        self._said = b""  # by the keeper: the rank's process id, then how it ended
        self._life, life = socket.socketpair()
        self._control, control = socket.socketpair()
        self._pmi, pmi = socket.socketpair()
        self._out, out = os.pipe()
        self._err, err = os.pipe()
        env = rank_environment(os.environ, start) | {"PMI_FD": str(pmi.fileno())}
        env |= {name: str(number) for name, number in files.items()}
        command = [start.executable or sys.executable, "-m", "pyhvd.spark.rank_process"]
        given = (life.fileno(), control.fileno(), pmi.fileno(), *files.values())
        try:
            self._process = subprocess.Popen(
                [*command, str(life.fileno()), str(control.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=given,
                start_new_session=True,
            )
        except OSError:
            for end in (self._life, self._control, self._pmi):
                end.close()
            os.close(self._out)
            os.close(self._err)
            raise
        finally:
            for end in (life, control, pmi):
                end.close()
            os.close(out)
            os.close(err)
        for fd in (self._life, self._control, self._pmi):
            fd.setblocking(False)
        os.set_blocking(self._out, False)
        os.set_blocking(self._err, False)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have a selector call this object's methods; its keys' data are called with the key's events."""
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector = selector
        selector.register(self._life, selectors.EVENT_READ, lambda: self._read_life())
        selector.register(self._control, both, lambda: self._talk())
        selector.register(self._pmi, selectors.EVENT_READ, lambda: self._read_pmi())
        selector.register(self._out, selectors.EVENT_READ, lambda: self._read_output(1, self._out))
        selector.register(self._err, selectors.EVENT_READ, lambda: self._read_output(2, self._err))

    def answer_pmi(self, line: str) -> None:
        """Pass on what the PMI server says; lines are short, and the rank waits for each."""
        with contextlib.suppress(OSError):
            self._pmi.sendall(line.encode())

    def kill(self) -> None:
        """End the rank and all that it has started, and wait until they are gone."""
        if self.ended:
            return
        self._life.close()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the keeper does not do its work: the kernel ends the rank with it
            self._process.wait(_KILL_S)
        self.ended = True

    def close(self) -> None:
        """Kill what is left, and close every descriptor."""
        self.kill()
        for end in (self._life, self._control, self._pmi):
            end.close()
        for fd in (self._out, self._err):
            with contextlib.suppress(OSError):
                os.close(fd)

    def _forget(self, source: int | socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def _talk(self) -> None:
        """Give the rank its code, as fast as it takes it, and hear its answer."""
        try:
            if self._to_rank:
                self._to_rank = self._to_rank[self._control.send(self._to_rank[:_CHUNK]) :]
                if not self._to_rank:
                    self._selector.modify(self._control, selectors.EVENT_READ, lambda: self._talk())
            data = self._control.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._forget(self._control)
            return
        self._answer += data
        self._take_answer()

    def _take_answer(self) -> None:
        head = 1 + LENGTH.size
        if len(self._answer) < head:
            return
        kind = bytes(self._answer[:1])
        (length,) = LENGTH.unpack_from(self._answer, 1)
        if len(self._answer) < head + length:
            return
        payload = bytes(self._answer[head : head + length])
        if kind == RESULT:
            self.result = payload
        elif kind == FAILURE:
            failed = decode_from_task(payload)
            if not isinstance(failed, Failed):
                raise ChannelError("the rank sent what is no failure")
            self.failure = failed

    def _read_pmi(self) -> None:
        try:
            data = self._pmi.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._forget(self._pmi)
            return
        *lines, self._pmi_line = (self._pmi_line + data).split(b"\n")
        if max(map(len, [*lines, self._pmi_line])) > 2 * MAX_LINE:
            self.failure = Failed(EXIT, "wrote to the descriptor of its PMI server", "", time.time())
            return
        for line in lines:
            self._on_pmi(line.decode(errors="replace"))

    def _read_output(self, stream: int, fd: int) -> bool:
        try:
            data = os.read(fd, _CHUNK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        if not data:
            self._forget(fd)
            return False
        self._on_output(stream, data)
        return True

    def _read_life(self) -> None:
        """The keeper has said who the rank is, or how it ended, or is gone."""
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
        while self._control.fileno() >= 0 and self._has_more():
            self._talk()
        for stream, fd in ((1, self._out), (2, self._err)):
            for _ in range(_LAST_CHUNKS):
                if not self._read_output(stream, fd):
                    break
        self._process.wait(_KILL_S)
        self.ended = True
        self._forget(self._life)
        if self.failure is None:
            self.failure = self._judge()

    def _has_more(self) -> bool:
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _kill_group(self) -> None:
        """The keeper was killed, and the rank with it: kill what the rank had started.

        Its process id is that of the group still, as long as there is anything left of the group.
        """
        pid = self._said.partition(b"\n")[0]
        if pid.isdigit():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(int(pid), signal.SIGKILL)

    def _judge(self) -> Failed | None:
        now = time.time()
        numbers = self._said.split()
        if len(numbers) < 2:
            return Failed(LOST, "and its keeper were killed", "", now)
        code = int(numbers[1])
        if code < 0:
            return Failed(SIGNAL, describe_signal(-code), "", now, 128 - code)
        if code and self.result is None:
            return Failed(EXIT, f"ended with exit code {code} before the function returned", "", now, code)
        if code:
            return Failed(EXIT, f"ended with exit code {code} after the function returned", "", now, code)
        if self.result is None:
            return Failed(EXIT, "ended with exit code 0 before the function returned", "", now, 1)
        return None

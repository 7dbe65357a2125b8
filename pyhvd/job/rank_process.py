"""The rank as its task sees it: a kept process, the lines to it, and how it ended.

Owns: the rank's control socket and its line to PMI-1. Knows nothing of Spark, nor of the driver.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping

from pyhvd.job.messages import Failed, Start, decode_from_task
from pyhvd.job.mpi.pmi import MAX_LINE
from pyhvd.job.process.exit_report import EXIT, LOST, SIGNAL
from pyhvd.job.process.signals import describe_signal
from pyhvd.job.process.supervised import SupervisedProcess
from pyhvd.job.rank import ENTERS, FAILURE, LENGTH, RESULT
from pyhvd.transport.tcp.session import ChannelError

_CHUNK = 1 << 16


def rank_environment(environ: Mapping[str, str], start: Start) -> dict[str, str]:
    """Return the environment of a rank: the task's, the job's, and with PMI-1 its place, as Hydra has it."""
    env = own_environment(without_foreign(environ)) | start.env
    if start.pmi:
        env |= {
            "PMI_RANK": str(start.rank),
            "PMI_SIZE": str(start.size),
            "PMI_SPAWNED": "0",
            "MPI_LOCALRANKID": str(start.local_rank),
            "MPI_LOCALNRANKS": str(start.local_size),
        }
    return env


# The executor's environment may speak of a job that the executor itself is part of, which is not this job.
_FOREIGN = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_LOCAL", "SLURM_", "HYDRA_", "HYDI_")
# The user sets parameters by spark.executorEnv; with orte and ess Open MPI 4 speaks of its own job.
_PARAMETERS = ("OMPI_MCA_", "PRTE_MCA_")
_OF_A_JOB = ("OMPI_MCA_orte_", "OMPI_MCA_ess_")


def without_foreign(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of another MPI job; the parameters of Open MPI stay."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_FOREIGN) or (name.startswith(_PARAMETERS) and not name.startswith(_OF_A_JOB))
    }


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which Python finds what this one finds, files that Spark has distributed too.

    What belongs to this Python itself is not in it: a process of another Python may be started.
    """
    wanted = set(environ.get("PYTHONPATH", "").split(os.pathsep))
    installed = tuple(os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))
    paths = [path for path in sys.path if path and (path in wanted or not path.startswith(installed))]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


class RankProcess:
    """A rank's process.

    Parameters
    ----------
    start : Start
        Which rank it is.
    code : bytes
        The pickled function, args and kwargs.
    on_pmi : callable
        Called with each line that the rank says to its PMI server.
    on_enter : callable
        Called when the rank is about to call MPI_Init.
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
    """

    def __init__(
        self,
        start: Start,
        code: bytes,
        on_pmi: Callable[[str], None],
        on_enter: Callable[[], None],
        on_output: Callable[[int, bytes], None],
        files: Mapping[str, int],
    ) -> None:
        self.failure: Failed | None = None
        self.result: bytes | None = None
        self._on_pmi = on_pmi
        self._on_enter = on_enter
        self._to_rank = memoryview(LENGTH.pack(len(code)) + code)
        self._answer = bytearray()
        self._pmi_line = b""
        self._control, control = socket.socketpair()
        self._pmi, pmi = socket.socketpair()
        env = rank_environment(os.environ, start)
        if start.pmi:
            env["PMI_FD"] = str(pmi.fileno())
        env |= {name: str(number) for name, number in files.items()}
        try:
            self._process = SupervisedProcess(
                "pyhvd.job.process.rank_main",
                [str(control.fileno())],
                env,
                on_output,
                self._note_end,
                descriptors=(control.fileno(), pmi.fileno(), *files.values()),
                python=start.executable,
            )
        except (OSError, ValueError):  # ValueError: a name or value that no environment can have
            self._control.close()
            self._pmi.close()
            raise
        finally:
            control.close()
            pmi.close()
        self._control.setblocking(False)
        self._pmi.setblocking(False)

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.ended

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have a selector call this object's methods: its keys' data."""
        both = selectors.EVENT_READ | selectors.EVENT_WRITE
        self._selector = selector
        selector.register(self._control, both, lambda: self._talk())
        selector.register(self._pmi, selectors.EVENT_READ, lambda: self._read_pmi())
        self._process.register(selector)

    def hold_output(self, held: bool) -> None:
        """Have the rank wait when it writes to its stdout or stderr, or no longer."""
        self._process.hold_output(held)

    def answer_pmi(self, line: str) -> None:
        """Pass on what the PMI server says; lines are short, and the rank waits for each."""
        with contextlib.suppress(OSError):
            self._pmi.sendall(line.encode())

    def close(self) -> None:
        """Kill the rank and all that it has started, and close every descriptor."""
        self._process.close()
        self._control.close()
        self._pmi.close()

    def _forget(self, source: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def _talk(self) -> None:
        """Give the rank its code, as fast as it takes it, and hear its answer."""
        if self._to_rank:
            self._give()
        self._hear()

    def _give(self) -> None:
        try:
            sent = self._control.send(self._to_rank[:_CHUNK])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            sent = len(self._to_rank)  # the rank takes no more; what it has said is still to be heard
        self._to_rank = self._to_rank[sent:]
        if not self._to_rank:
            self._selector.modify(self._control, selectors.EVENT_READ, lambda: self._talk())

    def _hear(self) -> None:
        try:
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
        del self._answer[: head + length]
        if kind == ENTERS:
            self._on_enter()
            self._take_answer()
        elif kind == RESULT:
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

    def _note_end(self) -> None:
        while self._control.fileno() >= 0 and self._has_more():
            self._hear()
        if self.failure is None:
            self.failure = self._judge()

    def _has_more(self) -> bool:
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK))
        except OSError:
            return False

    def _judge(self) -> Failed | None:
        now = time.time()
        code = self._process.code
        keeper = self._process.keeper_code
        if code is None and keeper is not None and keeper > 0:
            if self._process.began:
                return Failed(LOST, f"was killed, as its keeper ended with exit code {keeper}", "", now)
            text = f"could not be started: its Python ended with exit code {keeper}, and says why on stderr"
            return Failed(EXIT, text, "", now, keeper)
        if code is None:
            return Failed(LOST, "and its keeper were killed", "", now)
        if code < 0:
            return Failed(SIGNAL, describe_signal(-code), "", now, 128 - code)
        if code and self.result is None:
            text = f"ended with exit code {code} before the function returned"
            return Failed(EXIT, text, "", now, code, silent=True)
        if code:
            return Failed(EXIT, f"ended with exit code {code} after the function returned", "", now, code)
        if self.result is None:
            return Failed(EXIT, "ended with exit code 0 before the function returned", "", now, 1)
        return None

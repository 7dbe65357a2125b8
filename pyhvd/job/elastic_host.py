"""What the agent of a host keeps over the generations of an elastic job: the vault, and the processes beside.

The zygote starts beside the ranks of the first generation, which commands start. It takes over as soon as it
has done its imports; if it is not there, or unfit, commands start the ranks of later generations too. A
zygote that runs the program (:mod:`pyhvd.run.warm_program`) forks the ranks of the first generation too. A
zygote that was killed is replaced.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyhvd.job.function_process import FunctionProcess, split_call
from pyhvd.job.messages import Start
from pyhvd.job.notice import Notice
from pyhvd.job.process.guardian import signal_group
from pyhvd.job.program_process import Program, ProgramProcess, program_environment
from pyhvd.job.rank_process import RankEvents, RankProcess
from pyhvd.job.store_child import StoreChild
from pyhvd.job.vault import Vault
from pyhvd.job.zygote import Fork, Forked, Preload, Ready, receive, send

# A fork takes milliseconds; a zygote that does not answer for so long is given up.
_ANSWER_S = 2.0


class ElasticHost:
    """The vault and the zygote of one host, what is known of its end, and what stores its commits.

    Parameters
    ----------
    function : bool
        Whether the ranks run a function, and no program.
    """

    def __init__(self, function: bool = False) -> None:
        self._function = function
        self.vault = Vault.create()
        self.notice = Notice()
        self.store = StoreChild(self.vault)
        self._zygote: Zygote | None = None
        self._local_size = 0

    def make_rank(self, start: Start, code: bytes, events: RankEvents) -> RankProcess:
        """Start a rank; see :data:`pyhvd.job.agent.MakeRank`."""
        size = start.local_size  # threads of BLAS depend on it
        if self._zygote is None or self._local_size != size or self._zygote.lost:
            self._begin_zygote(start, split_call(code)[0] if self._function else Program.load(code))
        fit = self._zygote is not None and self._zygote.fit
        popen = self._zygote.popen if self._zygote is not None and fit else subprocess.Popen
        kind = FunctionProcess if self._function else ProgramProcess
        return kind(start, code, events, self.vault, popen)

    def close(self) -> None:
        """Forget the state, and end the zygote."""
        self.notice.close()
        self.store.close()
        self.vault.close()
        if self._zygote is not None:
            self._zygote.close()

    def _begin_zygote(self, start: Start, program: Program) -> None:
        self.end_zygote()
        self._local_size = start.local_size
        with contextlib.suppress(OSError):
            env = program_environment(os.environ, program, start)
            self._zygote = Zygote(program, env, start.local_size)

    def end_zygote(self) -> None:
        """End the zygote; the next ranks are started by commands."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


class Zygote:
    """The agent's end of a zygote; see :mod:`pyhvd.job.zygote`.

    Parameters
    ----------
    program : Program
        The ranks' program, whose imports it does; or which it runs until ``init()``, if that is to be warm.
    env : mapping of str to str
        The variables of a rank, which imports read.
    ranks : int
        The number of the host's ranks.
    """

    def __init__(self, program: Program, env: Mapping[str, str], ranks: int) -> None:
        self._channel, theirs = socket.socketpair()
        self._ready = False
        self._unfit = ""
        self._warm = bool(program.warm)
        self._requested: deque[ForkedProcess] = deque()  # those that are not forked yet
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", program.warm or "pyhvd.job.zygote", str(theirs.fileno())],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()
        self._channel.settimeout(_ANSWER_S)
        send(self._channel, Preload(program.arguments, program.directory, program.preload, ranks))

    @property
    def fit(self) -> bool:
        """Whether it can be asked to fork now; the first answer that it cannot is told on stderr.

        One that runs the program may be asked before it has come to ``init()``. It tells the user itself.
        """
        self._take_answers()
        return (self._ready or self._warm) and not self._unfit and self._process.poll() is None

    @property
    def lost(self) -> bool:
        """Whether it was killed."""
        self._take_answers()
        return not self._unfit and self._process.poll() is not None

    def popen(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None,
        stdin: int,
        stdout: int,
        stderr: int,
        pass_fds: Sequence[int],
        start_new_session: bool,  # noqa: ARG002 - it always does
    ) -> Any:
        """Start ``python ... -m module argument ...`` as :class:`subprocess.Popen` does, by a fork."""
        at = list(args).index("-m")
        null = os.open(os.devnull, os.O_RDONLY)
        process = ForkedProcess(self._take_answers)
        try:
            standard = [null if stdin == subprocess.DEVNULL else stdin, stdout, stderr]
            numbers = [0, 1, 2, *pass_fds]
            fork = Fork(args[at + 1], list(args[at + 2 :]), dict(env), cwd or os.getcwd(), numbers)
            send(self._channel, fork, [*standard, *pass_fds])
            self._requested.append(process)
            asked = self._warm or (self._take_answer(_ANSWER_S) and bool(process.pid))
        except (OSError, ValueError):
            asked = False
        finally:
            os.close(null)
        if not asked:
            self.close()
            return subprocess.Popen(
                args,
                env=env,
                cwd=cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        return process

    def _take_answers(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the channel may be closed
            while self._take_answer(0):
                pass

    def _take_answer(self, timeout: float) -> bool:
        """Take the zygote's next answer; return whether there was one."""
        if not select.select([self._channel], [], [], timeout)[0]:
            return False
        answer = receive(self._channel)
        if answer is None:
            return False
        if isinstance(answer[0], Ready):
            self._ready, self._unfit = True, answer[0].unfit
            if self._unfit and not self._warm:
                os.write(2, f"pyhvd: ranks start slowly: {self._unfit}\n".encode())
        elif isinstance(answer[0], Forked):
            self._requested.popleft().begin(answer[0].pid)
        return True

    def close(self) -> None:
        """End the zygote, and what the program has started in it; ranks that it has forked stay."""
        self._channel.close()
        if self._process.poll() is None:
            signal_group(self._process.pid, signal.SIGKILL)
        self._process.wait()


class ForkedProcess:
    """A guardian that a zygote has forked, or will fork: what :class:`subprocess.Popen` offers of it.

    Its exit code is the zygote's to read, and unknown here.

    Parameters
    ----------
    look : callable
        Looks whether it was forked, and calls :meth:`begin` then.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self.returncode: int | None = None
        self._look = look
        self._pid = 0
        self._descriptor = -1

    @property
    def pid(self) -> int:
        """Its process id; 0 until it is forked."""
        if not self._pid:
            self._look()
        return self._pid

    def begin(self, pid: int) -> None:
        """Note that it was forked; or that it never will be, if the id is 0."""
        self._pid = pid
        try:
            self._descriptor = os.pidfd_open(pid) if pid else -1
        except ProcessLookupError:
            self.returncode = 0

    def wait(self, timeout: float) -> int:
        """Wait for its end; do not wait for a process that is not forked, whose lifetime line has ended."""
        if self.pid and self.returncode is None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if not poll.poll(timeout * 1000):
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            os.close(self._descriptor)
            self.returncode = 0
        return 0

    def kill(self) -> None:
        """Kill it."""
        if self.pid and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

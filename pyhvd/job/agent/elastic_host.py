"""What the agent of a host keeps over the generations of an elastic job: the vault, and the processes beside.

The zygote starts beside the ranks of the first generation, which commands start. It takes over as soon as it
has done its imports; if it is not there, or unfit, commands start the ranks of later generations too. A
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
from collections.abc import Mapping, Sequence
from typing import Any

from pyhvd.job.agent.function_process import FunctionProcess, split_call
from pyhvd.job.agent.notice import Notice
from pyhvd.job.agent.program_process import ProgramProcess
from pyhvd.job.agent.rank_process import Program, RankEvents, RankProcess, rank_environment
from pyhvd.job.agent.zygote import Fork, Forked, Preload, ZygoteReady, receive, send
from pyhvd.job.commits.store_child import StoreChild
from pyhvd.job.commits.vault import Vault
from pyhvd.job.messages import Start

# A fork takes milliseconds; a zygote that does not answer within this time is given up.
_ANSWER_S = 2.0


class ElasticHost:
    """The vault and the zygote of one host, what is known of its end, and what stores its commits.

    Parameters
    ----------
    function : bool
        Whether the ranks run a function, and no program.
    """

    def __init__(self, *, function: bool = False) -> None:
        self._function = function
        self.vault = Vault.create()
        self.notice = Notice()
        self.store = StoreChild(self.vault)
        self._zygote: Zygote | None = None
        self._local_size = 0

    def make_rank(self, start: Start, code: bytes, events: RankEvents) -> RankProcess:
        """Start a rank; see :data:`pyhvd.job.agent.agent.MakeRank`."""
        size = start.local_size  # threads of BLAS depend on it
        if self._zygote is None or self._local_size != size or self._zygote.lost:
            self._begin_zygote(start, split_call(code)[0] if self._function else Program.load(code))
        fit = self._zygote is not None and self._zygote.fit
        popen = self._zygote.popen if self._zygote is not None and fit else subprocess.Popen
        kind = FunctionProcess if self._function else ProgramProcess
        return kind(start, code, events, self.vault.files, popen)

    def close(self) -> None:
        """Forget the state, and end the zygote."""
        self.notice.close()
        self.store.close()
        self.vault.close()
        self.end_zygote()

    def _begin_zygote(self, start: Start, program: Program) -> None:
        self.end_zygote()
        self._local_size = start.local_size
        with contextlib.suppress(OSError):
            env = rank_environment(os.environ, start, program)
            self._zygote = Zygote(program, env)

    def end_zygote(self) -> None:
        """End the zygote; the next ranks are started by commands."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


class Zygote:
    """The agent's end of a zygote; see :mod:`pyhvd.job.agent.zygote`.

    Parameters
    ----------
    program : Program
        The ranks' program, whose imports it does.
    env : mapping of str to str
        The variables of a rank, which imports read.
    """

    def __init__(self, program: Program, env: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair()
        self._ready = False
        self._unfit = ""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pyhvd.job.agent.zygote", str(theirs.fileno())],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()
        self._channel.settimeout(_ANSWER_S)
        send(self._channel, Preload(program.arguments, program.directory, program.preload))

    @property
    def fit(self) -> bool:
        """Whether it can fork now; the first answer that it cannot is told on stderr."""
        if not self._ready and select.select([self._channel], [], [], 0)[0]:
            with contextlib.suppress(OSError, ValueError):
                answer = receive(self._channel)
                if answer is not None and isinstance(answer[0], ZygoteReady):
                    self._ready, self._unfit = True, answer[0].unfit
                    if self._unfit:
                        os.write(2, f"pyhvd: ranks start slowly: {self._unfit}\n".encode())
        return self._ready and not self._unfit and self._process.poll() is None

    @property
    def lost(self) -> bool:
        """Whether it was killed."""
        return not self._unfit and self._process.poll() is not None

    def popen(self, args: Sequence[str], **options: Any) -> Any:
        """Start the guardian of a rank, a command, as :class:`subprocess.Popen` does, but by a fork.

        `options` are those of :class:`~pyhvd.job.process.supervised.SupervisedProcess`. The process gets a
        session of its own in any case.
        """
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            stdin = null if options["stdin"] == subprocess.DEVNULL else options["stdin"]
            numbers = [0, 1, 2, *options["pass_fds"]]
            directory = options["cwd"] or os.getcwd()
            fork = Fork(list(args[args.index("-m") + 2 :]), dict(options["env"]), directory, numbers)
            send(self._channel, fork, [stdin, options["stdout"], options["stderr"], *options["pass_fds"]])
            answer = receive(self._channel)
        except (OSError, ValueError):
            answer = None
        finally:
            os.close(null)
        if answer is None or not isinstance(answer[0], Forked):
            self.close()
            return subprocess.Popen(args, **options)
        return ForkedProcess(answer[0].pid)

    def close(self) -> None:
        """End the zygote; ranks that it has forked stay."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


class ForkedProcess:
    """A guardian that a zygote has forked: what :class:`subprocess.Popen` offers of it.

    Its exit code is the zygote's to read, and unknown here.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._descriptor, self.returncode = -1, 0

    def wait(self, timeout: float) -> int:
        """Wait for its end."""
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if not poll.poll(timeout * 1000):
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            os.close(self._descriptor)
            self.returncode = 0
        return self.returncode

    def kill(self) -> None:
        """Kill it."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

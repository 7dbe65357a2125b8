"""``python -P -m pyhvd.run.warm_program CHANNEL``: runs a program until ``init()``, and forks ranks there.

The zygote of ``--warm init``; :mod:`pyhvd.job.zygote` has the messages of its channel.

1. It takes the first request of each of the host's ranks. Until ``init()`` the program writes to the output
   of the first, so that it is shown once.
2. In ``init()`` it forks. Each child forks its rank, and becomes the rank's guardian. In the rank ``init()``
   goes on; in the zygote it never returns.
3. If the program ends before ``init()``, or does what forbids forks, the zygote says so, starts the ranks by
   commands, and ends. The agent starts later ranks by commands itself.

Until ``init()`` the program has no variables of one rank. In the rank, variables that the program has changed
keep its values.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from pyhvd.common import launcher_hooks
from pyhvd.common.text import describe_exception
from pyhvd.job.mpi import segments
from pyhvd.job.mpi.rank_env import OF_RANKS, read_rank_env, set_defaults, without
from pyhvd.job.process.guardian import close_all_but, die_with_parent, fork_guarded
from pyhvd.job.vault import DESCRIPTORS
from pyhvd.job.zygote import (
    OWN,
    Fork,
    Forked,
    Preload,
    Ready,
    fork,
    freeze,
    preload,
    receive,
    reseed,
    send,
    what_forbids_forks,
)
from pyhvd.run.program_rank import prepare
from pyhvd.run.user_script import Ending, flush, run_program

# How the names of variables begin that belong to one rank, or to one generation.
_OF_ONE_RANK = (
    *OF_RANKS,
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_", "HOROVOD_CROSS_"),
    *("HOROVOD_ELASTIC", "PYHVD_ELASTIC_"),
)
# Variables that hold the numbers of descriptors.
_NUMBERS = ("PMI_FD", *DESCRIPTORS)
_CHUNK = 1 << 16


@dataclass
class _Request:
    """A guardian and its rank that the agent wants; the program may have taken the descriptors' numbers."""

    wanted: Fork
    descriptors: list[int]

    @property
    def standard(self) -> list[int]:
        """The descriptors of stdin, stdout and stderr."""
        return self.descriptors[:3]

    @property
    def arguments(self) -> list[int]:
        """The descriptors of the lifetime line and of the control socket."""
        return [self._at(number) for number in self.wanted.arguments]

    @property
    def env(self) -> dict[str, str]:
        """The rank's variables."""
        env = self.wanted.env
        return env | {name: str(self._at(env[name])) for name in _NUMBERS if name in env}

    @property
    def is_over(self) -> bool:
        """Whether the agent has ended this rank."""
        poll = select.poll()  # the descriptor may be too large for select()
        poll.register(self.arguments[0], select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)

    def _at(self, number: str) -> int:
        return self.descriptors[self.wanted.numbers.index(int(number))]


class _Warm:
    """The zygote.

    Parameters
    ----------
    channel : socket.socket
        The agent's.
    waiting : list
        The first requests.
    """

    def __init__(self, channel: socket.socket, waiting: list[_Request]) -> None:
        self._channel = channel
        self._waiting = waiting
        self._before: dict[str, str] = {}  # the variables with which the program began
        self._ending = Ending()
        self._pid = os.getpid()

    def run(self, program: list[str]) -> int:
        """Run the program; return its exit code in a rank or another child, and never in the zygote."""
        self._before = dict(os.environ)
        launcher_hooks.before_init = self._fork_ranks
        code = run_program(program, self._ending)
        if os.getpid() == self._pid:
            error = getattr(sys, "last_value", None)
            how = "ended" if error is None else f"raised {describe_exception(error)}"
            self.refuse(f"the program {how} before init()")
        return code

    def refuse(self, why: str) -> NoReturn:
        """Start the ranks that were requested by commands, and end this process."""
        flush()
        segments.remove_own()  # MPI may be up here, and is not finalised
        with suppress(OSError):  # the program may have closed it
            os.write(2, f"pyhvd: --warm init has no effect: {why}\n".encode())
        send(self._channel, Ready(why))
        for request in self._requests():
            pid = 0 if request.is_over else _start_command(request)
            request.close()
            send(self._channel, Forked(pid))
            if not self._waiting and not select.select([self._channel], [], [], 0)[0]:
                break
        os._exit(0)

    def _fork_ranks(self) -> None:
        """Fork a rank for each request, and return there; also in a child that the program has forked."""
        launcher_hooks.before_init = bool
        if os.getpid() != self._pid:
            return
        if does := what_forbids_forks():
            self.refuse(f"the program {does} before init()")
        freeze()
        flush()
        handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the guardians
        _leave_output()
        send(self._channel, Ready())
        for request in self._requests():
            if request.is_over:
                pid = 0
            elif not (pid := fork()):
                self._become_rank(request)
                signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
                return
            request.close()
            send(self._channel, Forked(pid))
        os._exit(0)

    def _requests(self) -> Iterator[_Request]:
        """Yield requests until the channel ends."""
        while self._waiting:
            yield self._waiting.pop(0)
        while (request := _receive(self._channel)) is not None:
            yield request

    def _become_rank(self, request: _Request) -> None:
        """Fork the rank, and return in it; this process becomes its guardian."""
        self._channel.close()
        for other in self._waiting:
            other.close()
        os.setsid()
        for number, descriptor in enumerate(request.standard):
            os.dup2(descriptor, number)
            os.close(descriptor)
        life, control = request.arguments
        fork_guarded(life)
        _set_variables(_changed(request.env, self._before, without(os.environ, *_OF_ONE_RANK)))
        _, rank_env, report_fd = prepare(control)
        reseed()
        self._ending.begin(rank_env, report_fd)


def _receive(channel: socket.socket) -> _Request | None:
    received = receive(channel)
    if received is None or not isinstance(received[0], Fork):
        return None
    for descriptor in received[1]:  # what the program starts before init() must not keep them open
        os.set_inheritable(descriptor, False)
    return _Request(received[0], received[1])


def _start_command(request: _Request) -> int:
    """Start a guardian and its rank by a command; return the guardian's process id."""
    stdin, stdout, stderr = request.standard
    return subprocess.Popen(
        [sys.executable, "-P", "-m", request.wanted.module, *map(str, request.arguments)],
        env=request.env,
        cwd=request.wanted.directory,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=request.descriptors[3:],
        start_new_session=True,
    ).pid


def _changed(env: dict[str, str], before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Return variables, changed as those of the program have changed."""
    kept = {name: value for name, value in env.items() if name in now or name not in before}
    return kept | {name: value for name, value in now.items() if before.get(name) != value}


def _set_variables(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def _begin_helper(targets: Sequence[int]) -> None:
    """Start a child that passes this process's stdout and stderr on to a rank's, and outlives this process.

    The rank may be over before the program comes to ``init()``. The child drops what comes then, so that the
    program gets no error. When this process has ended, the child ends what the program has started in it.
    """
    zygote = os.pidfd_open(os.getpid())
    pipes = [os.pipe() for _ in targets]
    if os.fork() == 0:
        targets_of = {read: target for (read, _), target in zip(pipes, targets, strict=True)}
        close_all_but(zygote, *targets_of, *targets)
        _pass_on(targets_of, zygote)
        os.killpg(0, signal.SIGKILL)
    os.close(zygote)
    for number, (read, write) in enumerate(pipes, 1):
        os.dup2(write, number)
        os.close(read)
        os.close(write)


def _pass_on(targets: dict[int, int], zygote: int) -> None:
    """Pass on what comes from pipes, by the pipe's descriptor, until the zygote has ended."""
    ended = False
    while not ended:
        select.select([zygote, *targets], [], [])
        ended = bool(select.select([zygote], [], [], 0)[0])
        for source in select.select([*targets], [], [], 0)[0]:
            if data := os.read(source, _CHUNK):
                with suppress(OSError):
                    os.write(targets[source], data)
            else:
                os.close(targets.pop(source))


def _leave_output() -> None:
    """Let go of the first rank's output."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)
    if null > 2:  # else the program has closed the number
        os.close(null)


def serve(channel: socket.socket) -> int:
    """Run the program that the agent names; return its exit code in a rank, and never in the zygote."""
    first = receive(channel)
    if first is None or not isinstance(first[0], Preload):
        return 1
    wanted = first[0]
    waiting = [request for _ in range(wanted.ranks) if (request := _receive(channel)) is not None]
    if len(waiting) < wanted.ranks:
        return 1
    _begin_helper(waiting[0].standard[1:])
    rank_env = read_rank_env()
    if rank_env is not None:
        set_defaults(rank_env, os.environ)
    _set_variables(without(os.environ, *_OF_ONE_RANK))
    os.chdir(wanted.directory)
    warm = _Warm(channel, waiting)
    if unfit := preload([*OWN, *wanted.names]):
        warm.refuse(unfit)
    sys.path.insert(0, "")  # the entry that the program's run sets, and that -P leaves out
    return warm.run(wanted.program)


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, os.getppid())
    sys.exit(serve(socket.socket(fileno=int(sys.argv[1]))))

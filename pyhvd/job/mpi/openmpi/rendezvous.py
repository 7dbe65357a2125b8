"""mpiexec on the driver starts the world: for MPIs without PMI-1, Open MPI above all.

    mpiexec --calls--> agent ==net/==> driver ==net/==> first task of the host --starts--> MPI's daemon
    MPI's daemon --starts--> stand-in ==net/==> driver ==net/==> task --starts--> rank

mpiexec calls an agent (:mod:`pyhvd.job.mpi.openmpi.launch_agent`) per host, as it would call ssh; the daemon that it wants
there runs beside the host's task of the lowest index. What the daemon starts is a stand-in for each rank
(:mod:`pyhvd.job.mpi.openmpi.rank_proxy`); the ranks are children of their own Spark tasks, as without mpiexec, which
supervise them in the same way. So mpiexec tells ranks where they stand and serves MPI_Init, and no more.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    Pmi,
    RankProxy,
    StartDaemon,
)
from pyhvd.job.mpi.flavour import find_library, find_mpiexec
from pyhvd.job.mpi.openmpi.daemon import root_settings
from pyhvd.job.mpi.openmpi.rank_proxy import PYTHON
from pyhvd.job.mpi.pmi import Abort, Barrier, PmiError, check_abort, parse
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI
from pyhvd.job.placement import Seat, Task, seats_of
from pyhvd.job.process.exit_report import LOST, SIGNAL
from pyhvd.job.process.signals import describe_signal
from pyhvd.job.process.supervised import SupervisedProcess
from pyhvd.job.rendezvous import RendezvousHost, blame_abort
from pyhvd.transport.tcp.connection import Address

# What mpiexec says is kept to be shown should it fail: so much of its end.
_SAID = 4000
# When all ranks have ended, mpiexec and its daemons should; after so long they are ended.
_TIDY_S = 3.0
# It has a second from SIGTERM to SIGKILL.
_KILL_S = 3.0
# What the driver's environment says of a job that it is itself part of is not about this one.
_FOREIGN = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "PRTE_LAUNCHED", "SLURM_", "LSB_", "PBS_", "HYDI_")
_AGENT = '"$TMPDIR"/agent'


@dataclass(frozen=True)
class Mpiexec:
    """An mpiexec.

    Attributes
    ----------
    path : str
        Where it is.
    family : str
        ``"Open MPI"`` or ``"MPICH"``, whose launcher is Hydra.
    """

    path: str
    family: str

    @property
    def prefix(self) -> str:
        """Where its MPI is installed."""
        return os.path.dirname(os.path.dirname(self.path))


def find() -> Mpiexec:
    """Return the driver's mpiexec.

    Raises
    ------
    LaunchError
        mpi4py has no MPI here, or there is no mpiexec of it.
    UnsupportedLauncherError
        It is of an MPI that is not known here.
    """
    library = find_library()
    if library.family not in (OPENMPI, MPICH):
        raise UnsupportedLauncherError(
            f"launcher='mpiexec' knows Open MPI's and MPICH's mpiexec, not that of {library.name}"
        )
    return Mpiexec(os.path.abspath(find_mpiexec(library)), library.family)


def host_name(task: Task) -> str:
    """Return what mpiexec knows a host by: nothing that it would find to be this machine, or look up."""
    return f"h{task.host_hash}"


def command_line(mpiexec: Mpiexec, hosts: Mapping[str, int], extra: Sequence[str], address: str) -> str:
    """Return the shell command that starts a world.

    Parameters
    ----------
    mpiexec : Mpiexec
        With what.
    hosts : mapping of str to int
        How many ranks on which host, in order.
    extra : sequence of str
        Arguments of the user; they come last, before the program.
    address : str
        The driver's, as the executors know it.
    """
    slots = ",".join(f"{host}:{count}" for host, count in hosts.items())
    size = str(sum(hosts.values()))
    program = ["/bin/sh", "-c", f'exec "${PYTHON}" -m pyhvd.job.mpi.openmpi.rank_proxy']
    if mpiexec.family == OPENMPI:
        # Daemons stay below their agents, which end with them: all agents live at the same time.
        many = str(max(len(hosts), 1) + 1)
        before = ["--leave-session-attached", "--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent"]
        after = ["--prtemca", "plm_ssh_no_tree_spawn", "1", "--prtemca", "plm_ssh_num_concurrent", many]
        after += ["--host", slots]
    else:
        before = ["-launcher", "ssh", "-launcher-exec"]
        # The driver's environment is none of the executors' business, nor is its directory.
        after = ["-genvnone", "-wdir", "/", "-localhost", address, "-hosts", slots]
    start = " ".join(
        [
            shlex.join([mpiexec.path, *before]),
            _AGENT,
            shlex.join([*after, *extra, "-n", size, *program]),
        ]
    )
    script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pyhvd.job.mpi.openmpi.launch_agent "$@"\n'
    return f"printf %s {shlex.quote(script)} > {_AGENT} && chmod 700 {_AGENT} && exec {start}"


def environment(
    family: str, environ: Mapping[str, str], addresses: Sequence[Address], secret: Secret
) -> dict[str, str]:
    """Return mpiexec's environment; it hands nothing of it to other hosts but what is MPI's."""
    env = {name: value for name, value in environ.items() if not name.startswith(_FOREIGN)}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if family == OPENMPI:
        defaults = {
            "PRTE_MCA_rmaps_default_mapping_policy": "slot",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
            # As Horovod has it; to look for other networks costs seconds of every start.
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "self,sm,tcp",
        }
        if os.getuid() == 0:
            defaults |= root_settings("OMPI")
        env = defaults | env
    return env | dict(to_environment(addresses, secret))


class MpiexecRendezvous:
    """See :class:`~pyhvd.job.rendezvous.Rendezvous`.

    Parameters
    ----------
    mpiexec : Mpiexec
        With what.
    extra : sequence of str
        The user's arguments for it.
    secret : Secret
        The job's key.
    executable : str, optional
        The ranks' Python.
    """

    def __init__(
        self, mpiexec: Mpiexec, extra: Sequence[str], secret: Secret, executable: str | None = None
    ) -> None:
        self._mpiexec = mpiexec
        self._extra = list(extra)
        self._secret = secret
        self._executable = executable
        self._addresses: list[Address] = []
        self._told = ""
        self._process: SupervisedProcess | None = None
        self._groups: dict[str, list[Task]] = {}
        self._agents: dict[int, Peer] = {}  # by the task that runs the daemon
        self._stand_ins: dict[int, tuple[Peer, RankProxy]] = {}
        self._said = ""
        self._left: set[int] = set()
        self._tidy_at = math.inf
        self._stopped = False

    @property
    def ends_ranks(self) -> bool:
        """Open MPI's ranks end by themselves when their daemon or another rank is gone."""
        return self._mpiexec.family == OPENMPI

    def call_at(self, addresses: Iterable[Address], told: str) -> None:
        """Say where the driver listens for agents, and what executors know it by."""
        self._addresses = list(addresses)
        self._told = told

    def begin(self, office: RendezvousHost, groups: Sequence[Sequence[Task]]) -> None:
        """Start mpiexec.

        Raises
        ------
        LaunchError
            It cannot tell these hosts apart, or cannot be started.
        """
        self._office = office
        self._groups = {host_name(group[0]): list(group) for group in groups}
        self._barrier = Barrier(sum(map(len, groups)))
        if self._mpiexec.family == OPENMPI:
            _check_names([group[0].host for group in groups])
        hosts = {name: len(group) for name, group in self._groups.items()}
        command = command_line(self._mpiexec, hosts, self._extra, self._told)
        env = environment(self._mpiexec.family, os.environ, self._addresses, self._secret)
        try:
            self._process = SupervisedProcess(
                "pyhvd.job.process.command_main",
                [command],
                env,
                self._note_output,
                self._note_end,
                kill_s=_KILL_S,
            )
        except OSError as exc:
            raise LaunchError(f"{self._mpiexec.path} could not be started: {exc}") from exc
        self._process.register(office.selector)

    def seats(self) -> list[Seat]:
        """Return where each rank stands, once mpiexec has started all stand-ins."""
        if len(self._stand_ins) < sum(map(len, self._groups.values())):
            return []
        said = [self._stand_ins[rank][1] for rank in range(len(self._stand_ins))]
        return seats_of(self._groups[each.host][each.local_rank] for each in said)

    def waits_for(self) -> str:
        """Return what is still missing, for an error's text."""
        there = Counter(said.host for _, said in self._stand_ins.values())
        lacking = [group[0].host for name, group in self._groups.items() if there[name] < len(group)]
        return (
            f"{self._mpiexec.path} has started none, or not all, on {', '.join(lacking)}. Can this host be"
            f" reached from there on any port?{self._quote()}"
        )

    def variables(self, rank: int) -> Mapping[str, str]:
        """Return what mpiexec wants in the rank's environment."""
        return self._stand_ins[rank][1].env

    def speaks_pmi(self, rank: int) -> bool:
        """Whether mpiexec's daemon has given the stand-in a line for PMI-1."""
        return self._stand_ins[rank][1].pmi

    def hear_pmi(self, rank: int, line: str) -> None:
        """Pass on to mpiexec's daemon what a rank says to it."""
        try:
            check_abort(rank, parse(line))
        except Abort as abort:
            blame_abort(self._office, abort)
        else:
            self._stand_ins[rank][0].send(Pmi(line + "\n"))

    def enter(self, rank: int) -> None:
        """A rank is about to wait for the others in MPI_Init.

        Its lines of PMI-1 do not tell: Hydra leaves a rank without an answer when another has ended.
        """
        try:
            if self._barrier.enter(rank):
                for each in self._stand_ins:
                    self._barrier.release(each)
        except PmiError as exc:
            self._office.blame(rank, f"cannot go on: {exc}", 1)

    def hear(self, peer: Peer, message: FromTask) -> None:
        """An agent, a stand-in, or a task whose daemon it is, has said something."""
        if isinstance(message, Launch):
            self._launch(peer, message)
        elif isinstance(message, RankProxy):
            self._seat(peer, message)
        elif isinstance(message, DaemonOutput):
            self._note_output(2, message.data)
        elif isinstance(message, DaemonEnded) and peer.task is not None:
            self._note_daemon_end(peer.task, message.code)
        elif isinstance(message, Pmi):
            for rank, (stand_in, _) in self._stand_ins.items():
                if stand_in is peer:
                    self._office.tell_rank(rank, message)

    def leave(self, rank: int) -> None:
        """A rank has ended well: so does its stand-in."""
        self._left.add(rank)
        self._stand_ins[rank][0].send(Exit(0))
        if len(self._left) == len(self._stand_ins):
            self._tidy_at = time.monotonic() + _TIDY_S
        try:
            self._barrier.leave(rank)
        except PmiError as exc:
            self._office.blame(rank, f"left the others alone: {exc}", 1)

    def check(self, now: float) -> None:
        """End what should have ended by itself."""
        if now > self._tidy_at:
            self._tidy_at = math.inf
            for index in self._agents:
                self._office.tell_task(index, EndDaemon())
            self._end_process()

    def stop(self) -> None:
        """End mpiexec and all who have called, without waiting for it."""
        self._stopped = True
        for peer in [*self._agents.values(), *(stand_in for stand_in, _ in self._stand_ins.values())]:
            peer.send(Exit(1))
        self._end_process()

    def close(self) -> None:
        """End mpiexec."""
        self._stopped = True
        if self._process is not None:
            self._process.close()

    def _end_process(self) -> None:
        if self._process is not None and not self._process.ended:
            self._process.let_go()

    def _launch(self, agent: Peer, wanted: Launch) -> None:
        group = self._groups.get(wanted.host)
        if group is None or group[0].index in self._agents:
            agent.send(Exit(1))
            return
        index = group[0].index
        self._agents[index] = agent
        self._office.tell_task(
            index, StartDaemon(wanted.host, wanted.command, self._mpiexec.prefix, self._executable)
        )

    def _seat(self, peer: Peer, said: RankProxy) -> None:
        group = self._groups.get(said.host, [])
        known = {(other.host, other.local_rank) for _, other in self._stand_ins.values()}
        size = sum(map(len, self._groups.values()))
        if not 0 <= said.rank < size or said.rank in self._stand_ins or (said.host, said.local_rank) in known:
            peer.send(Exit(1))
        elif not 0 <= said.local_rank < len(group):
            peer.send(Exit(1))
            self._office.blame(
                -1,
                f"mpiexec wants rank {said.rank} to be local rank {said.local_rank} of a host that has"
                f" {len(group)} of the job's Spark tasks; do extra_mpi_args say so?",
                1,
            )
        else:
            self._stand_ins[said.rank] = (peer, said)

    def _note_daemon_end(self, task: Task, code: int) -> None:
        """A daemon has ended; mpiexec learns of it by the agent that stands for it."""
        shell = code if code >= 0 else 128 - code
        if shell > 128 and not self._is_over:
            how = describe_signal(shell - 128)
            self._office.blame(-1, f"mpiexec's daemon on host {task.host} {how}", 1, SIGNAL)
        agent = self._agents.pop(task.index, None)
        if agent is not None:
            agent.send(Exit(shell))

    @property
    def _is_over(self) -> bool:
        """Whether what runs here is to end anyway."""
        return self._stopped or 0 < len(self._stand_ins) == len(self._left)

    def _note_output(self, stream: int, data: bytes) -> None:  # noqa: ARG002
        self._said = (self._said + data.decode(errors="replace"))[-_SAID:]

    def _note_end(self) -> None:
        """mpiexec has ended; not too early, if all ranks have."""
        assert self._process is not None
        if self._is_over:
            return
        code = self._process.code
        if code is None or code < 0:
            how = "and its keeper were killed" if code is None else describe_signal(-code)
            self._office.blame(-1, f"{self._mpiexec.path} {how}", 1, SIGNAL)
            return
        # When it has ended the job for what a rank has done, the rank's task says so too.
        text = f"{self._mpiexec.path} ended with exit code {code} before the ranks{self._quote()}"
        self._office.blame(-1, text, 1, LOST)

    def _quote(self) -> str:
        said = self._said.strip()
        return f"; it said:\n{said}" if said else ""


def _check_names(names: Sequence[str]) -> None:
    same = [name for name, count in Counter(names).items() if count > 1]
    if same:
        raise LaunchError(
            f"Open MPI tells hosts apart by their names, and {same[0]} is the name of several here: give each"
            " a name of its own (containers: --hostname), or use launcher='pmi' with MPICH on the executors"
        )

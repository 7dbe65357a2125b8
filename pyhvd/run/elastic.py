"""pyhvdrun's elastic jobs: the hosts of the user, or of a discovery script, and a program."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from pyhvd.job.discovery import ScriptDiscovery
from pyhvd.job.driver import JobSpec
from pyhvd.job.errors import LaunchError
from pyhvd.job.facts import gather
from pyhvd.job.generation_driver import ElasticSpec, GenerationDriver
from pyhvd.job.generation_env import JOB
from pyhvd.job.hosts_driver import Checked, Seat
from pyhvd.job.membership import (
    FoundHost,
    Limits,
    Membership,
    Place,
    StartGeneration,
)
from pyhvd.job.mpi.rank_env import MPICH
from pyhvd.job.output import Output, is_terminal
from pyhvd.job.process.output import OutputFile
from pyhvd.job.program_process import Program
from pyhvd.job.rendezvous import PmiRendezvous
from pyhvd.job.status_line import StatusLine
from pyhvd.job.store import Store, StoreError, StoreOrder, open_folder
from pyhvd.run.cli import Options
from pyhvd.run.elastic_job import ElasticJob, Finds
from pyhvd.run.environment import of_stores, to_send
from pyhvd.run.hosts import Host, HostSeats, Seats
from pyhvd.run.launch_agent import explain, ssh_command
from pyhvd.run.many_hosts import agent_commands, check_hosts, exit_code, make_files, wanted_network
from pyhvd.run.own_host import find_own, is_own
from pyhvd.run.selection import Selection

# A store that does not answer holds up the end of the job so long.
_CLEAR_S = 10.0
# By how far zygotes come: see :attr:`Program.warm`.
_WARM = {"imports": "", "init": "pyhvd.run.warm_program"}


class RankFiles:
    """The files of the ranks' output, which stay open from one generation to the next.

    Parameters
    ----------
    directory : str or None
        Where the ranks' folders are; None without files.
    size : int
        The number of ranks by which the folders' names are padded.

    Attributes
    ----------
    by_rank : dict of int to dict of int to OutputFile
        The files of each rank that has some; the output reads it in another thread.
    """

    def __init__(self, directory: str | None, size: int) -> None:
        self.by_rank: dict[int, dict[int, OutputFile]] = {}
        self._directory = directory
        self._size = size

    def make(self, number: int) -> None:
        """Make the files of the first `number` ranks that have none yet; may raise LaunchError."""
        new = [rank for rank in range(number) if rank not in self.by_rank]
        self.by_rank |= make_files(self._directory, self._size, new)


class CommandJob(ElasticJob):
    """An elastic job whose agents are started by commands such as ssh.

    Parameters
    ----------
    options : Options
        The command line.
    agent : str
        The agent's command: a template.
    known : sequence of HostSeats
        The hosts of the user; none if discovery finds them.
    membership, discovery, status
        See :class:`ElasticJob`.
    output : Output
        Shows the ranks' output.
    files : RankFiles
        The files of the output.
    store : StoreOrder or None
        Where commits are stored.
    code : bytes
        What the ranks run.
    function : bool
        Whether that is a function.
    """

    def __init__(
        self,
        options: Options,
        agent: str,
        known: Sequence[HostSeats],
        membership: Membership,
        discovery: Finds | None,
        output: Output,
        status: StatusLine | None,
        files: RankFiles,
        store: StoreOrder | None,
        code: bytes,
        function: bool = False,
    ) -> None:
        super().__init__(membership, discovery, status, options.start_timeout)
        self._options = options
        self._agent = agent
        self._output = output
        self._files = files
        self._store = store
        self._code = code
        command = options.elastic.preemption_command
        self._elastic = ElasticSpec(options.elastic.max_np or 0, command, store, function)
        self._letters = secrets.token_hex(3)
        self._known = {each.host.name: each for each in known}
        self._checked: Checked | None = None

    def close(self) -> None:
        """See :meth:`ElasticJob.close`."""
        super().close()
        if self._store is not None:
            clear_store(self._store)

    def command(self, host: str) -> Sequence[str]:
        """See :meth:`ElasticJob.command`."""
        return agent_commands(self._options, self._seats([Place(host, 1)]))[host]

    def explain(self, host: str, code: int, said: str) -> tuple[str, bool]:
        """See :meth:`ElasticJob.explain`."""
        known = self._known.get(host)
        return explain(host if known is None else known.host.destination, code, said)

    def make_driver(self, begins: StartGeneration) -> GenerationDriver:
        """See :meth:`ElasticJob.make_driver`."""
        options = self._options
        directory = options.directory or os.getcwd()
        checked = self._check(directory)
        seats = self._seats(begins.places)
        try:
            self._files.make(seats.size)
        except LaunchError as exc:  # of ranks by which the job has grown
            self.say(f"pyhvd: {exc}")
        commands = agent_commands(options, seats)
        return GenerationDriver(
            begins.number,
            self._elastic,
            self.commit,
            self.holders,
            self.step,
            self.kept,
            JobSpec(seats.size, self._code, {JOB: self._letters}, start_timeout=options.start_timeout),
            [Seat(each.host.name, len(each.ranks), commands[each.host.name]) for each in seats.hosts],
            lambda: checked,
            self.explain,
            self._output,
            self.say,
            0 if begins.number == 0 and not self._elastic.function else None,
            wanted_network(options, seats),
            self.status,
        )

    def _seats(self, places: Sequence[Place]) -> Seats:
        seats, first = [], 0
        for place in places:
            known = self._known.get(place.host)
            own = known.own if known is not None else is_own(place.host)
            host = Host(place.host, place.slots, known.host.user if known is not None else "")
            seats.append(HostSeats(host, range(first, first + place.slots), own))
            first += place.slots
        return Seats(tuple(seats), self._agent)

    def _check(self, directory: str) -> Checked:
        """Return what all hosts must have; the ranks of each generation meet anew."""
        if self._checked is None:
            checked = check_hosts(self._options, directory)
            if checked.facts.mpi != MPICH:
                raise LaunchError(
                    f"an elastic job needs MPICH or Intel MPI, but mpi4py is built on"
                    f" {checked.facts.mpi_name}, whose launcher does not survive the loss of a host:"
                    ' pip install "pyhvd[mpich]"'
                )
            self._checked = checked
            return checked
        facts = gather(directory, self._options.script)  # the script may have changed, on all hosts
        return replace(self._checked, facts=facts, rendezvous=PmiRendezvous())


def run_found(options: Options) -> int:
    """Run an elastic job on the hosts that a script finds; return the exit code."""
    agent = options.launch_agent or ssh_command(options.ssh_port, options.ssh_identity_file)
    size = options.num_proc or options.elastic.min_np or 1
    script, slots = options.elastic.discovery_script, options.slots_per_host or 1
    assert script is not None
    with contextlib.closing(ScriptDiscovery([script], slots)) as discovery:
        return _run(options, agent, size, (), None, discovery)


def run_on(options: Options, selection: Selection) -> int:
    """Run an elastic job on the hosts of the user or of a cluster; return the exit code."""
    seats = selection.seats
    assert seats is not None
    return _run(options, seats.agent, seats.size, *hosts_of(selection), None)


def hosts_of(selection: Selection) -> tuple[list[HostSeats], list[FoundHost]]:
    """Return the hosts with all their slots: for the agents' commands, and for the membership."""
    own = find_own(selection.hosts)
    known = [HostSeats(host, range(host.slots), host in own) for host in selection.hosts]
    return known, [FoundHost(host.name, host.slots) for host in selection.hosts]


def _run(
    options: Options,
    agent: str,
    size: int,
    known: Sequence[HostSeats],
    fixed: Sequence[FoundHost] | None,
    discovery: Finds | None,
) -> int:
    elastic, limits = options.elastic, limits_of(options, size)
    status = StatusLine(sys.stderr, is_terminal(sys.stderr))

    def serve() -> None:
        given = dict(os.environb) if options.send_environment else {}
        sent, preload = to_send(given, options.settings), list(elastic.preload)
        directory = options.directory or os.getcwd()
        store = make_store(elastic.store, elastic.store_every, of_stores(sent))
        files = RankFiles(options.output_filename, elastic.max_np or size)
        files.make(limits.min_np)  # before anything is started
        shown = Output(None, None, options.prefix_timestamp, False, files.by_rank, options.ranks, status.end)
        with shown as output:
            membership = Membership(limits, time.monotonic(), fixed)
            job = CommandJob(
                *(options, agent, known, membership, discovery, output, status, files, store),
                Program(
                    "pyhvd.run.program_rank", options.program, directory, sent, preload, _WARM[elastic.warm]
                ).dump(),
            )
            with contextlib.closing(job):
                job.serve()

    return exit_code(serve)


def limits_of(options: Options, size: int) -> Limits:
    """Return the limits of a job that starts with so many ranks."""
    elastic = options.elastic
    return Limits(
        min_np=elastic.min_np or size,
        max_np=elastic.max_np,
        start_np=size,
        reset_limit=elastic.reset_limit,
        elastic_timeout=elastic.timeout,
        cooldown=elastic.cooldown,
    )


def make_store(url: str, every: int, env: list[tuple[bytes, bytes]]) -> StoreOrder | None:
    """Return where commits are stored; None without a URL.

    Parameters
    ----------
    url : str
        A folder for fsspec; empty for none.
    every : int
        Each `every`-th commit is stored.
    env : list of (bytes, bytes)
        The variables that fsspec needs on the hosts.

    Raises
    ------
    LaunchError
        fsspec cannot open such a folder here.
    """
    if not url:
        return None
    try:
        files, folder = open_folder(url)
    except StoreError as exc:
        raise LaunchError(str(exc)) from exc
    is_local = "file" in ((files.protocol,) if isinstance(files.protocol, str) else files.protocol)
    # A relative folder is one of this directory. Other URLs may say more than protocol and path.
    place = files.unstrip_protocol(folder) if is_local else url
    return StoreOrder(place, secrets.token_hex(6), secrets.token_bytes(32), every, env)


def clear_store(store: StoreOrder) -> None:
    """Remove the files of a job that is over: they are signed with its key, and of use to no other job."""

    def clear() -> None:
        with contextlib.suppress(StoreError):
            Store(store).clear()

    thread = threading.Thread(target=clear, name="pyhvd.run.clear", daemon=True)
    thread.start()
    thread.join(_CLEAR_S)

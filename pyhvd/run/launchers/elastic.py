"""Elastic jobs whose agents are started by commands: on hosts of the user, of a cluster or of a discovery."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pyhvd.job.agent.host_facts import gather
from pyhvd.job.agent.rank_process import Program
from pyhvd.job.commits.store import CommitStore, StoreError, open_folder
from pyhvd.job.driver.agent_command import AgentCommand, AgentProcess
from pyhvd.job.driver.agent_source import Checked, HostSlots
from pyhvd.job.driver.console import log_warning
from pyhvd.job.driver.discovery import CallDiscovery, Discovery, HostFinder, ScriptDiscovery
from pyhvd.job.driver.elastic_job import ElasticJob
from pyhvd.job.driver.output import Output, is_terminal
from pyhvd.job.driver.status_line import StatusLine
from pyhvd.job.errors import LaunchError
from pyhvd.job.machines.member_host import FoundHost
from pyhvd.job.machines.membership import Membership
from pyhvd.job.machines.roster import ElasticLimits, Place
from pyhvd.job.messages import StoreOrder
from pyhvd.job.mpi.rank_env import MPICH
from pyhvd.job.mpi.rendezvous import PmiRendezvous
from pyhvd.job.network.network_choice import Wanted
from pyhvd.job.process.output import OutputFile
from pyhvd.job.spec import ElasticSpec, JobSpec, NameOf, flag_of
from pyhvd.run.hosts.agent_template import explain, ssh_command
from pyhvd.run.hosts.environment import of_stores, to_send
from pyhvd.run.hosts.hosts import Host, HostRanks, JobHosts
from pyhvd.run.hosts.own_host import find_own, is_own
from pyhvd.run.hosts.selection import HostSelection
from pyhvd.run.launchers.many_hosts import agent_commands, check_hosts, exit_code, make_files, wanted_network
from pyhvd.run.options import Options
from pyhvd.transport.tcp.connection import new_key

# Time limit for clearing the store at the end of the job.
_CLEAR_S = 10.0


class RankFiles:
    """The files of the ranks' output, which stay open from one generation to the next.

    Parameters
    ----------
    directory : str or None
        Where the ranks' folders are; None without files.
    size : int
        The number of ranks by which the folders' names are padded.
    name_of : NameOf
        The names of options in errors.

    Attributes
    ----------
    by_rank : dict of int to dict of int to OutputFile
        The files of each rank that has some; the output reads it in another thread.
    """

    def __init__(self, directory: str | None, size: int, name_of: NameOf = flag_of) -> None:
        self.by_rank: dict[int, dict[int, OutputFile]] = {}
        self._directory = directory
        self._size = size
        self._name_of = name_of

    def make(self, number: int) -> None:
        """Make the files of the first `number` ranks that have none yet; may raise LaunchError."""
        new = [rank for rank in range(number) if rank not in self.by_rank]
        self.by_rank |= make_files(self._directory, self._size, new, self._name_of)


class CommandStarter:
    """Starts the agents of an elastic job by commands such as ssh; an :class:`AgentStarter`.

    Parameters
    ----------
    options : Options
        The command line.
    agent : str
        The agent's command: a template.
    known : sequence of HostRanks
        The hosts of the user; none if discovery finds them.
    files : RankFiles
        The files of the output.
    spec : JobSpec
        Says where commits are stored.
    say : callable
        Shows a line of the job's own.
    """

    def __init__(
        self,
        options: Options,
        agent: str,
        known: Sequence[HostRanks],
        files: RankFiles,
        spec: JobSpec,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._agent = agent
        self._known = {each.host.name: each for each in known}
        self._files = files
        self._store = None if spec.elastic is None else spec.elastic.store
        self._say = say
        self._checked: Checked | None = None

    def command(self, host: str) -> Sequence[str]:
        """See :meth:`AgentStarter.command`."""
        return agent_commands(self._options, self._placed([Place(host, 1)]))[host]

    def start(self, command: Sequence[str]) -> AgentCommand:
        """See :meth:`AgentStarter.start`."""
        return AgentCommand(command, new_key())

    def end(self, host: str, agent: AgentProcess) -> None:  # noqa: ARG002
        """See :meth:`AgentStarter.end`."""
        agent.end()
        agent.close()

    def explain(self, host: str, code: int, said: str) -> tuple[str, bool]:
        """See :meth:`AgentStarter.explain`."""
        known = self._known.get(host)
        destination = host if known is None else known.host.destination
        return explain(destination, code, said, self._options.name_of)

    def prepare(self, places: Sequence[Place]) -> tuple[list[HostSlots], Checked, Wanted]:
        """See :meth:`AgentStarter.prepare`."""
        checked = self._check(self._options.directory or os.getcwd())
        placed = self._placed(places)
        try:
            self._files.make(placed.size)
        except LaunchError as exc:  # of ranks by which the job has grown
            self._say(f"pyhvd: {exc}")
        commands = agent_commands(self._options, placed)
        hosts = [
            HostSlots(each.host.name, len(each.ranks), commands[each.host.name]) for each in placed.hosts
        ]
        return hosts, checked, wanted_network(self._options, placed)

    def leaving(self) -> Mapping[str, str]:
        """See :meth:`AgentStarter.leaving`: the agents themselves know."""
        return {}

    def why_over(self, number: int, now: float) -> Exception | None:  # noqa: ARG002
        """See :meth:`AgentStarter.why_over`: the membership knows."""
        return None

    def close(self) -> None:
        """See :meth:`AgentStarter.close`."""
        if self._store is not None:
            clear_store(self._store)

    def _placed(self, places: Sequence[Place]) -> JobHosts:
        placed, first = [], 0
        for place in places:
            known = self._known.get(place.host)
            own = known.own if known is not None else is_own(place.host)
            host = Host(place.host, place.slots, known.host.user if known is not None else "")
            placed.append(HostRanks(host, range(first, first + place.slots), own))
            first += place.slots
        return JobHosts(tuple(placed), self._agent)

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


def run(options: Options, selection: HostSelection | None = None) -> int:
    """Run an elastic job on these hosts, or on those that a script finds; return the exit code."""
    elastic, size = options.elastic, _size_of(options, selection)
    status = StatusLine(sys.stderr, terminal=is_terminal(sys.stderr))

    def serve() -> None:
        given = dict(os.environb) if options.send_environment else {}
        sent, preload = to_send(given, options.settings), list(elastic.preload)
        directory = options.directory or os.getcwd()
        store = make_store(elastic.store, elastic.store_every, of_stores(sent))
        files = RankFiles(options.output_filename, elastic.max_np or size)
        files.make(elastic.min_np or size)  # before anything is started
        shown = Output(
            files=files.by_rank,
            ranks=options.ranks,
            before=status.end,
            timestamp=options.prefix_timestamp,
        )
        program = Program("pyhvd.run.entry.program_rank", options.program, directory, sent, preload)
        spec = spec_of(options, program.dump(), store)
        with shown as output, begin(options, selection, None, spec, output, files, status) as job:
            job.serve()

    return exit_code(serve)


@contextlib.contextmanager
def begin(
    options: Options,
    selection: HostSelection | None,
    finder: HostFinder | None,
    spec: JobSpec,
    output: Output,
    files: RankFiles,
    status: StatusLine | None = None,
) -> Iterator[ElasticJob]:
    """Begin an elastic job; end its agents at the end of the context.

    Parameters
    ----------
    options : Options
        As of a command line.
    selection : HostSelection or None
        The hosts; None if they are found while the job runs.
    finder : HostFinder or None
        Finds them; None if a script does.
    spec : JobSpec
        Of :func:`spec_of`.
    output : Output
        Shows the ranks' output.
    files : RankFiles
        The files of the output.
    status : StatusLine, optional
        Of pyhvdrun; without it the log gets the job's own lines.
    """
    say = log_warning if status is None else status.say
    size = _size_of(options, selection)
    agent, known, fixed, discovery = "", list[HostRanks](), None, None
    with contextlib.ExitStack() as stack:
        if selection is None:
            discovery = stack.enter_context(contextlib.closing(_discover(options, finder)))
            agent = options.launch_agent or ssh_command(options.ssh_port, options.ssh_identity_file)
        elif selection.placed is not None:
            own = find_own(selection.hosts)
            known = [HostRanks(host, range(host.slots), host in own) for host in selection.hosts]
            fixed = [FoundHost(host.name, host.slots) for host in selection.hosts]
            agent = selection.placed.agent
        files.make(options.elastic.min_np or size)
        membership = Membership(_limits(options, size), time.monotonic(), fixed)
        starter = CommandStarter(options, agent, known, files, spec, say)
        job = ElasticJob(spec, membership, starter, discovery, output, say, status)
        yield stack.enter_context(contextlib.closing(job))


def _size_of(options: Options, selection: HostSelection | None) -> int:
    """Return the number of ranks with which a job starts."""
    placed = None if selection is None else selection.placed
    return placed.size if placed is not None else options.num_proc or options.elastic.min_np or 1


def _discover(options: Options, finder: HostFinder | None) -> Discovery:
    """Begin to look for hosts, by a function or by the script."""
    slots, script = options.slots_per_host or 1, options.elastic.discovery_script
    if finder is not None:
        return CallDiscovery(finder, slots)
    assert script is not None
    return ScriptDiscovery([script], slots)


def spec_of(
    options: Options, code: bytes, store: StoreOrder | None = None, *, function: bool = False
) -> JobSpec:
    """Return what the ranks of an elastic job run."""
    elastic = options.elastic
    return JobSpec(
        code,
        function,
        start_timeout=options.start_timeout,
        ends_late=options.ends_late,
        name_of=options.name_of,
        elastic=ElasticSpec(elastic.max_np or 0, elastic.preemption_command, store),
    )


def _limits(options: Options, size: int) -> ElasticLimits:
    """Return the limits of a job that starts with `size` ranks."""
    elastic = options.elastic
    return ElasticLimits(
        min_np=elastic.min_np or size,
        max_np=elastic.max_np,
        start_np=size,
        reset_limit=elastic.reset_limit,
        elastic_timeout=elastic.timeout,
        cooldown=elastic.cooldown,
        name_of=options.name_of,
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
            CommitStore(store).clear()

    thread = threading.Thread(target=clear, name="pyhvd.run.clear", daemon=True)
    thread.start()
    thread.join(_CLEAR_S)

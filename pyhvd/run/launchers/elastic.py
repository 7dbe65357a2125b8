"""Elastic jobs whose agents are started by commands: on hosts of the user, of a cluster or of a discovery."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pyhvd.job.agent.host_facts import gather
from pyhvd.job.agent.rank_process import Program
from pyhvd.job.commits.store import CommitStore, StoreError, open_folder
from pyhvd.job.driver.agent_source import AgentCommand, Checked, HostSlots
from pyhvd.job.driver.console import StatusLine, log_warning
from pyhvd.job.driver.discovery import CallDiscovery, Discovery, HostFinder, ScriptDiscovery
from pyhvd.job.driver.elastic_job import AgentStarter, ElasticJob
from pyhvd.job.driver.output import Output, is_terminal
from pyhvd.job.errors import LaunchError
from pyhvd.job.machines.member_host import FoundHost
from pyhvd.job.machines.membership import Membership
from pyhvd.job.machines.roster import ElasticLimits, Place
from pyhvd.job.messages import StoreOrder
from pyhvd.job.mpi.rank_env import MPICH, of_stores, to_send
from pyhvd.job.mpi.rendezvous import PmiRendezvous
from pyhvd.job.network.network_choice import Wanted
from pyhvd.job.spec import ElasticSpec, JobSpec
from pyhvd.run.hosts.agent_template import explain, ssh_command
from pyhvd.run.hosts.hosts import Host, HostRanks, JobHosts
from pyhvd.run.hosts.selection import HostSelection, find_own, is_own
from pyhvd.run.launchers.many_hosts import RankFiles, agent_commands, check_hosts, exit_code, wanted_network
from pyhvd.run.options import Options
from pyhvd.transport.tcp.connection import new_key

# Time limit for clearing the store at the end of the job.
_CLEAR_S = 10.0


@dataclass(eq=False)
class CommandStarter(AgentStarter):
    """Starts the agents of an elastic job by commands such as ssh.

    Attributes
    ----------
    options : Options
        The command line.
    agent : str
        The agent's command: a template.
    known : mapping of str to HostRanks
        The hosts of the user, by name; none if discovery finds them.
    files : RankFiles
        The files of the output.
    spec : JobSpec
        Says where commits are stored.
    say : callable
        Shows a line of the job's own.
    """

    options: Options
    agent: str
    known: Mapping[str, HostRanks]
    files: RankFiles
    spec: JobSpec
    say: Callable[[str], None]
    _checked: Checked | None = None

    def command(self, host: str) -> Sequence[str]:
        """See :meth:`AgentStarter.command`."""
        return agent_commands(self.options, self._placed([Place(host, 1)]))[host]

    def start(self, command: Sequence[str]) -> AgentCommand:
        """See :meth:`AgentStarter.start`."""
        return AgentCommand(command, new_key())

    def explain(self, host: str, code: int, said: str) -> tuple[str, bool]:
        """See :meth:`AgentStarter.explain`."""
        known = self.known.get(host)
        destination = host if known is None else known.host.destination
        return explain(destination, code, said, self.options.name_of)

    def prepare(self, places: Sequence[Place]) -> tuple[list[HostSlots], Checked, Wanted]:
        """See :meth:`AgentStarter.prepare`."""
        checked = self._check(self.options.directory or os.getcwd())
        placed = self._placed(places)
        try:
            self.files.make(placed.size)
        except LaunchError as exc:  # of ranks by which the job has grown
            self.say(f"pyhvd: {exc}")
        commands = agent_commands(self.options, placed)
        hosts = [
            HostSlots(each.host.name, len(each.ranks), commands[each.host.name]) for each in placed.hosts
        ]
        return hosts, checked, wanted_network(self.options, placed)

    def close(self) -> None:
        """See :meth:`AgentStarter.close`."""
        if self.spec.elastic is not None and self.spec.elastic.store is not None:
            clear_store(self.spec.elastic.store)

    def _placed(self, places: Sequence[Place]) -> JobHosts:
        placed, first = [], 0
        for place in places:
            known = self.known.get(place.host)
            own = known.own if known is not None else is_own(place.host)
            host = Host(place.host, place.slots, known.host.user if known is not None else "")
            placed.append(HostRanks(host, range(first, first + place.slots), own))
            first += place.slots
        return JobHosts(tuple(placed), self.agent)

    def _check(self, directory: str) -> Checked:
        """Return what all hosts must have; the ranks of each generation meet anew."""
        if self._checked is None:
            checked = check_hosts(self.options, directory)
            if checked.facts.mpi != MPICH:
                raise LaunchError(
                    f"an elastic job needs MPICH or Intel MPI, but mpi4py is built on"
                    f" {checked.facts.mpi_name}, whose launcher does not survive the loss of a host:"
                    ' pip install "pyhvd[mpich]"'
                )
            self._checked = checked
            return checked
        facts = gather(directory, self.options.script)  # the script may have changed, on all hosts
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
        program = Program("pyhvd.run.entry.user_script", options.program, directory, sent, preload)
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
    agent, known, fixed, discovery = "", dict[str, HostRanks](), None, None
    with contextlib.ExitStack() as stack:
        if selection is None:
            discovery = stack.enter_context(contextlib.closing(_discover(options, finder)))
            agent = options.launch_agent or ssh_command(options.ssh_port, options.ssh_identity_file)
        elif selection.placed is not None:
            own = find_own(selection.hosts)
            known = {host.name: HostRanks(host, range(host.slots), host in own) for host in selection.hosts}
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

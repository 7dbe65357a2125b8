"""Elastic jobs whose agents are started by commands: on hosts of the user, of a cluster or of a discovery."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pyhvd.job.agent.host_facts import gather
from pyhvd.job.commits.resume_file import ResumeError, ResumeFile
from pyhvd.job.commits.store import CommitStore, StoreError, open_folder
from pyhvd.job.driver.agent_source import AgentCommand, Checked, HostSlots
from pyhvd.job.driver.console import StatusLine, log_warning
from pyhvd.job.driver.discovery import CallDiscovery, Discovery, ScriptDiscovery
from pyhvd.job.driver.elastic_job import AgentStarter, ElasticJob
from pyhvd.job.driver.output import Output
from pyhvd.job.errors import LaunchError
from pyhvd.job.machines.member_host import FoundHost
from pyhvd.job.machines.membership import Membership
from pyhvd.job.machines.roster import ElasticLimits, Place
from pyhvd.job.messages import StoreOrder
from pyhvd.job.mpi.rank_env import MPICH, of_stores
from pyhvd.job.mpi.rendezvous import PmiRendezvous
from pyhvd.job.network.network_choice import Wanted
from pyhvd.job.spec import ElasticSpec, JobSpec
from pyhvd.run.hosts.agent_template import explain, ssh_command
from pyhvd.run.hosts.hosts import Host, HostRanks, JobHosts
from pyhvd.run.hosts.selection import HostSelection, find_own, is_own
from pyhvd.run.launchers.many_hosts import (
    RankFiles,
    check_hosts,
    host_slots,
    make_program,
    show_job,
    spec_of,
    wanted_network,
)
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
        (found,) = host_slots(self.options, self._placed([Place(host, 1)]))
        return found.command

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
        checked = self._check()
        placed = self._placed(places)
        try:
            self.files.make(placed.size)
        except LaunchError as exc:  # of ranks by which the job has grown
            self.say(f"pyhvd: {exc}")
        return host_slots(self.options, placed), checked, wanted_network(self.options, placed)

    def close(self) -> None:
        """See :meth:`AgentStarter.close`."""
        elastic = self.spec.elastic
        if elastic is not None and elastic.store is not None and not elastic.resumable:
            clear_store(elastic.store)

    def _placed(self, places: Sequence[Place]) -> JobHosts:
        placed, first = [], 0
        for place in places:
            known = self.known.get(place.host)
            own = known.own if known is not None else is_own(place.host)
            host = Host(place.host, place.slots, known.host.user if known is not None else "")
            placed.append(HostRanks(host, range(first, first + place.slots), own))
            first += place.slots
        return JobHosts(tuple(placed), self.agent)

    def _check(self) -> Checked:
        """Return what all hosts must have; the ranks of each generation meet anew."""
        if self._checked is None:
            checked = check_hosts(self.options)
            if checked.facts.mpi != MPICH:
                raise LaunchError(
                    f"an elastic job needs MPICH or Intel MPI, but mpi4py is built on"
                    f" {checked.facts.mpi_name}, whose launcher does not survive the loss of a host:"
                    ' pip install "pyhvd[mpich]"'
                )
            self._checked = checked
            return checked
        # The script may have changed, on all hosts.
        facts = gather(self.options.rank_directory, self.options.script)
        return replace(self._checked, facts=facts, rendezvous=PmiRendezvous())


def run(options: Options, selection: HostSelection | None = None) -> int:
    """Run an elastic job on these hosts, or on those that a script finds; return the exit code."""
    elastic, size = options.elastic, _size_of(options, selection)

    def serve(output: Output, files: RankFiles, status: StatusLine) -> None:
        program = make_program(options, elastic.preload)
        resume = _resume_file(elastic.resume)
        store = make_store(elastic.store, elastic.store_every, of_stores(program.env), resume)
        spec = elastic_spec(options, program.dump(), store)
        with begin(options, selection, spec, output, files, status, resume) as job:
            job.serve()
        if resume is not None and store is not None:  # the job has finished
            clear_store(store)
            resume.remove()

    return show_job(options, elastic.max_np or size, serve)


def _resume_file(path: str) -> ResumeFile | None:
    try:
        return ResumeFile(path) if path else None
    except ResumeError as exc:
        raise LaunchError(str(exc)) from exc


@contextlib.contextmanager
def begin(
    options: Options,
    selection: HostSelection | None,
    spec: JobSpec,
    output: Output,
    files: RankFiles,
    status: StatusLine | None = None,
    resume: ResumeFile | None = None,
) -> Iterator[ElasticJob]:
    """Begin an elastic job; end its agents at the end of the context.

    Parameters
    ----------
    options : Options
        As of a command line.
    selection : HostSelection or None
        The hosts; None if they are found while the job runs.
    spec : JobSpec
        Of :func:`elastic_spec`.
    output : Output
        Shows the ranks' output.
    files : RankFiles
        The files of the output.
    status : StatusLine, optional
        Of pyhvdrun; without it the log gets the job's own lines.
    resume : ResumeFile, optional
        Lets a later run of the job go on.
    """
    say = log_warning if status is None else status.say
    size, elastic = _size_of(options, selection), options.elastic
    limits = ElasticLimits(
        min_np=elastic.min_np or size,
        max_np=elastic.max_np,
        start_np=size,
        reset_limit=elastic.reset_limit,
        elastic_timeout=elastic.timeout,
        cooldown=elastic.cooldown,
        first=0 if resume is None else resume.first,
        resumable=resume is not None,
        name_of=options.name_of,
    )
    files.make(limits.min_np)  # before anything is started
    agent, known, fixed, discovery = "", dict[str, HostRanks](), None, None
    with contextlib.ExitStack() as stack:
        if selection is None:
            discovery = stack.enter_context(contextlib.closing(_discover(options)))
            agent = options.launch_agent or ssh_command(options.ssh_port, options.ssh_identity_file)
        elif selection.placed is not None:
            own = find_own(selection.hosts)
            known = {host.name: HostRanks(host, range(host.slots), host in own) for host in selection.hosts}
            fixed = [FoundHost(host.name, host.slots) for host in selection.hosts]
            agent = selection.placed.agent
        membership = Membership(limits, time.monotonic(), fixed)
        starter = CommandStarter(options, agent, known, files, spec, say)
        job = ElasticJob(spec, membership, starter, discovery, output, say, status, resume)
        yield stack.enter_context(contextlib.closing(job))


def _size_of(options: Options, selection: HostSelection | None) -> int:
    """Return the number of ranks with which a job starts."""
    placed = None if selection is None else selection.placed
    return placed.size if placed is not None else options.num_proc or options.elastic.min_np or 1


def _discover(options: Options) -> Discovery:
    """Begin to look for hosts, by a function or by the script."""
    slots, elastic = options.slots_per_host or 1, options.elastic
    if elastic.finder is not None:
        return CallDiscovery(elastic.finder, slots)
    assert elastic.discovery_script is not None
    return ScriptDiscovery([elastic.discovery_script], slots)


def elastic_spec(
    options: Options, code: bytes, store: StoreOrder | None = None, *, function: bool = False
) -> JobSpec:
    """Return what the ranks of an elastic job run."""
    elastic = options.elastic
    own = ElasticSpec(elastic.max_np or 0, elastic.preemption_command, store, bool(elastic.resume))
    return replace(spec_of(options, code, function=function), elastic=own)


def make_store(
    url: str, every: int, env: list[tuple[bytes, bytes]], resume: ResumeFile | None = None
) -> StoreOrder | None:
    """Return where commits are stored; None without a URL.

    Parameters
    ----------
    url : str
        A folder for fsspec; empty for none.
    every : int
        Each `every`-th commit is stored.
    env : list of (bytes, bytes)
        The variables that fsspec needs on the hosts.
    resume : ResumeFile, optional
        Names the job, and has its secret; without it the job is a new one.

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
    if resume is not None:
        return StoreOrder(place, resume.job, resume.key, every, env)
    return StoreOrder(place, secrets.token_hex(6), secrets.token_bytes(32), every, env)


def clear_store(store: StoreOrder) -> None:
    """Remove the files of a job that is over: they are signed with its key, and of use to no other job."""

    def clear() -> None:
        with contextlib.suppress(StoreError):
            CommitStore(store).clear()

    thread = threading.Thread(target=clear, name="pyhvd.run.clear", daemon=True)
    thread.start()
    thread.join(_CLEAR_S)

"""The launcher on many hosts: it starts an agent on each host, and shows one cause if the job fails.

pyhvd opens no port on the launcher: each agent's command, ssh by default, carries its channel. The agents
start the ranks, and send their output and failures. The ranks find each other by PMI-1, which the launcher
serves, or by Open MPI's mpiexec, whose daemons run beside the agents and connect to it.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from pyhvd.common.standard_files import say
from pyhvd.errors import ConfigError
from pyhvd.job.agent.host_facts import gather
from pyhvd.job.agent.rank_process import Program
from pyhvd.job.driver.agent_source import Checked, CommandSource, HostSlots
from pyhvd.job.driver.console import Console, StatusLine, Terminal, noting_signals, wake_by
from pyhvd.job.driver.generation_driver import GenerationDriver, ending
from pyhvd.job.driver.kept_agents import KeptAgents
from pyhvd.job.driver.output import Output, is_terminal
from pyhvd.job.errors import Interrupted, LaunchError, RankError, Suspended
from pyhvd.job.mpi.flavour import INSTALL, Flavour, find_library, find_mpiexec
from pyhvd.job.mpi.openmpi.rendezvous import MpiexecRendezvous
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, to_send
from pyhvd.job.mpi.rendezvous import PmiRendezvous, Rendezvous
from pyhvd.job.network.network_choice import Wanted
from pyhvd.job.network.network_plans import ANY, parse_wishes
from pyhvd.job.process.output import OutputFile, rank_files
from pyhvd.job.spec import NETWORK_INTERFACES, OUTPUT_FILENAME, JobSpec, NameOf, flag_of
from pyhvd.run.entry.missing_script import describe_missing
from pyhvd.run.hosts.agent_template import agent_command, explain
from pyhvd.run.hosts.hosts import HostRanks, JobHosts
from pyhvd.run.options import Options

# A rank listens on one port for MPI, and on two for links, IPv4 and IPv6.
_PORTS = 3


def run(options: Options, placed: JobHosts) -> int:
    """Run the program on hosts; return the exit code of the first failure, or 0."""
    if options.binding_args:
        say(
            "pyhvd: --binding-args have no effect on many hosts, where mpiexec does not start the ranks:"
            " leave them out, and bind each rank in the program, e.g. with os.sched_setaffinity"
        )
        return 2
    if options.verbose or options.dry_run:
        for host in host_slots(options, placed):
            say(f"pyhvd: {host.name}: {shlex.join(host.command)}")
    if options.dry_run:
        return 0

    def serve(output: Output, files: RankFiles, status: StatusLine) -> None:
        files.make(placed.size)
        spec = spec_of(options, make_program(options).dump())
        terminal = Terminal(status)
        console = Console(status.say, status.say, terminal)
        driver, _ = make_driver(options, spec, placed, output, console)
        with noting_signals(terminal.signals.append) as wake, ending(driver):
            wake_by(driver.selector, wake)
            driver.serve()

    return show_job(options, placed.size, serve)


def show_job(options: Options, most: int, serve: Callable[[Output, RankFiles, StatusLine], None]) -> int:
    """Serve a job, and show its output; show why it failed, if it does, and return the exit code.

    `most` is the largest number of ranks, by which the names of files are padded.
    """
    status = StatusLine(sys.stderr, terminal=is_terminal(sys.stderr))
    files = RankFiles(options.output_filename, most)
    shown = Output(
        files=files.by_rank, ranks=options.ranks, before=status.end, timestamp=options.prefix_timestamp
    )
    try:
        with shown as output:
            serve(output, files, status)
    except (LaunchError, ConfigError) as exc:
        for line in str(exc).splitlines():
            say(f"pyhvd: {line}")
        return 1
    except RankError as exc:
        say(str(exc))
        return exc.code
    except Suspended as exc:
        say(str(exc))
        return os.EX_TEMPFAIL
    except Interrupted as exc:
        if str(exc):
            say(str(exc))
        say(f"pyhvd: ended by {signal.Signals(exc.number).name}")
        return 128 + exc.number
    return 0


def make_program(options: Options, preload: Sequence[str] = ()) -> Program:
    """Return what the ranks run; zygotes import the modules of `preload`."""
    given = dict(os.environb) if options.send_environment else {}
    sent = to_send(given, options.settings)
    return Program(
        "pyhvd.run.entry.user_script", options.program, options.rank_directory, sent, list(preload)
    )


def spec_of(options: Options, code: bytes, *, function: bool = False) -> JobSpec:
    """Return the description of a job, whose ranks run a program or a function."""
    return JobSpec(
        code,
        function,
        start_timeout=options.start_timeout,
        ends_late=options.ends_late,
        name_of=options.name_of,
    )


def make_driver(
    options: Options,
    spec: JobSpec,
    placed: JobHosts,
    output: Output,
    console: Console,
    name_of: Callable[[HostRanks], str] = attrgetter("host.name"),
    kept: KeptAgents | None = None,
) -> tuple[GenerationDriver, CommandSource]:
    """Return the driver of a job that the first failure ends, and the source of its agents.

    `name_of` returns a host's name for messages and ranks, and `kept` has the agents of earlier jobs.
    """
    logins = {name_of(each): each.host.destination for each in placed.hosts}
    source = CommandSource(
        spec,
        host_slots(options, placed, name_of),
        lambda: check_hosts(options),
        lambda name, code, said: explain(logins[name], code, said, options.name_of),
        kept,
    )
    return GenerationDriver(spec, source, output, console, wanted_network(options, placed)), source


def wanted_network(options: Options, placed: JobHosts) -> Wanted:
    """Return what the user wants of the network between the hosts, or else the cluster.

    Raises
    ------
    LaunchError
        A host is named that is not one of the job's, or there are too few ports.
    """
    given, ports = options.network_interfaces, options.port_range
    needed = _PORTS * max(len(each.ranks) for each in placed.hosts)
    if ports[0] and len(ports) < needed:
        raise LaunchError(
            f"--port-range {ports[0]}-{ports[-1]} has {len(ports)} ports: give at least {needed}, which is"
            f" {_PORTS} for each rank of a host"
        )
    if ANY in given:
        return Wanted(probe=False, ports=ports)
    source = ""
    if not given and placed.interface:
        given, source = [placed.interface], "the interface that the cluster names"
    wishes = parse_wishes(given)
    hosts = {each.host.name for each in placed.hosts}
    if strange := [wish.host for wish in wishes if wish.host and wish.host not in hosts]:
        option = options.name_of(NETWORK_INTERFACES)
        raise LaunchError(f"{option} names {strange[0]}, which is not a host of this job")
    return Wanted(wishes, source, show=options.verbose, ports=ports, name_of=options.name_of)


def host_slots(
    options: Options, placed: JobHosts, name_of: Callable[[HostRanks], str] = attrgetter("host.name")
) -> list[HostSlots]:
    """Return the hosts of a job, with the commands that start their agents."""
    agent = f"exec {shlex.quote(options.python or sys.executable)} -P -m pyhvd.job.agent.host_agent"
    hosts = []
    for each in placed.hosts:
        command = agent_command(placed.agent, each.host.destination, agent)
        if each.own and options.launch_agent is None:
            command = ["sh", "-c", agent]
        hosts.append(HostSlots(name_of(each), len(each.ranks), command))
    return hosts


@dataclass
class RankFiles:
    """The files of the ranks' output, which stay open from one generation to the next.

    Attributes
    ----------
    directory : str or None
        Where the ranks' folders are; None without files.
    size : int
        The number of ranks by which the folders' names are padded.
    name_of : NameOf
        The names of options in errors.
    by_rank : dict of int to dict of int to OutputFile
        The files of each rank that has some; the output reads it in another thread.
    """

    directory: str | None
    size: int
    name_of: NameOf = flag_of
    by_rank: dict[int, dict[int, OutputFile]] = field(default_factory=dict)
    _failures: set[int] = field(default_factory=set)

    def make(self, number: int) -> None:
        """Make the files of the first `number` ranks that have none yet; may raise LaunchError."""
        if self.directory is None:
            return
        try:
            for rank in range(number):
                if rank not in self.by_rank:
                    self.by_rank[rank] = rank_files(self.directory, rank, self.size, self._failures)
        except OSError as exc:
            raise LaunchError(f"cannot write the files of {self.name_of(OUTPUT_FILENAME)}: {exc}") from exc

    def close(self) -> None:
        """Close the files."""
        for file in (file for both in self.by_rank.values() for file in both.values()):
            file.close()


def check_hosts(options: Options) -> Checked:
    """Return what all hosts must have, as this one has it.

    Raises
    ------
    LaunchError
        This host itself lacks something, or its MPI does not fit the options.
    """
    library = find_library()
    if options.verbose:
        say(f"pyhvd: mpi4py is built on {library.name}")
    directory = options.rank_directory
    facts = gather(directory, options.script, library)
    if options.script and not facts.script:
        raise LaunchError(describe_missing(options.script, directory).removeprefix("pyhvd: "))
    return Checked(directory, options.script, facts, choose_rendezvous(options, library))


def choose_rendezvous(options: Options, library: Flavour) -> Rendezvous:
    """Return the way for ranks of an MPI to find each other.

    Raises
    ------
    LaunchError
        There is none for this MPI, or the options ask for another.
    """
    built = f"mpi4py is built on {library.name}"
    if library.family == OPENMPI:
        if options.launcher == "pmi":
            raise LaunchError(f"--launcher pmi is for MPICH and Intel MPI, but {built}: leave --launcher out")
        show = (lambda line: say(f"pyhvd: {line}")) if options.verbose else None
        return MpiexecRendezvous(find_mpiexec(library), options.mpi_args, None, options.settings, show)
    if library.family != MPICH:
        raise LaunchError(f"{built}, but many hosts need MPICH, Intel MPI or Open MPI; {INSTALL}")
    if options.launcher == "mpiexec":
        raise LaunchError(
            f"--launcher mpiexec is for Open MPI on many hosts, but {built}: leave --launcher out"
        )
    if options.mpi_args:
        raise LaunchError(
            f"--mpi-args are for mpiexec, which does not run on many hosts, as {built}: leave them out, and"
            " set variables of MPI with -x"
        )
    return PmiRendezvous()

"""The launcher on many hosts: it starts an agent on each host, and shows one cause if the job fails.

pyhvd opens no port on the launcher: each agent's command, ssh by default, carries its channel. The agents
start the ranks, and send their output and failures. The ranks find each other by PMI-1, which the launcher
serves, or by Open MPI's mpiexec, whose daemons run beside the agents and connect to it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pyhvd.errors import ConfigError
from pyhvd.job.agent.host_facts import gather
from pyhvd.job.agent.rank_process import Program
from pyhvd.job.driver.agent_source import Checked, CommandSource, HostSlots
from pyhvd.job.driver.console import Console, StatusLine, Terminal, noting_signals, say, wake_by
from pyhvd.job.driver.generation_driver import GenerationDriver
from pyhvd.job.driver.kept_agents import KeptAgents
from pyhvd.job.driver.output import Output, is_terminal
from pyhvd.job.errors import Interrupted, LaunchError, RankError
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

# How long the agents have to end their ranks at the end of the job.
_STOP_S = 5.0
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
        for name, command in agent_commands(options, placed).items():
            say(f"pyhvd: {name}: {shlex.join(command)}")
    if options.dry_run:
        return 0
    status = StatusLine(sys.stderr, terminal=is_terminal(sys.stderr))

    def serve() -> None:
        files = RankFiles(options.output_filename, placed.size)
        files.make(placed.size)
        shown = Output(
            files=files.by_rank,
            ranks=options.ranks,
            before=status.end,
            timestamp=options.prefix_timestamp,
        )
        with shown as output:
            _drive(options, placed, output, status)

    return exit_code(serve)


def exit_code(serve: Callable[[], None]) -> int:
    """Serve a job; show why it failed, if it does, and return the exit code."""
    try:
        serve()
    except (LaunchError, ConfigError) as exc:
        for line in str(exc).splitlines():
            say(f"pyhvd: {line}")
        return 1
    except RankError as exc:
        say(str(exc))
        return exc.code
    except Interrupted as exc:
        if str(exc):
            say(str(exc))
        say(f"pyhvd: ended by {signal.Signals(exc.number).name}")
        return 128 + exc.number
    return 0


def _drive(options: Options, placed: JobHosts, output: Output, status: StatusLine) -> None:
    directory = options.directory or os.getcwd()
    given = dict(os.environb) if options.send_environment else {}
    program = Program(
        "pyhvd.run.entry.user_script", options.program, directory, to_send(given, options.settings)
    )
    spec = JobSpec(program.dump(), start_timeout=options.start_timeout, ends_late=options.ends_late)
    terminal = Terminal(status)
    console = Console(status.say, status.say, terminal)
    driver, _ = make_driver(options, spec, placed, directory, output, console)
    with noting_signals(terminal.signals) as wake, ending(driver):
        wake_by(driver.selector, wake)
        driver.serve()


def make_driver(
    options: Options,
    spec: JobSpec,
    placed: JobHosts,
    directory: str,
    output: Output,
    console: Console,
    name_of: Callable[[HostRanks], str] = lambda each: each.host.name,
    kept: KeptAgents | None = None,
) -> tuple[GenerationDriver, CommandSource]:
    """Return the driver of a job that the first failure ends, and the source of its agents.

    `directory` is where the ranks run, `name_of` returns a host's name for messages and ranks, and `kept` has
    the agents of earlier jobs.
    """
    commands = agent_commands(options, placed)
    logins = {name_of(each): each.host.destination for each in placed.hosts}
    source = CommandSource(
        spec,
        [HostSlots(name_of(each), len(each.ranks), commands[each.host.name]) for each in placed.hosts],
        lambda: check_hosts(options, directory),
        lambda name, code, said: explain(logins[name], code, said, options.name_of),
        kept,
    )
    return GenerationDriver(spec, source, output, console, wanted_network(options, placed)), source


@contextlib.contextmanager
def ending(driver: GenerationDriver) -> Iterator[None]:
    """End the ranks, the agents that are left, and the driver at the end of the context."""
    try:
        yield
    finally:
        try:
            driver.stop("the job is over", _STOP_S)
        finally:
            driver.close()


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


def agent_commands(options: Options, placed: JobHosts) -> dict[str, list[str]]:
    """Return the command that starts each host's agent, by the host's name."""
    python = options.python or sys.executable
    agent = f"exec {shlex.quote(python)} -P -m pyhvd.job.agent.host_agent"
    return {
        each.host.name: ["sh", "-c", agent]
        if each.own and options.launch_agent is None
        else agent_command(placed.agent, each.host.destination, agent)
        for each in placed.hosts
    }


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


def check_hosts(options: Options, directory: str) -> Checked:
    """Return what all hosts must have, as this one has it.

    Raises
    ------
    LaunchError
        This host itself lacks something, or its MPI does not fit the options.
    """
    library = find_library()
    if options.verbose:
        say(f"pyhvd: mpi4py is built on {library.name}")
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

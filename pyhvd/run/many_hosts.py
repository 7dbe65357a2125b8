"""The launcher on many hosts: it starts an agent on each host, and shows one cause if the job fails.

pyhvd opens no port on the launcher: each agent's command, ssh by default, carries its channel. The agents
start the ranks, and send their output and failures. The ranks find each other by PMI-1, which the launcher
serves, or by Open MPI's mpiexec, whose daemons run beside the agents and connect to it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator

from pyhvd.job.driver import JobSpec
from pyhvd.job.errors import LaunchError
from pyhvd.job.facts import gather
from pyhvd.job.hosts_driver import Checked, HostsDriver, Seat
from pyhvd.job.hosts_machine import Interrupted, RankError
from pyhvd.job.mpi.flavour import INSTALL, Flavour, find_library, find_mpiexec
from pyhvd.job.mpi.openmpi.rendezvous import MpiexecRendezvous
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI
from pyhvd.job.network_choice import Wanted
from pyhvd.job.network_plans import ANY, parse_wishes
from pyhvd.job.output import Output, is_terminal
from pyhvd.job.process.output import OutputFile, rank_files
from pyhvd.job.process.signals import to_handle, wake_on_signals
from pyhvd.job.program_process import Program
from pyhvd.job.rendezvous import PmiRendezvous, Rendezvous
from pyhvd.job.status_line import StatusLine, say
from pyhvd.run.cli import Options
from pyhvd.run.environment import to_send
from pyhvd.run.hosts import Seats
from pyhvd.run.launch_agent import agent_command, explain

# How long the agents have to end their ranks at the end of the job.
_STOP_S = 5.0
# A rank listens on one port for MPI, and on two for links, IPv4 and IPv6.
_PORTS = 3


def run(options: Options, seats: Seats) -> int:
    """Run the program on hosts; return the exit code of the first failure, or 0."""
    if options.binding_args:
        say(
            "pyhvd: --binding-args have no effect on many hosts, where mpiexec does not start the ranks:"
            " leave them out, and bind each rank in the program, e.g. with os.sched_setaffinity"
        )
        return 2
    if options.verbose or options.dry_run:
        for name, command in agent_commands(options, seats).items():
            say(f"pyhvd: {name}: {shlex.join(command)}")
    if options.dry_run:
        return 0
    status = StatusLine(sys.stderr, is_terminal(sys.stderr))

    def serve() -> None:
        files = make_files(options.output_filename, seats.size)
        shown = Output(None, None, options.prefix_timestamp, False, files, options.ranks, status.end)
        with shown as output:
            _drive(_make_driver(options, seats, output, status))

    return exit_code(serve)


def exit_code(serve: Callable[[], None]) -> int:
    """Serve a job; show why it failed, if it does, and return the exit code."""
    try:
        serve()
    except LaunchError as exc:
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


def _make_driver(options: Options, seats: Seats, output: Output, status: StatusLine) -> HostsDriver:
    directory = options.directory or os.getcwd()
    given = dict(os.environb) if options.send_environment else {}
    program = Program("pyhvd.run.program_rank", options.program, directory, to_send(given, options.settings))
    spec = JobSpec(seats.size, program.dump(), start_timeout=options.start_timeout)
    commands = agent_commands(options, seats)
    logins = {each.host.name: each.host.destination for each in seats.hosts}
    return HostsDriver(
        spec,
        [Seat(each.host.name, len(each.ranks), commands[each.host.name]) for each in seats.hosts],
        lambda: check_hosts(options, directory),
        lambda name, code, said: explain(logins[name], code, said),
        output,
        status.say,
        stdin=0,
        network=wanted_network(options, seats),
        status=status,
    )


def wanted_network(options: Options, seats: Seats) -> Wanted:
    """Return what the user wants of the network between the hosts, or else the cluster.

    Raises
    ------
    LaunchError
        A host is named that is not one of the job's, or there are too few ports.
    """
    given, ports = options.network_interfaces, options.port_range
    needed = _PORTS * max(len(each.ranks) for each in seats.hosts)
    if ports[0] and len(ports) < needed:
        raise LaunchError(
            f"--port-range {ports[0]}-{ports[-1]} has {len(ports)} ports: give at least {needed}, which is"
            f" {_PORTS} for each rank of a host"
        )
    if ANY in given:
        return Wanted(probe=False, ports=ports)
    source = "--network-interfaces"
    if not given and seats.interface:
        given, source = (seats.interface,), "the interface that the cluster names"
    wishes = parse_wishes(given)
    hosts = {each.host.name for each in seats.hosts}
    if strange := [wish.host for wish in wishes if wish.host and wish.host not in hosts]:
        raise LaunchError(f"--network-interfaces names {strange[0]}, which is not a host of this job")
    return Wanted(wishes, source, show=options.verbose, ports=ports)


def agent_commands(options: Options, seats: Seats) -> dict[str, list[str]]:
    """Return the command that starts each host's agent, by the host's name."""
    python = options.python or sys.executable
    agent = f"exec {shlex.quote(python)} -P -m pyhvd.job.host_agent"
    return {
        each.host.name: ["sh", "-c", agent]
        if each.own and options.launch_agent is None
        else agent_command(seats.agent, each.host.destination, agent)
        for each in seats.hosts
    }


def make_files(
    directory: str | None, size: int, ranks: Iterable[int] | None = None
) -> dict[int, dict[int, OutputFile]]:
    """Return new files for the output of ranks, and none without a directory; may raise LaunchError.

    Parameters
    ----------
    directory : str or None
        Where the folders of the ranks are.
    size : int
        The number of ranks, by which their folders' names are padded.
    ranks : iterable of int, optional
        The ranks; by default all.
    """
    if directory is None:
        return {}
    failures: set[int] = set()
    try:
        return {
            rank: rank_files(directory, rank, size, failures)
            for rank in (range(size) if ranks is None else ranks)
        }
    except OSError as exc:
        raise LaunchError(f"cannot write the files of --output-filename: {exc}") from exc


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
        raise LaunchError(f"can't open file {os.path.join(directory, options.script)!r}: no such file")
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


def _drive(driver: HostsDriver) -> None:
    with signals(driver):
        try:
            driver.serve()
        finally:
            try:
                driver.stop("the job is over", _STOP_S)
            finally:
                driver.close()


@contextlib.contextmanager
def signals(driver: HostsDriver) -> Iterator[None]:
    """Pass signals to the driver while it serves."""
    numbers = [*to_handle(), signal.SIGCHLD, signal.SIGTSTP]
    before = {number: signal.getsignal(number) for number in numbers}
    wake = wake_on_signals(lambda number, _: driver.note_signal(number))
    if before[signal.SIGTSTP] != signal.SIG_IGN:  # a shell without job control
        signal.signal(signal.SIGTSTP, lambda number, _: driver.note_signal(number))
    driver.selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
    try:
        yield
    finally:
        os.close(signal.set_wakeup_fd(-1))
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(wake)

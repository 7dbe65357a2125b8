"""``launch``: run a function on ranks of this host or of others; ``Hosts``: the same again on kept agents.

Any thread may call. No signal is handled, and nothing is printed but the ranks' output. The thread that calls
serves the job: see :mod:`pyhvd.job.driver.generation_driver`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import shlex
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TextIO, TypeVar, Unpack

from pyhvd.job.agent.function_process import dump_call
from pyhvd.job.agent.rank_process import RANK_OF_CALLS, RANK_OF_FUNCTION
from pyhvd.job.driver.agent_source import CommandSource
from pyhvd.job.driver.console import Console
from pyhvd.job.driver.generation_driver import GenerationDriver, ending
from pyhvd.job.driver.kept_agents import KeptAgents
from pyhvd.job.driver.living_ranks import LivingRanks
from pyhvd.job.driver.output import Output
from pyhvd.job.mpi.rank_env import to_send
from pyhvd.job.network.network_plans import ANY, parse_wishes
from pyhvd.job.rank.call import (
    as_function_errors,
    check_call,
    check_size,
    check_text_files,
    expect,
    interface_names,
    module_paths,
    rank_variables,
    read_duration,
)
from pyhvd.job.rank.living import load_modules
from pyhvd.job.spec import START_TIMEOUT, argument_of
from pyhvd.run.hosts.agent_template import check_agent
from pyhvd.run.hosts.clusters.detection import find_rank
from pyhvd.run.hosts.clusters.results import Surroundings
from pyhvd.run.hosts.hosts import HostRanks, HostsError, is_loopback
from pyhvd.run.hosts.selection import HostSelection, find_own, read_file, select
from pyhvd.run.launchers.elastic import begin, elastic_spec
from pyhvd.run.launchers.launch_elastic import Elastic, read_elastic
from pyhvd.run.launchers.many_hosts import RankFiles, make_driver, spec_of
from pyhvd.run.options import Options

P = ParamSpec("P")
R = TypeVar("R")

_log = logging.getLogger("pyhvd")


@dataclass(frozen=True)
class _CallOptions:
    """What is one call's own; see :func:`launch`."""

    env: Mapping[str, str] | None
    stdout: TextIO | None
    stderr: TextIO | None
    output_filename: str | None
    prefix_output_with_timestamp: bool
    directory: str | None

    def __post_init__(self) -> None:
        check_text_files(self.stdout, self.stderr)

    def show(self, files: RankFiles) -> Output:
        """Return what shows the ranks' output, and copies it into files."""
        timestamp = self.prefix_output_with_timestamp
        return Output(self.stdout, self.stderr, files=files.by_rank, timestamp=timestamp)


class Hosts:
    """Hosts on which functions run, one after the other or several at once; a context manager.

    The agents that look after the ranks stay between two calls of :meth:`launch`, so that the second starts
    faster. They end with the context, with this process, or when they hear nothing of it for 20 s.

    Parameters
    ----------
    hosts : str, optional
        ``"h1:4,h2:4"``, as after ``pyhvdrun -H``. Without it and `hostfile`: the hosts that a cluster
        allocated to this job, else this host.
    hostfile : str, optional
        The path of a file whose lines are ``h slots=4``, ``h:4`` or ``h``.
    np : int, optional
        The number of ranks, unless :meth:`launch` says another; by default one for each slot, and one on this
        host alone.
    start_timeout : float, optional
        Seconds until all ranks must have started (PYHVD_START_TIMEOUT, or 30). If one of them is given, also
        how much later than another a rank may call :func:`pyhvd.init`; else a warning names it.
    ssh_port : int, optional
        The port of the hosts' sshd.
    ssh_identity_file : str, optional
        The private key for ssh.
    network_interfaces : str or iterable of str, optional
        The network between the hosts: interfaces, or subnets; see ``pyhvdrun --network-interfaces``.
    executable : str, optional
        The ranks' Python on all hosts; by default this one.
    launch_agent : str, optional
        A command in place of ssh, which has ``{host}`` and ``{command}`` in it.
    verbose : int
        1: log the commands that start the agents.

    Raises
    ------
    ValueError
        An argument is invalid, or there are not enough slots.
    """

    def __init__(
        self,
        hosts: str | None = None,
        hostfile: str | os.PathLike[str] | None = None,
        np: int | None = None,
        start_timeout: float | None = None,
        ssh_port: int | None = None,
        ssh_identity_file: str | None = None,
        network_interfaces: str | Sequence[str] | None = None,
        executable: str | None = None,
        launch_agent: str | None = None,
        verbose: int = 0,
    ) -> None:
        _check_places(hosts, hostfile, ssh_port, ssh_identity_file, launch_agent)
        expect(isinstance(verbose, int), "verbose", verbose, "0 or 1")
        given = read_duration(START_TIMEOUT._replace(default=0.0), start_timeout)  # 0 if nobody gives it
        self._options = Options(
            program=[],
            num_proc=None if np is None else check_size(np, "np"),
            start_timeout=given or START_TIMEOUT.default,
            ends_late=given > 0,
            python=executable,
            hosts=hosts,
            hostfile=None if hostfile is None else os.fspath(hostfile),
            launch_agent=launch_agent,
            ssh_port=ssh_port,
            ssh_identity_file=ssh_identity_file,
            network_interfaces=_network(network_interfaces),
            name_of=argument_of,
        )
        self._level = logging.WARNING if verbose else logging.DEBUG
        self._select = functools.cache(functools.partial(_select, self._options))
        self._select(self._options.num_proc)
        self._kept: KeptAgents | None = KeptAgents()

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the agents."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def launch(
        self,
        fn: Callable[P, R],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        np: int | None = None,
        env: Mapping[str, str] | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        output_filename: str | None = None,
        prefix_output_with_timestamp: bool = False,
        directory: str | None = None,
    ) -> list[R]:
        """Run ``fn(*args, **kwargs)`` on every rank; return the results in rank order.

        The parameters, and the errors, are those of :func:`pyhvd.launch`.
        """
        job = _CallOptions(env, stdout, stderr, output_filename, prefix_output_with_timestamp, directory)
        return self._launch((fn, args, kwargs), np, job, {})

    def start(
        self,
        *,
        np: int | None = None,
        env: Mapping[str, str] | None = None,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
        output_filename: str | None = None,
        prefix_output_with_timestamp: bool = False,
        directory: str | None = None,
    ) -> Ranks:
        """Start ranks that make one call after the other, and return when all are ready for the first.

        The parameters are those of :func:`pyhvd.launch`. Use the result as a context manager, or call its
        :meth:`Ranks.close`.
        """
        job = _CallOptions(env, stdout, stderr, output_filename, prefix_output_with_timestamp, directory)
        with contextlib.ExitStack() as stack:
            driver, source = self._enter(stack, (load_modules, (), None), np, job, RANK_OF_CALLS)
            living = LivingRanks(driver, source)
            living.begin()
            return Ranks(living, stack.pop_all())

    def _launch(
        self, call: tuple[Any, Any, Any], np: int | None, job: _CallOptions, elastic: Mapping[str, Any]
    ) -> list[Any]:
        if elastic:
            options, code = self._pack(call, job, elastic, RANK_OF_FUNCTION)
            if options.elastic.wanted:
                return self._launch_elastic(options, code, job)
        with contextlib.ExitStack() as stack:
            driver, source = self._enter(stack, call, np, job, RANK_OF_FUNCTION)
            with as_function_errors(), ending(driver):
                driver.serve()
                source.keep_agents()
            return driver.take_results()

    def _pack(
        self, call: tuple[Any, Any, Any], job: _CallOptions, elastic: Mapping[str, Any], module: str
    ) -> tuple[Options, bytes]:
        """Return the options of a job, and its code."""
        if self._kept is None:
            raise ValueError("these hosts are closed: make new ones")
        fn, args, kwargs = call
        check_call((fn, args, {} if kwargs is None else kwargs), job.env, self._options.python)
        directory = os.path.abspath(job.directory or os.getcwd())
        options = dataclasses.replace(self._options, directory=directory, **elastic)
        variables = to_send(os.environb, rank_variables(job.env, None))
        whole = fn, tuple(args), dict(kwargs or {})
        return options, dump_call(whole, directory, variables, module_paths(), module)

    def _enter(
        self,
        stack: contextlib.ExitStack,
        call: tuple[Any, Any, Any],
        np: int | None,
        job: _CallOptions,
        module: str,
    ) -> tuple[GenerationDriver, CommandSource]:
        """Return the driver of a job and its source; the stack closes the files of the job's output."""
        options, code = self._pack(call, job, {}, module)
        placed = self._select(options.num_proc if np is None else check_size(np, "np")).placed
        assert placed is not None
        spec = spec_of(options, code, function=True)
        # A caller cannot know without the log what is a warning.
        console = Console(
            functools.partial(_log.log, self._level, "%s"), functools.partial(_log.warning, "%s")
        )
        files = stack.enter_context(
            contextlib.closing(RankFiles(job.output_filename, placed.size, argument_of))
        )
        files.make(placed.size)
        output = stack.enter_context(job.show(files))
        driver, source = make_driver(options, spec, placed, output, console, _name, self._kept)
        for host in source.hosts:
            _log.log(self._level, "the agent of %s: %s", host.name, shlex.join(host.command))
        return driver, source

    def _launch_elastic(self, options: Options, code: bytes, job: _CallOptions) -> list[Any]:
        finds_hosts = options.elastic.finds_hosts
        if finds_hosts and options.chooses_hosts:
            raise ValueError(
                "host_discovery_script or discovery finds the hosts: leave hosts and hostfile out"
            )
        selection = None if finds_hosts else _select(options, options.num_proc)
        most = options.elastic.max_np or options.num_proc or 1
        spec = elastic_spec(options, code, function=True)
        with contextlib.closing(RankFiles(job.output_filename, most, argument_of)) as files:
            shown = job.show(files)
            with shown as output, begin(options, selection, spec, output, files) as begun:
                return begun.serve_function()


class Ranks:
    """Ranks that make one call after the other, of :meth:`Hosts.start`; a context manager.

    Each call finds what earlier calls have left in its rank, such as variables of modules and what
    :func:`pyhvd.init` has made. Any thread may call; a rank makes its calls in their order. The first call
    that fails ends all ranks, and later calls raise :class:`LaunchError`.

    Attributes
    ----------
    size : int
        The number of ranks.
    """

    def __init__(self, living: LivingRanks, files: contextlib.ExitStack) -> None:
        self.size = living.size
        self._living = living
        self._files = files

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, fn: Callable[P, R], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[R]:
        """Run ``fn(*args, **kwargs)`` on every rank; return the results in rank order.

        Raises
        ------
        RankFailedError, LaunchError, ValueError
            See :func:`pyhvd.launch`. LaunchError also if the ranks have ended.
        """
        named = {} if kwargs is None else kwargs
        check_call((fn, args, named), None, None)
        return self._living.run((fn, tuple(args), dict(named)))

    def close(self) -> None:
        """End the ranks after their calls; those that still run 5 s later are killed."""
        try:
            self._living.end()
        finally:
            self._files.close()


def launch(
    fn: Callable[P, R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    num_proc: int | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    launch_agent: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    output_filename: str | None = None,
    prefix_output_with_timestamp: bool = False,
    directory: str | None = None,
    verbose: int = 0,
    **elastic: Unpack[Elastic],
) -> list[R]:
    """Run ``fn(*args, **kwargs)`` on every rank, and return the results in rank order.

    For arguments that are not listed here see :class:`Hosts`. With `min_num_proc`, `host_discovery_script` or
    `discovery` the job is elastic; `max_num_proc`, `slots`, `reset_limit`, `elastic_timeout` and
    `cooldown_range` are as pyhvdrun's flags. `discovery` is a callable, or has
    ``find_available_hosts_and_slots()``; another thread calls it each second. It returns the slots of each
    host, or lines such as ``"h1:2"``. The results are then those of the last ranks.

    Parameters
    ----------
    fn : callable
        Calls :func:`pyhvd.init` itself. cloudpickle carries it, its arguments and its result.
    np, num_proc : int, optional
        The number of ranks, by either name; by default one for each slot, and one on this host alone.
    env : mapping of str to str, optional
        Variables of the ranks, in addition to those of this process.
    stdout, stderr : text file, optional
        The files for the ranks' output; by default sys.stdout and sys.stderr.
    output_filename, directory : str, optional
        A folder for copies of the output; and where the ranks run, by default the working directory.

    Raises
    ------
    RankFailedError, LaunchError, ValueError
        A rank failed, and its exception is the ``__cause__``, or a :class:`RemoteError` if it cannot be sent.
        The ranks could not be started. An argument is invalid, or there are not enough slots.
    """
    wanted = read_elastic(elastic)
    job = _CallOptions(env, stdout, stderr, output_filename, prefix_output_with_timestamp, directory)
    with Hosts(
        *(hosts, hostfile, _one_size(np, num_proc), start_timeout, ssh_port, ssh_identity_file),
        *(network_interfaces, executable, launch_agent, verbose),
    ) as made:
        return made._launch((fn, args, kwargs), None, job, wanted)


def _one_size(np: int | None, num_proc: int | None) -> int | None:
    if np is not None and num_proc is not None and np != num_proc:
        raise ValueError(
            f"np={np!r} and num_proc={num_proc!r} are both the number of ranks: give one of them"
        )
    return num_proc if np is None else np


def _check_places(hosts: Any, hostfile: Any, port: Any, identity_file: Any, launch_agent: Any) -> None:
    expect(hosts is None or isinstance(hosts, str), "hosts", hosts, "a str such as 'h1:4,h2:4'")
    path = isinstance(hostfile, str | os.PathLike)
    expect(hostfile is None or path, "hostfile", hostfile, "the path of a file")
    number = isinstance(port, int) and not isinstance(port, bool) and 0 < port < 1 << 16
    expect(port is None or number, "ssh_port", port, "a number from 1 to 65535")
    right = identity_file is None or isinstance(identity_file, str)
    expect(right, "ssh_identity_file", identity_file, "the path of a file, as str")
    if launch_agent is None:
        return
    if port is not None or identity_file is not None:
        raise ValueError("ssh_port and ssh_identity_file are for ssh: put them into launch_agent")
    expect(isinstance(launch_agent, str), "launch_agent", launch_agent, "a command, as str")
    try:
        check_agent(launch_agent)
    except ValueError as exc:
        raise ValueError(f"launch_agent: {exc}") from None


def _network(given: str | Sequence[str] | None) -> list[str]:
    names = interface_names(given, "network_interfaces") or []
    words = [word for name in names for word in name.split(",")]
    if ANY not in words:
        try:
            parse_wishes(words)
        except ValueError as exc:
            raise ValueError(f"network_interfaces: {exc}") from None
    return words


def _select(options: Options, size: int | None) -> HostSelection:
    """Return the hosts of a job of `size` ranks; if None, each host slot gets a rank."""
    rank = find_rank(os.environ)
    # Another launcher has divided an allocation among its ranks already.
    environ = os.environ if rank is None or rank.alone else {}
    around = Surroundings(environ, read_file, name_of=argument_of)
    try:
        selection = select(dataclasses.replace(options, num_proc=size), around, find_own)
    except HostsError as exc:
        raise ValueError(str(exc)) from None
    return _select(options, 1) if selection.placed is None else selection


def _name(placed: HostRanks) -> str:
    """Return a host's name for messages and ranks; that of this host, if the user gave none."""
    return socket.gethostname() if placed.own and is_loopback(placed.host.name) else placed.host.name

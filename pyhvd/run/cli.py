"""The command line of ``python -m pyhvd.run`` and ``pyhvdrun``."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pyhvd import __version__
from pyhvd.config import LOG_LEVELS, port_range
from pyhvd.run.flags import ConfigFileError, add_flags, settings_of
from pyhvd.run.horovod_name import AS_HOROVOD

_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_NO_EFFECT = {
    "--mpi": "ranks always use MPI",
    "--gloo": "ranks always use MPI",
    "--tcp": "choose the network with --network-interfaces, or with variables of MPI",
    "--disable-cache": "no check of a host is remembered",
}
_REFUSED = {
    "--jsrun": "jsrun starts the ranks itself: jsrun -n N python -m pyhvd.run script.py",
}
_REPLACE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
"""The program of ranks that run a command."""
_EXAMPLES = """\
examples:
  pyhvdrun -n 4 train.py --epochs 3             4 ranks on this host
  pyhvdrun -n 4 -m mypackage.train              a module
  pyhvdrun -n 4 --timeline-filename traces/ train.py
  pyhvdrun -n 2 -c "import pyhvd as hvd; hvd.init(); print(hvd.rank())"
  pyhvdrun -n 4 --stall-check-warning-time-seconds 10 train.py
  pyhvdrun -n 4 --log-level info train.py       pyhvd logs what it does
  pyhvdrun -n 4 --autotune --autotune-log-file tuned.csv train.py
  pyhvdrun -n 4 --metrics-port 0 train.py       with metrics for python -m pyhvd top
  pyhvdrun --check-build                        what pyhvd can use on this host
  pyhvdrun -H h1:4,h2:4 train.py                4 ranks on each of two hosts, started by ssh
  pyhvdrun -H h1:4,h2:4 --show-config           which ranks sit on which host
  mpiexec -n 4 python -m pyhvd.run train.py     the same under your own mpiexec
"""


@dataclass(frozen=True)
class ElasticOptions:
    """What the command line says of an elastic job.

    Attributes
    ----------
    discovery_script : str or None
        The path of the script that prints the hosts.
    min_np, max_np : int or None
        The fewest and the most ranks; None for as many as the job starts with, and for no limit.
    reset_limit : int or None
        How often ranks may be started again.
    timeout : float
        Seconds to wait for enough hosts.
    cooldown : tuple of float or None
        Seconds for which a host that failed is put aside, at first and at most; None for ever.
    preemption_command : str
        A shell command that succeeds on a host that will be taken away; empty without one.
    store : str
        The folder, as fsspec names it, in which commits are stored; empty without one.
    store_every : int
        Each commit of so many is stored.
    preload : tuple of str
        Modules that zygotes import besides those at the program's top.
    warm : str
        How far zygotes come: ``imports``, or ``init``, where they run the program until it calls ``init()``.
    """

    discovery_script: str | None = None
    min_np: int | None = None
    max_np: int | None = None
    reset_limit: int | None = None
    timeout: float = 600.0
    cooldown: tuple[float, float] | None = (10.0, 300.0)
    preemption_command: str = ""
    store: str = ""
    store_every: int = 1
    preload: tuple[str, ...] = ()
    warm: str = "imports"

    @property
    def wanted(self) -> bool:
        """Whether the job is elastic."""
        return self.discovery_script is not None or self.min_np is not None


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    Attributes
    ----------
    program : list of str
        A script, ``-m module`` or ``-c code``, with its arguments.
    ranks : frozenset of int or None
        The ranks whose output is shown; None for all.
    settings : dict of str to str
        Variables of the ranks, which override the environment.
    mpi_args, binding_args : list of str
        The user's arguments for mpiexec; the latter bind ranks to cores.
    launcher : str or None
        The ranks find each other by ``pmi`` or by ``mpiexec``; None to choose by the MPI and the hosts.
    directory : str or None
        The absolute path of the directory in which the ranks run; None for the launcher's own.
    python : str or None
        The ranks' Python; None for the launcher's.
    send_environment : bool
        Whether ranks on other hosts get the launcher's environment.
    hosts, hostfile : str or None
        The hosts of ``-H``, and the path of ``--hostfile``.
    launch_agent : str or None
        The agent's command, which :func:`pyhvd.run.launch_agent.check_agent` has accepted.
    network_interfaces : tuple of str
        What :func:`pyhvd.job.network_plans.parse_wishes` has accepted, or ``any``.
    port_range : range
        The ports on which ranks listen for other hosts; 0 is any.
    elastic : ElasticOptions
        Whether ranks and hosts may come and go.
    """

    program: list[str]
    num_proc: int | None = None
    verbose: bool = False
    mpi_args: list[str] = field(default_factory=list)
    binding_args: list[str] = field(default_factory=list)
    launcher: str | None = None
    start_timeout: float = 30.0
    output_filename: str | None = None
    prefix_output: bool = False
    prefix_timestamp: bool = False
    ranks: frozenset[int] | None = None
    dry_run: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    check_build: bool = False
    directory: str | None = None
    python: str | None = None
    send_environment: bool = True
    hosts: str | None = None
    hostfile: str | None = None
    slots_per_host: int | None = None
    launch_agent: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interfaces: tuple[str, ...] = ()
    port_range: range = range(1)
    show_config: bool = False
    elastic: ElasticOptions = ElasticOptions()

    @property
    def chooses_hosts(self) -> bool:
        """Whether the command line gives hosts."""
        return self.hosts is not None or self.hostfile is not None

    @property
    def script(self) -> str:
        """The path of the script; empty for a module or code."""
        return "" if self.program[:1] in ([], ["-m"], ["-c"]) else self.program[0]

    @property
    def starts_ranks(self) -> bool:
        """Whether the command line says how many ranks to start, or where."""
        return self.num_proc is not None or self.chooses_hosts

    def rank_arguments(self) -> list[str]:
        """Return the arguments of each rank's own command line."""
        arguments = []
        if self.output_filename is not None:
            arguments += ["--output-filename", self.output_filename]
        if self.prefix_output:
            arguments.append("--prefix-output")
        if self.prefix_timestamp:
            arguments.append("--prefix-timestamp")
        if self.ranks is not None:
            arguments += ["--ranks", ",".join(map(str, sorted(self.ranks)))]
        return [*arguments, *self.program]


def parse(arguments: Sequence[str], *, under_mpiexec: bool, launcher: str = "mpiexec") -> Options:
    """Parse the command line; exit with code 2 on bad usage, as argparse does.

    Parameters
    ----------
    arguments : sequence of str
        ``sys.argv[1:]``.
    under_mpiexec : bool
        Whether mpiexec has started this process as a rank. Then ``-n``, ``-H`` and ``--hostfile`` are wrong.
    launcher : str
        The name of that mpiexec, for messages.
    """
    parser = _parser()
    own, program = _split(list(arguments), parser)
    known = parser.parse_args(_joined(own))
    if known.check_build:
        return Options(program=[], verbose=known.verbose, check_build=True)
    if not known.show_config:
        _check_program(program, parser)
    if under_mpiexec:
        _refuse_to_start_ranks(known, parser, launcher)
    if known.launch_agent is not None and (known.ssh_port or known.ssh_identity_file):
        parser.error("-p and -i are for ssh: put them into the command of --launch-agent")
    _tell_horovods(known, parser, quiet=under_mpiexec)
    try:
        settings = {**settings_of(known), **dict(known.env)}
    except ConfigFileError as exc:
        parser.error(str(exc))
    return Options(
        program=program,
        num_proc=known.num_proc,
        verbose=known.verbose,
        mpi_args=known.mpi_args,
        binding_args=known.binding_args,
        launcher=known.launcher,
        start_timeout=known.start_timeout,
        output_filename=_absolute(known.output_filename),
        prefix_output=known.prefix_output or known.prefix_timestamp,
        prefix_timestamp=known.prefix_timestamp,
        ranks=known.ranks,
        dry_run=known.dry_run,
        settings=settings,
        directory=_absolute(known.chdir),
        python=known.python,
        send_environment=not known.no_env,
        hosts=known.hosts,
        hostfile=known.hostfile,
        slots_per_host=known.slots_per_host,
        launch_agent=known.launch_agent,
        ssh_port=known.ssh_port,
        ssh_identity_file=known.ssh_identity_file,
        network_interfaces=tuple(known.network_interfaces),
        port_range=known.port_range,
        show_config=known.show_config,
        elastic=_elastic(known, parser),
    )


def _refuse_to_start_ranks(known: argparse.Namespace, parser: argparse.ArgumentParser, launcher: str) -> None:
    """Exit with a usage error if the command line starts ranks, which a launcher has done."""
    given = {
        "-n": known.num_proc,
        "-H": known.hosts,
        "--hostfile": known.hostfile,
        "--min-np": known.min_np,
        "--host-discovery-script": known.host_discovery_script,
    }
    refused = next((flag for flag, value in given.items() if value is not None), None)
    if refused is not None:
        parser.error(
            f"{launcher} has started this rank already: use either {launcher} or {refused}, not both"
        )


def _elastic(known: argparse.Namespace, parser: argparse.ArgumentParser) -> ElasticOptions:
    """Return what the command line says of an elastic job; exit if it contradicts itself."""
    elastic = ElasticOptions(
        discovery_script=_absolute(known.host_discovery_script),
        min_np=known.min_np,
        max_np=known.max_np,
        reset_limit=known.reset_limit,
        timeout=known.elastic_timeout,
        cooldown=known.blacklist_cooldown_range,
        preemption_command=known.preemption_command,
        store=known.elastic_store,
        store_every=known.elastic_store_every,
        preload=tuple(filter(None, known.preload.split(","))),
        warm=known.warm,
    )
    flags = ("max_np", "reset_limit", "preemption_command", "elastic_store")
    given = [flag for flag in flags if getattr(known, flag)] + ["warm"] * (elastic.warm != "imports")
    if given and not elastic.wanted:
        parser.error(f"--{given[0].replace('_', '-')} is for elastic jobs: give --min-np too")
    sizes = [n for n in (elastic.min_np, known.num_proc, elastic.max_np) if n is not None]
    if elastic.wanted and sizes != sorted(sizes):
        parser.error("--min-np, -n and --max-np: expected each to be at least the one before")
    if elastic.discovery_script is not None and (known.hosts or known.hostfile):
        parser.error("--host-discovery-script finds the hosts: leave -H and --hostfile out")
    return elastic


def without_python(arguments: Sequence[str]) -> list[str]:
    """Return a command line of horovodrun, whose program is a command, as one of pyhvdrun.

    The program loses ``python`` and its option ``-u`` in front. A Python script, such as pytest, is looked up
    on the PATH. In place of another command, Python code runs that the command replaces.
    """
    own, program = _split(list(arguments), _parser())
    if not program or program[0] in ("-m", "-c"):
        return [*own, *program]
    if _PYTHON.fullmatch(os.path.basename(program[0])):
        after = list(itertools.dropwhile("-u".__eq__, program[1:]))
        if after and (not after[0].startswith("-") or after[0] in ("-m", "-c")):
            return [*own, *after]
    path = program[0] if os.path.isfile(program[0]) else shutil.which(program[0]) or program[0]
    if not os.path.isfile(path) or _is_python_script(path):
        return [*own, path, *program[1:]]
    return [*own, "-c", _REPLACE, *program]


def _is_python_script(path: str) -> bool:
    with open(path, "rb") as file:
        first = file.readline(4096)
    return path.endswith(".py") or (first.startswith(b"#!") and b"python" in first)


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(path)


def usage_error(text: str) -> NoReturn:
    """Print a usage error, as for a wrong flag, and exit with code 2."""
    _parser().error(text)


def _check_program(program: list[str], parser: argparse.ArgumentParser) -> None:
    """Exit with a usage error if the program is missing or invalid."""
    if not program:
        parser.error("no script: give a script, -m module or -c code")
    if program[0] == "-":
        parser.error("a script read from stdin would reach rank 0 only: save it to a file")
    if program[0] in ("-m", "-c") and len(program) < 2:
        parser.error(f"argument expected for the {program[0]} option")
    if _PYTHON.fullmatch(os.path.basename(program[0])):
        rest = shlex.join(program[1:]) or "script.py"
        parser.error(
            f"the program is a Python script, without {program[0]!r} before it: pyhvdrun -n N {rest}"
        )


def _joined(own: list[str]) -> list[str]:
    """Join mpiexec's arguments with their flags: argparse takes a separate word with a dash for a flag."""
    for at, word in enumerate(own[:-1]):
        if word in ("--mpi-args", "--binding-args"):
            return [*own[:at], f"{word}={own[at + 1]}", *_joined(own[at + 2 :])]
    return own


def _split(arguments: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Return pyhvdrun's own arguments, and the program with its arguments."""
    takes_values = {
        name: action.nargs if isinstance(action.nargs, int) else 1
        for action in parser._actions
        if action.nargs is None or isinstance(action.nargs, int)
        for name in action.option_strings
    }
    at = 0
    while at < len(arguments):
        word = arguments[at]
        if word == "--":
            return arguments[:at], arguments[at + 1 :]
        if word in ("-m", "-c", "-") or not word.startswith("-"):
            break
        joined = word[:2] in ("-m", "-c") and not word.startswith("--") and word != "-cb"
        if joined:  # "-mmodule" in one word, which python accepts too
            return arguments[:at], [word[:2], word[2:], *arguments[at + 1 :]]
        at += 1 + takes_values.get(word, 0)
    return arguments[:at], arguments[at:]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyhvdrun",
        description="Run a Python program on many ranks. Under mpiexec: run this rank's part of it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="pyhvdrun (-n N | -H HOSTS) [options] (script.py | -m module | -c code) [argument ...]",
        allow_abbrev=False,
    )
    parser.add_argument("-v", "--version", action="version", version=f"pyhvd {__version__}")
    parser.add_argument(
        "-cb",
        "--check-build",
        action="store_true",
        help="show the available frameworks, controllers and operations, and exit; --verbose: why",
    )
    parser.add_argument("-n", "-np", "--num-proc", type=positive_int, metavar="N", help="number of ranks")
    _add_hosts(parser)
    _add_elastic(parser)
    parser.add_argument(
        "--verbose", action="store_true", help="show the commands that start the ranks, and the settings"
    )
    parser.add_argument(
        "--start-timeout",
        type=positive_float,
        default=30.0,
        metavar="S",
        help="fail if not all ranks have started after S seconds (default: 30)",
    )
    parser.add_argument(
        "--output-filename",
        metavar="DIR",
        help="also write each rank's output to DIR/rank.<rank>/stdout and stderr",
    )
    parser.add_argument(
        "--prefix-output", action="store_true", help="begin each line with its rank: [1]<stdout>:"
    )
    parser.add_argument(
        "--prefix-timestamp",
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="as --prefix-output, with the time of day first",
    )
    parser.add_argument(
        "--ranks", type=_ranks, metavar="RANKS", help="show the output of these ranks only, e.g. 0,4-7"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show the commands that would start the ranks, and exit"
    )
    _add_mpi(parser)
    _add_place(parser)
    _add_logging(parser)
    add_flags(parser)
    _add_horovods(parser)
    return parser


def _add_mpi(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("MPI")
    group.add_argument(
        "--launcher",
        choices=("pmi", "mpiexec"),
        help="how ranks find each other: pmi (MPICH, Intel MPI) or mpiexec (default: mpiexec on one host; on"
        " many pmi, but for Open MPI)",
    )
    for flag, what in (("--mpi-args", "more arguments"), ("--binding-args", "arguments that bind ranks")):
        group.add_argument(
            flag, type=_words, default=[], metavar='"ARGS"', help=f"{what} for mpiexec, as in a shell"
        )


def _add_place(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the ranks' Python, directory and environment")
    group.add_argument("--python", metavar="PATH", help="the ranks' Python (default: the launcher's)")
    group.add_argument(
        "--chdir", metavar="DIR", help="where the ranks run (default: the launcher's working directory)"
    )
    group.add_argument(
        "-x",
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="a variable of the ranks, with the launcher's value if none is given; may be given again",
    )
    group.add_argument(
        "--no-env",
        action="store_true",
        help="do not send the launcher's environment to other hosts, but for what -x names",
    )


def _add_hosts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("hosts")
    group.add_argument(
        "-H",
        "--hosts",
        metavar="HOSTS",
        help="run on these hosts, e.g. h1:4,h2:4 (4 ranks each at most), user@h:2 or [fe80::1]:2",
    )
    group.add_argument(
        "-hostfile",
        "--hostfile",
        metavar="FILE",
        help="run on the hosts of FILE; each line is h slots=4, h:4 or h",
    )
    group.add_argument(
        "--slots-per-host",
        type=positive_int,
        metavar="N",
        help="the ranks of a host for which none are given (default: 1)",
    )
    group.add_argument(
        "--launch-agent",
        type=_agent,
        metavar="COMMAND",
        help="start a host's agent by COMMAND, with {host} and {command} in it (default: by ssh)",
    )
    group.add_argument(
        "-p", "--ssh-port", type=_port, metavar="PORT", help="the port of the hosts' sshd (default: as ssh)"
    )
    group.add_argument(
        "-i", "--ssh-identity-file", metavar="FILE", help="the private key for ssh (default: as ssh)"
    )
    group.add_argument(
        "--network-interfaces",
        "--network-interface",
        type=_interfaces,
        action="extend",
        default=[],
        metavar="NAMES",
        help="connect hosts by these interfaces or subnets, e.g. eth0,10.0.0.0/24 or h1=ib0,h2=ib1; may be"
        " given again; any: leave the choice to MPI (default: one by which all hosts reach each other)",
    )
    group.add_argument(
        "--port-range",
        type=_port_range,
        default=range(1),
        metavar="A-B",
        help="ports on which ranks listen for other hosts, at least 3 for each rank of a host (default: any)",
    )
    group.add_argument(
        "--show-config",
        action="store_true",
        help="show which ranks sit on which host, and which rule chose the hosts, and exit",
    )


def _add_elastic(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("elastic jobs, in which ranks and hosts come and go")
    group.add_argument(
        "--min-np",
        "--min-num-proc",
        type=positive_int,
        metavar="N",
        help="go on with as few as N ranks; ranks that fail are started again",
    )
    group.add_argument(
        "--max-np", "--max-num-proc", type=positive_int, metavar="N", help="use N ranks at most"
    )
    group.add_argument(
        "--host-discovery-script",
        metavar="PATH",
        help="a program that prints the hosts there are, each as h or h:slots on a line; run every second",
    )
    group.add_argument(
        "--preload",
        default="",
        metavar="NAMES",
        help="modules that ranks import anyway, e.g. torch,pandas: ranks are forked from a process that has"
        " imported them, and what the program imports at its top",
    )
    group.add_argument(
        "--warm",
        choices=("imports", "init"),
        default="imports",
        help="fork ranks from a process that has done the imports, or, with init, from one that has run the"
        " program until it calls init(), so that data is loaded once per host (default: imports)",
    )
    group.add_argument(
        "--reset-limit", type=positive_int, metavar="N", help="give up when ranks were started again N times"
    )
    group.add_argument(
        "--elastic-timeout",
        type=positive_float,
        default=600.0,
        metavar="S",
        help="give up when there are too few hosts for S seconds (default: 600)",
    )
    group.add_argument(
        "--blacklist-cooldown-range",
        type=positive_float,
        nargs=2,
        action=_Cooldown,
        default=(10.0, 300.0),
        metavar=("MIN", "MAX"),
        help="put a host that failed aside for MIN seconds, later longer, at most MAX (default: 10 300)",
    )
    _add_elastic_losses(group)


def _add_elastic_losses(group: Any) -> None:
    group.add_argument(
        "--preemption-command",
        default="",
        metavar="COMMAND",
        help="a shell command that runs on each host, again 1 s after it failed; when it succeeds, the ranks"
        " leave the host, and no step is lost",
    )
    group.add_argument(
        "--elastic-store",
        default="",
        metavar="URL",
        help="store commits in a folder too, which fsspec reaches and all hosts share, e.g. s3://bucket/job:"
        " the job then survives the loss of all hosts at once",
    )
    group.add_argument(
        "--elastic-store-every",
        type=positive_int,
        default=1,
        metavar="N",
        help="store each N-th commit (default: 1); commits that come faster than the store are left out",
    )


class _Cooldown(argparse.Action):
    """Takes two numbers of seconds in order."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        low, high = values
        if low > high:
            parser.error(f"argument {option_string}: expected MIN MAX, with MIN at most MAX")
        setattr(namespace, self.dest, (low, high))


def _add_logging(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logging")
    group.add_argument(
        "--log-level",
        dest="PYHVD_LOG_LEVEL",
        type=str.lower,
        choices=LOG_LEVELS,
        metavar="LEVEL",
        help=f"level of pyhvd's log: {', '.join(LOG_LEVELS)} (default: PYHVD_LOG_LEVEL, or warning)",
    )
    group.add_argument(
        "--log-with-timestamp",
        "--no-log-hide-timestamp",
        dest="PYHVD_LOG_HIDE_TIME",
        action="store_true",
        default=None,
        help="show the time in pyhvd's log (the default)",
    )
    group.add_argument(
        "--log-without-timestamp",
        "--log-hide-timestamp",
        dest="PYHVD_LOG_HIDE_TIME",
        action="store_false",
        default=None,
        help="do not show the time in pyhvd's log",
    )


def _add_horovods(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--as-horovod",
        dest="env",
        action="append_const",
        const=(AS_HOROVOD, "1"),
        help="let the program import horovod.torch, which is pyhvd's, unless Horovod is installed",
    )
    group = parser.add_argument_group("of horovodrun, without effect")
    for flag, why in _NO_EFFECT.items():
        group.add_argument(flag, dest="no_effect", action="append_const", const=flag, default=[], help=why)
    for flag in _REFUSED:
        parser.add_argument(flag, dest="refused", action="store_const", const=flag, help=argparse.SUPPRESS)


def _tell_horovods(known: argparse.Namespace, parser: argparse.ArgumentParser, quiet: bool) -> None:
    """Exit with the remedy for a flag that is refused; unless `quiet`, tell those without effect once."""
    if known.refused is not None:
        parser.error(f"argument {known.refused}: {_REFUSED[known.refused]}")
    for flag in dict.fromkeys([] if quiet else known.no_effect):
        print(f"pyhvd: {flag} has no effect: {_NO_EFFECT[flag]}", file=sys.stderr)


def _agent(text: str) -> str:
    from pyhvd.run.launch_agent import check_agent

    try:
        return check_agent(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _interfaces(text: str) -> list[str]:
    from pyhvd.job.network_plans import ANY, parse_wishes

    if text == ANY:
        return [ANY]
    try:
        parse_wishes([text])
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
    return text.split(",")


def _port_range(text: str) -> range:
    try:
        return port_range(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{exc}, not {text!r}") from None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{exc}: {text!r}") from None


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"expected NAME or NAME=VALUE, not {text!r}")
    if not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name} is not set here: give {name}=VALUE")
    return name, value if equals else os.environ[name]


def _port(text: str) -> int:
    value = positive_int(text)
    if value >= 1 << 16:
        raise argparse.ArgumentTypeError(f"must be less than 65536, not {value}")
    return value


def _ranks(text: str) -> frozenset[int]:
    ranks: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise argparse.ArgumentTypeError(f"expected ranks such as 0,4-7, not {text!r}")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def positive_int(text: str) -> int:
    """Return a whole number of at least 1, for argparse."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, not {text!r}") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def positive_float(text: str) -> float:
    """Return a number of seconds, for argparse."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, not {text!r}") from None
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be positive, and less than 1e9, not {text}")
    return value

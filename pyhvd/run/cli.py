"""The command line of ``python -m pyhvd.run`` and ``pyhvdrun``."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pyhvd._version import __version__
from pyhvd.common.urls import local_path
from pyhvd.config import port_range, read_timeout
from pyhvd.errors import ConfigError
from pyhvd.job.mpi.rank_env import AS_HOROVOD
from pyhvd.job.spec import ELASTIC_TIMEOUT, START_TIMEOUT
from pyhvd.run.flags import SETTINGS, ConfigFileError, add_flags, checked, settings_of
from pyhvd.run.options import ElasticOptions, Options

_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_VERSIONS = ("3", f"3.{sys.version_info[1]}")
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


_HOROVODRUN_EXAMPLES = """\
examples:
  horovodrun -np 4 python train.py --epochs 3   4 ranks on this host
  horovodrun -np 8 -H h1:4,h2:4 python train.py 4 ranks on each of two hosts, started by ssh
  horovodrun -np 4 pytest -v                    other commands, too
  horovodrun --check-build                      what pyhvd can use on this host
"""


def parse(
    arguments: Sequence[str], *, under_mpiexec: bool, launcher: str = "mpiexec", tells: bool = True
) -> Options:
    """Parse the command line; exit with code 2 on bad usage, as argparse does.

    Parameters
    ----------
    arguments : sequence of str
        ``sys.argv[1:]``.
    under_mpiexec : bool
        Whether mpiexec has started this process as a rank. Then ``-n``, ``-H`` and ``--hostfile`` are wrong.
    launcher : str
        The name of that mpiexec, for messages.
    tells : bool
        Whether to tell what has no effect: of the ranks under mpiexec, one does.
    """
    parser = _parser()
    own, program = _split(list(arguments), parser)
    program = _after_python(program)
    known = parser.parse_args(_joined(own))
    if known.check_build:
        return Options(program=[], verbose=known.verbose, check_build=True)
    if not known.show_config:
        _check_program(program, parser)
    if under_mpiexec:
        _refuse_to_start_ranks(known, parser, launcher)
    if known.launch_agent is not None and (known.ssh_port or known.ssh_identity_file):
        parser.error("-p and -i are for ssh: put them into the command of --launch-agent")
    settings = _read_settings(known, parser, _tell if tells else bool)
    elastic = _elastic(known, parser)
    return Options(program, settings=settings, elastic=elastic, **_fields_of(Options, known))


def _fields_of(kind: type[Options | ElasticOptions], known: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a dataclass that the parser knows by the same names."""
    names = (each.name for each in dataclasses.fields(kind))
    return {name: getattr(known, name) for name in names if hasattr(known, name)}


def _read_settings(
    known: argparse.Namespace, parser: argparse.ArgumentParser, tell: Callable[[str], object]
) -> dict[str, str]:
    """Return the variables of the ranks; complete what depends on them; tell what has no effect."""
    _tell_horovods(known, parser, tell)
    try:
        given = known.start_timeout or read_timeout(START_TIMEOUT.suffix, 0.0)
        known.start_timeout, known.ends_late = given or START_TIMEOUT.default, given > 0
        known.timeout = known.timeout or read_timeout(ELASTIC_TIMEOUT.suffix, ELASTIC_TIMEOUT.default)
        known.prefix_output |= known.prefix_timestamp
        return {**settings_of(known, tell), **dict(known.env)}
    except (ConfigFileError, ConfigError) as exc:
        parser.error(str(exc))


def _refuse_to_start_ranks(known: argparse.Namespace, parser: argparse.ArgumentParser, launcher: str) -> None:
    """Exit with a usage error if the command line starts ranks, which a launcher has done."""
    given = {
        "-n": known.num_proc,
        "-H": known.hosts,
        "--hostfile": known.hostfile,
        "--min-np": known.min_np,
        "--host-discovery-script": known.discovery_script,
    }
    refused = next((flag for flag, value in given.items() if value is not None), None)
    if refused is not None:
        parser.error(
            f"{launcher} has started this rank already: use either {launcher} or {refused}, not both"
        )


def _elastic(known: argparse.Namespace, parser: argparse.ArgumentParser) -> ElasticOptions:
    """Return what the command line says of an elastic job; exit if it contradicts itself."""
    elastic = ElasticOptions(**_fields_of(ElasticOptions, known))
    given = {
        "--max-np": elastic.max_np,
        "--reset-limit": elastic.reset_limit,
        "--preemption-command": elastic.preemption_command,
        "--elastic-store": elastic.store,
    }
    lone = next((flag for flag, value in given.items() if value), None)
    if lone is not None and not elastic.wanted:
        parser.error(f"{lone} is for elastic jobs: give --min-np too")
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
    if (after := _after_python(program)) != program:
        return [*own, *after]
    path = program[0] if os.path.isfile(program[0]) else shutil.which(program[0]) or program[0]
    if not os.path.isfile(path) or _is_python_script(path):
        return [*own, path, *program[1:]]
    return [*own, "-c", _REPLACE, *program]


def _after_python(program: list[str]) -> list[str]:
    """Return a program without this Python and its option ``-u`` in front: the ranks' Python runs it."""
    if program and _is_this_python(program[0]):
        after = list(itertools.dropwhile("-u".__eq__, program[1:]))
        if after and (not after[0].startswith("-") or after[0] in ("-m", "-c")):
            return after
    return program


def _is_this_python(command: str) -> bool:
    """Return whether a command names this Python: by its path, or without one, and by its version, if any."""
    folder, name = os.path.split(command)
    if not (named := _PYTHON.fullmatch(name)) or (named[1] or "3") not in _VERSIONS:
        return False
    return not folder or os.path.realpath(folder) == os.path.realpath(os.path.dirname(sys.executable))


def _is_python_script(path: str) -> bool:
    with open(path, "rb") as file:
        first = file.readline(4096)
    return path.endswith(".py") or (first.startswith(b"#!") and b"python" in first)


def usage_error(text: str) -> NoReturn:
    """Print a usage error, as for a wrong flag, and exit with code 2."""
    _parser().error(text)


def _check_program(program: list[str], parser: argparse.ArgumentParser) -> None:
    """Exit with a usage error if the program is missing or invalid."""
    if not program:
        what = "command: give one, such as python train.py" if _is_horovodrun() else ""
        parser.error(f"no {what or 'script: give a script, -m module or -c code'}")
    if program[0] == "-":
        parser.error("a script read from stdin would reach rank 0 only: save it to a file")
    if program[0] in ("-m", "-c") and len(program) < 2:
        parser.error(f"argument expected for the {program[0]} option")
    if not _PYTHON.fullmatch(os.path.basename(program[0])):
        return
    if not _is_this_python(program[0]):
        parser.error(
            f"{program[0]!r} is another Python than that of the ranks, {sys.executable}: leave it out, or"
            " start the job by the other one, as in python -m pyhvd.run -n N script.py"
        )
    parser.error(
        f"after {program[0]!r} give a script, -m module or -c code, without other options of Python: the"
        " ranks' Python has those of the launcher's, as in python -O -m pyhvd.run -n N script.py"
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


def _is_horovodrun() -> bool:
    return os.path.basename(sys.argv[0]) == "horovodrun"


def _parser() -> argparse.ArgumentParser:
    is_horovodrun = _is_horovodrun()
    program = "command" if is_horovodrun else "(script.py | -m module | -c code)"
    name, number = ("horovodrun", "-np") if is_horovodrun else ("pyhvdrun", "-n")
    parser = argparse.ArgumentParser(
        prog=name,
        description="Run a Python program on many ranks. Under mpiexec: run this rank's part of it.",
        epilog=_HOROVODRUN_EXAMPLES if is_horovodrun else _EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"{name} ({number} N | -H HOSTS) [options] {program} [argument ...]",
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
        metavar="S",
        help=f"fail if not all ranks have started after S seconds (default: {START_TIMEOUT.source}), or if"
        " a rank calls init() S seconds later than another (default: PYHVD_START_TIMEOUT, or only say so)",
    )
    _add_output(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="show the commands that would start the ranks, and exit"
    )
    _add_mpi(parser)
    _add_place(parser)
    add_flags(parser)
    _add_log_spellings(parser)
    _add_horovods(parser)
    return parser


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output-filename",
        type=checked(lambda text: os.path.abspath(local_path(text))),
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
        "--chdir",
        dest="directory",
        type=os.path.abspath,
        metavar="DIR",
        help="where the ranks run (default: the launcher's working directory)",
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
        dest="send_environment",
        action="store_false",
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
        "--slots",
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
        type=checked(port_range),
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
        dest="discovery_script",
        type=os.path.abspath,
        metavar="PATH",
        help="a program that prints the hosts there are, each as h or h:slots on a line; run every second",
    )
    group.add_argument(
        "--preload",
        type=_names,
        default=(),
        metavar="NAMES",
        help="modules that ranks import anyway, e.g. torch,pandas: ranks are forked from a process that has"
        " imported them, and what the program imports at its top",
    )
    group.add_argument(
        "--reset-limit", type=positive_int, metavar="N", help="give up when ranks were started again N times"
    )
    group.add_argument(
        "--elastic-timeout",
        dest="timeout",
        type=positive_float,
        metavar="S",
        help=f"give up when there are too few hosts for S seconds (default: {ELASTIC_TIMEOUT.source})",
    )
    group.add_argument(
        "--blacklist-cooldown-range",
        dest="cooldown",
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
        dest="store",
        default="",
        metavar="URL",
        help="store commits in a folder too, which fsspec reaches and all hosts share, e.g. s3://bucket/job:"
        " the job then survives the loss of all hosts at once",
    )
    group.add_argument(
        "--elastic-store-every",
        dest="store_every",
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


def _add_log_spellings(parser: argparse.ArgumentParser) -> None:
    """Add horovodrun's other spellings of ``--log-with-timestamp``."""
    for flags, shown in (
        (("--no-log-hide-timestamp",), True),
        (("--log-without-timestamp", "--log-hide-timestamp"), False),
    ):
        parser.add_argument(
            *flags, dest="PYHVD_LOG_HIDE_TIME", action="store_const", const=shown, help=argparse.SUPPRESS
        )


def _add_horovods(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--as-horovod",
        dest="env",
        action="append_const",
        const=(AS_HOROVOD, "1"),
        help="let the program import horovod.torch, which is pyhvd's, unless Horovod is installed",
    )
    without = [*_NO_EFFECT, *(each.flag for each in SETTINGS if each.knob is None and each.flag)]
    parser.add_argument_group(
        "flags of horovodrun without effect", textwrap.fill(", ".join(without), break_on_hyphens=False)
    )
    hidden = argparse.SUPPRESS
    for flag in _NO_EFFECT:
        parser.add_argument(
            flag, dest="no_effect", action="append_const", const=flag, default=[], help=hidden
        )
    for flag in _REFUSED:
        parser.add_argument(flag, dest="refused", action="store_const", const=flag, help=hidden)


def _tell(text: str) -> None:
    print(f"pyhvd: {text}", file=sys.stderr)


def _tell_horovods(
    known: argparse.Namespace, parser: argparse.ArgumentParser, tell: Callable[[str], object]
) -> None:
    """Exit with the remedy for a flag that is refused; tell those without effect once."""
    if known.refused is not None:
        parser.error(f"argument {known.refused}: {_REFUSED[known.refused]}")
    for flag in dict.fromkeys(known.no_effect):
        tell(f"{flag} has no effect: {_NO_EFFECT[flag]}")


def _agent(text: str) -> str:
    from pyhvd.run.hosts.agent_template import check_agent

    try:
        return check_agent(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _interfaces(text: str) -> list[str]:
    from pyhvd.job.network.network_plans import ANY, parse_wishes

    if text == ANY:
        return [ANY]
    try:
        parse_wishes([text])
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
    return text.split(",")


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


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

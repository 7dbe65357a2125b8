"""The command line of ``python -m pyhvd.run`` and ``pyhvdrun``."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from pyhvd._version import __version__
from pyhvd.config import read_timeout
from pyhvd.errors import ConfigError
from pyhvd.job.mpi.rank_env import AS_HOROVOD
from pyhvd.job.spec import ELASTIC_TIMEOUT, START_TIMEOUT
from pyhvd.run.flags import SETTINGS, add_flags, settings_of
from pyhvd.run.options import GROUPS, ElasticOptions, Options

_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
_VERSIONS = ("3", f"3.{sys.version_info[1]}")
_NO_EFFECT = {
    "--mpi": "ranks always use MPI",
    "--gloo": "ranks always use MPI",
    "--tcp": "choose the network with --network-interfaces, or with variables of MPI",
    "--disable-cache": "no check of a host is remembered",
}
_JSRUN = "jsrun starts the ranks itself: jsrun -n N python -m pyhvd.run script.py"
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
    if known.launch_agent is not None:
        _check_agent(known, parser)
    settings = _read_settings(known, parser, _tell if tells else bool)
    elastic = _elastic(known, parser)
    return Options(program, settings=settings, elastic=elastic, **_fields_of(Options, known))


def _check_agent(known: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from pyhvd.run.hosts.agent_template import check_agent

    try:
        check_agent(known.launch_agent)
    except ValueError as exc:
        parser.error(f"argument --launch-agent: {exc}")
    if known.ssh_port or known.ssh_identity_file:
        parser.error("-p and -i are for ssh: put them into the command of --launch-agent")


def _fields_of(kind: type[Options | ElasticOptions], known: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of a dataclass that the command line gives."""
    names = [each.name for each in dataclasses.fields(kind)]
    return {name: value for name, value in vars(known).items() if name in names and value is not None}


def _read_settings(
    known: argparse.Namespace, parser: argparse.ArgumentParser, tell: Callable[[str], object]
) -> dict[str, str]:
    """Return the variables of the ranks; complete what depends on them; tell what has no effect."""
    if known.jsrun:
        parser.error(f"argument --jsrun: {_JSRUN}")
    for flag in dict.fromkeys(known.no_effect):
        tell(f"{flag} has no effect: {_NO_EFFECT[flag]}")
    try:
        given = known.start_timeout or read_timeout(START_TIMEOUT.suffix, 0.0)
        known.start_timeout, known.ends_late = given or START_TIMEOUT.default, given > 0
        known.timeout = known.timeout or read_timeout(ELASTIC_TIMEOUT.suffix, ELASTIC_TIMEOUT.default)
        known.prefix_output |= known.prefix_timestamp
        return {**settings_of(known, tell), **dict(known.env or ())}
    except ConfigError as exc:
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
    if known.cooldown is not None:
        low, high = known.cooldown = tuple(known.cooldown)
        if low > high:
            parser.error("argument --blacklist-cooldown-range: expected MIN MAX, with MIN at most MAX")
    elastic = ElasticOptions(**_fields_of(ElasticOptions, known))
    given = {
        "--max-np": elastic.max_np,
        "--reset-limit": elastic.reset_limit,
        "--preemption-command": elastic.preemption_command,
        "--elastic-store": elastic.store,
        "--elastic-resume": elastic.resume,
    }
    lone = next((flag for flag, value in given.items() if value), None)
    if lone is not None and not elastic.wanted:
        parser.error(f"{lone} is for elastic jobs: give --min-np too")
    if elastic.resume and not elastic.store:
        parser.error("--elastic-resume goes on from the elastic store: give --elastic-store too")
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
    _add_fields(parser)
    add_flags(parser)
    _add_log_spellings(parser)
    _add_horovods(parser)
    return parser


def _add_fields(parser: argparse.ArgumentParser) -> None:
    """Add the flags that set options."""
    groups: dict[str, Any] = {title: parser.add_argument_group(title) for title in GROUPS if title}
    groups[""] = parser
    for each in (*dataclasses.fields(Options), *dataclasses.fields(ElasticOptions)):
        if each.metadata:
            add = groups[each.metadata["group"]].add_argument
            add(*each.metadata["names"], dest=each.name, **each.metadata["how"])


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
    parser.add_argument("--jsrun", action="store_true", help=hidden)


def _tell(text: str) -> None:
    print(f"pyhvd: {text}", file=sys.stderr)

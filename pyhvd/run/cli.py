"""The command line of ``python -m pyhvd.run`` and ``pyhvdrun``."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyhvd import __version__
from pyhvd.config import LOG_LEVELS
from pyhvd.run.flags import ConfigFileError, add_flags, settings_of

_PYTHON = re.compile(r"python(\d(\.\d+)?)?")
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
  mpiexec -n 4 python -m pyhvd.run train.py     the same under your own mpiexec
"""


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    Attributes
    ----------
    program : list of str
        A script, ``-m module`` or ``-c code``, with its arguments.
    settings : dict of str to str
        Variables of the ranks, which override the environment.
    """

    program: list[str]
    num_proc: int | None = None
    verbose: bool = False
    mpi_args: list[str] = field(default_factory=list)
    start_timeout: float = 30.0
    output_filename: str | None = None
    prefix_output: bool = False
    prefix_timestamp: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    check_build: bool = False

    def rank_arguments(self) -> list[str]:
        """Return the arguments of each rank's own command line."""
        arguments = []
        if self.output_filename is not None:
            arguments += ["--output-filename", os.path.abspath(self.output_filename)]
        if self.prefix_output:
            arguments.append("--prefix-output")
        if self.prefix_timestamp:
            arguments.append("--prefix-timestamp")
        return [*arguments, *self.program]


def parse(arguments: Sequence[str], *, under_mpiexec: bool) -> Options:
    """Parse the command line; exit with code 2 on bad usage, as argparse does.

    Parameters
    ----------
    arguments : sequence of str
        ``sys.argv[1:]``.
    under_mpiexec : bool
        Whether mpiexec has started this process as a rank. Then ``-n`` is refused; otherwise it is required.
    """
    parser = _parser()
    own, program = _split(list(arguments), parser)
    known = parser.parse_args(_joined(own))
    if known.check_build:
        return Options(program=[], verbose=known.verbose, check_build=True)
    _check_program(program, parser)
    if under_mpiexec and known.num_proc is not None:
        parser.error("mpiexec has started this rank already: use either mpiexec or -n, not both")
    if not under_mpiexec and known.num_proc is None:
        parser.error("the number of ranks is missing: give e.g. -n 2")
    try:
        settings = settings_of(known)
    except ConfigFileError as exc:
        parser.error(str(exc))
    try:
        mpi_args = shlex.split(known.mpi_args)
    except ValueError as exc:
        parser.error(f"argument --mpi-args: {exc}: {known.mpi_args!r}")
    return Options(
        program=program,
        num_proc=known.num_proc,
        verbose=known.verbose,
        mpi_args=mpi_args,
        start_timeout=known.start_timeout,
        output_filename=known.output_filename,
        prefix_output=known.prefix_output or known.prefix_timestamp,
        prefix_timestamp=known.prefix_timestamp,
        settings=settings,
    )


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
    """Join ``--mpi-args ARGS`` into one word: argparse takes a separate ARGS with a dash for an option."""
    if "--mpi-args" not in own[:-1]:
        return own
    at = own.index("--mpi-args")
    return [*own[:at], f"--mpi-args={own[at + 1]}", *own[at + 2 :]]


def _split(arguments: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Return pyhvdrun's own arguments, and the program with its arguments."""
    takes_value = {
        name for action in parser._actions if action.nargs is None for name in action.option_strings
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
        at += 2 if word in takes_value else 1
    return arguments[:at], arguments[at:]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pyhvdrun",
        description="Run a Python program on many ranks. Under mpiexec: run this rank's part of it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="pyhvdrun -n N [options] (script.py | -m module | -c code) [argument ...]",
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
    parser.add_argument("--verbose", action="store_true", help="show the mpiexec command and the settings")
    parser.add_argument("--mpi-args", default="", metavar='"ARGS"', help="more arguments for mpiexec")
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
        "--prefix-timestamp", action="store_true", help="as --prefix-output, with the time of day first"
    )
    _add_logging(parser)
    add_flags(parser)
    return parser


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

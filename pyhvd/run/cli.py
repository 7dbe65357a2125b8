"""The command line of ``python -m pyhvd.run`` and ``pyhvdrun``."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyhvd._version import __version__

_EXAMPLES = """\
examples:
  pyhvdrun -n 4 train.py --epochs 3             4 ranks on this host
  pyhvdrun -n 4 -m mypackage.train              a module
  pyhvdrun -n 4 --timeline-filename traces/ train.py
  pyhvdrun -n 2 -c "import pyhvd as hvd; hvd.init(); print(hvd.rank())"
  mpiexec -n 4 python -m pyhvd.run train.py     the same under an mpiexec of your own
"""


@dataclass(frozen=True)
class Options:
    """What the command line asks for; `program` is script, ``-m module`` or ``-c code``, with arguments."""

    program: list[str]
    num_proc: int | None = None
    verbose: bool = False
    mpi_args: list[str] = field(default_factory=list)
    start_timeout: float = 30.0
    output_filename: str | None = None
    prefix_output: bool = False
    prefix_timestamp: bool = False
    settings: dict[str, str] = field(default_factory=dict)
    """Environment variables for the ranks, which win over what is set already."""

    def rank_arguments(self) -> list[str]:
        """The options that each rank needs, as its own command line."""
        arguments = []
        if self.output_filename is not None:
            arguments += ["--output-filename", os.path.abspath(self.output_filename)]
        if self.prefix_output:
            arguments.append("--prefix-output")
        if self.prefix_timestamp:
            arguments.append("--prefix-timestamp")
        return [*arguments, *self.program]


def parse(arguments: Sequence[str], *, under_mpiexec: bool) -> Options:
    """Parse the command line; bad usage ends the process with code 2, as argparse does.

    Parameters
    ----------
    arguments : sequence of str
        ``sys.argv[1:]``.
    under_mpiexec : bool
        Whether this process is a rank already: then ``-n`` is refused, else it is required.
    """
    parser = _parser()
    own, program = _split(list(arguments), parser)
    known = parser.parse_args(own)
    if not program:
        parser.error("no script: give a script, -m module or -c code")
    if program[0] == "-":
        parser.error("a script read from stdin would reach rank 0 only: save it to a file")
    if program[0] in ("-m", "-c") and len(program) < 2:
        parser.error(f"argument expected for the {program[0]} option")
    if under_mpiexec and known.num_proc is not None:
        parser.error("mpiexec has started this rank already: give either mpiexec or -n, not both")
    if not under_mpiexec and known.num_proc is None:
        parser.error("say how many ranks, e.g. -n 2")
    return Options(
        program=program,
        num_proc=known.num_proc,
        verbose=known.verbose,
        mpi_args=shlex.split(known.mpi_args),
        start_timeout=known.start_timeout,
        output_filename=known.output_filename,
        prefix_output=known.prefix_output or known.prefix_timestamp,
        prefix_timestamp=known.prefix_timestamp,
        settings=_settings(known),
    )


def _settings(known: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables that flags stand for."""
    settings = {}
    if known.timeline_filename is not None:
        settings["PYHVD_TIMELINE"] = known.timeline_filename
    if known.timeline_mark_cycles is not None:
        settings["PYHVD_TIMELINE_MARK_CYCLES"] = str(int(known.timeline_mark_cycles))
    return settings


def _split(arguments: list[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Cut our options from the program: all that follows the script's name belongs to the script."""
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
        if word[:2] in ("-m", "-c") and not word.startswith("--"):  # -mmodule, as python takes it
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
    parser.add_argument("-n", "-np", "--num-proc", type=_positive_int, metavar="N", help="number of ranks")
    parser.add_argument("--verbose", action="store_true", help="show the mpiexec command and what was chosen")
    parser.add_argument("--mpi-args", default="", metavar='"ARGS"', help="further arguments for mpiexec")
    parser.add_argument(
        "--start-timeout",
        type=_positive_float,
        default=30.0,
        metavar="S",
        help="give up when not all ranks have started after S seconds (default: 30)",
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
        "--prefix-timestamp", action="store_true", help="as --prefix-output, with the time of day in front"
    )
    parser.add_argument(
        "--timeline-filename",
        metavar="PATH",
        help="record what every rank does: rank 0 to PATH, the others beside it (a directory: all into it)",
    )
    parser.add_argument(
        "--timeline-mark-cycles",
        action=argparse.BooleanOptionalAction,
        help="mark in the timeline when response lists are taken up (default: no)",
    )
    return parser


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"must be positive, not {text}")
    return value

"""``python -m pyhvd SUBCOMMAND``: a thin dispatcher; each subcommand has its own ``--help``."""

from __future__ import annotations

import importlib
import os
import sys

from pyhvd._version import __version__
from pyhvd.common.standard_files import fill_standard_files

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("pyhvd.tools.doctor.command", "look at this host and its MPI, and try them out"),
    "elastic": ("pyhvd.tools.elastic", "let a running elastic job leave a host"),
    "simulate": (
        "pyhvd.simulation.command.main",
        "simulate training on a cluster: where a step's time goes, what would help",
    ),
    "top": ("pyhvd.tools.top", "show what the ranks of a running job do, live"),
    "trace": ("pyhvd.tools.trace", "merge the ranks' timelines, or sum up where the time went"),
}
"""Subcommand: its module, which has ``main(argv: list[str]) -> int``, and one line of help."""


def usage() -> str:
    """Return the help text."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {help_line}" for name, (_, help_line) in COMMANDS.items()]
    return "\n".join(
        [
            f"usage: python -m pyhvd ({' | '.join(COMMANDS)}) [options]",
            "",
            f"pyhvd {__version__}. Programs are run by pyhvdrun, or python -m pyhvd.run.",
            "",
            "subcommands:",
            *rows,
            "",
            "example:",
            f"  python -m pyhvd {next(iter(COMMANDS))} --help",
        ]
    )


def main(argv: list[str]) -> int:
    """Run a subcommand; return its exit code: 1 for an error, 2 for bad usage, 130 after Ctrl-C.

    An operating system's error, as of an output that cannot be written, is a line on stderr.
    """
    fill_standard_files()
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)
    except KeyboardInterrupt:
        return 130
    except OSError as exc:
        if not isinstance(exc, BrokenPipeError):  # a reader such as head needs no more
            print(" ".join(["python -m pyhvd", *argv[:1]]) + f": {exc}", file=sys.stderr)
        # Else the interpreter would try to write the rest at its exit, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _run(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print(usage())
        return 0
    if argv[:1] in (["-v"], ["--version"]):
        print(f"pyhvd {__version__}")
        return 0
    if not argv or argv[0] not in COMMANDS:
        wrong = f"\npyhvd: error: no subcommand {argv[0]!r}" if argv else "\npyhvd: error: no subcommand"
        print(usage() + "\n" + wrong, file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[argv[0]][0])
    code: int = module.main(argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

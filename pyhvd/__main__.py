"""``python -m pyhvd``: one command with subcommands; each has its own ``--help``."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "trace": ("pyhvd.tools.trace", "merge the ranks' timelines, and sum up where time went"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(f"python -m pyhvd: no command {arguments[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    result: int = importlib.import_module(COMMANDS[arguments[0]][0]).main(arguments[1:])
    return result


def _usage() -> str:
    lines = [f"  {name:<10}{line}" for name, (_, line) in sorted(COMMANDS.items())]
    return "\n".join(["usage: python -m pyhvd COMMAND [--help] ...", "", "commands:", *lines])


if __name__ == "__main__":
    sys.exit(main())

"""``python -m pyhvd elastic drain HOST``: let a running elastic job leave a host; no step is lost."""

from __future__ import annotations

import argparse
import sys

from pyhvd.common.command_line import CommandParser
from pyhvd.job.driver.drain_socket import DrainError, ask_to_drain, find_jobs

_EXAMPLES = """\
examples, on the host of pyhvdrun:
  python -m pyhvd elastic drain h2               the job's ranks leave host h2 at their next commit
  python -m pyhvd elastic drain h2 --job 4711    of several jobs, that of the pyhvdrun with process id 4711
"""


def main(argv: list[str]) -> int:
    """Run ``elastic drain``; return the exit code."""
    given = _parser().parse_args(argv)
    jobs = find_jobs()
    if given.job is not None:
        jobs = {pid: path for pid, path in jobs.items() if pid == given.job}
    try:
        if not jobs:
            raise DrainError("no such elastic job of yours runs here: use the host on which pyhvdrun runs")
        if len(jobs) > 1:
            raise DrainError(
                "several elastic jobs run here; choose one by the process id of its pyhvdrun, with --job:"
                f" {', '.join(map(str, jobs))}"
            )
        print(ask_to_drain(next(iter(jobs.values())), given.host))
    except DrainError as exc:
        print(f"pyhvd elastic: {exc}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m pyhvd elastic", description="Change a running elastic job.", examples=_EXAMPLES
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="drain")
    drain = actions.add_parser(
        "drain",
        help="let the ranks leave a host at their next commit",
        description="Let the ranks leave a host at their next commit, so that no step is lost.",
        examples=_EXAMPLES,
    )
    drain.add_argument("host", metavar="HOST", help="the host, by the name that the job uses")
    drain.add_argument("--job", type=int, metavar="PID", help="the process id of the job's pyhvdrun")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

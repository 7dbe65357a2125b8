"""Entry of ``python -m pyhvd.run`` and ``pyhvdrun``: a rank under mpiexec, the launcher outside it."""

from __future__ import annotations

import sys

from pyhvd.job.mpi.rank_env import find_place
from pyhvd.run.cli import parse


def main() -> int:
    """Run the command line in ``sys.argv``; return the exit code."""
    place = find_place()
    options = parse(sys.argv[1:], under_mpiexec=place is not None)
    if options.check_build:
        from pyhvd.run.check_build import check_build

        return check_build(options.verbose) if place is None or place.rank == 0 else 0
    if place is not None:
        from pyhvd.run.rank_entry import run_rank

        return run_rank(options, place)
    from pyhvd.run.local import launch

    return launch(options)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m pyhvd.run`` and ``pyhvdrun``: a rank under mpiexec, the launcher elsewhere."""

from __future__ import annotations

import sys

from pyhvd.job.mpi.rank_env import read_rank_env
from pyhvd.run.cli import parse


def main() -> int:
    """Run the command line in ``sys.argv``; return the exit code."""
    rank_env = read_rank_env()
    options = parse(sys.argv[1:], under_mpiexec=rank_env is not None)
    if options.check_build:
        from pyhvd.run.check_build import check_build

        return check_build(options.verbose) if rank_env is None or rank_env.rank == 0 else 0
    if rank_env is not None:
        from pyhvd.run.rank_entry import run_rank

        return run_rank(options, rank_env)
    from pyhvd.run.local import launch

    return launch(options)


if __name__ == "__main__":
    sys.exit(main())

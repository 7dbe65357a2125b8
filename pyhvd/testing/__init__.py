"""Public tools for tests: ranks as threads of one process, with no MPI at all."""

from pyhvd.testing.ranks import RanksFailed, run_ranks

__all__ = ["RanksFailed", "run_ranks"]

"""Open MPI's mpiexec and PRRTE: their ranks."""

from __future__ import annotations

from pyhvd.job.mpi.rank_env import OPENMPI, read_rank_env
from pyhvd.run.hosts.clusters.results import Environ, ForeignRank


def find_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank that Open MPI's mpiexec started."""
    numbers = read_rank_env(environ)
    return ForeignRank("mpiexec", numbers) if numbers is not None and numbers.launcher == OPENMPI else None


def find_pmi_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank of a launcher that only PMI_RANK or PMIX_RANK shows, such as PRRTE's prun."""
    numbers = read_rank_env(environ)
    return ForeignRank("mpiexec", numbers) if numbers is not None else None

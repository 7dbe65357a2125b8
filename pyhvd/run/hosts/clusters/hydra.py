"""Hydra, the mpiexec of MPICH and Intel MPI: its ranks, and its variables for a hostfile."""

from __future__ import annotations

from pyhvd.job.mpi.rank_env import MPICH, read_rank_env
from pyhvd.run.hosts.clusters.results import Allocation, Environ, ForeignRank, Surroundings, read_named
from pyhvd.run.hosts.hosts import parse_hostfile

HOST_FILES = ("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE")


def find_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank that Hydra started: it sets the local numbers too, srun does not."""
    numbers = read_rank_env(environ)
    return ForeignRank("mpiexec", numbers) if numbers is not None and numbers.launcher == MPICH else None


def find_allocation(around: Surroundings) -> Allocation | None:
    """Return the hosts of the hostfile that a variable of Hydra names."""
    environ = around.environ
    for variable in HOST_FILES:
        if environ.get(variable):
            text = read_named(variable, around)
            hosts = parse_hostfile(text, environ[variable], around.slots_per_host or 1)
            return Allocation(f"{variable}={environ[variable]}", hosts)
    return None

"""The order in which the detectors are asked. Pure."""

from __future__ import annotations

from pyhvd.job.spec import HOSTFILE, HOSTS
from pyhvd.run.hosts.clusters import (
    flux,
    hydra,
    kubernetes,
    lsf,
    mpijob,
    openmpi,
    pals,
    pbs,
    sagemaker,
    sge,
    slurm,
)
from pyhvd.run.hosts.clusters.results import Allocation, Environ, ForeignRank, Surroundings
from pyhvd.run.hosts.hosts import HostsError

# Ranks of an mpiexec inherit the variables of the cluster's job: mpiexecs come first. PALS, Flux and srun may
# set PMI's variables too: PMI's variables alone come last.
_RANKS = (
    openmpi.find_rank,
    hydra.find_rank,
    lsf.find_rank,
    pals.find_rank,
    flux.find_rank,
    slurm.find_rank,
    openmpi.find_pmi_rank,
)
# A hostfile that the user chose comes before the hosts of the cluster's job. Flux and Kubernetes, whose
# variables name no hosts, come last: other systems run inside them.
_ALLOCATIONS = (
    mpijob.find_allocation,
    hydra.find_allocation,
    slurm.find_allocation,
    lsf.find_allocation,
    pbs.find_allocation,
    sge.find_allocation,
    sagemaker.find_allocation,
    flux.find_allocation,
    kubernetes.find_allocation,
)


def find_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank as which another launcher started this process; None if there is none."""
    return next((rank for find in _RANKS if (rank := find(environ)) is not None), None)


def find_allocation(around: Surroundings) -> Allocation | None:
    """Return what a cluster allocated to the job of this process; None if there is none.

    Raises
    ------
    HostsError
        There is an allocation, but its hosts cannot be read; the text has the remedy.
    """
    try:
        return next((found for find in _ALLOCATIONS if (found := find(around)) is not None), None)
    except HostsError as exc:
        options = f"{around.name_of(HOSTS)} or {around.name_of(HOSTFILE)}"
        raise HostsError(f"{exc}: give the hosts with {options}") from None

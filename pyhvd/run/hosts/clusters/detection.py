"""The order in which the detectors are asked. Pure."""

from __future__ import annotations

from pyhvd.job.spec import HOSTFILE, HOSTS
from pyhvd.run.hosts.clusters import slurm, small
from pyhvd.run.hosts.clusters.results import Allocation, Environ, ForeignRank, Surroundings
from pyhvd.run.hosts.hosts import HostsError

# Ranks of an mpiexec inherit the variables of the cluster's job: mpiexecs come first. PALS, Flux and srun may
# set PMI's variables too: PMI's variables alone come last.
_RANKS = (
    small.find_mpiexec_rank,
    small.find_jsrun_rank,
    small.find_pals_rank,
    small.find_flux_rank,
    slurm.find_rank,
    small.find_pmi_rank,
)
# A hostfile that the user chose comes before the hosts of the cluster's job. Flux and Kubernetes, whose
# variables name no hosts, come last: other systems run inside them.
_ALLOCATIONS = (
    small.find_mpijob_allocation,
    small.find_hydra_allocation,
    slurm.find_allocation,
    small.find_lsf_allocation,
    small.find_pbs_allocation,
    small.find_sge_allocation,
    small.find_sagemaker_allocation,
    small.find_flux_allocation,
    small.find_kubernetes_allocation,
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

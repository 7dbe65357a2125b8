"""Whether a cluster or another launcher has set variables here; then the detectors are asked, in order. Pure.

On a plain host none is set. Then neither the detectors nor the rules for hosts are imported. They would add
15 ms to the start. Also what to say of processes that have another system's variables, and are no ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pyhvd.job.spec import HOSTFILE, HOSTS

if TYPE_CHECKING:
    from pyhvd.run.hosts.clusters.results import Allocation, Environ, ForeignRank, Surroundings

# How the names of variables begin that a detector needs. Those of Open MPI's and Hydra's ranks are left out:
# read_rank_env looks for them.
_MARKS = (
    *("SLURM_", "LSB_", "JSM_", "PBS_", "PALS_", "FLUX_TASK_RANK", "PE_HOSTFILE", "SM_HOSTS"),
    *("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE", "K_MPI_JOB_ROLE", "OMPI_MCA_plm_rsh_agent"),
    "TORCHELASTIC_RUN_ID",
)
# Of systems that name neither ranks nor hosts, but have an agent for hosts that the user names.
_MARKS_OF_AGENTS = ("FLUX_URI", "KUBERNETES_SERVICE_HOST")


def has_marks(names: Iterable[str], marks: tuple[str, ...] = _MARKS) -> bool:
    """Return whether a detector may find a rank or hosts, in an environment with variables of these names."""
    return any(name.startswith(marks) for name in names)


def find_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank as which another launcher started this process; None if there is none."""
    from pyhvd.run.hosts.clusters import slurm, small

    # Ranks of an mpiexec inherit the variables of the cluster's job: mpiexecs come first. PALS, Flux and srun
    # may set PMI's variables too: PMI's variables alone come last.
    detectors = (
        small.find_mpiexec_rank,
        small.find_jsrun_rank,
        small.find_pals_rank,
        small.find_flux_rank,
        slurm.find_rank,
        small.find_pmi_rank,
    )
    return next((rank for find in detectors if (rank := find(environ)) is not None), None)


def find_allocation(around: Surroundings) -> Allocation | None:
    """Return what a cluster allocated to the job of this process; None if there is none.

    Raises
    ------
    HostsError
        There is an allocation, but its hosts cannot be read; the text has the remedy.
    """
    if not has_marks(around.environ, _MARKS + _MARKS_OF_AGENTS):
        return None
    from pyhvd.run.hosts.clusters import slurm, small
    from pyhvd.run.hosts.hosts import HostsError

    # A hostfile that the user chose comes before the hosts of the cluster's job. Flux and Kubernetes, whose
    # variables name no hosts, come last: other systems run inside them.
    detectors = (
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
    try:
        return next((found for find in detectors if (found := find(around)) is not None), None)
    except HostsError as exc:
        options = f"{around.name_of(HOSTS)} or {around.name_of(HOSTFILE)}"
        raise HostsError(f"{exc}: give the hosts with {options}") from None


def explain_pod_of_job(environ: Environ) -> str | None:
    """Return an error's text for a pod of an indexed Job, whose index is no rank."""
    index = environ.get("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    return (
        f"this is pod {index} of an indexed Job of Kubernetes, which is no rank: use an MPIJob, give the pods"
        " with -H, or start ranks in this pod alone with -n N"
    )


def explain_torchrun(environ: Environ) -> str | None:
    """Return an error's text for a process that torchrun started."""
    if "TORCHELASTIC_RUN_ID" not in environ or "RANK" not in environ:
        return None
    size = environ.get("WORLD_SIZE", "N")
    return (
        f"torchrun has started this process (RANK={environ['RANK']}), and MPI does not know it:"
        f" start the script with pyhvdrun alone, e.g. pyhvdrun -n {size} train.py"
    )

"""Detectors for systems that a few variables show. Pure.

Open MPI's mpiexec, Hydra (the mpiexec of MPICH and Intel MPI), PALS, Flux, PBS and Torque, Grid Engine (SGE),
SageMaker, pods of Kubernetes without the MPI operator, and torchrun.
"""

from __future__ import annotations

import json

from pyhvd.job.mpi.rank_env import OTHER, read_rank_env
from pyhvd.run.hosts.clusters.results import (
    HYDRA_HOST_FILES,
    Allocation,
    Environ,
    ForeignRank,
    Surroundings,
    number,
    rank_env,
    read_named,
)
from pyhvd.run.hosts.hosts import Host, HostsError, merged, parse_hostfile

FLUX_AGENT = """sh -c 'exec flux exec -r "$(flux overlay lookup "$0")" sh -c "$1"' {host} {command}"""
"""``flux exec`` takes the rank of a broker, which ``flux overlay lookup`` finds by the host's name
(flux-overlay(1)); not tried on a cluster."""

KUBERNETES_AGENT = "kubectl exec -i {host} -- sh -c {command}"


def find_mpiexec_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank that Open MPI's mpiexec or Hydra started: they set local numbers too, unlike srun."""
    rank = find_pmi_rank(environ)
    return rank if rank is not None and rank.numbers.launcher != OTHER else None


def find_pmi_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank of a launcher that only PMI_RANK or PMIX_RANK shows, such as PRRTE's prun."""
    numbers = read_rank_env(environ)
    return ForeignRank("mpiexec", numbers) if numbers is not None else None


def find_pals_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank that PALS started, the launcher of HPE Cray systems; its hosts come from PBS or Slurm.

    Slurm's plugin mpi/cray_shasta and Flux's cray-pals set PALS_RANKID and PALS_LOCAL_RANKID too, but PMI's
    sizes instead of PALS_SIZE and PALS_LOCAL_SIZE. The latter two are taken from programs for such systems,
    not tried.
    """
    rank = number(environ, "PALS_RANKID")
    if rank is None:
        return None
    size = number(environ, "PALS_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    local_rank = number(environ, "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK")
    local_size = number(environ, "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
    return ForeignRank("PALS's mpiexec", rank_env(environ, rank, size, local_rank, local_size))


def find_flux_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank that Flux started; a batch script has no FLUX_TASK_RANK."""
    rank = number(environ, "FLUX_TASK_RANK")
    size = number(environ, "FLUX_JOB_SIZE")
    if rank is None:
        return None
    nodes = number(environ, "FLUX_JOB_NNODES")
    # Flux does not tell it, and spreads ranks evenly.
    local_size = -(-size // nodes) if size and nodes else None
    return ForeignRank(
        "flux run", rank_env(environ, rank, size, number(environ, "FLUX_TASK_LOCAL_ID"), local_size)
    )


def find_hydra_allocation(around: Surroundings) -> Allocation | None:
    """Return the hosts of the hostfile that a variable of Hydra names."""
    environ = around.environ
    for variable in HYDRA_HOST_FILES:
        if environ.get(variable):
            text = read_named(variable, around)
            hosts = parse_hostfile(text, environ[variable], around.slots_per_host or 1)
            return Allocation(f"{variable}={environ[variable]}", hosts)
    return None


def find_pbs_allocation(around: Surroundings) -> Allocation | None:
    """Return the hosts of the job: PBS_NODEFILE has a line for each slot."""
    environ = around.environ
    job = environ.get("PBS_JOBID")
    if not job or not environ.get("PBS_NODEFILE"):
        return None
    lines = read_named("PBS_NODEFILE", around).split()
    if not lines:
        raise HostsError(f"{environ['PBS_NODEFILE']} names no host")
    folder = environ.get("PBS_O_WORKDIR")
    note = f"PBS starts jobs in the home directory; this job was submitted in {folder}" if folder else ""
    return Allocation(
        f"PBS's job {job}", merged((Host(name, 1) for name in lines), "PBS_NODEFILE"), note=note
    )


def find_sge_allocation(around: Surroundings) -> Allocation | None:
    """Return the hosts of the job: each line of PE_HOSTFILE begins with host and slots (sge_pe(5))."""
    environ = around.environ
    path = environ.get("PE_HOSTFILE")
    if not path:
        return None
    hosts = []
    for at, line in enumerate(read_named("PE_HOSTFILE", around).splitlines(), 1):
        words = line.split()
        if words:
            slots = words[1] if len(words) > 1 else ""
            if not slots.isdecimal() or int(slots) < 1:
                raise HostsError(f"{path}, line {at}: {line!r}: expected a host and its slots")
            hosts.append(Host(words[0], int(slots)))
    total = number(environ, "NSLOTS")
    given = sum(host.slots for host in hosts)
    if total is not None and total != given:
        raise HostsError(f"{path} has {given} slots, but NSLOTS={total}")
    if not hosts:
        raise HostsError(f"{path} names no host")
    return Allocation(f"SGE's job {environ.get('JOB_ID', '')}".rstrip(), merged(hosts, path))


def find_sagemaker_allocation(around: Surroundings) -> Allocation | None:
    """Return the hosts of the training job, with a slot for each GPU, or one.

    sagemaker-training's ENVIRONMENT_VARIABLES.md describes the variables.

    Raises
    ------
    HostsError
        SM_HOSTS is malformed, or this is not the first host: SageMaker runs the program on every host.
    """
    environ = around.environ
    text = environ.get("SM_HOSTS")
    current = environ.get("SM_CURRENT_HOST")
    if not text or not current:
        return None
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise HostsError(f"cannot read SM_HOSTS={text!r}")
    if current != names[0]:
        raise HostsError(
            f"SageMaker runs this program on every host: start the job on {names[0]} only, not on {current},"
            " or choose other hosts"
        )
    slots = around.slots_per_host or number(environ, "SM_NUM_GPUS") or 1
    hosts = tuple(Host(name, slots) for name in names)
    return Allocation("SageMaker", hosts, interface=environ.get("SM_NETWORK_INTERFACE_NAME", ""))


def find_flux_allocation(around: Surroundings) -> Allocation | None:
    """Return the agent's command for hosts of ``-H`` or ``--hostfile``: an instance's variables name none."""
    return Allocation("Flux", (), FLUX_AGENT) if around.environ.get("FLUX_URI") else None


def find_kubernetes_allocation(around: Surroundings) -> Allocation | None:
    """Return the agent's command, for pods that ``-H`` or ``--hostfile`` names."""
    return (
        Allocation("a pod of Kubernetes", (), KUBERNETES_AGENT)
        if around.environ.get("KUBERNETES_SERVICE_HOST")
        else None
    )


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

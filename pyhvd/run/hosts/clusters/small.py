"""Detectors for all systems but Slurm. Pure.

Open MPI's mpiexec, Hydra (the mpiexec of MPICH and Intel MPI), PALS, Flux, LSF with jsrun, PBS and Torque,
Grid Engine (SGE), SageMaker, and Kubernetes with and without the MPI operator.
"""

from __future__ import annotations

import json
import re

from pyhvd.job.mpi.rank_env import OTHER, read_rank_env
from pyhvd.run.hosts.agent_template import SSH
from pyhvd.run.hosts.clusters.results import (
    HYDRA_HOST_FILES,
    Allocation,
    Environ,
    ForeignRank,
    Surroundings,
    number,
    rank_env,
    read_file,
    read_named,
)
from pyhvd.run.hosts.hosts import Host, HostsError, merged, parse_hostfile

FLUX_AGENT = """sh -c 'exec flux exec -r "$(flux overlay lookup "$0")" sh -c "$1"' {host} {command}"""
"""``flux exec`` takes the rank of a broker, which ``flux overlay lookup`` finds by the host's name
(flux-overlay(1)); not tried on a cluster."""

KUBERNETES_AGENT = "kubectl exec -i {host} -- sh -c {command}"

LSF_AGENT = "blaunch -no-shell {host} sh -c {command}"
"""The options of blaunch are those of IBM's reference of LSF 10.1, not tried on a cluster."""

# Of the launcher pods of Kubernetes' MPI operator, v2beta1 and v1.
_HOST_FILE = "/etc/mpi/hostfile"
_KUBEXEC = "/etc/mpi/kubexec.sh"
# The script of the operator v1 ends with: /opt/kube/kubectl exec ${POD_NAME} -- /bin/sh -c "$*"
_KUBECTL = re.compile(r"^(\S*kubectl) exec \$\{POD_NAME\}((?: [\w=./-]+)*?) -- /bin/sh -c ", re.MULTILINE)


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


def find_jsrun_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank that jsrun started."""
    rank = number(environ, "JSM_NAMESPACE_RANK")
    if rank is None:
        return None
    of_host = [number(environ, f"JSM_NAMESPACE_LOCAL_{name}") for name in ("RANK", "SIZE")]
    return ForeignRank("jsrun", rank_env(environ, rank, number(environ, "JSM_NAMESPACE_SIZE"), *of_host))


def find_mpijob_allocation(around: Surroundings) -> Allocation | None:
    """Return the workers of the MPIJob whose launcher this pod is."""
    environ = around.environ
    kubexec = environ.get("OMPI_MCA_plm_rsh_agent") == _KUBEXEC
    if environ.get("K_MPI_JOB_ROLE") != "launcher" and not kubexec:
        return None
    given = [environ.get(name) for name in ("OMPI_MCA_orte_default_hostfile", *HYDRA_HOST_FILES)]
    path = next((name for name in given if name), _HOST_FILE)
    slots = number(environ, "OMPI_MCA_orte_set_default_slots", "I_MPI_PERHOST")
    text = read_file(path, "this pod is the launcher of an MPIJob", around)
    hosts = parse_hostfile(text, path, around.slots_per_host or slots or 1)
    return Allocation("Kubernetes' MPIJob", hosts, _kubexec_agent(around) if kubexec else SSH)


def _kubexec_agent(around: Surroundings) -> str:
    """Return the command of the operator's script with ``-i``, without which no input reaches the agent.

    A script that is not the operator's is used as it is.
    """
    try:
        text = read_file(_KUBEXEC, "it starts the workers of this MPIJob", around)
    except HostsError:
        text = ""
    found = _KUBECTL.search(text)
    if found is None:
        return f"{_KUBEXEC} {{host}} {{command}}"
    return f"{found[1]} exec -i {{host}}{found[2]} -- sh -c {{command}}"


def find_hydra_allocation(around: Surroundings) -> Allocation | None:
    """Return the hosts of the hostfile that a variable of Hydra names."""
    environ = around.environ
    for variable in HYDRA_HOST_FILES:
        if environ.get(variable):
            text = read_named(variable, around)
            hosts = parse_hostfile(text, environ[variable], around.slots_per_host or 1)
            return Allocation(f"{variable}={environ[variable]}", hosts)
    return None


def find_lsf_allocation(around: Surroundings) -> Allocation | None:
    """Return the hosts of LSF's job, without the launch node that LSF adds on systems with jsrun."""
    environ = around.environ
    job = environ.get("LSB_JOBID")
    if not job:
        return None
    hosts = _of_lsf_files(around) or _of_pairs(environ)
    return Allocation(f"LSF's job {job}", hosts, LSF_AGENT) if hosts else None


def _of_lsf_files(around: Surroundings) -> tuple[Host, ...]:
    """Return the hosts of the files that have a line for each slot."""
    environ = around.environ
    if environ.get("LSB_DJOB_RANKFILE"):
        lines = read_named("LSB_DJOB_RANKFILE", around).split()
        return _counted(lines[1:] if _has_launch_node(lines, environ) else lines, "LSB_DJOB_RANKFILE")
    if environ.get("LSB_DJOB_HOSTFILE"):
        return _counted(read_named("LSB_DJOB_HOSTFILE", around).split(), "LSB_DJOB_HOSTFILE")
    return ()


def _has_launch_node(lines: list[str], environ: Environ) -> bool:
    """Return whether the first line is the launch node, which takes no ranks.

    It is one with CSM. Elsewhere it is one if it is there once and every other host several times. Without
    CSM LSF writes the first host of the job there, which takes ranks.
    """
    others = lines[1:]
    if not others or lines[0] in others:
        return False
    return "CSM_ALLOCATION_ID" in environ or all(others.count(name) > 1 for name in set(others))


def _of_pairs(environ: Environ) -> tuple[Host, ...]:
    """Return the hosts of LSB_MCPU_HOSTS: ``h1 4 h2 4``."""
    text = environ.get("LSB_MCPU_HOSTS", "")
    words = text.split()
    names, counts = words[::2], words[1::2]
    if len(names) != len(counts) or not all(word.isdecimal() and int(word) > 0 for word in counts):
        raise HostsError(f"cannot read LSB_MCPU_HOSTS={text!r}")
    return merged((Host(*pair) for pair in zip(names, map(int, counts), strict=True)), "LSB_MCPU_HOSTS")


def _counted(lines: list[str], where: str) -> tuple[Host, ...]:
    return merged((Host(name, 1) for name in lines), where)


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
    return Allocation(f"PBS's job {job}", _counted(lines, "PBS_NODEFILE"), note=note)


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

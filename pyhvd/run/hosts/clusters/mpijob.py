"""The workers of an MPIJob of Kubernetes' MPI operator, v2beta1 and v1, as its launcher pod sees them."""

from __future__ import annotations

import re

from pyhvd.run.hosts.agent_template import SSH
from pyhvd.run.hosts.clusters.results import HYDRA_HOST_FILES, Allocation, Surroundings, number, read_file
from pyhvd.run.hosts.hosts import HostsError, parse_hostfile

_HOST_FILE = "/etc/mpi/hostfile"
_KUBEXEC = "/etc/mpi/kubexec.sh"
# The script of the operator v1 ends with: /opt/kube/kubectl exec ${POD_NAME} -- /bin/sh -c "$*"
_KUBECTL = re.compile(r"^(\S*kubectl) exec \$\{POD_NAME\}((?: [\w=./-]+)*?) -- /bin/sh -c ", re.MULTILINE)


def find_allocation(around: Surroundings) -> Allocation | None:
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

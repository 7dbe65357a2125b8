"""PBS and Torque: the hosts of a job."""

from __future__ import annotations

from pyhvd.run.hosts.clusters.results import Allocation, Surroundings, read_named
from pyhvd.run.hosts.hosts import Host, HostsError, merged


def find_allocation(around: Surroundings) -> Allocation | None:
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

"""Pods of Kubernetes without the MPI operator."""

from __future__ import annotations

from pyhvd.run.hosts.clusters.results import Allocation, Environ, Surroundings

AGENT = "kubectl exec -i {host} -- sh -c {command}"


def find_allocation(around: Surroundings) -> Allocation | None:
    """Return the agent's command, for pods that ``-H`` or ``--hostfile`` names."""
    return (
        Allocation("a pod of Kubernetes", (), AGENT)
        if around.environ.get("KUBERNETES_SERVICE_HOST")
        else None
    )


def explain_missing_size(environ: Environ) -> str | None:
    """Return an error's text for a pod of an indexed Job, whose index is no rank."""
    index = environ.get("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    return (
        f"this is pod {index} of an indexed Job of Kubernetes, which is no rank: use an MPIJob, give the pods"
        " with -H, or start ranks in this pod alone with -n N"
    )

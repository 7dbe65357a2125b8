"""Flux: ranks that flux run started, and the agent's command inside an instance.

The environment of an instance does not name its hosts. ``flux exec`` takes the rank of a broker, which
``flux overlay lookup`` finds by the host's name (flux-overlay(1)); not tried on a cluster.
"""

from __future__ import annotations

from pyhvd.run.hosts.clusters.results import Allocation, Environ, ForeignRank, Surroundings, number, rank_env

AGENT = """sh -c 'exec flux exec -r "$(flux overlay lookup "$0")" sh -c "$1"' {host} {command}"""


def find_rank(environ: Environ) -> ForeignRank | None:
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


def find_allocation(around: Surroundings) -> Allocation | None:
    """Return the agent's command, for hosts of ``-H`` or ``--hostfile``."""
    return Allocation("Flux", (), AGENT) if around.environ.get("FLUX_URI") else None

"""torchrun: it starts processes that MPI does not know."""

from __future__ import annotations

from pyhvd.run.hosts.clusters.results import Environ


def explain_refusal(environ: Environ) -> str | None:
    """Return an error's text for a process that torchrun started."""
    if "TORCHELASTIC_RUN_ID" not in environ or "RANK" not in environ:
        return None
    size = environ.get("WORLD_SIZE", "N")
    return (
        f"torchrun has started this process (RANK={environ['RANK']}), and MPI does not know it:"
        f" start the script with pyhvdrun alone, e.g. pyhvdrun -n {size} train.py"
    )

"""Environment defaults that every rank gets before the script runs; what the user has set stays."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, Place

# A rank that waits must give its core away when ranks share cores. MPICH polls without yielding unless told
# otherwise: the first variable works at THREAD_MULTIPLE, the other two below it. With Open MPI, 4 ranks on
# 2 cores took seconds for what takes milliseconds with it.
_YIELD = {
    MPICH: {
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
        "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
        "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "16",
    },
    OPENMPI: {"OMPI_MCA_mpi_yield_when_idle": "1"},
}


def count_cores() -> tuple[int, int]:
    """How many cores this process may use, and how many the job has on this host.

    They differ when mpiexec bound this rank to cores of its own; what mpiexec itself may use counts then.
    """
    if not hasattr(os, "sched_getaffinity"):  # macOS: no affinity, no binding
        cores = os.cpu_count() or 1
        return cores, cores
    mine = os.sched_getaffinity(0)
    try:
        parents = os.sched_getaffinity(os.getppid())
    except OSError:
        parents = mine
    return len(mine), max(len(mine), len(parents))


def set_defaults(place: Place, environ: MutableMapping[str, str]) -> str | None:
    """Set OMP_NUM_THREADS, and have waiting ranks yield when there are more ranks than cores.

    Call it in the process that mpiexec started, whose parent is mpiexec's.

    Returns
    -------
    str or None
        What was decided about OMP_NUM_THREADS, to be said once; None when the user had decided.
    """
    mine, cores = count_cores()
    if place.local_size > cores:
        for name, value in _YIELD.get(place.launcher, {}).items():
            environ.setdefault(name, value)
    if "OMP_NUM_THREADS" in environ:
        return None
    threads = mine if mine < cores else max(1, cores // place.local_size)
    environ["OMP_NUM_THREADS"] = str(threads)
    bound = f", bound to {mine} each" if mine < cores else ""
    counted = f"{cores} cores, {place.local_size} local ranks{bound}"
    return f"pyhvd: OMP_NUM_THREADS={threads} on each rank ({counted}); set it yourself to change this"

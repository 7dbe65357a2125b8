"""The variables of a rank: reading what its launcher set, removing a launcher's variables, setting defaults.

Does not touch MPI.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from pyhvd.job.generation_env import GENERATION

OPENMPI = "Open MPI"
MPICH = "MPICH"
OTHER = "unknown"

# (launcher, rank, size, local rank, local size). Open MPI first: its ranks may inherit PMI_* from Slurm.
_VARIABLES = (
    (
        OPENMPI,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    (MPICH, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    (OTHER, "PMIX_RANK", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)

OF_RANKS = (
    *("PMI_", "PMIX_", "HYDI_", "MPI_LOCAL", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_APP_CTX"),
    *("OMPI_FIRST_RANKS", "OMPI_NUM_APP_CTX", "OMPI_FILE_LOCATION", "PRTE_LAUNCHED"),
)
"""How names of variables begin that an mpiexec sets for its ranks: with them, MPI_Init joins that job."""

# Without these settings a waiting rank keeps its core, also when ranks share cores. The first variable of
# MPICH works at THREAD_MULTIPLE, the others below. With Open MPI, 4 ranks on 2 cores took seconds instead of
# milliseconds.
_YIELD = {
    MPICH: {
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
        "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
        "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "16",
    },
    OPENMPI: {"OMPI_MCA_mpi_yield_when_idle": "1"},
}


@dataclass(frozen=True)
class RankEnv:
    """A rank's numbers, as its launcher announced them.

    Attributes
    ----------
    launcher : str
        ``"Open MPI"``, ``"MPICH"`` (Hydra, also Intel MPI's) or ``"unknown"``.
    rank, size, local_rank, local_size : int
        Rank and number of ranks, in the job and on this host. If the launcher does not announce those of the
        host, they are those of the job.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def title(self) -> str:
        """The words that begin every message: ``rank 3 of 8 on host h``."""
        return f"rank {self.rank} of {self.size} on host {socket.gethostname()}"


def read_rank_env(environ: Mapping[str, str] = os.environ) -> RankEnv | None:
    """Return this rank's numbers; None in a process that is not a rank."""
    for launcher, rank_name, size_name, local_rank_name, local_size_name in _VARIABLES:
        rank = _number(environ.get(rank_name))
        if rank is None:
            continue
        size = _number(environ.get(size_name)) or 1
        local_rank = _number(environ.get(local_rank_name))
        if launcher == MPICH and "MPI_LOCALNRANKS" not in environ:
            launcher = OTHER  # srun or another resource manager sets PMI_RANK too, without Hydra's PMI-1
        return RankEnv(
            launcher=launcher,
            rank=rank,
            size=size,
            local_rank=rank if local_rank is None else local_rank,
            local_size=_number(environ.get(local_size_name)) or size,
        )
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def without(environ: Mapping[str, str], *prefixes: str) -> dict[str, str]:
    """Return an environment without the variables whose names begin with one of the prefixes."""
    return {name: value for name, value in environ.items() if not name.startswith(prefixes)}


def set_defaults(rank_env: RankEnv, environ: MutableMapping[str, str]) -> str | None:
    """Set OMP_NUM_THREADS, let SIGHUP end a rank, and make waiting ranks yield if there are too few cores.

    Ranks of elastic jobs get no shared memory of UCX: MPICH has its own inside a host, and UCX's files would
    stay in /dev/shm when ranks are killed.

    Variables that the user has set stay. Call it in the process that mpiexec started: its parent must be
    mpiexec's process.

    Returns
    -------
    str or None
        The chosen OMP_NUM_THREADS, as a message to print once; None if the user had set it.
    """
    mine, cores = _count_cores()
    if rank_env.local_size > cores:
        for name, value in _YIELD.get(rank_env.launcher, {}).items():
            environ.setdefault(name, value)
    if rank_env.launcher == MPICH:  # mpiexec of Open MPI does not pass on that nohup ignores SIGHUP
        let_hangup_end(environ)
        if GENERATION in environ:
            environ.setdefault("UCX_TLS", "^sm")
    if "OMP_NUM_THREADS" in environ:
        return None
    threads = mine if mine < cores else max(1, cores // rank_env.local_size)
    environ["OMP_NUM_THREADS"] = str(threads)
    bound = f", bound to {mine} each" if mine < cores else ""
    counted = f"{cores} cores, {rank_env.local_size} local ranks{bound}"
    return f"pyhvd: OMP_NUM_THREADS={threads} on each rank ({counted}); set it yourself to change this"


def let_hangup_end(environ: MutableMapping[str, str]) -> None:
    """Let SIGHUP end this rank: else UCX takes it, and stops the rank for a debugger."""
    environ.setdefault("UCX_DEBUG_SIGNO", "0")


def _count_cores() -> tuple[int, int]:
    """Return how many cores this process may use, and how many the job may use on this host.

    They differ if mpiexec bound this rank to cores of its own: then the job has the cores of mpiexec.
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

"""What the environment says about this process's place in a job, without touching MPI."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

OPENMPI = "Open MPI"
MPICH = "MPICH"
OTHER = "unknown"

# (launcher, rank, size, local rank, local size): Open MPI first, its ranks may inherit PMI_* from Slurm.
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


@dataclass(frozen=True)
class Place:
    """Where a rank stands, as its launcher announced it.

    Attributes
    ----------
    launcher : str
        ``"Open MPI"``, ``"MPICH"`` (Hydra, also Intel MPI's) or ``"unknown"``.
    rank, size, local_rank, local_size : int
        Global and per-host rank and count. When the launcher does not announce the local ones, they are
        taken from the global ones, as if the job had one host.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def title(self) -> str:
        """The words every message begins with: ``rank 3 of 8 on host h``."""
        return f"rank {self.rank} of {self.size} on host {socket.gethostname()}"


def find_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Read this process's place from the environment; None outside mpiexec."""
    for launcher, rank_name, size_name, local_rank_name, local_size_name in _VARIABLES:
        rank = _number(environ.get(rank_name))
        if rank is None:
            continue
        size = _number(environ.get(size_name)) or 1
        local_rank = _number(environ.get(local_rank_name))
        if launcher == MPICH and "MPI_LOCALNRANKS" not in environ:
            launcher = OTHER  # PMI_RANK of srun or another resource manager: not Hydra's PMI-1
        return Place(
            launcher=launcher,
            rank=rank,
            size=size,
            local_rank=rank if local_rank is None else local_rank,
            local_size=_number(environ.get(local_size_name)) or size,
        )
    return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None

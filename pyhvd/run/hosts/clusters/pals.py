"""PALS, the launcher of HPE Cray systems: its ranks. The hosts of a job come from PBS or Slurm.

Slurm's plugin mpi/cray_shasta and Flux's cray-pals set PALS_RANKID and PALS_LOCAL_RANKID too, but PMI's sizes
instead of PALS_SIZE and PALS_LOCAL_SIZE. The latter two are taken from programs for such systems, not tried.
"""

from __future__ import annotations

from pyhvd.run.hosts.clusters.results import Environ, ForeignRank, number, rank_env


def find_rank(environ: Environ) -> ForeignRank | None:
    """Return the rank that PALS started."""
    rank = number(environ, "PALS_RANKID")
    if rank is None:
        return None
    size = number(environ, "PALS_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    local_rank = number(environ, "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK")
    local_size = number(environ, "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")
    return ForeignRank("PALS's mpiexec", rank_env(environ, rank, size, local_rank, local_size))

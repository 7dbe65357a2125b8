"""Whether any variable of a cluster or of another launcher is set. Pure.

On a plain host none is. Then neither the detectors nor the rules for hosts are imported. They would add 15 ms
to the start. The variables of Open MPI's and Hydra's ranks are left out, because ``read_rank_env`` looks for
them, and so are those of systems that name neither ranks nor hosts.
"""

from __future__ import annotations

from collections.abc import Iterable

_PREFIXES = (
    *("SLURM_", "LSB_", "JSM_", "PBS_", "PALS_", "FLUX_TASK_RANK", "PE_HOSTFILE", "SM_HOSTS"),
    *("HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE", "K_MPI_JOB_ROLE", "OMPI_MCA_plm_rsh_agent"),
    "TORCHELASTIC_RUN_ID",
)


def has_marks(names: Iterable[str]) -> bool:
    """Return whether a detector may find something in an environment with variables of these names."""
    return any(name.startswith(_PREFIXES) for name in names)

"""Tells whether MPI found one rank although a launcher started several processes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, OTHER, read_rank_env

ALLOWED = "PYHVD_ALLOW_ALONE"
# Each launcher, a variable that marks its processes, and the variable with their number. srun's is not
# SLURM_PROCID, as Slurm sets that in a batch script, too.
_LAUNCHERS = (
    ("torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE"),  # before srun, which may have started it
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("PALS's mpiexec", "PALS_RANKID", "PALS_SIZE"),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("srun", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
)
_REMEDIES = {
    "srun": "use srun --mpi=pmi2 for MPICH, or srun --mpi=pmix for Open MPI (the default is Slurm's"
    " MpiDefault, which may be none); or start the script with pyhvdrun in a batch script",
    "torchrun": "install torch for this Python, whose store the ranks need to meet; or start the script with"
    " pyhvdrun alone, e.g. pyhvdrun -n {size} train.py",
}
_NAMES = {OPENMPI: "Open MPI's mpiexec", MPICH: "MPICH's mpiexec", OTHER: "the launcher"}


def explain_alone(environ: Mapping[str, str], library: str) -> str:
    """Return the error text, with the remedy, if a launcher started several processes and MPI found one rank.

    Parameters
    ----------
    environ : mapping of str to str
        The environment of the process.
    library : str
        The MPI library on which mpi4py is built.

    Returns
    -------
    str
        Empty without a launcher, or if the innermost one started one process, even inside a larger job.
    """
    ranks = read_rank_env(environ)
    if ranks is not None and ranks.launcher != OTHER:
        name, size = _NAMES[ranks.launcher], ranks.size
    else:
        found = [
            (name, int(environ[size]))
            for name, number, size in _LAUNCHERS
            if environ.get(number) and environ.get(size, "").isdecimal()
        ]
        name, size = found[0] if found else (_NAMES[OTHER], 1 if ranks is None else ranks.size)
    if size <= 1:
        return ""
    remedy = _REMEDIES.get(name, f"use the mpiexec of {library}, or pyhvdrun").format(size=size)
    return (
        f"{name} has started {size} processes, but {library}, on which mpi4py is built, has found one rank:"
        f" each process would train alone. {remedy[0].upper()}{remedy[1:]}. {ALLOWED}=1 allows it"
    )

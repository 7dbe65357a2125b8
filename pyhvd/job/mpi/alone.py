"""Whether a process for which MPI has found one rank was meant to be one of several. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, OTHER, read_rank_env

ALLOWED = "PYHVD_ALLOW_ALONE"
# The launcher, the variable by which it numbers its processes, and the one with how many there are. Slurm's
# batch script has a number too, but no step.
_LAUNCHERS = (
    ("torchrun", "TORCHELASTIC_RUN_ID", "WORLD_SIZE"),  # which srun may have started, once on each node
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("PALS's mpiexec", "PALS_RANKID", "PALS_SIZE"),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("srun", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
)
_REMEDIES = {
    "srun": "let srun tell MPI of them by srun --mpi=pmi2 (MPICH) or srun --mpi=pmix (Open MPI), as Slurm's"
    " MpiDefault may be none; or start the script by pyhvdrun in a batch script",
    "torchrun": "start the script with pyhvdrun alone, e.g. pyhvdrun -n {size} train.py",
}
_NAMES = {OPENMPI: "Open MPI's mpiexec", MPICH: "MPICH's mpiexec", OTHER: "the launcher"}


def explain_alone(environ: Mapping[str, str], library: str) -> str:
    """Return which launcher has started more processes than the one rank that MPI has found, and the remedy.

    Parameters
    ----------
    environ : mapping of str to str
        The environment of the process.
    library : str
        The MPI library on which mpi4py is built.

    Returns
    -------
    str
        Empty if no launcher says so. The nearest one counts: a job of one rank inside a larger one is right.
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
        f" each would train alone. {remedy[0].upper()}{remedy[1:]}. {ALLOWED}=1 allows it"
    )

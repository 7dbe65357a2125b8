"""Processes that MPI has left alone, under launchers that have started more."""

from __future__ import annotations

import pytest

from pyhvd.job.mpi.alone import explain_alone

_SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
_TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "8"}
_MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}
_OPENMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}


@pytest.mark.parametrize(
    ("environ", "begin", "remedy"),
    [
        (_SRUN, "srun has started 4 processes", "srun --mpi=pmi2"),
        ({**_SRUN, "PMI_RANK": "1", "PMI_SIZE": "4"}, "srun has started 4 processes", "--mpi=pmix"),
        (_TORCHRUN, "torchrun has started 8 processes", "pyhvdrun -n 8 train.py"),
        ({**_SRUN, "SLURM_STEP_NUM_TASKS": "1", **_TORCHRUN}, "torchrun has started 8", "pyhvdrun -n 8"),
        (_MPICH, "MPICH's mpiexec has started 2 processes", "Use the mpiexec of Open MPI 5.0.11"),
        (_OPENMPI, "Open MPI's mpiexec has started 3 processes", "or pyhvdrun"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "the launcher has started 2 processes", "or pyhvdrun"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"}, "flux run has started 2 processes", "or pyhvdrun"),
        ({"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "6"}, "jsrun has started 6", "or pyhvdrun"),
        ({"PALS_RANKID": "0", "PALS_SIZE": "6"}, "PALS's mpiexec has started 6", "or pyhvdrun"),
    ],
)
def test_the_launcher_and_the_remedy_are_named(environ: dict[str, str], begin: str, remedy: str) -> None:
    text = explain_alone(environ, "Open MPI 5.0.11")
    assert text.startswith(begin)
    assert "but Open MPI 5.0.11, on which mpi4py is built, has found one rank" in text
    assert remedy in text
    assert text.endswith(". PYHVD_ALLOW_ALONE=1 allows it")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},  # a batch script
        {**_SRUN, "SLURM_STEP_NUM_TASKS": "1"},
        {**_TORCHRUN, "WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "8"},  # of another launcher, or of the user
        {**_TORCHRUN, **_MPICH, "PMI_SIZE": "1"},  # a job of one rank inside another one
        {**_SRUN, **_OPENMPI, "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_process_that_is_alone_by_right(environ: dict[str, str]) -> None:
    assert explain_alone(environ, "MPICH 5.0.2") == ""

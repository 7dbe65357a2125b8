"""The variables by which torch.distributed knows a rank, from those of launchers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pyhvd.job.mpi.rank_env import outside_of_rank
from pyhvd.torch import rank_variables
from tests.mpi.launch import mpiexec_command
from tests.torch.test_torchrun import lines_of, start

_MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
_OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
_UNDER_MPIEXEC = """
import os, time
import torch.distributed as dist
from pyhvd.torch.rank_variables import set_up
set_up()
set_up()
assert "mpi4py" not in __import__("sys").modules
rank = os.environ["LOCAL_RANK"]
dist.init_process_group("gloo")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
assert int(os.environ["MASTER_PORT"]) > 0
os.write(1, f"{rank} {dist.get_rank()}: {' '.join(os.environ[name] for name in names)}\\n".encode())
for _ in range(3):  # rank 1 is back before rank 0 has ended its group
    if rank == "0":
        time.sleep(0.2)
    dist.destroy_process_group()
    dist.init_process_group("gloo")
dist.destroy_process_group()
"""
_UNDER_SRUN = """
import os
import torch
import torch.distributed as dist
rank = os.environ.get("PMI_RANK") or os.environ["PMIX_RANK"]
for name in [name for name in os.environ if name.startswith(("MPI_LOCAL", "HYDI_", "OMPI_COMM_WORLD_"))]:
    del os.environ[name]  # srun does not set them
os.environ |= {"SLURM_JOB_ID": "4245", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "2"}
import pyhvd.torch.distributed
assert os.environ["RANK"] == rank
for _ in range(2):
    dist.init_process_group("pyhvd")
    total = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
os.write(1, f"{total.item()}: {' '.join(os.environ[name] for name in names)}\\n".encode())
"""
_ALL = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("launchers", "expected"),
    [
        (_MPICH, _ALL),
        (_OPENMPI, _ALL),
        ({"PMI_RANK": "3", "PMI_SIZE": "4"}, {"RANK": "3", "WORLD_SIZE": "4"}),  # srun
        ({"PMIX_RANK": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}, _ALL),
        ({}, {}),
    ],
)
def test_numbers_of_launchers(launchers: dict[str, str], expected: dict[str, str]) -> None:
    environ = dict(launchers)
    rank_variables.set_numbers(environ)
    assert environ == launchers | expected
    environ = launchers | {"RANK": "7"}
    rank_variables.set_numbers(environ)
    assert environ["RANK"] == "7"


def test_a_process_without_a_launcher_is_left_alone() -> None:
    before = dict(os.environ)
    rank_variables.set_up()
    assert dict(os.environ) == before


def test_a_child_outside_of_the_job_has_no_variables_of_torch() -> None:
    of_torch = _ALL | {"GROUP_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
    assert outside_of_rank(of_torch | {"A": "b"}) == of_torch | {"A": "b"}
    assert outside_of_rank(of_torch | _MPICH | {"A": "b"}) == {"A": "b"}
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "ROLE_RANK": "3"}
    assert outside_of_rank(of_torch | torchrun | {"A": "b"}) == {"A": "b"}


def test_a_group_under_mpiexec_needs_no_variables(tmp_path: Path) -> None:
    path = tmp_path / "groups.py"
    path.write_text(_UNDER_MPIEXEC)
    lines = lines_of(start(*mpiexec_command(2, sys.executable, str(path))))
    assert lines == [f"{rank} {rank}: {rank} 2 {rank} 2 0 127.0.0.1" for rank in range(2)]


def test_a_group_under_srun_needs_no_variables(tmp_path: Path) -> None:
    """With mpiexec in the place of srun: the ranks see srun's variables, and those of PMI."""
    path = tmp_path / "groups.py"
    path.write_text(_UNDER_SRUN)
    lines = lines_of(start(*mpiexec_command(2, sys.executable, str(path))))
    assert lines == [f"3.0: {rank} 2 {rank} 2 0 127.0.0.1" for rank in range(2)]

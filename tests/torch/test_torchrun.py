"""Ranks that torchrun or torch.multiprocessing has started, with torch.distributed beside pyhvd."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401 - these tests need it

from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.rank_env import MPICH
from tests.mpi.launch import ROOT
from tests.waiting import wait_until

SECONDS = 90.0  # below the limit of a test
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
_PROGRAM = """
import os, signal, sys
import torch
import torch.distributed as dist
import pyhvd.torch as hvd
from pyhvd.job.mpi.store_world import join_world

if "restart" in sys.argv:  # as a backend does; gloo of torch 2.13 hangs after a restart
    store, rank, size = next(dist.rendezvous("env://"))
    join_world(dist.PrefixStore("default_pg", store), rank, size)
    hvd.init()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    dist.all_reduce, dist.get_rank, dist.get_world_size = hvd.allreduce_, hvd.rank, hvd.size
elif "torch-first" in sys.argv:
    dist.init_process_group("gloo")
    hvd.init()
else:
    hvd.init()
    dist.init_process_group("gloo")
here, there = torch.full((2,), hvd.rank() + 1.0), torch.full((2,), hvd.rank() + 1.0)
hvd.allreduce_(here, op=hvd.Sum)
dist.all_reduce(there, op=hvd.Sum if "restart" in sys.argv else dist.ReduceOp.SUM)
assert (hvd.rank(), hvd.size()) == (dist.get_rank(), dist.get_world_size())
line = f"rank {hvd.rank()} of {hvd.size()}, {hvd.local_rank()} of {hvd.local_size()}: {here[0]} {there[0]}"
os.write(1, f"{line}\\n".encode())
if dist.is_initialized():
    dist.destroy_process_group()
"""
_SPAWNS = """
import os, sys
import torch.multiprocessing as mp
from torch.distributed import FileStore

def run(rank, path):
    from pyhvd.job.mpi.store_world import join_world
    import pyhvd.torch as hvd, torch
    join_world(FileStore(path, 2), rank, 2)
    hvd.init()
    total = hvd.allreduce(torch.full((2,), hvd.rank() + 1.0), op=hvd.Sum)
    os.write(1, f"rank {hvd.rank()} of {hvd.size()}, {total[0]}\\n".encode())

if __name__ == "__main__":
    mp.spawn(run, (sys.argv[1],), nprocs=2)
"""
needs_mpich = pytest.mark.skipif(find_library().family != MPICH, reason="only MPICH needs no launcher")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(*command: str) -> subprocess.Popen[str]:
    """Start a command, with its output in pipes."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=_environment(), cwd="/")


def lines_of(*processes: subprocess.Popen[str]) -> list[str]:
    """Return the lines of processes that all end well."""
    lines = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, f"{out}\n{err}"
            lines += out.splitlines()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return sorted(lines)


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(_PROGRAM)
    return str(path)


def _servers() -> set[int]:
    """Return the world servers on this host."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if b"pyhvd.job.mpi.world_server" in command and state != "Z" and str(ROOT).encode() in command:
            found.add(int(folder.name))
    return found


_TWO = [f"rank {rank} of 2, {rank} of 2: 3.0 3.0" for rank in range(2)]


@needs_mpich
def test_a_job_of_torchrun_is_one_world(program: str) -> None:
    assert lines_of(start(*_TORCHRUN, "--nproc-per-node", "2", program)) == _TWO


@needs_mpich
def test_two_nodes_and_torch_first(program: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    nodes = [
        start(
            *_TORCHRUN, "--nnodes", "2", "--node-rank", node, "--nproc-per-node", "1",
            "--master-addr", "127.0.0.1", "--master-port", port, program, "torch-first",
        )
        for node in "01"
    ]  # fmt: skip
    assert lines_of(*nodes) == _TWO


@needs_mpich
def test_a_restart_forms_the_world_again_and_leaves_nothing(program: str) -> None:
    before = _servers()
    options = ("--nnodes", "1:1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    job = start(*_TORCHRUN, *options, "--max-restarts", "1", "--nproc-per-node", "2", program, "restart")
    assert lines_of(job) == _TWO
    wait_until(lambda: _servers() <= before, 10.0)


@needs_mpich
def test_ranks_of_torch_multiprocessing_meet_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "spawns.py"
    path.write_text(_SPAWNS)
    lines = lines_of(start(sys.executable, str(path), str(tmp_path / "store")))
    assert lines == [f"rank {rank} of 2, 3.0" for rank in range(2)]

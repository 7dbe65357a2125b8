"""Ranks without an MPI launcher that meet in a store: real processes, and scripted ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pyhvd.common.kernel import node_of
from pyhvd.job.errors import LaunchError
from pyhvd.job.mpi import store_world
from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.rank_env import MPICH, OF_RANKS, OPENMPI, find_rank_process, read_torchrun, without
from pyhvd.job.mpi.world_server import WorldError
from tests.folder_store import FolderStore
from tests.mpi.launch import ROOT

SECONDS = 60.0
_BEGIN = """
import os, sys
from pathlib import Path
from tests.folder_store import FolderStore
from pyhvd.job.mpi.store_world import join_world
folder, rank, size, seconds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
store = FolderStore(folder, seconds)
"""
_JOIN = f"{_BEGIN}join_world(store, rank, size)\n"
_MEETS = f"""{_JOIN}
import numpy as np
import pyhvd as hvd
hvd.init()
join_world(store, rank, size)
total = hvd.allreduce(np.full(4, rank + 1.0), op=hvd.Sum, name="a")
names = ("PMI_RANK", "PMI_SIZE", "PMI_SPAWNED", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
print(hvd.rank(), hvd.size(), hvd.local_size(), *total.astype(int), *(os.environ[name] for name in names))
"""


def _family() -> str | None:
    try:
        return find_library().family
    except LaunchError:
        return None


FAMILY = _family()
needs_mpich = pytest.mark.skipif(FAMILY != MPICH, reason="mpi4py here is not built on MPICH")


def start(
    program: str, folder: Path, rank: int, size: int, seconds: float = SECONDS
) -> subprocess.Popen[str]:
    environ = without(os.environ, *OF_RANKS) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(folder), str(rank), str(size), str(seconds)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, text=True, cwd="/")


def ends(*processes: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Return exit code, stdout and stderr of each process."""
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=SECONDS)
            found.append((process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


@needs_mpich
def test_ranks_meet_although_the_store_knows_an_earlier_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for place in (("lo", "127.0.0.1/8", 1), ("lo", "127.0.0.1/8", silent.getsockname()[1])):
            notice = f'{{"key": "{"00" * 32}", "places": [["{place[0]}", "{place[1]}", {place[2]}]], '
            notice += f'"network": "{node_of("net")}"}}'
            FolderStore(tmp_path, 1.0).set("pyhvd/server", notice)
        others = [start(_MEETS, tmp_path, rank, 3) for rank in (2, 1)]
        time.sleep(0.5)
        found = ends(*others, start(_MEETS, tmp_path, 0, 3))
    assert [code for code, _, _ in found] == [0, 0, 0], found
    said = [out.split() for _, out, _ in found]
    assert said == [[rank, "3", "3", *"6666", rank, "3", "0", rank, "3"] for rank in "210"]


@needs_mpich
def test_a_rank_that_ends_before_mpi_init_ends_the_others(tmp_path: Path) -> None:
    dies = f"""{_BEGIN}
import pyhvd.job.mpi.store_world as store_world
become = store_world._become_rank
def die(*arguments):
    become(*arguments)
    os._exit(7)
store_world._become_rank = die
join_world(store, rank, size)
"""
    zero, one = ends(start(_JOIN, tmp_path, 0, 2), start(dies, tmp_path, 1, 2))
    assert one[0] == 7, one
    assert zero[0] not in (0, 1), zero  # MPICH ends it, or the server, as it waits in shared memory
    assert "pyhvd: rank 1 has ended before all ranks had left MPI_Init" in zero[2]


@needs_mpich
def test_ranks_that_do_not_come_are_named(tmp_path: Path) -> None:
    found = ends(*(start(_JOIN, tmp_path, rank, 4, 1.0) for rank in (0, 2)))
    assert [code for code, _, _ in found] == [1, 1]
    assert (
        "TransportError: ranks 1, 3 of 4 did not come to torch's store within its time limit" in found[0][2]
    )
    assert "TransportError: rank 2 cannot join the MPI world: rank 0 has not written" in found[1][2]


@needs_mpich
@pytest.mark.parametrize("first", ["from mpi4py import MPI", "join_world(store, 0, 1)"])
def test_numbers_that_differ_from_mpis_are_refused(tmp_path: Path, first: str) -> None:
    program = f"{_BEGIN}{first}\njoin_world(store, rank, size)\n"
    ((code, _, err),) = ends(start(program, tmp_path, 1, 2))
    assert code == 1
    assert "MPI is up in this process as rank 0 of 1, but torch.distributed has it as rank 1 of 2" in err


@pytest.mark.skipif(FAMILY != OPENMPI, reason="mpi4py here is not built on Open MPI")
def test_open_mpi_names_the_remedy(tmp_path: Path) -> None:
    ((code, _, err),) = ends(start(_JOIN, tmp_path, 0, 2))
    assert code == 1
    assert 'pyhvdrun -n 2 train.py; or install MPICH, which needs none: pip install "pyhvd[mpich]"' in err


@pytest.mark.slow
def test_fifty_worlds_leave_no_process_and_no_port(tmp_path: Path) -> None:
    """Rank 0 is lost before the others come in a quarter of them, rank 1 comes twice in another quarter."""
    ports = []
    for number in range(50):
        folder = tmp_path / str(number)
        folder.mkdir()
        store = FolderStore(folder, 10.0)
        zero = store_world._start_server(store, 2, 10.0, store_world._addresses("", one_host=True))
        ports += [place[2] for place in json.loads(store.get("pyhvd/server"))["places"]]
        if number % 4 != 1:
            for _ in range(1 + (number % 4 == 3)):
                threading.Thread(target=_reach, args=(store,), daemon=True).start()
            store_world._register(zero, 0, 2, time.monotonic() + 10.0)
        zero.close()
    servers, store_world._servers[:] = store_world._servers[:], []
    assert len(servers) == 50
    for server in servers:
        server.wait(10.0)
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1.0)


def _reach(store: FolderStore) -> None:
    with contextlib.suppress(WorldError, OSError):
        store_world._reach_server(store, 1, 2, time.monotonic() + 2.0)[0].close()


_RUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}


def test_the_numbers_of_torchrun() -> None:
    found = read_torchrun(_RUN | {"PMI_RANK": "0", "PMI_FD": "4711", "PMIX_RANK": "0"})
    assert found is not None
    assert (found.launcher, found.rank, found.size, found.local_rank, found.local_size) == (
        "torchrun",
        1,
        4,
        1,
        2,
    )
    assert read_torchrun({"RANK": "1", "WORLD_SIZE": "4"}) is None
    assert read_torchrun({"TORCHELASTIC_RUN_ID": "none"}) is None


def test_a_launcher_inside_of_a_process_of_torchrun() -> None:
    own, other = socket.socketpair()
    with own, other:
        environ = _RUN | {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": str(own.fileno())}
        assert (
            read_torchrun(environ) is not None
        )  # a descriptor of another process, whose number is used again
        program = (
            "import os; from pyhvd.job.mpi.rank_env import read_torchrun; print(read_torchrun(os.environ))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **environ, "PYTHONPATH": str(ROOT)},
            pass_fds=[own.fileno()],
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
        )
        assert done.stdout == "None\n"


def test_a_child_of_a_rank_of_torchrun_is_none() -> None:
    environ = _RUN | {"MASTER_PORT": "29500", "_PYHVD_RANK_PROCESS": f"{os.getpid()} none,,,29500,1"}
    assert find_rank_process(environ) == ""
    assert find_rank_process(environ | {"_PYHVD_RANK_PROCESS": "1 none,,,29500,1"}) == "rank 1 (process 1)"
    assert find_rank_process(environ | {"_PYHVD_RANK_PROCESS": "1 none,,,29500,0"}) == ""
    assert find_rank_process(_RUN | {"PMI_FD": "4711", "PMI_RANK": "0"}) == ""  # srun has started torchrun

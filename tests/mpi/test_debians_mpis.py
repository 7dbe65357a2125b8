"""Jobs under the MPIs of Debian's packages openmpi-bin and mpich, which many hosts have.

mpi4py's wheel looks for MPICH as libmpi.so.12, and Debian has it as libmpich.so.12: a link makes up for it.
``make test-debian`` runs them in a fresh Debian; elsewhere they are skipped without the packages.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mpi.run_support import Ended, launcher_command, pyhvdrun, script, started

_LIBRARIES = {"openmpi": "libmpi.so.40", "mpich": "libmpich.so.12"}
_FOLDERS = [*Path("/usr/lib").glob("*-linux-gnu"), Path("/usr/lib64")]
_WORKS = """
import numpy as np
import pyhvd as hvd
hvd.init()
assert hvd.allreduce(np.full(5, hvd.rank()), op=hvd.Sum).tolist() == [hvd.size() * (hvd.size() - 1) // 2] * 5
from mpi4py import MPI
print(hvd.rank(), hvd.size(), *MPI.Get_library_version().split()[:2])
"""
# A host's name of its own: Open MPI tells hosts apart by it.
_AGENT = """#!/bin/sh
exec unshare --uts sh -c 'hostname "$0"; PYHVD_HOST_SALT=$0 exec sh -c "$1"' "$1" "$2"
"""
pytestmark = [pytest.mark.any_mpi, pytest.mark.timeout(120)]
Job = Callable[..., Ended]


@pytest.fixture(params=["openmpi", "mpich"])
def variables(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The variables by which mpi4py finds one of these MPIs."""
    name = request.param
    found = [folder / _LIBRARIES[name] for folder in _FOLDERS if (folder / _LIBRARIES[name]).exists()]
    if not found or not Path(f"/usr/bin/mpiexec.{name}").exists():
        pytest.skip(f"no /usr/bin/mpiexec.{name}: Debian's package is not installed")
    if name == "openmpi":
        return {"MPI4PY_LIBMPI": str(found[0])}
    link = tmp_path / "lib" / "libmpi.so.12"
    link.parent.mkdir()
    link.symlink_to(found[0])
    return {"MPI4PY_LIBMPI": str(link), "LD_LIBRARY_PATH": str(link.parent)}


def _said(ended: Ended) -> list[str]:
    return [line for line in ended.err.splitlines() if "OMP_NUM_THREADS" not in line]


@pytest.mark.parametrize("where", ["one host", "two hosts"])
def test_ranks_form_one_world(where: str, variables: dict[str, str], tmp_path: Path) -> None:
    arguments = ["-n", "3"]
    if where == "two hosts":
        if os.getuid() != 0:
            pytest.skip("only root can give a host a name")
        agent = tmp_path / "agent"
        agent.write_text(_AGENT)
        agent.chmod(0o700)
        arguments = ["-H", "h1:1,h2:2", "--launch-agent", f"{agent} {{host}} {{command}}"]
    ended = pyhvdrun(*arguments, script(tmp_path, _WORKS), env=variables)
    assert (ended.code, _said(ended)) == (0, []), ended.err
    lines = sorted(line.rpartition(">:")[2] or line for line in ended.out.splitlines())
    assert [line.split()[:2] for line in lines] == [["0", "3"], ["1", "3"], ["2", "3"]]
    assert len({line.partition(" 3 ")[2] for line in lines}) == 1


@pytest.mark.parametrize(
    ("act", "code", "first"),
    [
        ("raise ValueError('boo')", 1, "failed:"),
        ("sys.exit(3)", 3, "called sys.exit(3)"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
    ],
)
def test_the_first_failure_is_the_last_on_the_screen(
    act: str, code: int, first: str, variables: dict[str, str], tmp_path: Path
) -> None:
    path = script(
        tmp_path,
        f"""
        import os, sys, time
        import pyhvd as hvd
        hvd.init()
        if hvd.rank() == 1:
            {act}
        hvd.barrier()
        """,
    )
    ended = pyhvdrun("-n", 3, path, env=variables)
    assert ended.code == code, ended.err
    said = _said(ended)
    place = next(at for at, line in enumerate(said) if line.startswith("pyhvd: rank 1 of 3 on host"))
    assert first in said[place]
    assert ended.last == ("ValueError: boo" if "boo" in act else said[place]), ended.err
    assert ended.seconds < 20


def test_ctrl_c_ends_a_job(variables: dict[str, str], tmp_path: Path) -> None:
    path = script(
        tmp_path, "import pyhvd as hvd, time\nhvd.init()\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    # The tests' own variables for mpiexec name a part that only Open MPI 5 has.
    with started(launcher_command("-n", 2, path), {**variables, "OMPI_MCA_btl": "self,vader,tcp"}) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        assert job.stdout.readline() == "up\n"
        time.sleep(0.5)  # the other rank is up, too
        job.send_signal(signal.SIGINT)
        assert job.wait(20) == 130
        assert job.stderr.read().splitlines()[-1] == "pyhvd: ended by SIGINT"

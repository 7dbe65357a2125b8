"""launcher="mpiexec" with Open MPI's daemons and real ranks; threads and processes play Spark."""

from __future__ import annotations

import functools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import pyhvd as hvd
from pyhvd.job.errors import LaunchError, StartTimeoutError, UnsupportedLauncherError
from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.openmpi.rendezvous import MpiexecRendezvous, find
from pyhvd.job.mpi.rank_env import OPENMPI
from pyhvd.spark.task_body import TaskBody
from tests.spark_services import PATIENCE_S, Bench, Result, drop

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Spark's ranks need Linux")
# Time from the failure to the error: a second, more on a busy machine.
_SOON_S = 4.0
# All processes of a test have it in their environment.
_MARK = "PYHVD_TEST_MARK"


@functools.cache
def is_open_mpi() -> bool:
    return find_library().family == OPENMPI


def test_another_mpi_is_refused() -> None:
    if is_open_mpi():
        pytest.skip("mpi4py uses Open MPI")
    with pytest.raises(UnsupportedLauncherError, match=r"needs Open MPI, but .*: use launcher='pmi'"):
        find()


def make(function: Callable[..., Any], size: int, extra: str = "", mpiexec: str = "", **spec: Any) -> Bench:
    if not is_open_mpi():
        pytest.skip("launcher='mpiexec' needs Open MPI")
    rendezvous = MpiexecRendezvous(mpiexec or find(), shlex.split(extra), spec.get("executable"))
    return Bench(function, size, drop, rendezvous=rendezvous, **spec)


def run(function: Callable[..., Any], size: int, extra: str = "", **spec: Any) -> list[Any]:
    bench = make(function, size, extra, **spec)
    return bench.run(*(bench.task(index) for index in range(size)))


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check after a test that no rank, mpiexec, daemon, launch agent or rank proxy is left."""
    monkeypatch.setenv(_MARK, f"mpiexec-{uuid.uuid4()}")
    yield
    until = time.monotonic() + PATIENCE_S
    while (left := _marked()) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == {}


def _marked() -> dict[int, str]:
    """Return ids and command lines of this test's processes."""
    mark = f"{_MARK}={os.environ[_MARK]}".encode()
    found = {}
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and mark in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found


def add_up() -> tuple[int, int, int, float]:
    import numpy as np

    hvd.init()
    total = hvd.allreduce(np.full(3, float(hvd.rank())), op=hvd.Sum)
    return hvd.rank(), hvd.local_rank(), hvd.local_size(), float(total[0])


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_one_world(size: int) -> None:
    assert run(add_up, size) == [(rank, rank, size, size * (size - 1) / 2) for rank in range(size)]


@pytest.mark.any_mpi
def test_ranks_without_mpi() -> None:
    assert run(lambda: 7, 2) == [7, 7]


def test_arguments_reach_mpiexec() -> None:
    assert run(lambda: os.environ["MODE"], 2, "-x MODE=train") == ["train", "train"]


def test_environment_of_the_ranks() -> None:
    def look() -> tuple[str, bool, bool]:
        key = any("PYHVD_JOB_KEY" in name for name in os.environ)
        return os.environ["MODE"], key, "PMI_FD" in os.environ

    assert run(look, 1, env={"MODE": "train"}) == [("train", False, False)]


def test_an_argument_that_mpiexec_does_not_know() -> None:
    with pytest.raises(
        LaunchError, match=r"mpiexec exited with code \d+ before the ranks; its output:\n(?s:.)*nonesuch"
    ):
        run(add_up, 2, "--nonesuch-option")


def _fail(how: str) -> Callable[[], None]:
    def function() -> None:
        import numpy as np

        hvd.init()
        hvd.allreduce(np.ones(1))
        if hvd.rank() == 1:
            subprocess.Popen(["sleep", "1000"])
            if how == "raise":
                raise KeyError("no such column")
            if how == "exit":
                sys.exit(3)
            if how == "leave":
                os._exit(0)
            os.kill(os.getpid() if how == "kill" else os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        hvd.allreduce(np.ones(1))

    return function


@pytest.mark.parametrize(
    ("how", "text"),
    [
        pytest.param("raise", r"failed: KeyError: 'no such column'", marks=pytest.mark.any_mpi),
        pytest.param("exit", r"called sys.exit\(3\) and returned nothing", marks=pytest.mark.any_mpi),
        pytest.param("leave", r"exited with code 0 before the function returned", marks=pytest.mark.any_mpi),
        ("kill", r"was killed by SIGKILL"),
        ("guardian", r"and its guardian were killed"),
    ],
)
def test_a_rank_that_fails(how: str, text: str) -> None:
    with pytest.raises(
        hvd.RankFailedError, match=rf"rank 1 of 2 on host \S+ \(Spark task 1\) {text}"
    ) as caught:
        run(_fail(how), 2)
    assert caught.value.rank == 1
    if how == "raise":
        assert 'raise KeyError("no such column")' in str(caught.value.__cause__)


def test_mpi_abort() -> None:
    def abort() -> None:
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_rank() == 1:
            MPI.COMM_WORLD.Abort(9)
        MPI.COMM_WORLD.Barrier()

    with pytest.raises(hvd.RankFailedError, match=r"rank 1 of 2 .* called MPI_Abort with code 9"):
        run(abort, 2)


def _only_rank_0() -> None:
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        hvd.init()


@pytest.mark.any_mpi
def test_a_rank_that_never_starts_pyhvd() -> None:
    with pytest.raises(hvd.RankFailedError, match=r"every rank must call pyhvd\.init"):
        run(_only_rank_0, 2)


@pytest.mark.any_mpi
def test_a_python_that_is_not_there() -> None:
    with pytest.raises(hvd.RankFailedError, match=r"could not be started: .*nonesuch"):
        run(add_up, 2, executable="/nonesuch/python")


@pytest.mark.parametrize(
    ("victim", "text"),
    [
        (r"\S*/(mpiexec|prterun) ", r"mpiexec was killed by SIGKILL"),
        (r"\S*/prted ", r"mpiexec's daemon on host \S+ was killed by SIGKILL"),
        # mpiexec ends the job; MPI may end a rank first.
        (r"\S+ -P -m pyhvd\.job\.mpi\.openmpi\.rank_proxy", r"mpiexec exited with code|rank \d of 2"),
    ],
)
def test_a_part_of_the_launcher_is_killed(victim: str, text: str, tmp_path: Path) -> None:
    when = tmp_path / "when"

    def function() -> None:
        hvd.init()
        if hvd.rank() == 0:
            found = [pid for pid, line in _marked().items() if re.match(victim, line)]
            when.write_text(str(time.time()))
            os.kill(found[0], signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises((LaunchError, hvd.RankFailedError), match=text):
        run(function, 2)
    assert time.time() - float(when.read_text()) < _SOON_S


@pytest.mark.any_mpi
def test_a_start_that_takes_too_long(tmp_path: Path) -> None:
    program = tmp_path / "mpiexec"
    program.write_text("#!/bin/sh\necho thinking; exec sleep 1000\n")
    program.chmod(0o755)
    with pytest.raises(
        StartTimeoutError, match=r"all 2 Spark tasks .* within 5 s: (?s:.)*its output:\nthinking"
    ):
        run(add_up, 2, mpiexec=str(program), start_timeout=5)


_TASK = """
import sys
import cloudpickle
body, index = cloudpickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(cloudpickle.dumps(body.run_attempt(index, 0)))
"""


def _can_name_hosts() -> bool:
    return subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode == 0


def _on_host(bench: Bench, name: str, index: int) -> Callable[[], Result]:
    """Return a task that runs in a separate process, on a host of that name."""

    def task() -> Result:
        command = [
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0"; exec "$@"',
            name,
            sys.executable,
            "-c",
            _TASK,
        ]
        given = cloudpickle.dumps((TaskBody(bench.addresses, bench.secret, {}), index))
        done = subprocess.run(command, input=given, stdout=subprocess.PIPE, timeout=PATIENCE_S, check=True)
        result: Result = cloudpickle.loads(done.stdout)
        return result

    return task


@pytest.mark.parametrize(("extra", "order"), [("", [0, 2, 1]), ("by node", [0, 1, 2])])
def test_two_hosts(extra: str, order: list[int]) -> None:
    if not _can_name_hosts():
        pytest.skip("unshare --uts is not allowed here")
    if extra:
        extra = "--map-by node"
    bench = make(add_up, 3, extra)
    results = bench.run(*(_on_host(bench, f"host-{'aba'[index]}", index) for index in range(3)))
    placements = bench.driver.placements
    assert [each.index for each in placements] == order
    assert results == [(each.rank, each.local_rank, each.local_size, 3.0) for each in placements]


def test_a_task_that_is_killed_is_the_cause_whatever_mpi_makes_of_it() -> None:
    if not _can_name_hosts():
        pytest.skip("unshare --uts is not allowed here")

    def function() -> None:
        import numpy as np

        hvd.init()
        hvd.allreduce(np.ones(1))
        if hvd.rank() == 2:
            guardian = Path(f"/proc/{os.getppid()}/stat").read_text()
            os.kill(int(guardian.rpartition(")")[2].split()[1]), signal.SIGKILL)
            time.sleep(1000)
        hvd.allreduce(np.ones(1))

    bench = make(function, 3)
    with pytest.raises(hvd.RankFailedError, match=r"rank 2 of 3 on host host-b .* its Spark task is gone"):
        bench.run(*(_on_host(bench, f"host-{'aab'[index]}", index) for index in range(3)))

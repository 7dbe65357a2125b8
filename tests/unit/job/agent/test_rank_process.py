"""A rank's process and its guardian, seen from the task."""

from __future__ import annotations

import os
import selectors
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from pyhvd.job.agent.rank_process import RankEvents, RankProcess, rank_environment
from pyhvd.job.messages import Start
from pyhvd.job.mpi.openmpi.daemon import daemon_environment
from pyhvd.job.process.exit_report import LOST
from pyhvd.job.process.segments import remove_of_world
from pyhvd.job.process.supervised import GuardianCommand, SupervisedProcess
from tests.spark_services import PATIENCE_S

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Spark's ranks need Linux")


def test_a_rank_that_ends_before_it_has_taken_its_code(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport os, sys\nos.write(int(sys.argv[4]), b'x')\n")
    python.chmod(0o700)
    process = _end_under(python)
    assert process.failure is not None
    assert process.failure.report.kind == LOST


def _ignore(*_: object) -> None:
    pass


_EVENTS = RankEvents(*[_ignore] * 7)


def _end_under(python: Path) -> RankProcess:
    """Return a rank that has ended before it has taken its code; its guardian is in the file `python`."""
    start = Start(0, 1, 0, 1, {}, str(python))
    process = RankProcess(start, bytes(1 << 24), _EVENTS)
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # the rank has reported, and nobody reads the code
    _see_to_the_end(process)
    return process


def _see_to_the_end(process: SupervisedProcess) -> None:
    until = time.monotonic() + PATIENCE_S
    with selectors.DefaultSelector() as selector:
        process.register(selector)
        while not process.ended and time.monotonic() < until:
            for key, _ in selector.select(0.1):
                key.data()
    process.close()


def test_a_guardian_that_breaks_is_no_rank_that_could_not_be_started(tmp_path: Path) -> None:
    python = tmp_path / "python"
    said = "os.write(int(sys.argv[3]), b'%d\\n' % os.getpid())"  # the rank's process id
    python.write_text(f"#!{sys.executable}\nimport os, sys\n{said}\nsys.exit(3)\n")
    python.chmod(0o700)
    failure = _end_under(python).failure
    assert failure is not None
    assert (failure.report.kind, failure.report.text) == (
        LOST,
        "was killed, as its guardian exited with code 3",
    )


def test_a_guardian_that_does_not_end_takes_nothing_from_the_rank() -> None:
    ended: list[int | None] = []
    guarded = SupervisedProcess(
        GuardianCommand("tests.slow_guardian", [], dict(os.environ)),
        lambda *_: None,
        lambda: ended.append(guarded.code),
        kill_s=0.2,
    )
    _see_to_the_end(guarded)
    assert ended == [0]


def test_a_guardian_closes_what_is_open_whatever_the_limit() -> None:
    script = """
import os, resource
from pyhvd.job.process.guardian import close_all_but
os.dup2(1, 300)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
guarded, life = os.pipe()
close_all_but(guarded, life)
left = [fd for fd in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{fd}")]
os._exit(0 if sorted(left) == sorted([0, 1, 2, guarded, life]) else 1)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S, check=False).returncode == 0


def test_a_rank_that_cannot_be_started_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="null byte"):
        RankProcess(Start(0, 1, 0, 1, {"A": "\0"}), b"", _EVENTS)
    assert os.listdir("/proc/self/fd") == before


def test_a_rank_finds_what_its_task_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(1, 4, 1, 2, {"MODE": "train"})
    monkeypatch.setattr(sys, "path", ["", "/executor/files.zip", f"{sys.prefix}/lib/python", "/given"])
    given = {"PYTHONPATH": f"/given:{sys.prefix}/lib/python", "PMI_RANK": "7", "OMPI_X": "1", "CUDA_X": "0"}
    env = rank_environment(given, start)
    assert env["PYTHONPATH"].split(":") == ["/executor/files.zip", f"{sys.prefix}/lib/python", "/given"]
    del given["PYTHONPATH"]
    assert rank_environment(given, start)["PYTHONPATH"].split(":") == ["/executor/files.zip", "/given"]
    assert (env["PMI_RANK"], env["PMI_SIZE"], env["MPI_LOCALRANKID"], env["MPI_LOCALNRANKS"]) == tuple("1412")
    assert (env["MODE"], env["CUDA_X"], "OMPI_X" in env) == ("train", "0", False)


def test_the_users_parameters_of_open_mpi_reach_ranks_and_daemons() -> None:
    """The parameters come from spark.executorEnv; variables of another MPI job are removed."""
    given = {"OMPI_MCA_btl": "tcp,self", "PRTE_MCA_plm": "x", "PMIX_RANK": "1", "OMPI_COMM_WORLD_RANK": "1"}
    given |= {"OMPI_MCA_ess_base_jobid": "7", "OMPI_MCA_orte_hnp_uri": "u", "PRTE_LAUNCHED": "1", "A": "b"}
    rank = rank_environment(given, Start(0, 1, 0, 1, {}))
    daemon = daemon_environment(given)
    for env in (rank, daemon):
        assert {name for name in given if name in env} == {"OMPI_MCA_btl", "PRTE_MCA_plm", "A"}
    assert rank_environment(given, Start(0, 1, 0, 1, {"OMPI_MCA_btl": "sm"}))["OMPI_MCA_btl"] == "sm"


_GUARDED = """
import mmap, itertools, os, socket, sys, time
from pyhvd.job.process.guardian import guard

def make(name):
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)
"""


def _end_guarded(body: str) -> None:
    """Run the lines of `body`, one of which prints ready, in a guarded process whose owner ends then."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    program = f"{_GUARDED}\ndef body():\n{lines}\nguard(int(sys.argv[1]), body)\n"
    mine, its = socket.socketpair()
    with mine, its:
        argv = [sys.executable, "-c", program, str(its.fileno())]
        guardian = subprocess.Popen(argv, stdout=subprocess.PIPE, pass_fds=[its.fileno()])
        its.close()
        assert guardian.stdout is not None
        try:
            assert guardian.stdout.readline() == b"ready\n"
            mine.shutdown(socket.SHUT_WR)
            assert guardian.wait(10) == 0
        finally:
            guardian.kill()
            guardian.stdout.close()


def test_a_guardian_removes_the_shared_memory_that_mpi_left() -> None:
    """It knows MPI's files by their names, and keeps all others."""
    names = [
        f"{prefix}{uuid.uuid4().hex}" for prefix in ("mpich_shm_", "sm_segment.", "ucx_shm_posix_", "own_")
    ]
    try:
        _end_guarded(f"""
kept = [make(name) for name in {names!r}]
print("ready", flush=True)
time.sleep(1000)
""")
        assert [os.path.exists(f"/dev/shm/{name}") for name in names] == [False, False, False, True]
    finally:
        for name in names:
            Path(f"/dev/shm/{name}").unlink(missing_ok=True)


def test_a_rank_makes_no_shared_memory_after_its_guardian_has_looked() -> None:
    prefix = f"ucx_shm_posix_{uuid.uuid4().hex}_"
    try:
        for _ in range(5):
            _end_guarded(f"""
for number in itertools.count():
    kept = make(f"{prefix}{{number}}")
    number == 9 and print("ready", flush=True)
    os.unlink(f"/dev/shm/{prefix}{{number}}")
""")
            assert not list(Path("/dev/shm").glob(f"{prefix}*"))
    finally:
        for path in Path("/dev/shm").glob(f"{prefix}*"):
            path.unlink(missing_ok=True)


def test_the_shared_memory_of_a_world_is_removed_by_its_name() -> None:
    """MPICH 5.0 made this number from this name."""
    paths = [Path(f"/dev/shm/mpich_shm_{number}_0") for number in ("12af2a23", "12af2a24")]
    try:
        for path in paths:
            path.touch()
        remove_of_world("pyhvd-700dd44a05e31e58")
        assert [path.exists() for path in paths] == [False, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)

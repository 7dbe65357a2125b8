"""launcher="mpiexec" without MPI: command lines, environments, placements, and the order of shutdown."""

from __future__ import annotations

import os
import selectors
import shlex
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pyhvd.job.connections import Peer
from pyhvd.job.errors import LaunchError, UnsupportedLauncherError
from pyhvd.job.job_key import Secret, call_driver, to_environment
from pyhvd.job.messages import (
    DaemonEnded,
    EndDaemon,
    Exit,
    FromDriver,
    Launch,
    RankProxy,
    StartDaemon,
    Task,
)
from pyhvd.job.mpi.flavour import Flavour
from pyhvd.job.mpi.openmpi import launch_agent, rank_proxy
from pyhvd.job.mpi.openmpi.daemon import DaemonError, daemon_environment, localise
from pyhvd.job.mpi.openmpi.rendezvous import MpiexecRendezvous, command_line, environment, find
from pyhvd.job.mpi.pmi import Barrier, PmiError
from pyhvd.job.mpi.rank_env import MPICH, OTHER
from pyhvd.job.placement import assign
from pyhvd.job.process.exit_report import EXIT, SIGNAL
from pyhvd.job.process.supervised import SupervisedProcess
from pyhvd.transport.tcp.session import ChannelError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Spark's ranks need Linux")
_PATIENCE_S = 30.0

PROXY = """/bin/sh -c 'exec "$_PYHVD_JOB_PYTHON" -m pyhvd.job.mpi.openmpi.rank_proxy'"""


def test_command_line_of_open_mpi() -> None:
    command = command_line("/driver/mpi/bin/mpiexec", {"ha": 2, "hb": 1}, ["--map-by", "node"])
    assert command.partition(" && exec ")[2] == (
        "/driver/mpi/bin/mpiexec --leave-session-attached --prtemca plm ssh --prtemca plm_ssh_agent"
        ' "$TMPDIR"/agent --prtemca plm_ssh_no_tree_spawn 1 --prtemca plm_ssh_num_concurrent 3'
        f" --host ha:2,hb:1 --map-by node -n 3 {PROXY}"
    )


def test_the_agent_is_a_program_of_the_job_alone(tmp_path: Path) -> None:
    command = command_line("/bin/echo", {"h": 1}, [])
    env = {"TMPDIR": str(tmp_path), "PATH": os.defpath}
    said = subprocess.run(["/bin/sh", "-c", command], env=env, capture_output=True, text=True, check=True)
    assert f"plm_ssh_agent {tmp_path}/agent --prtemca" in said.stdout
    program = tmp_path / "agent"
    assert stat.S_IMODE(program.stat().st_mode) == 0o700
    assert (
        program.read_text()
        == f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pyhvd.job.mpi.openmpi.launch_agent "$@"\n'
    )


def test_environment_of_mpiexec() -> None:
    given = {"PMIX_RANK": "0", "SLURM_JOBID": "7", "OMPI_MCA_pml": "ucx", "A": "b"}
    env = environment(given, [("driver", 1)], Secret())
    assert (env["OMPI_MCA_pml"], env["OMPI_MCA_btl"], env["A"]) == ("ucx", "self,sm,tcp", "b")
    assert not {"PMIX_RANK", "SLURM_JOBID"} & env.keys()


def test_the_key_is_in_no_command() -> None:
    secret = Secret()
    env = daemon_environment({"OMPI_X": "1", "A": "b"}, "ha", [("driver", 1)], secret)
    assert (env["A"], env["_PYHVD_JOB_HOST"], "OMPI_X" in env) == ("b", "ha", False)
    assert [name for name, value in env.items() if secret.reveal().hex() in value] == ["_PYHVD_JOB_KEY"]


@pytest.mark.parametrize("environ", [{}, {"_PYHVD_JOB_DRIVER": "7", "_PYHVD_JOB_KEY": "aa"}])
def test_nobody_calls_the_driver_by_hand(environ: dict[str, str]) -> None:
    with pytest.raises(ChannelError, match=r"pyhvd\.spark\.run starts this program; do not start it by hand"):
        call_driver(environ)


def test_what_calls_the_driver_forgets_how() -> None:
    environ = dict(to_environment([("127.0.0.1", 1)], Secret()))
    with pytest.raises(ChannelError, match=r"no connection .*127\.0\.0\.1:1"):
        call_driver(environ)
    assert environ == {}


@pytest.mark.parametrize("flags", [[], ["-x"], ["-x", "-n"]])
def test_arguments_of_the_agent(flags: list[str]) -> None:
    assert launch_agent.parse([*flags, "ha", "A=b;", '"/p/proxy"', "-x 1"]) == Launch(
        "ha", 'A=b; "/p/proxy" -x 1'
    )


def test_an_agent_started_by_hand_says_so() -> None:
    for module, text in (
        ("launch_agent", "expected a host and a command"),
        ("rank_proxy", "do not start it by hand"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", f"pyhvd.job.mpi.openmpi.{module}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert text in done.stderr
        assert "Traceback" not in done.stderr


PRTED = 'PRTE_PREFIX=/d/mpi;export PRTE_PREFIX;L=/d/mpi/lib:$L; /d/mpi/bin/prted --prtemca ess "env"'
OTHERS = '"/d/mpi/bin/prted" --launcher /tmp/d/mpi2/agent --id 0'


def test_the_daemon_is_that_of_its_own_host(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "prted").touch(0o755)
    folders = ["/nonesuch", str(tmp_path / "bin")]
    assert localise(PRTED, "/d/mpi", folders) == PRTED.replace("/d/mpi", str(tmp_path))
    assert localise(OTHERS, "/d/mpi", folders) == OTHERS.replace("/d/mpi/", f"{tmp_path}/")
    assert localise("prted --prtemca", "/d/mpi", folders) == "prted --prtemca"
    with pytest.raises(DaemonError, match=r"no prted on this executor \(/nonesuch\): .*pyhvd\[openmpi\]"):
        localise(PRTED, "/d/mpi", ["/nonesuch"])


def test_what_mpiexec_adds_goes_to_the_rank() -> None:
    daemon = {"PATH": "/bin", "HOME": "/root", "_PYHVD_JOB_HOST": "ha", "MODE": "a"}
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    environ = daemon | mpi | {"PATH": "/mpi:/bin", "MODE": "b", "PWD": "/"}
    assert rank_proxy.introduce(environ, daemon) == RankProxy("ha", 3, 1, mpi | {"MODE": "b"})


def test_the_key_does_not_go_to_the_rank() -> None:
    environ = dict(to_environment([("127.0.0.1", 1)], Secret())) | {"OMPI_COMM_WORLD_RANK": "0"}
    assert not rank_proxy.introduce(environ, {}).env.keys() & to_environment([], Secret()).keys()


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_PROCID": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
    ],
)
def test_a_rank_proxy_without_open_mpi(environ: dict[str, str]) -> None:
    with pytest.raises(ChannelError, match="Open MPI's mpiexec starts this program"):
        rank_proxy.introduce(environ, {})


@pytest.mark.parametrize(("family", "vendor"), [(MPICH, "MPICH"), (MPICH, "Intel MPI"), (OTHER, "some MPI")])
def test_an_mpi_other_than_open_mpi(monkeypatch: pytest.MonkeyPatch, family: str, vendor: str) -> None:
    monkeypatch.setattr(
        "pyhvd.job.mpi.openmpi.rendezvous.find_library", lambda: Flavour(family, "5.0", vendor)
    )
    with pytest.raises(UnsupportedLauncherError, match=f"uses {vendor} 5.0: use launcher='pmi'"):
        find()


def test_the_environment_that_a_process_was_started_with() -> None:
    environ = {"A": "b=c", "EMPTY": ""}
    pipe = subprocess.PIPE
    process = subprocess.Popen(["/bin/cat"], env=environ, bufsize=0, stdin=pipe, stdout=pipe)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        assert process.stdout.readline() == b"\n"  # before that the kernel may still be setting it up
        assert rank_proxy.read_environment(process.pid) == environ
    finally:
        process.kill()
        process.communicate()


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_placements_in_any_order(hosts: list[str]) -> None:
    placements = assign(Task(index, 0, host, host) for index, host in enumerate(hosts))
    for placement in placements:
        alike = [other for other in placements if other.host == placement.host]
        assert (placement.local_rank, placement.local_size) == (alike.index(placement), len(alike))


def test_a_barrier_that_cannot_fill() -> None:
    barrier = Barrier(2)
    assert not barrier.enter(0)
    with pytest.raises(PmiError, match="rank 1 has ended without taking part in MPI, but rank 0 waits"):
        barrier.leave(1)
    barrier.release(0)
    barrier.leave(1)
    with pytest.raises(PmiError, match="rank 0 waits"):
        barrier.enter(0)


class Recorder:
    """A driver's service, and connections to launch agents and rank proxies; all record what they receive."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.told: list[tuple[Any, FromDriver]] = []
        self.blamed: list[tuple[int, str, int, str]] = []

    def tell_rank(self, rank: int, message: FromDriver) -> None:
        self.told.append((f"rank {rank}", message))

    def tell_task(self, index: int, message: FromDriver) -> None:
        self.told.append((f"task {index}", message))

    def blame(self, rank: int, text: str, code: int, kind: str = EXIT) -> None:
        self.blamed.append((rank, text, code, kind))

    def peer(self, name: str, task: Task | None = None) -> Peer:
        told = self.told

        class Line:
            open = True

            def send(self, record: bytes) -> None:
                from pyhvd.job.messages import decode_from_driver

                told.append((name, decode_from_driver(record)))

        return Peer(Line(), task)  # type: ignore[arg-type]


GROUPS = [[Task(0, 0, "aa", "first"), Task(2, 0, "aa", "first")], [Task(1, 0, "bb", "second")]]


@pytest.fixture
def driver() -> Any:
    return Recorder()


@pytest.fixture
def rendezvous(driver: Any) -> Any:
    made = MpiexecRendezvous("/bin/true", [], Secret())
    made.listen_at([("127.0.0.1", 1)])
    made.begin(driver, GROUPS)
    yield made
    made.close()


def pump(driver: Recorder, until: Callable[[], object]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not until() and time.monotonic() < end:
        for key, _ in driver.selector.select(0.1):
            key.data()
    assert until()


def start_all(rendezvous: MpiexecRendezvous, driver: Recorder) -> None:
    """Register rank proxies as ``--map-by node`` starts them: neighbouring ranks are on different hosts."""
    for rank, host, local_rank in ((2, "haa", 1), (0, "haa", 0), (1, "hbb", 0)):
        assert rendezvous.placements() == []
        rendezvous.hear(driver.peer(f"proxy {rank}"), RankProxy(host, rank, local_rank, {"R": str(rank)}))


def test_ranks_are_placed_as_mpiexec_says(rendezvous: MpiexecRendezvous, driver: Recorder) -> None:
    start_all(rendezvous, driver)
    assert [(each.rank, each.index, each.host) for each in rendezvous.placements()] == [
        (0, 0, "first"),
        (1, 1, "second"),
        (2, 2, "first"),
    ]
    assert rendezvous.variables(1) == {"R": "1"}
    assert driver.told == []
    assert driver.blamed == []


def test_the_first_task_of_a_host_runs_its_daemon(rendezvous: MpiexecRendezvous, driver: Recorder) -> None:
    rendezvous.hear(driver.peer("agent"), Launch("hbb", "proxy 1"))
    rendezvous.hear(driver.peer("again"), Launch("hbb", "proxy 1"))
    rendezvous.hear(driver.peer("stranger"), Launch("elsewhere", "proxy 2"))
    rendezvous.hear(driver.peer("task 1", GROUPS[1][0]), DaemonEnded(3))
    assert driver.told == [
        ("task 1", StartDaemon("hbb", "proxy 1", "/")),
        ("again", Exit(1)),
        ("stranger", Exit(1)),
        ("agent", Exit(3)),
    ]
    assert driver.blamed == []


@pytest.mark.parametrize("code", [-9, 137])
def test_a_daemon_that_is_killed_is_the_cause(
    rendezvous: MpiexecRendezvous, driver: Recorder, code: int
) -> None:
    rendezvous.hear(driver.peer("agent"), Launch("hbb", "proxy 1"))
    driver.told.clear()
    rendezvous.hear(driver.peer("task 1", GROUPS[1][0]), DaemonEnded(code))
    assert driver.told == [("agent", Exit(137))]
    ((rank, text, _, kind),) = driver.blamed
    assert (rank, kind) == (-1, SIGNAL)
    assert text.startswith("mpiexec's daemon on host second was killed by SIGKILL")


@pytest.mark.parametrize("said", [(3, "haa", 0), (-1, "haa", 0), (0, "haa", 0), (1, "haa", 0)])
def test_a_proxy_of_a_rank_that_is_taken_or_unknown(
    rendezvous: MpiexecRendezvous, driver: Recorder, said: tuple[int, str, int]
) -> None:
    rendezvous.hear(driver.peer("first"), RankProxy("haa", 0, 0, {}))
    rank, host, local_rank = said
    rendezvous.hear(driver.peer("second"), RankProxy(host, rank, local_rank, {}))
    assert driver.told == [("second", Exit(1))]
    assert rendezvous.placements() == []
    assert driver.blamed == []


def test_more_ranks_on_a_host_than_tasks(rendezvous: MpiexecRendezvous, driver: Recorder) -> None:
    rendezvous.hear(driver.peer("proxy"), RankProxy("hbb", 1, 1, {}))
    assert driver.told == [("proxy", Exit(1))]
    ((rank, text, _, _),) = driver.blamed
    assert rank == -1
    assert "be local rank 1 of a host that has 1 of the job's Spark tasks; do extra_mpi_args" in text


def test_a_rank_that_ends_while_others_wait_for_it(rendezvous: MpiexecRendezvous, driver: Recorder) -> None:
    start_all(rendezvous, driver)
    rendezvous.enter(0)
    rendezvous.leave(1)
    ((rank, text, _, _),) = driver.blamed
    assert rank == 1
    assert "every rank must call pyhvd.init()" in text


@pytest.mark.parametrize("first", ["enter", "leave"])
def test_a_rank_that_takes_no_part_in_mpi(
    rendezvous: MpiexecRendezvous, driver: Recorder, first: str
) -> None:
    start_all(rendezvous, driver)
    for what in ("enter", "leave") if first == "enter" else ("leave", "enter"):
        rendezvous.enter(0) if what == "enter" else rendezvous.leave(1)
    ((_, text, _, _),) = driver.blamed
    assert "rank 1 has ended without taking part in MPI, but rank 0 waits for it" in text


def test_ranks_that_leave_after_all_have_entered(driver: Recorder, rendezvous: MpiexecRendezvous) -> None:
    for rank, host, local_rank in ((0, "haa", 0), (1, "hbb", 0), (2, "haa", 1)):
        rendezvous.hear(driver.peer(f"proxy {rank}"), RankProxy(host, rank, local_rank, {}))
    for rank in range(3):
        rendezvous.enter(rank)
    for rank in range(3):
        rendezvous.leave(rank)
    assert driver.blamed == []


def test_proxies_end_as_their_ranks_do_and_daemons_are_ended(
    rendezvous: MpiexecRendezvous, driver: Recorder
) -> None:
    rendezvous.hear(driver.peer("agent"), Launch("haa", "proxy"))
    start_all(rendezvous, driver)
    driver.told.clear()
    for rank in range(3):
        rendezvous.leave(rank)
    assert driver.told == [(f"proxy {rank}", Exit(0)) for rank in range(3)]
    rendezvous.check(time.monotonic())
    assert len(driver.told) == 3
    rendezvous.check(time.monotonic() + 60)
    assert driver.told[3:] == [("task 0", EndDaemon())]


def test_an_mpiexec_that_ends_too_early_says_why(driver: Any, tmp_path: Path) -> None:
    program = tmp_path / "mpiexec"
    program.write_text("#!/bin/sh\necho unknown option >&2\nexit 3\n")
    program.chmod(0o755)
    rendezvous = MpiexecRendezvous(str(program), [], Secret())
    rendezvous.listen_at([("127.0.0.1", 1)])
    rendezvous.begin(driver, GROUPS)
    try:
        pump(driver, lambda: driver.blamed)
    finally:
        rendezvous.close()
    ((rank, text, _, _),) = driver.blamed
    assert rank == -1
    assert text == f"{program} exited with code 3 before the ranks; its output:\nunknown option"
    assert "has not started all ranks on first, second. Can those hosts connect" in rendezvous.waits_for()


def test_open_mpi_needs_hosts_with_names_of_their_own(driver: Any) -> None:
    rendezvous = MpiexecRendezvous("/bin/true", [], Secret())
    rendezvous.listen_at([("127.0.0.1", 1)])
    with pytest.raises(
        LaunchError, match="Open MPI identifies hosts by name, but several hosts have the name same"
    ):
        rendezvous.begin(driver, [[Task(0, 0, "aa", "same")], [Task(1, 0, "bb", "same")]])


_SLOW = "trap 'sleep 0.2; echo tidied; exit 5' TERM; echo ready; while :; do sleep 0.05; done"


def run_command(
    command: str, said: list[bytes], ended: list[int | None]
) -> tuple[SupervisedProcess, Recorder]:
    recorder = Recorder()
    process = SupervisedProcess(
        "pyhvd.job.process.command_main",
        [command],
        dict(os.environ),
        lambda _, data: said.append(data),
        lambda: ended.append(process.code),
        kill_s=5.0,
    )
    process.register(recorder.selector)
    return process, recorder


def test_a_command_may_tidy_up_before_it_is_killed() -> None:
    said: list[bytes] = []
    ended: list[int | None] = []
    process, recorder = run_command(_SLOW, said, ended)
    try:
        pump(recorder, lambda: said)
        process.end()
        pump(recorder, lambda: ended)
    finally:
        process.close()
    assert b"".join(said).endswith(b"tidied\n")  # a shell may also print that its child was terminated
    assert ended == [5]


def test_a_command_that_does_not_end_is_killed() -> None:
    said: list[bytes] = []
    ended: list[int | None] = []
    process, recorder = run_command("trap '' TERM; echo ready; while :; do sleep 0.05; done", said, ended)
    try:
        pump(recorder, lambda: said)
        process.end()
        pump(recorder, lambda: ended)
    finally:
        process.close()
    assert ended == [-9]


def test_a_commands_temporary_directory_goes_with_it() -> None:
    said: list[bytes] = []
    ended: list[int | None] = []
    process, recorder = run_command('touch "$TMPDIR/it" && echo "$TMPDIR"', said, ended)
    try:
        pump(recorder, lambda: ended)
    finally:
        process.close()
    assert ended == [0]
    folder = Path(b"".join(said).decode().strip())
    assert folder.name.startswith("pyhvd-")
    assert not folder.exists()

"""launcher="mpiexec", its pure parts: command lines, environments, who is seated where, what ends when."""

from __future__ import annotations

import os
import selectors
import shlex
import socket
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
from pyhvd.job.errors import LaunchError
from pyhvd.job.job_key import Secret, call_driver, to_environment
from pyhvd.job.messages import (
    DaemonEnded,
    EndDaemon,
    Exit,
    FromDriver,
    Launch,
    Pmi,
    RankProxy,
    StartDaemon,
)
from pyhvd.job.mpi.openmpi import launch_agent, rank_proxy
from pyhvd.job.mpi.openmpi.daemon import DaemonError, daemon_environment, localise
from pyhvd.job.mpi.openmpi.rendezvous import Mpiexec, MpiexecRendezvous, command_line, environment
from pyhvd.job.mpi.pmi import Barrier, PmiError
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI
from pyhvd.job.placement import Task, seats_of
from pyhvd.job.process.exit_report import EXIT, SIGNAL
from pyhvd.job.process.supervised import SupervisedProcess
from pyhvd.transport.tcp.session import ChannelError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Spark's ranks need Linux")
_PATIENCE_S = 30.0

OPEN = Mpiexec("/driver/mpi/bin/mpiexec", OPENMPI)
HYDRA = Mpiexec("/driver/mpi/bin/mpiexec", MPICH)
STAND_IN = """/bin/sh -c 'exec "$_PYHVD_SPARK_PYTHON" -m pyhvd.job.mpi.openmpi.rank_proxy'"""


def test_command_line_of_open_mpi() -> None:
    command = command_line(OPEN, {"ha": 2, "hb": 1}, ["--map-by", "node"], "driver")
    assert command.partition(" && exec ")[2] == (
        "/driver/mpi/bin/mpiexec --leave-session-attached --prtemca plm ssh --prtemca plm_ssh_agent"
        ' "$TMPDIR"/agent --prtemca plm_ssh_no_tree_spawn 1 --prtemca plm_ssh_num_concurrent 3'
        f" --host ha:2,hb:1 --map-by node -n 3 {STAND_IN}"
    )


def test_command_line_of_hydra() -> None:
    command = command_line(HYDRA, {"ha": 2, "hb": 1}, ["-genv", "A", "b c"], "192.0.2.1")
    assert command.partition(" && exec ")[2] == (
        '/driver/mpi/bin/mpiexec -launcher ssh -launcher-exec "$TMPDIR"/agent -genvnone -wdir / -localhost'
        f" 192.0.2.1 -hosts ha:2,hb:1 -genv A 'b c' -n 3 {STAND_IN}"
    )


def test_the_agent_is_a_program_of_the_job_alone(tmp_path: Path) -> None:
    wrong = Mpiexec("/bin/echo", OPENMPI)
    command = command_line(wrong, {"h": 1}, [], "driver")
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
    env = environment(OPENMPI, given, [("driver", 1)], Secret())
    assert (env["OMPI_MCA_pml"], env["OMPI_MCA_btl"], env["A"]) == ("ucx", "self,sm,tcp", "b")
    assert not {"PMIX_RANK", "SLURM_JOBID"} & env.keys()
    assert not [name for name in environment(MPICH, given, [], Secret()) if name.startswith("OMPI_MCA_b")]


def test_the_key_is_in_no_command() -> None:
    secret = Secret()
    env = daemon_environment({"OMPI_X": "1", "A": "b"}, "ha", [("driver", 1)], secret)
    assert (env["A"], env["_PYHVD_SPARK_HOST"], "OMPI_X" in env) == ("b", "ha", False)
    assert [name for name, value in env.items() if secret.reveal().hex() in value] == ["_PYHVD_SPARK_KEY"]


@pytest.mark.parametrize("environ", [{}, {"_PYHVD_SPARK_DRIVER": "7", "_PYHVD_SPARK_KEY": "aa"}])
def test_nobody_calls_the_driver_by_hand(environ: dict[str, str]) -> None:
    with pytest.raises(ChannelError, match=r"started by pyhvd\.spark\.run, not by hand"):
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
    for module, text in (("launch_agent", "expected a host and a command"), ("rank_proxy", "not by hand")):
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
PROXY = '"/d/mpi/bin/hydra_pmi_proxy" --launcher-exec /tmp/d/mpi2/agent --proxy-id 0'


def test_the_daemon_is_that_of_its_own_host(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("prted", "hydra_pmi_proxy"):
        (tmp_path / "bin" / name).touch(0o755)
    folders = ["/nonesuch", str(tmp_path / "bin")]
    assert localise(PRTED, "/d/mpi", folders) == PRTED.replace("/d/mpi", str(tmp_path))
    assert localise(PROXY, "/d/mpi", folders) == PROXY.replace("/d/mpi/", f"{tmp_path}/")
    assert localise("prted --prtemca", "/d/mpi", folders) == "prted --prtemca"
    with pytest.raises(DaemonError, match=r"no prted on this executor \(/nonesuch\): .*pyhvd\[openmpi\]"):
        localise(PRTED, "/d/mpi", ["/nonesuch"])


def test_what_mpiexec_adds_goes_to_the_rank() -> None:
    daemon = {"PATH": "/bin", "HOME": "/root", "_PYHVD_SPARK_HOST": "ha", "MODE": "a"}
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    environ = daemon | mpi | {"PATH": "/mpi:/bin", "MODE": "b", "PWD": "/"}
    assert rank_proxy.introduce(environ, daemon) == RankProxy("ha", 3, 1, mpi | {"MODE": "b"}, pmi=False)


def test_the_key_does_not_go_to_the_rank() -> None:
    environ = dict(to_environment([("127.0.0.1", 1)], Secret())) | {
        "PMI_FD": "7",
        "PMI_RANK": "0",
        "PMI_SIZE": "1",
    }
    environ |= {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert not rank_proxy.introduce(environ, {}).env.keys() & to_environment([], Secret()).keys()


def test_a_stand_in_without_mpiexec() -> None:
    with pytest.raises(ChannelError, match="Open MPI or MPICH"):
        rank_proxy.introduce({"SLURM_PROCID": "1"}, {})


def test_the_environment_that_a_process_was_started_with() -> None:
    environ = {"A": "b=c", "EMPTY": ""}
    pipe = subprocess.PIPE
    process = subprocess.Popen(["/bin/cat"], env=environ, bufsize=0, stdin=pipe, stdout=pipe)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        assert process.stdout.readline() == b"\n"  # until it runs, the kernel may still be about to set it up
        assert rank_proxy.read_environment(process.pid) == environ
    finally:
        process.kill()
        process.communicate()


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_seats_in_any_order(hosts: list[str]) -> None:
    seats = seats_of(Task(index, 0, host, host) for index, host in enumerate(hosts))
    for seat in seats:
        alike = [other for other in seats if other.host == seat.host]
        across = [other for other in seats if other.local_rank == seat.local_rank]
        assert (seat.local_rank, seat.local_size) == (alike.index(seat), len(alike))
        assert seat.cross_size == len(across)
    for local_rank in {seat.local_rank for seat in seats}:
        numbers = [seat.cross_rank for seat in seats if seat.local_rank == local_rank]
        assert sorted(numbers) == list(range(len(numbers)))


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
    """Stands for the driver's service, and for connections to agents and stand-ins."""

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
def office() -> Recorder:
    return Recorder()


@pytest.fixture
def wiring(office: Recorder) -> Any:
    made = MpiexecRendezvous(Mpiexec("/bin/true", MPICH), [], Secret())
    made.call_at([("127.0.0.1", 1)], "driver")
    made.begin(office, GROUPS)
    yield made
    made.close()


def pump(office: Recorder, until: Callable[[], object]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not until() and time.monotonic() < end:
        for key, _ in office.selector.select(0.1):
            key.data()
    assert until()


def seat_all(wiring: MpiexecRendezvous, office: Recorder) -> None:
    """As ``--map-by node`` would: neighbours are on different hosts."""
    for rank, host, local_rank in ((2, "haa", 1), (0, "haa", 0), (1, "hbb", 0)):
        assert wiring.seats() == []
        wiring.hear(
            office.peer(f"stand-in {rank}"), RankProxy(host, rank, local_rank, {"R": str(rank)}, True)
        )


def test_ranks_are_seated_as_mpiexec_says(wiring: MpiexecRendezvous, office: Recorder) -> None:
    seat_all(wiring, office)
    assert [(seat.rank, seat.index, seat.host) for seat in wiring.seats()] == [
        (0, 0, "first"),
        (1, 1, "second"),
        (2, 2, "first"),
    ]
    assert wiring.variables(1) == {"R": "1"}
    assert office.told == []
    assert office.blamed == []


def test_the_first_task_of_a_host_runs_its_daemon(wiring: MpiexecRendezvous, office: Recorder) -> None:
    wiring.hear(office.peer("agent"), Launch("hbb", "proxy 1"))
    wiring.hear(office.peer("again"), Launch("hbb", "proxy 1"))
    wiring.hear(office.peer("stranger"), Launch("elsewhere", "proxy 2"))
    wiring.hear(office.peer("task 1", GROUPS[1][0]), DaemonEnded(3))
    assert office.told == [
        ("task 1", StartDaemon("hbb", "proxy 1", "/")),
        ("again", Exit(1)),
        ("stranger", Exit(1)),
        ("agent", Exit(3)),
    ]
    assert office.blamed == []


@pytest.mark.parametrize("code", [-9, 137])
def test_a_daemon_that_is_killed_is_the_cause(wiring: MpiexecRendezvous, office: Recorder, code: int) -> None:
    wiring.hear(office.peer("agent"), Launch("hbb", "proxy 1"))
    office.told.clear()
    wiring.hear(office.peer("task 1", GROUPS[1][0]), DaemonEnded(code))
    assert office.told == [("agent", Exit(137))]
    ((rank, text, _, kind),) = office.blamed
    assert (rank, kind) == (-1, SIGNAL)
    assert text.startswith("mpiexec's daemon on host second was killed by SIGKILL")


@pytest.mark.parametrize("said", [(3, "haa", 0), (-1, "haa", 0), (0, "haa", 0), (1, "haa", 0)])
def test_a_seat_that_is_taken_or_none(
    wiring: MpiexecRendezvous, office: Recorder, said: tuple[int, str, int]
) -> None:
    wiring.hear(office.peer("first"), RankProxy("haa", 0, 0, {}, True))
    rank, host, local_rank = said
    wiring.hear(office.peer("second"), RankProxy(host, rank, local_rank, {}, True))
    assert office.told == [("second", Exit(1))]
    assert wiring.seats() == []
    assert office.blamed == []


def test_more_ranks_on_a_host_than_tasks(wiring: MpiexecRendezvous, office: Recorder) -> None:
    wiring.hear(office.peer("stand-in"), RankProxy("hbb", 1, 1, {}, True))
    assert office.told == [("stand-in", Exit(1))]
    ((rank, text, _, _),) = office.blamed
    assert rank == -1
    assert "be local rank 1 of a host that has 1 of the job's Spark tasks; do extra_mpi_args" in text


def test_lines_of_pmi_pass_both_ways(wiring: MpiexecRendezvous, office: Recorder) -> None:
    seat_all(wiring, office)
    wiring.hear_pmi(1, "cmd=get key=a")
    stand_ins = {said.rank: peer for peer, said in wiring._stand_ins.values()}
    wiring.hear(stand_ins[1], Pmi("cmd=get_result value=b\n"))
    assert office.told == [
        ("stand-in 1", Pmi("cmd=get key=a\n")),
        ("rank 1", Pmi("cmd=get_result value=b\n")),
    ]


def test_an_abort_is_its_ranks_own_failure(wiring: MpiexecRendezvous, office: Recorder) -> None:
    seat_all(wiring, office)
    wiring.hear_pmi(2, "cmd=abort exitcode=9")
    assert office.blamed == [(2, "called MPI_Abort with code 9", 9, EXIT)]
    assert office.told == []


def test_a_rank_that_ends_while_others_wait_for_it(wiring: MpiexecRendezvous, office: Recorder) -> None:
    seat_all(wiring, office)
    wiring.enter(0)
    wiring.leave(1)
    ((rank, text, _, _),) = office.blamed
    assert rank == 1
    assert "every rank must call pyhvd.init()" in text


@pytest.mark.parametrize("first", ["enter", "leave"])
def test_a_rank_that_takes_no_part_in_mpi_without_pmi(office: Recorder, first: str) -> None:
    wiring = MpiexecRendezvous(Mpiexec("/bin/true", OPENMPI), [], Secret())
    wiring.begin(office, GROUPS[1:])
    for rank in range(2):
        wiring._stand_ins[rank] = (office.peer(f"stand-in {rank}"), RankProxy("hbb", rank, rank, {}, False))
    wiring._barrier = Barrier(2)
    try:
        for what in ("enter", "leave") if first == "enter" else ("leave", "enter"):
            wiring.enter(0) if what == "enter" else wiring.leave(1)
    finally:
        wiring.close()
    ((_, text, _, _),) = office.blamed
    assert "rank 1 has ended without taking part in MPI, but rank 0 waits for it" in text


def test_ranks_that_leave_after_all_have_entered(office: Recorder, wiring: MpiexecRendezvous) -> None:
    for rank, host, local_rank in ((0, "haa", 0), (1, "hbb", 0), (2, "haa", 1)):
        wiring.hear(office.peer(f"stand-in {rank}"), RankProxy(host, rank, local_rank, {}, False))
    for rank in range(3):
        wiring.enter(rank)
    for rank in range(3):
        wiring.leave(rank)
    assert office.blamed == []


def test_stand_ins_end_as_their_ranks_do_and_daemons_are_helped(
    wiring: MpiexecRendezvous, office: Recorder
) -> None:
    wiring.hear(office.peer("agent"), Launch("haa", "proxy"))
    seat_all(wiring, office)
    office.told.clear()
    for rank in range(3):
        wiring.leave(rank)
    assert office.told == [(f"stand-in {rank}", Exit(0)) for rank in range(3)]
    wiring.check(time.monotonic())
    assert len(office.told) == 3
    wiring.check(time.monotonic() + 60)
    assert office.told[3:] == [("task 0", EndDaemon())]


def test_an_mpiexec_that_ends_too_early_says_why(office: Recorder, tmp_path: Path) -> None:
    program = tmp_path / "mpiexec"
    program.write_text("#!/bin/sh\necho unknown option >&2\nexit 3\n")
    program.chmod(0o755)
    wiring = MpiexecRendezvous(Mpiexec(str(program), MPICH), [], Secret())
    wiring.call_at([("127.0.0.1", 1)], "driver")
    wiring.begin(office, GROUPS)
    try:
        pump(office, lambda: office.blamed)
    finally:
        wiring.close()
    ((rank, text, _, _),) = office.blamed
    assert rank == -1
    assert text == f"{program} ended with exit code 3 before the ranks; it said:\nunknown option"
    assert "started none, or not all, on first, second. Can this host be reached" in wiring.waits_for()


def test_open_mpi_needs_hosts_with_names_of_their_own(office: Recorder) -> None:
    wiring = MpiexecRendezvous(Mpiexec("/bin/true", OPENMPI), [], Secret())
    wiring.call_at([("127.0.0.1", 1)], "driver")
    with pytest.raises(LaunchError, match="Open MPI tells hosts apart by their names, and same is the name"):
        wiring.begin(office, [[Task(0, 0, "aa", "same")], [Task(1, 0, "bb", "same")]])


_SLOW = "trap 'sleep 0.2; echo tidied; exit 5' TERM; echo ready; while :; do sleep 0.05; done"


def run_command(
    command: str, said: list[bytes], ended: list[int | None]
) -> tuple[SupervisedProcess, Recorder]:
    recorder = Recorder()
    kept = SupervisedProcess(
        "pyhvd.job.process.command_main",
        [command],
        dict(os.environ),
        lambda _, data: said.append(data),
        lambda: ended.append(kept.code),
        kill_s=5.0,
    )
    kept.register(recorder.selector)
    return kept, recorder


def test_a_command_may_tidy_up_before_it_is_killed() -> None:
    said: list[bytes] = []
    ended: list[int | None] = []
    kept, recorder = run_command(_SLOW, said, ended)
    try:
        pump(recorder, lambda: said)
        kept.let_go()
        pump(recorder, lambda: ended)
    finally:
        kept.close()
    assert b"".join(said).endswith(b"tidied\n")  # a shell may also say that its child was terminated
    assert ended == [5]


def test_a_command_that_does_not_end_is_killed() -> None:
    said: list[bytes] = []
    ended: list[int | None] = []
    kept, recorder = run_command("trap '' TERM; echo ready; while :; do sleep 0.05; done", said, ended)
    try:
        pump(recorder, lambda: said)
        kept.let_go()
        pump(recorder, lambda: ended)
    finally:
        kept.close()
    assert ended == [-9]


def test_a_commands_temporary_directory_goes_with_it() -> None:
    said: list[bytes] = []
    ended: list[int | None] = []
    kept, recorder = run_command('touch "$TMPDIR/it" && echo "$TMPDIR"', said, ended)
    try:
        pump(recorder, lambda: ended)
    finally:
        kept.close()
    assert ended == [0]
    folder = Path(b"".join(said).decode().strip())
    assert folder.name.startswith("pyhvd-")
    assert not folder.exists()


def test_a_relay_passes_whole_lines() -> None:
    daemon, ours = socket.socketpair()
    sent: list[bytes] = []

    class Driver:
        open = True
        wants_write = False

        def send(self, record: bytes) -> None:
            sent.append(record)

    relay = rank_proxy.Relay(Driver(), ours)  # type: ignore[arg-type]
    with daemon, ours:
        for part in (b"cmd=a x=", b"1\ncmd=b\ncm"):
            daemon.sendall(part)
            relay._hear_daemon()
    from pyhvd.job.messages import decode_from_task

    assert [decode_from_task(record) for record in sent] == [Pmi("cmd=a x=1\n"), Pmi("cmd=b\n")]

"""Open MPI's mpiexec without MPI: command lines, environments, placements, and the order of shutdown."""

from __future__ import annotations

import os
import selectors
import shlex
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pyhvd.job.connections import Peer
from pyhvd.job.errors import LaunchError, UnsupportedLauncherError
from pyhvd.job.messages import (
    DaemonEnded,
    EndDaemon,
    Exit,
    FromDriver,
    FromProgram,
    Launch,
    Member,
    RankProxy,
    StartDaemon,
    decode_from_driver,
    encode,
)
from pyhvd.job.mpi.flavour import Flavour
from pyhvd.job.mpi.openmpi import launch_agent, rank_proxy
from pyhvd.job.mpi.openmpi.daemon import DaemonError, daemon_environment, localise
from pyhvd.job.mpi.openmpi.local_server import VARIABLES, LocalServer, call_server, tell
from pyhvd.job.mpi.openmpi.rendezvous import MpiexecRendezvous, command_line, environment, find
from pyhvd.job.mpi.openmpi.served_command import ServedCommand
from pyhvd.job.mpi.pmi import PmiError, PmiServer
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, OTHER
from pyhvd.job.mpi.rendezvous import assign
from pyhvd.job.process.exit_report import EXIT, SIGNAL
from pyhvd.transport.tcp.connection import Connection
from pyhvd.transport.tcp.session import ChannelError, Role, Session

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Spark's ranks need Linux")
_PATIENCE_S = 30.0
_FIND_LIBRARY = "pyhvd.job.mpi.openmpi.rendezvous.find_library"

PROXY = """/bin/sh -c 'exec "$_PYHVD_JOB_PYTHON" -P -m pyhvd.job.mpi.openmpi.rank_proxy'"""


def test_command_line_of_open_mpi_4() -> None:
    command = command_line("/usr/bin/mpiexec", {"ha": 2}, [], "4.1.4")
    assert command.partition(" && exec ")[2] == (
        '/usr/bin/mpiexec --leave-session-attached --mca plm rsh --mca plm_rsh_agent "$TMPDIR"/agent'
        f" --mca plm_rsh_no_tree_spawn 1 --mca plm_rsh_num_concurrent 2 --host ha:2 --wdir / -n 2 {PROXY}"
    )


def test_command_line_of_open_mpi() -> None:
    command = command_line("/driver/mpi/bin/mpiexec", {"ha": 2, "hb": 1}, ["--map-by", "node"], "5.0.11")
    assert command.partition(" && exec ")[2] == (
        "/driver/mpi/bin/mpiexec --leave-session-attached --prtemca plm ssh --prtemca plm_ssh_agent"
        ' "$TMPDIR"/agent --prtemca plm_ssh_no_tree_spawn 1 --prtemca plm_ssh_num_concurrent 3'
        f" --host ha:2,hb:1 --wdir / --map-by node -n 3 {PROXY}"
    )


def test_the_agent_is_a_program_of_the_job_alone(tmp_path: Path) -> None:
    command = command_line("/bin/echo", {"h": 1}, [], "5.0.11")
    env = {"TMPDIR": str(tmp_path), "PATH": os.defpath}
    said = subprocess.run(["/bin/sh", "-c", command], env=env, capture_output=True, text=True, check=True)
    assert f"plm_ssh_agent {tmp_path}/agent --prtemca" in said.stdout
    program = tmp_path / "agent"
    assert stat.S_IMODE(program.stat().st_mode) == 0o700
    assert (
        program.read_text()
        == f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P -m pyhvd.job.mpi.openmpi.launch_agent "$@"\n'
    )


def test_environment_of_mpiexec() -> None:
    given = {"PMIX_RANK": "0", "SLURM_JOBID": "7", "OMPI_MCA_pml": "ucx", "A": "b"}
    env = environment(given, "5.0.11", {"OMPI_MCA_btl": "self,tcp", "PATH": "/ranks"})
    assert (env["OMPI_MCA_pml"], env["OMPI_MCA_btl"], env["A"]) == ("ucx", "self,tcp", "b")
    assert not {"PMIX_RANK", "SLURM_JOBID", "PATH"} & env.keys()
    new, old = environment({}, "5.0.11"), environment({}, "4.1.4")
    assert (new["OMPI_MCA_btl"], new["PRTE_MCA_rmaps_default_mapping_policy"]) == ("self,sm,tcp", "slot")
    assert (old["OMPI_MCA_btl"], old["OMPI_MCA_rmaps_base_mapping_policy"]) == ("self,vader,tcp", "slot")
    assert not any(name.startswith("PRTE_") for name in old)


def test_environment_of_a_daemon() -> None:
    env = daemon_environment({"OMPI_X": "1", "OMPI_MCA_pml": "ucx", "A": "b"})
    assert (env["A"], env["OMPI_MCA_pml"], env["_PYHVD_JOB_PYTHON"]) == ("b", "ucx", sys.executable)
    assert "OMPI_X" not in env
    assert env["HOME"] == "/"


@pytest.mark.parametrize("environ", [{}, {"_PYHVD_JOB_SOCKET": "/7", "_PYHVD_JOB_KEY": "no key"}])
def test_a_program_that_no_job_has_started(environ: dict[str, str]) -> None:
    with pytest.raises(ChannelError, match=r"a job of pyhvd starts this program; do not start it by hand"):
        call_server(environ)


def test_a_program_whose_job_is_over(tmp_path: Path) -> None:
    environ = {"_PYHVD_JOB_SOCKET": str(tmp_path / "gone"), "_PYHVD_JOB_KEY": "ab" * 32}
    with pytest.raises(ChannelError, match=r"the job of pyhvd is over \(.*/gone: "):
        call_server(environ)
    assert environ == {}


class Server:
    """A local server, which a thread of its own serves."""

    def __init__(self, folder: Path) -> None:
        self.heard: list[FromProgram] = []
        self.server = LocalServer(str(folder), self._hear)
        self.environ = self.server.variables
        self._over = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _hear(self, program: Connection, message: FromProgram) -> None:
        self.heard.append(message)
        tell(program, Exit(3))

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            self.server.register(selector)
            while not self._over:
                for key, _ in selector.select(0.01):
                    key.data()

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self.server.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    served = Server(tmp_path)
    yield served
    served.close()


def test_a_program_and_its_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    assert launch_agent.run("test", lambda: Launch("ha", "prted")) == 3
    assert server.heard == [Launch("ha", "prted")]
    assert not VARIABLES & os.environ.keys()


def test_nothing_is_decoded_before_the_program_has_proved_the_key(server: Server) -> None:
    path = server.environ["_PYHVD_JOB_SOCKET"]
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(path)
        stranger.sendall(encode(Launch("ha", "prted")) * 9)
        assert stranger.recv(1) == b""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(path)
        connection = Connection(peer, Session(bytes(32), Role.CLIENT))
        with pytest.raises(ChannelError):
            connection.shake_hands(_PATIENCE_S)
    assert server.heard == []


def test_a_message_that_no_program_sends(server: Server) -> None:
    program = call_server(server.environ)
    program.send(encode(Exit(0)))
    until = time.monotonic() + _PATIENCE_S
    while program.open and time.monotonic() < until:
        program.wait(0.1)
        program.pump_in()
    assert not program.open
    program.close()
    assert server.heard == []


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
    with pytest.raises(DaemonError, match=r"no prted on this host \(/nonesuch\): .*pyhvd\[openmpi\]"):
        localise(PRTED, "/d/mpi", ["/nonesuch"])


def test_what_mpiexec_adds_goes_to_the_rank() -> None:
    daemon = {"PATH": "/bin", "HOME": "/root", "MODE": "a"}
    mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    environ = daemon | mpi | {"PATH": "/mpi:/bin", "MODE": "b", "PWD": "/"}
    assert rank_proxy.introduce(environ, daemon) == RankProxy(3, 1, mpi | {"MODE": "b"})


def test_the_key_does_not_go_to_the_rank() -> None:
    environ = dict.fromkeys(VARIABLES, "secret") | {"OMPI_COMM_WORLD_RANK": "0"}
    assert rank_proxy.introduce(environ, {}).env == {"OMPI_COMM_WORLD_RANK": "0"}


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
    monkeypatch.setattr(_FIND_LIBRARY, lambda: Flavour(family, "5.0", vendor))
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
    placements = assign(Member(index, 0, host, host) for index, host in enumerate(hosts))
    for placement in placements:
        alike = [other for other in placements if other.host == placement.host]
        assert (placement.local_rank, placement.local_size) == (alike.index(placement), len(alike))


def test_a_barrier_that_cannot_fill() -> None:
    server = PmiServer([0, 0])
    assert not server.handle(0, "cmd=barrier_in")
    with pytest.raises(PmiError, match="rank 1 has ended without taking part in MPI, but rank 0 waits"):
        server.leave(1)
    other = PmiServer([0, 0])
    other.leave(1)
    with pytest.raises(PmiError, match="rank 0 waits"):
        other.handle(0, "cmd=barrier_in")


class Recorder:
    """A driver, and connections to launch agents; all record what they receive."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.told: list[tuple[Any, FromDriver]] = []
        self.blamed: list[tuple[int, str, int, str]] = []

    def tell_rank(self, rank: int, message: FromDriver) -> None:
        self.told.append((f"rank {rank}", message))

    def tell_agent(self, index: int, message: FromDriver) -> None:
        self.told.append((f"agent {index}", message))

    def blame(self, rank: int, text: str, code: int, kind: str = EXIT) -> None:
        self.blamed.append((rank, text, code, kind))

    def program(self, name: str) -> Any:
        told = self.told

        class Line:
            open = authenticated = True

            def send(self, record: bytes) -> None:
                told.append((name, decode_from_driver(record)))

        return Line()


def agent(index: int) -> Peer:
    """Return the connection to an agent, on which nothing is sent."""
    members = {member.index: member for group in GROUPS for member in group}
    return Peer(None, members[index])  # type: ignore[arg-type]


GROUPS = [[Member(0, 0, "aa", "first"), Member(2, 0, "aa", "first")], [Member(1, 0, "bb", "second", slots=2)]]


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI 5 is the library, also where mpi4py finds another one or none."""
    monkeypatch.setattr(_FIND_LIBRARY, lambda: Flavour(OPENMPI, "5.0.11", "Open MPI"))


@pytest.fixture
def driver() -> Any:
    return Recorder()


@pytest.fixture
def rendezvous(driver: Any) -> Any:
    made = MpiexecRendezvous("/bin/true", [])
    made.begin(driver, GROUPS)
    yield made
    made.close()


def pump(driver: Recorder, until: Callable[[], object]) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not until() and time.monotonic() < end:
        for key, _ in driver.selector.select(0.1):
            key.data()
    assert until()


def start_all(rendezvous: MpiexecRendezvous) -> None:
    """Register rank proxies as ``--map-by node`` starts them: neighbouring ranks are on different hosts."""
    for rank, host, local_rank in ((2, 0, 1), (0, 0, 0), (3, 1, 1), (1, 1, 0)):
        assert rendezvous.placements() == []
        rendezvous.hear(agent(host), RankProxy(rank, local_rank, {"R": str(rank)}))


def test_ranks_are_placed_as_mpiexec_says(rendezvous: MpiexecRendezvous, driver: Recorder) -> None:
    start_all(rendezvous)
    assert [(each.rank, each.index, each.host, each.local_rank) for each in rendezvous.placements()] == [
        (0, 0, "first", 0),
        (1, 1, "second", 0),
        (2, 2, "first", 1),
        (3, 1, "second", 1),
    ]
    assert rendezvous.variables(1) == {"R": "1"}
    assert driver.told == []
    assert driver.blamed == []


def test_the_first_agent_of_a_host_runs_its_daemon(rendezvous: MpiexecRendezvous, driver: Recorder) -> None:
    rendezvous._launch(driver.program("call"), Launch("hbb", "proxy 1"))
    rendezvous._launch(driver.program("again"), Launch("hbb", "proxy 1"))
    rendezvous._launch(driver.program("stranger"), Launch("elsewhere", "proxy 2"))
    rendezvous._launch(driver.program("proxy"), RankProxy(0, 0, {}))
    rendezvous.hear(agent(1), DaemonEnded(3))
    assert driver.told == [
        ("agent 1", StartDaemon("proxy 1", "/")),
        ("again", Exit(1)),
        ("stranger", Exit(1)),
        ("proxy", Exit(1)),
        ("call", Exit(3)),
    ]
    assert driver.blamed == []


@pytest.mark.parametrize("code", [-9, 137])
def test_a_daemon_that_is_killed_is_the_cause(
    rendezvous: MpiexecRendezvous, driver: Recorder, code: int
) -> None:
    rendezvous._launch(driver.program("call"), Launch("hbb", "proxy 1"))
    driver.told.clear()
    rendezvous.hear(agent(1), DaemonEnded(code))
    assert driver.told == [("call", Exit(137))]
    ((rank, text, _, kind),) = driver.blamed
    assert (rank, kind) == (-1, SIGNAL)
    assert text.startswith("mpiexec's daemon on host second was killed by SIGKILL")


_ABORT = """\
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_SELF
  Proc: [[36925,1],2]
  Errorcode: 9

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
"""


@pytest.mark.parametrize("cut", [0, 100, 170])
def test_a_rank_that_calls_mpi_abort(rendezvous: MpiexecRendezvous, driver: Recorder, cut: int) -> None:
    start_all(rendezvous)
    rendezvous._note_output(_ABORT[:cut].encode())
    rendezvous._note_output(_ABORT[cut:].encode())
    rendezvous._note_output(_ABORT.replace("9\n", "8\n").encode())
    assert driver.blamed == [(2, "called MPI_Abort with code 9", 9, EXIT)]


def test_an_abort_of_a_rank_that_is_unknown(rendezvous: MpiexecRendezvous, driver: Recorder) -> None:
    start_all(rendezvous)
    rendezvous._note_output(_ABORT.replace("1],2]", "1],4]").encode())
    assert driver.blamed == []


def test_the_command_of_mpiexec_is_shown(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_btl", "self,tcp")
    shown: list[str] = []
    made = MpiexecRendezvous("/bin/true", ["--map-by", "node"], None, {"OMPI_MCA_pml": "cm"}, shown.append)
    made.begin(driver, GROUPS)
    made.close()
    (line,) = shown
    assert "OMPI_MCA_btl=self,tcp OMPI_MCA_pml=cm " in line
    assert " /bin/true --leave-session-attached " in line
    assert " --host haa:2,hbb:2 --wdir / --map-by node -n 4 /bin/sh -c " in line
    assert "KEY" not in line


@pytest.mark.parametrize("said", [(4, 0), (-1, 0), (0, 1), (1, 0), (1, 2), (1, -1)])
def test_a_proxy_of_a_rank_that_is_taken_or_unknown(
    rendezvous: MpiexecRendezvous, driver: Recorder, said: tuple[int, int]
) -> None:
    rendezvous.hear(agent(0), RankProxy(0, 0, {}))
    rendezvous.hear(agent(0), RankProxy(*said, {}))
    assert rendezvous.placements() == []
    ((rank, text, _, _),) = driver.blamed
    assert rank == -1
    assert text == (
        f"mpiexec wants rank {said[0]} of 4 to be local rank {said[1]} on host first, which has 2 of the"
        " job's ranks: check the arguments for mpiexec"
    )


def test_proxies_end_after_the_last_rank_and_daemons_are_ended(
    rendezvous: MpiexecRendezvous, driver: Recorder
) -> None:
    rendezvous._launch(driver.program("call"), Launch("haa", "proxy"))
    start_all(rendezvous)
    driver.told.clear()
    for rank in range(4):
        assert driver.told == []
        rendezvous.leave(rank)
    assert driver.told == [("agent 0", Exit(0))]
    rendezvous.check(time.monotonic())
    assert len(driver.told) == 1
    rendezvous.check(time.monotonic() + 60)
    assert driver.told[1:] == [("agent 0", EndDaemon())]


def test_an_mpiexec_that_ends_too_early_says_why(driver: Any, tmp_path: Path) -> None:
    program = tmp_path / "mpiexec"
    program.write_text("#!/bin/sh\necho unknown option >&2\nexit 3\n")
    program.chmod(0o755)
    rendezvous = MpiexecRendezvous(str(program), [])
    rendezvous.begin(driver, GROUPS)
    try:
        pump(driver, lambda: driver.blamed)
    finally:
        rendezvous.close()
    ((rank, text, _, _),) = driver.blamed
    assert rank == -1
    assert text == f"{program} exited with code 3 before the ranks; its output:\nunknown option"
    assert "has not started all ranks on first, second. Its daemons there must" in rendezvous.waits_for()


def test_open_mpi_needs_hosts_with_names_of_their_own(driver: Any) -> None:
    rendezvous = MpiexecRendezvous("/bin/true", [])
    with pytest.raises(
        LaunchError, match="Open MPI identifies hosts by name, but several hosts have the name same"
    ):
        rendezvous.begin(driver, [[Member(0, 0, "aa", "same")], [Member(1, 0, "bb", "same")]])


_SLOW = "trap 'sleep 0.2; echo tidied; exit 5' TERM; echo ready; while :; do sleep 0.05; done"


def run_command(
    command: str, said: list[bytes], ended: list[int | None], grace: float = 1.0
) -> tuple[ServedCommand, Recorder]:
    recorder = Recorder()
    process = ServedCommand(
        command, os.environ, lambda *_: None, said.append, lambda: ended.append(process.code), grace
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


def test_a_command_without_grace_is_killed_at_once() -> None:
    said: list[bytes] = []
    ended: list[int | None] = []
    process, recorder = run_command(_SLOW, said, ended, grace=0.0)
    try:
        pump(recorder, lambda: said)
        process.end()
        pump(recorder, lambda: ended)
    finally:
        process.close()
    assert ended == [-9]


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
    process, recorder = run_command('touch "$TMPDIR/it" && ls -ld "$TMPDIR" && echo "$TMPDIR"', said, ended)
    try:
        pump(recorder, lambda: ended)
        listed, name = b"".join(said).decode().splitlines()
        assert listed.startswith("drwx------")
        assert Path(name).name.startswith("pyhvd-")
        assert not Path(name).exists()
    finally:
        process.close()
    assert ended == [0]

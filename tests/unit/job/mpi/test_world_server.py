"""The world server with scripted ranks, in a thread of the test."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from pyhvd.job.mpi import world_server
from pyhvd.job.mpi.pmi import MAX_LINE
from pyhvd.job.mpi.world_server import Gathering, WorldError, hello, read_place, serve
from pyhvd.transport.tcp.connection import Connection, connect_once, listen, new_key
from pyhvd.transport.tcp.session import ChannelError, Role, Session

SECONDS = 10.0
NO_PROCESS = (1 << 31) - 1


@dataclass
class Served:
    """A server in a thread, and what the ranks need."""

    size: int
    key: bytes
    port: int
    first: socket.socket
    thread: threading.Thread
    codes: list[int] = field(default_factory=list)

    def come(self, rank: int, host: str = "a", pid: int = NO_PROCESS) -> Connection:
        """Return the connection of a rank that has sent its hello."""
        if rank:
            connection = connect_once(("127.0.0.1", self.port), self.key, SECONDS)
        else:
            connection = Connection(self.first, Session(self.key, Role.CLIENT))
            connection.shake_hands(SECONDS)
        connection.send(hello(rank, self.size, pid, host * 16))
        return connection

    def end(self) -> int:
        """Return the server's exit code, once it has ended."""
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        return self.codes[0]


@contextmanager
def served(size: int, seconds: float = SECONDS) -> Iterator[Served]:
    key, listener = new_key(), listen("127.0.0.1", 64)
    first, own = socket.socketpair()
    gathering = Gathering(size, key, own, [listener], time.monotonic() + seconds)
    thread = threading.Thread(target=lambda: it.codes.append(serve(gathering)), daemon=True)
    it = Served(size, key, listener.getsockname()[1], first, thread)
    thread.start()
    yield it
    first.close()
    it.end()


@pytest.fixture
def no_mercy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server kill ranks in MPI_Init at once."""
    monkeypatch.setattr(world_server, "_MERCY_S", 0.2)


def answer(connection: Connection) -> bytes:
    """Return the record that the server sends; empty if it closes the connection."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        connection.wait(0.1)
        if records := connection.pump_in():
            return records[0]
        if not connection.open:
            return b""
    raise AssertionError("the server does not answer")


def seated(*connections: Connection) -> list[socket.socket]:
    """Return the sockets of ranks that have received their places."""
    sockets = []
    for connection in connections:
        read_place(answer(connection))
        sock = connection.detach()
        sock.setblocking(True)
        sock.settimeout(SECONDS)
        sockets.append(sock)
    return sockets


def ask(sock: socket.socket, line: str) -> bytes:
    sock.sendall(f"{line}\n".encode())
    return sock.recv(4096)


def test_ranks_get_places_and_answers_and_the_server_ends_with_them() -> None:
    with served(4) as it:
        connections = [it.come(rank, host) for rank, host in ((2, "a"), (1, "b"), (3, "b"), (0, "a"))]
        two, one, three, zero = connections
        assert [read_place(answer(each)) for each in (zero, one, two, three)] == [
            (0, 2),
            (0, 2),
            (1, 2),
            (1, 2),
        ]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", it.port), 1)
        sockets = [each.detach() for each in connections]
        for sock in sockets:
            sock.settimeout(SECONDS)
        found = ask(sockets[0], "cmd=get kvsname=w key=PMI_process_mapping")
        assert found == b"cmd=get_result rc=0 msg=success value=(vector,(0,2,1),(0,2,1))\n"
        for sock in sockets:
            sock.sendall(b"cmd=barrier_in\n")
        assert {sock.recv(100) for sock in sockets} == {b"cmd=barrier_out\n"}
        for sock in sockets:
            assert ask(sock, "cmd=finalize") == b"cmd=finalize_ack\n"
            sock.close()
        assert it.end() == 0


def test_strangers_neither_enter_nor_delay() -> None:
    with served(2) as it:
        silent = [socket.create_connection(("127.0.0.1", it.port), 1) for _ in range(3)]
        with pytest.raises(ChannelError):
            connect_once(("127.0.0.1", it.port), new_key(), SECONDS)
        speaker = socket.create_connection(("127.0.0.1", it.port), 1)
        speaker.sendall(b"cmd=init pmi_version=1 pmi_subversion=1\n" * 100)
        begin = time.monotonic()
        sockets = seated(*(it.come(rank) for rank in range(2)))
        assert time.monotonic() - begin < 2.0
        for sock in (*silent, *sockets, speaker):
            sock.close()


def test_too_many_strangers_lose_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_server, "_STRANGERS", 2)
    with served(2) as it:
        silent = [socket.create_connection(("127.0.0.1", it.port), 1) for _ in range(8)]
        for sock in silent:
            sock.settimeout(SECONDS)
        assert silent[0].recv(1) == b""
        sockets = seated(*(it.come(rank) for rank in range(2)))
        for sock in (*silent, *sockets):
            sock.close()


def test_silent_peers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_server, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(world_server, "_TICK_S", 0.05)
    with served(2) as it:
        with socket.create_connection(("127.0.0.1", it.port), 1) as silent:
            silent.settimeout(SECONDS)
            assert silent.recv(1) == b""
        it.first.close()
        assert it.end() == 1


def test_the_deadline_names_the_missing_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    with served(5, seconds=0.5) as it:
        connections = [it.come(rank) for rank in (0, 2)]
        for each in connections:
            with pytest.raises(
                WorldError, match=r"ranks 1, 3-4 of 5 did not come within [01] s: each rank must"
            ):
                read_place(answer(each))
            each.close()
        assert it.end() == 1
    assert "pyhvd: ranks 1, 3-4 of 5 did not come" in capfd.readouterr().err


def test_rank_0_takes_the_others_along() -> None:
    with served(3) as it:
        other, zero = it.come(1), it.come(0)
        zero.close()
        assert b"rank 0 has ended" in answer(other)
        assert it.end() == 1


def test_a_rank_that_leaves_early_may_come_again() -> None:
    with served(2) as it:
        it.come(1).close()
        again = it.come(1)
        newest = it.come(1)
        assert answer(again) == b""
        for sock in seated(it.come(0), newest):
            sock.close()


@pytest.mark.parametrize(
    ("rank", "size", "pid"), [(1, 3, NO_PROCESS), (2, 2, NO_PROCESS), (0, 2, NO_PROCESS), (1, 2, 0)]
)
def test_a_rank_of_another_world_is_refused(rank: int, size: int, pid: int) -> None:
    with served(2) as it:
        connection = connect_once(("127.0.0.1", it.port), it.key, SECONDS)
        connection.send(hello(rank, size, pid, "a" * 16))
        with pytest.raises(WorldError, match=f"rank {rank} of {size} has no place in a world of 2 ranks"):
            read_place(answer(connection))
        connection.close()


@pytest.mark.usefixtures("no_mercy")
@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "rank 1 has ended without taking part in MPI, but rank 0 waits"),
        (world_server.UP, "rank 1 has ended without taking part in MPI, but rank 0 waits"),
        (b"x" * (3 * MAX_LINE), "rank 1 wrote to the descriptor of its PMI server"),
        (b"cmd=spawn\n", "'spawn', which pyhvd does not support"),
        (b"cmd=abort exitcode=3\n", ""),
    ],
)
def test_a_failure_ends_the_wait_of_others(line: bytes, why: str, capfd: pytest.CaptureFixture[str]) -> None:
    with served(2) as it:
        zero, one = seated(it.come(0), it.come(1))
        zero.sendall(world_server.UP + b"cmd=barrier_in\n")
        time.sleep(0.1)
        one.sendall(line)
        if line in (b"", world_server.UP):
            one.close()
        assert zero.recv(100) == b""
        assert it.end() == (1 if why else 0)
        zero.close()
        one.close()
    assert why in capfd.readouterr().err


def test_a_place_that_pmi_cannot_describe_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyhvd.job.mpi.pmi._MAX_MAPPING", 10)
    with served(2) as it:
        for connection in [it.come(rank, host) for rank, host in enumerate("ab")]:
            with pytest.raises(WorldError, match="which of 2 ranks share the 2 hosts"):
                read_place(answer(connection))
            connection.close()


@pytest.mark.usefixtures("no_mercy")
def test_mpi_abort_ends_all_ranks_of_the_host() -> None:
    with subprocess.Popen(["sleep", "100"]) as computing, served(2) as it:
        one, zero = seated(it.come(1), it.come(0, pid=computing.pid))
        for sock in (zero, one):
            sock.sendall(world_server.UP)
        time.sleep(0.1)
        one.sendall(b"cmd=abort exitcode=3\n")
        assert computing.wait(SECONDS) == -signal.SIGKILL
        zero.close()
        one.close()


@pytest.mark.usefixtures("no_mercy")
@pytest.mark.parametrize("up", [False, True])
def test_a_rank_in_mpi_init_is_killed_if_another_has_ended(
    up: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["sleep", "100"]) as waiting, served(2) as it:
        one, zero = seated(it.come(1), it.come(0, pid=waiting.pid))
        if up:
            zero.sendall(world_server.UP)
            time.sleep(0.1)
        one.close()
        assert zero.recv(100) == b""
        assert it.end() == 1
        assert waiting.poll() is None if up else waiting.wait(SECONDS) == -signal.SIGKILL
        waiting.kill()
    assert "rank 1 has ended before all ranks had left MPI_Init" in capfd.readouterr().err

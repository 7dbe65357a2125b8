"""The driver and the tasks in one process: ranks are real processes, Spark is played by threads."""

from __future__ import annotations

import errno
import math
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import cloudpickle
import pytest

from pyhvd.common.kernel import host_hash
from pyhvd.common.text import MAX_TEXT
from pyhvd.errors import RankFailedError, RemoteError
from pyhvd.job.agent.agent import Agent
from pyhvd.job.agent.rank_process import RankProcess
from pyhvd.job.connections import SILENT_S, ConnectionServer, Peer
from pyhvd.job.errors import LaunchError, StartTimeoutError
from pyhvd.job.messages import (
    OUTPUT_CREDIT,
    Beat,
    Ended,
    Member,
    Pmi,
    RankOutput,
    Start,
    Stop,
    decode_from_driver,
    encode,
)
from pyhvd.job.mpi.rendezvous import PmiRendezvous
from pyhvd.job.rank.pickles import dump
from pyhvd.spark import errors as spark_errors
from pyhvd.spark.api import as_spark_errors
from pyhvd.spark.errors import SparkError, reason_of
from pyhvd.spark.job import CollectJob, serve_tasks
from pyhvd.transport.tcp.connection import HANDSHAKE_S, Connection, Secret, connect, new_key
from pyhvd.transport.tcp.session import ChannelError, Role, Session
from tests.spark_services import PATIENCE_S, Bench, EagerDisplay, drop
from tests.waiting import wait_gone, wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Spark's ranks need Linux")


def rank() -> int:
    return int(os.environ["PMI_RANK"])


def test_results_in_rank_order_whatever_the_tasks_order() -> None:
    bench = Bench(rank, 3, drop)
    assert bench.run(bench.task(2), bench.task(0), bench.task(1)) == [0, 1, 2]


def test_an_agent_owns_several_ranks() -> None:
    shown: list[tuple[int, int, bytes]] = []

    def local_rank() -> tuple[str, str]:
        print(os.environ["PMI_RANK"])
        return os.environ["MPI_LOCALRANKID"], os.environ["MPI_LOCALNRANKS"]

    bench = Bench(local_rank, 5, lambda *what: shown.append(what), agents=2)
    ended: list[list[int]] = []

    def agent(index: int, slots: int) -> Callable[[], Any]:
        def run() -> Any:
            driver = connect(bench.addresses, bench.secret.reveal(), PATIENCE_S)
            with closing(driver), closing(Agent(driver, RankProcess)) as made:
                results = made.run(Member(index, 0, str(index), f"host {index}", slots))
                driver.finish(PATIENCE_S)
            ended.append(sorted(results))
            return list(results.items())

        return run

    results = bench.run(agent(0, 3), agent(1, 2))
    assert results == [("0", "3"), ("1", "3"), ("2", "3"), ("0", "2"), ("1", "2")]
    assert sorted(ended) == [[0, 1, 2], [3, 4]]
    assert sorted(shown) == [(rank, 1, b"%d\n" % rank) for rank in range(5)]


def test_where_so_many_files_are_open_that_select_knows_no_other() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process may not open as many files")
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        for _ in range(1024):
            stack.enter_context(open(os.devnull))
        bench = Bench(rank, 2, drop)
        assert bench.run(bench.task(0), bench.task(1)) == [0, 1]


def test_output_reaches_the_driver_before_the_results() -> None:
    shown: list[tuple[int, int, bytes]] = []
    bench = Bench(lambda: print("hello"), 1, lambda *what: shown.append(what))
    assert bench.run(bench.task(0)) == [None]
    assert shown == [(0, 1, b"hello\n")]


def _print_much() -> None:
    for number in range(20_000):
        print(f"{number:060d}")
    os.write(1, b"the last line, which does not end")


def test_who_reads_the_output_may_stand_still_for_longer_than_the_driver_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYHVD_DRIVER_TIMEOUT", "1.5")
    begin = time.monotonic()
    display = Slow()
    bench = Bench(_print_much, 2, drop, display=display)
    assert bench.run(bench.task(0), bench.task(1), lambda: display.let_through_after(3)) == [None, None]
    assert time.monotonic() - begin >= 3
    for rank in (0, 1):
        lines = b"".join(data for who, _, data in display.seen if who == rank).splitlines()
        assert lines[:-1] == [b"%060d" % number for number in range(20_000)]
        assert lines[-1] == b"the last line, which does not end"
    # The contents of a rank's pipe, and of one read, come on top of the credit.
    assert display.most_before <= 2 * (OUTPUT_CREDIT + (1 << 17))


class Slow(EagerDisplay):
    """A display that accepts all output, and reports it as shown only after the test allows it."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.seen: list[tuple[int, int, bytes]] = []
        self.most_before = 0
        self._open = False
        self._held: list[tuple[int, int, bytes]] = []
        self._lock = threading.Lock()

    def write(self, rank: int, stream: int, data: bytes) -> None:
        with self._lock:
            self.seen.append((rank, stream, data))
            if not self._open:
                self._held.append((rank, stream, data))
                self.most_before += len(data)
                return
            super().write(rank, stream, data)

    def take_shown(self) -> dict[int, int]:
        with self._lock:
            return super().take_shown()

    def let_through_after(self, seconds: float) -> None:
        time.sleep(seconds)
        with self._lock:
            self._open = True
            for what in self._held:
                super().write(*what)


def _fail_while_a_thread_prints() -> None:
    def print_on() -> None:
        while True:
            print("x" * 1000)

    threading.Thread(target=print_on, daemon=True).start()
    time.sleep(2)  # by now the rank waits
    raise LookupError("not here")


def test_a_failure_does_not_wait_for_who_reads_the_output() -> None:
    buffered = {"PYTHONUNBUFFERED": ""}
    bench = Bench(_fail_while_a_thread_prints, 1, drop, display=Slow(), env=buffered)
    begin = time.monotonic()
    with pytest.raises(RankFailedError, match="LookupError: not here"):
        bench.run(bench.task(0))
    assert time.monotonic() - begin < PATIENCE_S / 2


def test_nothing_is_lost_of_what_comes_after_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bytes] = []
    bench = Bench(rank, 1, lambda rank, stream, data: shown.append(data))
    monkeypatch.setattr(bench.driver, "stop", lambda *_: None)  # stop() would keep listening

    def much_then_a_result() -> Any:
        connection = bench.register(0)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if any(isinstance(decode_from_driver(each), Start) for each in connection.pump_in()):
                break
            time.sleep(0.01)
        for _ in range(64):
            connection.send(encode(RankOutput(0, 1, b"x" * 65536)))
        connection.send(encode(Ended(0)))
        threading.Thread(target=connection.finish, args=(PATIENCE_S,)).start()
        return 0, b"".join(dump("result"))

    assert bench.run(much_then_a_result) == ["result"]
    assert sum(map(len, shown)) == 64 * 65536


def _raise() -> None:
    if rank() == 1:
        raise LookupError("not here")
    time.sleep(1000)


def test_the_first_failure_ends_all_ranks_and_has_its_traceback() -> None:
    bench = Bench(_raise, 2, drop)
    with pytest.raises(
        RankFailedError, match=r"rank 1 of 2 on host .* failed: LookupError: not here"
    ) as caught:
        bench.run(bench.task(0), bench.task(1))
    assert caught.value.rank == 1
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert 'raise LookupError("not here")' in cause.traceback


def _raise_without_room_for_threads() -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse  # type: ignore[method-assign]
    raise KeyError("the rank's own")


def test_a_rank_without_room_for_a_thread_tells_its_failure() -> None:
    bench = Bench(_raise_without_room_for_threads, 1, drop)
    with pytest.raises(RankFailedError, match='failed: KeyError: "the rank\'s own"'):
        bench.run(bench.task(0))


def test_a_newer_attempt_takes_the_place_of_an_older_one() -> None:
    bench = Bench(rank, 2, drop)
    stopped: list[str] = []

    def old_attempt() -> None:
        connection = bench.register(0)
        registered.set()
        stopped.append(wait_for_stop(connection).reason)

    def new_attempt() -> tuple[int, bytes] | None:
        registered.wait(PATIENCE_S)
        time.sleep(0.1)
        return bench.task(0, attempt=1)()

    def other() -> tuple[int, bytes] | None:
        while not stopped:
            time.sleep(0.01)
        return bench.task(1)()

    registered = threading.Event()
    assert bench.run(old_attempt, new_attempt, other) == [0, 1]
    assert stopped == ["a newer attempt of this task has registered"]


def test_an_older_attempt_that_comes_late_is_sent_away() -> None:
    bench = Bench(rank, 2, drop)
    stopped: list[str] = []

    def old_attempt() -> None:
        wait_until(lambda: bench.driver.machine.pool.missing == [1])
        stopped.append(wait_for_stop(bench.register(0)).reason)

    def other() -> tuple[int, bytes] | None:
        wait_until(lambda: bool(stopped))
        return bench.task(1)()

    assert bench.run(old_attempt, bench.task(0, attempt=1), other) == [0, 1]
    assert stopped == ["a newer attempt of this task has registered"]


def test_a_task_that_comes_after_all_have_registered_is_sent_away(tmp_path: Path) -> None:
    stopped: list[str] = []
    file = tmp_path / "end"

    def wait_for_file(path: str = str(file), patience: float = PATIENCE_S) -> None:
        until = time.monotonic() + patience
        while not os.path.exists(path) and time.monotonic() < until:
            time.sleep(0.01)

    bench = Bench(wait_for_file, 1, drop)

    def late() -> None:
        wait_until(lambda: bool(bench.driver.placements))
        stopped.append(wait_for_stop(bench.register(0, attempt=1)).reason)
        file.touch()

    assert bench.run(bench.task(0), late) == [None]
    assert stopped == ["all tasks of the job have registered already, and none can be replaced"]


def test_a_task_that_comes_as_the_job_ends_is_told_why_it_ended() -> None:
    bench = Bench(rank, 2, drop, start_timeout=0.5)
    times_out_once_only_these_are_missing(bench, [1])
    ending, told = threading.Event(), threading.Event()
    stopped: list[Stop] = []

    def lingers() -> None:
        connection = bench.register(0)
        until = time.monotonic() + PATIENCE_S
        while not told.wait(0.05) and time.monotonic() < until:
            connection.send(encode(Beat()))
            if any(isinstance(decode_from_driver(each), Stop) for each in connection.pump_in()):
                ending.set()
        connection.close()

    def late() -> None:
        assert ending.wait(PATIENCE_S)
        stopped.append(wait_for_stop(bench.register(1)))
        told.set()

    with pytest.raises(StartTimeoutError):
        bench.run(lingers, late)
    assert stopped == [Stop("the test is over", quietly=True)]


def wait_for_stop(connection: Connection) -> Stop:
    until = time.monotonic() + PATIENCE_S
    while connection.open and time.monotonic() < until:
        for record in connection.pump_in():
            message = decode_from_driver(record)
            if isinstance(message, Stop):
                connection.close()
                return message
        time.sleep(0.01)
    raise AssertionError("was not stopped")


def test_a_task_that_falls_silent_is_missed() -> None:
    bench = Bench(lambda: time.sleep(1000), 2, drop)
    open_connections: list[Connection] = []
    text = rf"rank 1 of 2 on host b \(Spark task 1\) has been silent for {SILENT_S:g} s"
    begin = time.monotonic()
    with pytest.raises(RankFailedError, match=text):
        bench.run(bench.task(0), lambda: open_connections.append(bench.register(1, host="b")))
    assert time.monotonic() - begin >= SILENT_S
    open_connections[0].close()


def test_the_end_of_a_job_does_not_wait_for_a_silent_task() -> None:
    bench = Bench(rank, 2, drop, start_timeout=3)
    open_connections: list[Connection] = []

    def silent() -> None:
        open_connections.append(bench.register(1))
        time.sleep(3.5)

    begin = time.monotonic()
    with pytest.raises(StartTimeoutError):
        bench.run(silent)
    assert time.monotonic() - begin < SILENT_S
    open_connections[0].close()


def times_out_once_only_these_are_missing(bench: Bench, missing: list[int]) -> None:
    """Let the start time out only once exactly these ranks are missing, however slow the machine is."""
    machine: Any = bench.driver.machine
    inner = machine.tick
    machine.tick = lambda now: inner(now if machine.pool.missing in (missing, []) else -math.inf)


def test_tasks_that_do_not_come_are_named() -> None:
    bench = Bench(rank, 4, drop, start_timeout=0.5)
    times_out_once_only_these_are_missing(bench, [1, 3])
    text = r"2 of 4 Spark tasks have not started within 0.5 s: index 1, 3\. .*PYHVD_SPARK_START_TIMEOUT"
    with pytest.raises(StartTimeoutError, match=text) as caught:
        bench.run(bench.task(0), bench.task(2))
    assert caught.value.missing == [1, 3]


class Pipe:
    """A Spark job that fails when fail() is called."""

    def __init__(self) -> None:
        self._wake, self._waker = os.pipe()
        self.done = False

    def fileno(self) -> int:
        return self._wake

    def results(self) -> list[tuple[int, bytes]]:
        raise SparkError("Spark ended the job")

    def fail(self) -> None:
        self.done = True
        os.close(self._waker)

    def close(self) -> None:
        os.close(self._wake)


def test_the_end_of_a_job_waits_for_its_tasks_when_spark_has_ended_it() -> None:
    bench, job = Bench(rank, 2, drop, start_timeout=0.5), Pipe()
    times_out_once_only_these_are_missing(bench, [1])
    connections: list[Connection] = []
    caller = threading.Thread(target=lambda: connections.append(bench.register(0)))
    caller.start()
    with pytest.raises(StartTimeoutError):
        serve_tasks(bench.driver, cast(Any, job))
    caller.join(PATIENCE_S)
    job.fail()
    with patch.object(bench.driver.connections, "turn", wraps=bench.driver.connections.turn) as turn:
        bench.driver.stop("the test", 1.0)
    assert 0 < turn.call_count < 50  # without messages each waits for a quarter of a second
    connections[0].close()
    bench.driver.close()
    bench.display.close()
    job.close()


def test_strangers_are_refused_and_disturb_nobody() -> None:
    bench = Bench(rank, 1, drop)

    def stranger() -> tuple[int, bytes] | None:
        with pytest.raises(ChannelError, match="no connection"):
            connect(bench.addresses, new_key(), 0.5)
        with socket.create_connection(bench.addresses[0]) as noise:
            noise.sendall(b"GET / HTTP/1.1\r\n\r\n")
        return bench.task(0)()

    assert bench.run(stranger) == [0]


def test_silent_strangers_lock_no_task_out() -> None:
    """There may be more of them than the driver keeps: the oldest goes for each that comes."""
    bench = Bench(rank, 1, drop)

    def come_late() -> tuple[int, bytes] | None:
        silent = [socket.create_connection(bench.addresses[0]) for _ in range(80)]
        try:
            return bench.task(0)()
        finally:
            for each in silent:
                each.close()

    assert bench.run(come_late) == [0]


def wait_for_peers(server: ConnectionServer, count: int) -> None:
    def there_are() -> bool:
        server.turn()
        return len(server.peers) == count

    wait_until(there_are, 10.0)


@pytest.mark.parametrize("strangers", [0, 3])
def test_a_driver_without_descriptors_rests(strangers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its listener stays ready: it does not look at it again and again, and drops strangers."""
    server = ConnectionServer(Secret(), ["127.0.0.1"], 1, lambda *_: None, lambda *_, waited: None)
    address = ("127.0.0.1", server.ports[0])
    silent = [socket.create_connection(address) for _ in range(strangers)]
    wait_for_peers(server, strangers)
    silent.append(socket.create_connection(address))
    tried: list[float] = []
    accept = socket.socket.accept

    def fail(_: socket.socket) -> tuple[socket.socket, object]:
        tried.append(time.monotonic())
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "accept", fail)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            server.turn()
    assert strangers < len(tried) <= strangers + 3
    assert server.peers == []
    assert socket.socket.accept is accept
    wait_for_peers(server, 1)
    server.close()
    for each in silent:
        each.close()


def test_a_driver_that_stood_still_judges_no_agent_by_that_time() -> None:
    """It does so by what it hears, or does not hear, from then on."""
    lost: list[str] = []
    server = ConnectionServer(
        Secret(), [], 1, lambda *_: None, lambda _, why, waited: lost.append(why), silent_s=1.5
    )
    ours, theirs = socket.socketpair()
    key = server.secret.reveal()
    with closing(server), closing(Connection(theirs, Session(key, Role.CLIENT))) as agent:
        peer = server.adopt(Connection(ours, Session(key, Role.SERVER)))
        while not agent.authenticated:
            agent.pump_out()
            agent.pump_in()
            server.turn()
        peer.member = Member(0, 0, "host", "name", 1)
        time.sleep(2.5)  # as if it were stopped, and all that it hears from
        server.turn()
        server.turn()
        assert not lost
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            server.turn()
        assert lost == ["has been silent for 1.5 s: its host is frozen, cut off or without power"]


def test_a_task_without_a_driver_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyhvd.transport.tcp.connection._AGAIN_S", HANDSHAKE_S)  # no second attempt
    bench = Bench(rank, 1, drop)
    bench.driver.close()
    with pytest.raises(ChannelError, match="no connection within"):
        bench.task(0)()


def test_the_spark_job_may_end_for_its_own_reasons() -> None:
    bench = Bench(rank, 2, drop)

    def fail() -> None:
        raise OSError("disk full")

    with pytest.raises(SparkError, match="Spark ended the job: disk full"):
        bench.run(fail)


def test_what_a_rank_has_started_goes_with_it(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def start_and_fail(path: str = str(pid_file)) -> None:
        import subprocess

        child = subprocess.Popen(["sleep", "1000"])
        with open(path, "w") as file:
            file.write(str(child.pid))
        raise RuntimeError("now")

    bench = Bench(start_and_fail, 1, drop)
    with pytest.raises(RankFailedError, match="RuntimeError: now"):
        bench.run(bench.task(0))
    pid = int(pid_file.read_text())
    wait_gone([pid])


def test_a_python_that_has_no_pyhvd(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho No module named pyhvd >&2\nexit 1\n")
    python.chmod(0o700)
    shown: list[tuple[int, int, bytes]] = []
    bench = Bench(rank, 1, lambda *what: shown.append(what), executable=str(python))
    with pytest.raises(RankFailedError, match=r"could not be started: its Python exited with code 1"):
        bench.run(bench.task(0))
    assert shown == [(0, 2, b"No module named pyhvd\n")]


class Broken(PmiRendezvous):
    """A rendezvous that has placements only after a task is lost, and then sends to the lost rank."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def begin(self, driver: Any, groups: Any) -> None:
        super().begin(driver, groups)
        self.service = driver
        self.begun.set()

    def placements(self) -> Any:
        lost = len(self.service.connections.peers) < 2
        return super().placements() if lost else []

    def check(self, now: float) -> None:
        if self.begun.is_set():
            self._driver.tell_rank(1, Pmi(1, "cmd=barrier_out\n"))


def test_a_task_that_is_lost_between_the_rendezvous_and_the_start_is_the_error() -> None:
    rendezvous = Broken()
    bench = Bench(lambda: time.sleep(1000), 2, drop, rendezvous=rendezvous)

    def leave() -> None:
        connection = bench.register(1, host="b")
        assert rendezvous.begun.wait(PATIENCE_S)
        connection.close()

    with pytest.raises(LaunchError, match=r"Spark task 1 on host b is lost"):
        bench.run(bench.task(0), leave)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            "Job aborted: PythonException: Traceback (most recent call last):\n"
            '  File "user.py", line 9, in bad\n    raise ValueError\nValueError: no luck\n\n\tat org.Runner',
            "ValueError: no luck",
        ),
        (
            "An error occurred.\n: SparkException: Job 3 cancelled\n\tat org.Scheduler",
            "SparkException: Job 3",
        ),
        (
            "Job aborted: PythonException: Traceback (most recent call last):\n"
            + '  File "user.py", line 9, in deep\n    deep()\n' * 100
            + "ValueError: no luck\n\n"
            + "\tat org.Runner\n" * 300,
            "ValueError: no luck",
        ),
        ("no executor", "no executor"),
        ("ValueError: " + "x" * 20_000, "ValueError: xxx"),
    ],
)
def test_what_spark_says_is_told_in_a_line(said: str, reason: str) -> None:
    assert reason in reason_of(RuntimeError(said))
    assert "\n" not in reason_of(RuntimeError(said))
    assert len(reason_of(RuntimeError(said))) < MAX_TEXT + 100


def test_an_error_is_not_lost_when_spark_cannot_be_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = CollectJob.__new__(CollectJob)
    job.group = "pyhvd.spark.run.7"
    job._over = threading.Event()
    job.context = cast(Any, SimpleNamespace(_jsc=None))
    monkeypatch.setattr("pyhvd.spark.job.END_S", 0.0)
    job.end()
    assert "Spark could not be told to end job group pyhvd.spark.run.7" in caplog.text
    assert "Spark has not ended job group pyhvd.spark.run.7 within 0 s" in caplog.text


def test_hosts_that_cannot_be_described_are_a_launch_error() -> None:
    hosts = [[Member(i, 0, str(i), "h")] * (1 + i % 2) for i in range(200)]
    driver: Any = None
    with pytest.raises(LaunchError, match="use as many ranks on each host"):
        PmiRendezvous().begin(driver, hosts)


def test_nothing_is_said_to_a_peer_that_is_gone() -> None:
    said: list[bytes] = []
    connection: Any = SimpleNamespace(open=True, send=said.append)
    peer = Peer(connection)
    peer.send(Stop("once"))
    connection.open = False
    peer.send(Stop("twice"))
    assert said == [encode(Stop("once"))]


def test_the_host_hash_is_stable_and_salted() -> None:
    assert host_hash() == host_hash()
    assert host_hash() != host_hash("other")


def test_the_secret_is_not_shown() -> None:
    secret = Secret()
    assert secret.reveal().hex() not in f"{secret} {secret!r}"
    assert cloudpickle.loads(cloudpickle.dumps(secret)).reveal() == secret.reveal()


def test_errors_of_the_job_reach_users_of_spark_as_spark_errors() -> None:
    with pytest.raises(spark_errors.StartTimeoutError, match="2 of 3 tasks") as late, as_spark_errors():
        raise StartTimeoutError("2 of 3 tasks", [0, 2])
    assert isinstance(late.value, SparkError)
    assert late.value.missing == [0, 2]
    with pytest.raises(SparkError, match="no host"), as_spark_errors():
        raise LaunchError("no host")
    own = SparkError("already")
    with pytest.raises(SparkError) as same, as_spark_errors():
        raise own
    assert same.value is own

"""The agent of a host between two jobs, and agents that wait for one."""

from __future__ import annotations

import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from pyhvd.job.agent.agent import AgentStoppedError
from pyhvd.job.agent.elastic_host import ElasticHost
from pyhvd.job.agent.host_agent import read_key, serve
from pyhvd.job.driver import kept_agents
from pyhvd.job.driver.agent_source import AgentCommand
from pyhvd.job.driver.kept_agents import KeptAgents
from pyhvd.job.messages import (
    Again,
    Beat,
    Failed,
    FromAgent,
    FromDriver,
    Hello,
    Member,
    Prepare,
    Remark,
    Start,
    Stop,
    decode_from_agent,
    encode,
)
from pyhvd.transport.tcp.connection import Connection, new_key
from pyhvd.transport.tcp.session import ChannelError, Role, Session
from tests.spark_services import PATIENCE_S
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="agents need Linux")


class Driver:
    """The driver's end of a channel whose agent is a thread."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        key = new_key()
        self.connection = Connection(ours, Session(key, Role.SERVER))
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, args=(theirs, key))
        self._thread.start()

    def _serve(self, channel: socket.socket, key: bytes) -> None:
        try:
            serve(channel, key)
        except (AgentStoppedError, ChannelError) as exc:
            self.error = exc

    def received(self) -> list[FromAgent]:
        """Return what has arrived."""
        return [decode_from_agent(record) for record in self.connection.pump_in()]

    def wait_for(self, kind: type[FromAgent]) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            self.connection.wait(1)
            self.connection.pump_out()
            if any(isinstance(message, kind) for message in self.received()):
                return
        raise AssertionError(f"no {kind.__name__}")

    def send(self, message: FromDriver) -> None:
        self.connection.send(encode(message))

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextmanager
def driver() -> Iterator[Driver]:
    made = Driver()
    try:
        made.wait_for(Hello)
        yield made
    finally:
        made.connection.close()
        made.join()


def test_it_says_hello_again_when_asked() -> None:
    with driver() as made:
        for _ in range(3):
            made.send(Beat())
            made.send(Again())
            made.wait_for(Hello)
        made.send(Stop("over"))
        made.join()
        assert made.error is None


@pytest.mark.parametrize("last", [Again(), Stop("over")])
def test_a_job_that_is_cancelled_in_the_same_batch_of_messages(last: FromDriver, tmp_path: Path) -> None:
    with driver() as made:
        made.connection._session.send(encode(Prepare(0, 1, str(tmp_path), "")))
        made.send(last)  # with the message before it
        if isinstance(last, Again):
            made.wait_for(Hello)
            made.send(Stop("over"))
        made.join()
        assert made.error is None


def test_it_keeps_the_state_while_the_driver_stands_still_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("pyhvd.job.agent.agent._DRIVER_ANSWER_S", 0.1)
    monkeypatch.setattr(ElasticHost, "make_rank", fails)
    with driver() as made:
        made.send(Prepare(0, 1, str(tmp_path), "", again=True, elastic=True))
        made.wait_for(Member)
        made.send(Start(0, 1, 0, 1, {}))
        made.wait_for(Failed)
        time.sleep(1.0)
        made.send(Again())
        made.wait_for(Hello)
        made.send(Stop("over"))
        made.join()
        assert made.error is None


def test_after_a_failure_it_waits_for_a_driver_that_stands_still(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("pyhvd.job.agent.agent._DRIVER_ANSWER_S", 0.5)
    monkeypatch.setattr("pyhvd.job.agent.agent.BEAT_S", 0.1)
    monkeypatch.setattr("pyhvd.job.agent.host_agent.ProgramProcess", fails)
    with driver() as made:
        made.send(Prepare(0, 1, str(tmp_path), ""))
        made.wait_for(Member)
        made.send(Start(0, 1, 0, 1, {}))
        made.wait_for(Failed)
        time.sleep(1.5)
        assert made.error is None
        for _ in range(30):  # now it speaks, but does not end the job
            made.send(Beat())
            time.sleep(0.05)
        made.join()
        assert str(made.error) == "rank 0 failed"


def test_it_ends_with_the_channel() -> None:
    with driver() as made:
        made.connection.close()
        made.join()
        assert made.error is None


def test_it_ends_when_the_driver_is_silent_for_as_long_as_that_has_said() -> None:
    with driver() as made:
        made.send(Beat(patience=0.1))
        made.join()
        assert "silent for 0.1 s (PYHVD_DRIVER_TIMEOUT)" in str(made.error)


def test_it_tells_once_that_the_driver_is_silent_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pyhvd.job.agent.agent.DRIVER_SILENT_S", 0.3)
    with driver() as made:
        made.send(Prepare(0, 1, str(tmp_path), "", again=True, elastic=True))
        made.wait_for(Member)
        for _ in range(2):  # once in each silence
            time.sleep(1.5)
            told = [each.text for each in made.received() if isinstance(each, Remark)]
            assert told == ["its agent has heard nothing from the launcher for 0.3 s, and its ranks go on"]
            made.send(Beat())
        made.send(Again())
        made.wait_for(Hello)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200))
def test_it_ends_at_a_message_that_is_none(data: bytes) -> None:
    with driver() as made:
        made.connection.send(data)
        made.join()
        assert isinstance(made.error, ChannelError)


def test_it_ends_at_bytes_that_no_holder_of_the_key_has_sent() -> None:
    with driver() as made:
        made.connection.detach().sendall(bytes(100))
        made.join()
        assert isinstance(made.error, ChannelError)


COMMAND = [sys.executable, "-P", "-m", "pyhvd.job.agent.host_agent"]


def _agent() -> AgentCommand:
    made = AgentCommand(COMMAND, new_key())
    until = time.monotonic() + PATIENCE_S
    while not made.connection.pump_in() and time.monotonic() < until:  # until it greets
        made.connection.wait(1)
        made.connection.pump_out()
    return made


def test_an_agent_is_kept_by_beats_and_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_agents, "BEAT_S", 0.01)
    with closing(KeptAgents()) as kept:
        agent = _agent()
        kept.keep(COMMAND, agent)
        beat = agent.connection.heard
        wait_until(lambda: agent.connection.heard > beat)
        assert kept.take(["another"]) is None
        assert kept.take(COMMAND) is agent
        assert kept.take(COMMAND) is None
        kept.keep(COMMAND, agent)
    assert not agent.connection.open


def test_one_that_has_ended_is_not_given_to_a_job() -> None:
    with closing(KeptAgents()) as kept:
        agent = _agent()
        agent.connection.send(encode(Stop("over")))
        hung_up = select.poll()
        hung_up.register(agent.connection, 0)
        assert hung_up.poll(PATIENCE_S * 1000)
        kept.keep(COMMAND, agent)
        assert kept.take(COMMAND) is None
        assert not agent.connection.open


def test_after_the_end_nothing_is_kept() -> None:
    kept = KeptAgents()
    kept.close()
    agent = _agent()
    kept.keep(COMMAND, agent)
    assert not agent.connection.open
    assert kept.take(COMMAND) is None


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"abcd\n", b"no hexadecimal digits, but long enough\n", b"\xff" * 500]
)
def test_a_first_line_that_is_no_key(line: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(line)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelError, match="do not start it by hand") as caught:
            read_key(theirs)
        assert "digits" not in str(caught.value)


def test_the_first_line_is_the_key_and_what_follows_stays() -> None:
    ours, theirs = socket.socketpair()
    key = new_key()
    with ours, theirs:
        ours.sendall(key.hex().encode() + b"\nrest")
        assert read_key(theirs) == key
        assert theirs.recv(10) == b"rest"

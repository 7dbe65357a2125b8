"""Tasks that connect to the driver of an elastic job, and strangers who do."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from pyhvd.job.driver import arrivals
from pyhvd.job.driver.arrivals import Arrivals
from pyhvd.job.machines.found_hosts import Found
from pyhvd.job.machines.member_host import FoundHost
from pyhvd.job.messages import Beat, Stop, decode_from_driver, encode, hello
from pyhvd.transport.tcp.connection import Connection, Secret
from pyhvd.transport.tcp.session import ChannelError, Role, Session
from tests.waiting import wait_until

HOST = FoundHost("task 0 on 127.0.0.1", 1)


def names() -> Callable[[int, str], FoundHost]:
    count = itertools.count()
    return lambda _, address: FoundHost(f"task {next(count)} on {address}", 1)


@pytest.fixture
def made() -> Iterator[tuple[Arrivals, Secret]]:
    secret = Secret()
    found = Arrivals(secret, ["127.0.0.1"], names())
    yield found, secret
    found.close()


def connect(found: Arrivals, secret: Secret) -> Connection:
    channel = socket.create_connection(("127.0.0.1", found.ports[0]))
    return Connection(channel, Session(secret.reveal(), Role.CLIENT))


def hosts(found: Arrivals, task: Connection) -> tuple[FoundHost, ...]:
    """Return what is found next, while the task does its part of the handshake, and greets."""
    results: list[Found] = []
    greeting = [encode(msgspec.structs.replace(hello(), task=7))]

    def is_there() -> bool:
        task.pump_out()
        task.pump_in()
        if task.authenticated and greeting:
            assert not results
            task.send(greeting.pop())
        results.extend(result for result in found.take() if isinstance(result, Found))
        return bool(results)

    wait_until(is_there, 10.0)
    return results[0].hosts


def test_a_task_is_a_host_with_one_slot(made: tuple[Arrivals, Secret]) -> None:
    found, secret = made
    task = connect(found, secret)
    assert hosts(found, task) == (HOST,)
    agent = found.agent(HOST.name)
    assert agent.connection.authenticated
    assert agent.connection.spoken
    assert found.numbers == {HOST.name: 7}
    assert agent.end() == (0, "")
    agent.close()
    assert found.take() == []  # it is gone, and no other is there
    with pytest.raises(OSError, match="it has ended"):
        found.agent(HOST.name)
    task.close()


def test_a_task_is_told_why_it_is_stopped(made: tuple[Arrivals, Secret]) -> None:
    found, secret = made
    task = connect(found, secret)
    hosts(found, task)
    told: list[bytes] = []

    def listen() -> None:
        while task.open:
            task.wait(10.0)
            told.extend(task.pump_in())
        task.close()

    listener = threading.Thread(target=listen)
    listener.start()
    agent = found.agent(HOST.name)
    agent.stop("another one is better")
    agent.end()
    agent.close()
    listener.join()
    assert [decode_from_driver(record) for record in told] == [Stop("another one is better")]


@pytest.mark.parametrize("record", [encode(Beat()), b"\xc1"])
def test_a_task_that_does_not_greet_is_no_host(made: tuple[Arrivals, Secret], record: bytes) -> None:
    found, secret = made
    task = connect(found, secret)
    unsaid = [record]

    def is_refused() -> bool:
        assert found.take() == []
        task.pump_out()
        task.pump_in()
        if task.authenticated and unsaid:
            task.send(unsaid.pop())
        return not task.open

    wait_until(is_refused, 10.0)
    task.close()


def test_a_task_that_comes_too_late_is_dismissed(made: tuple[Arrivals, Secret]) -> None:
    found, secret = made
    task = connect(found, secret)
    unsaid = [encode(hello())]

    def is_dismissed() -> bool:
        found.dismiss()
        task.pump_out()
        assert task.pump_in() == []
        if task.authenticated and unsaid:
            task.send(unsaid.pop())
        return not task.open

    wait_until(is_dismissed, 10.0)
    assert not unsaid
    assert found.take() == []
    task.close()


def test_a_task_for_which_nobody_asks_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    secret = Secret()
    found = Arrivals(secret, ["127.0.0.1"], names())
    task = connect(found, secret)
    assert hosts(found, task) == (HOST,)
    task.close()
    found.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_tasks_have_names_of_their_own(made: tuple[Arrivals, Secret]) -> None:
    found, secret = made
    first = connect(found, secret)
    assert hosts(found, first) == (HOST,)
    second = connect(found, secret)
    assert hosts(found, second) == (HOST, FoundHost("task 1 on 127.0.0.1", 1))
    first.close()
    second.close()


def test_who_lacks_the_key_is_no_host(made: tuple[Arrivals, Secret]) -> None:
    found, _ = made
    stranger = connect(found, Secret())

    def is_refused() -> bool:
        assert found.take() == []
        stranger.pump_out()
        stranger.pump_in()
        return not stranger.open

    with pytest.raises(ChannelError):
        wait_until(is_refused, 10.0)
    stranger.close()


def test_a_silent_stranger_does_not_stay(
    made: tuple[Arrivals, Secret], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = made
    monkeypatch.setattr(arrivals, "HANDSHAKE_S", 0.1)
    with socket.create_connection(("127.0.0.1", found.ports[0])) as silent:
        silent.settimeout(0.01)

        def is_ended() -> bool:
            assert found.take() == []
            try:
                return silent.recv(1 << 16) == b""
            except TimeoutError:
                return False

        wait_until(is_ended, 10.0)


def test_silent_strangers_lock_no_task_out(made: tuple[Arrivals, Secret]) -> None:
    found, secret = made
    address = ("127.0.0.1", found.ports[0])
    silent = [socket.create_connection(address) for _ in range(arrivals._MOST_STRANGERS)]
    assert found.take() == []
    silent += [socket.create_connection(address) for _ in range(10)]
    task = connect(found, secret)
    assert hosts(found, task) == (HOST,)
    for each in silent:
        each.close()
    task.close()

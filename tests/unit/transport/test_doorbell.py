"""Doorbells: a ring by any thread, before or during a sleep, ends the sleep and never blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pyhvd.transport.doorbell import Doorbell, host_id

LONG = 60.0


@pytest.fixture
def bell() -> Iterator[Doorbell]:
    bell = Doorbell()
    yield bell
    bell.close()


def test_a_ring_before_the_sleep_ends_it_at_once(bell: Doorbell) -> None:
    bell.ring()
    bell.ring()
    assert bell.wait(LONG)
    assert not bell.wait(0), "however often it was rung, it wakes once"


@pytest.mark.parametrize("timeout", [0, -5.0, 0.001])
def test_a_sleep_ends_by_itself(bell: Doorbell, timeout: float) -> None:
    assert not bell.wait(timeout)


def test_a_sleep_is_never_shorter_than_told(bell: Doorbell) -> None:
    before = time.monotonic()
    assert not bell.wait(0.0101)
    assert time.monotonic() - before >= 0.01


@pytest.mark.parametrize("timeout", [None, LONG, 1e7, 1e300])
def test_a_ring_ends_a_sleep(bell: Doorbell, timeout: float | None) -> None:
    ringer = threading.Timer(0.01, bell.ring)
    ringer.start()
    assert bell.wait(timeout)
    ringer.join()


def test_one_bell_rings_another(bell: Doorbell) -> None:
    other = Doorbell()
    other.ring(bell.address)
    assert bell.wait(LONG)
    assert not other.wait(0)
    other.close()


def test_a_full_bell_does_not_block_and_is_emptied_by_one_sleep(bell: Doorbell) -> None:
    for _ in range(2000):
        bell.ring()
    assert bell.wait(LONG)
    assert not bell.wait(0)


def test_nobody_there_does_no_harm(bell: Doorbell) -> None:
    gone = Doorbell()
    gone.close()
    bell.ring(gone.address)
    gone.ring()


def test_addresses_differ_and_the_host_is_one() -> None:
    bells = [Doorbell() for _ in range(5)]
    assert len({bell.address for bell in bells}) == 5
    for bell in bells:
        bell.close()
    assert host_id() == host_id() != ""


def test_every_ring_is_heard_by_a_sleeper() -> None:
    """Ping-pong: each side rings only after it was woken, so one lost ring would hang."""
    left, right = Doorbell(), Doorbell()
    rounds = 2000
    heard = []

    def answer() -> None:
        for _ in range(rounds):
            heard.append(right.wait(LONG))
            right.ring(left.address)

    thread = threading.Thread(target=answer)
    thread.start()
    for _ in range(rounds):
        left.ring(right.address)
        assert left.wait(LONG)
    thread.join()
    assert heard == [True] * rounds
    left.close()
    right.close()

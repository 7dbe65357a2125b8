"""Descriptors reach all ranks of a host, or none is left open and all ranks get an error in time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pyhvd.transport import link_sharing

LONG = 60.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def bell(stack: ExitStack) -> int:
    fd = os.eventfd(0)
    stack.callback(os.close, fd)
    return fd


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("extra", [0, 1, 247, 248, 600])
def test_all_descriptors_arrive_in_their_order(stack: ExitStack, extra: int) -> None:
    size = 3
    listener, path = link_sharing.listen(size, stack)
    bells = [bell(stack) for _ in range(size)]
    shared = [os.eventfd(100 + number) for number in range(extra)]
    for fd in shared:
        stack.callback(os.close, fd)
    until = time.monotonic() + LONG
    taken: dict[int, list[int]] = {}

    def follow(rank: int) -> None:
        taken[rank] = link_sharing.follow(path, rank, [bells[rank]], size + extra, until)

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in (2, 1)]
    for thread in threads:
        thread.start()
    taken[0] = [*link_sharing.lead(listener, [bells[0]], size, shared, until), *shared]
    for thread in threads:
        thread.join(LONG)
    for fd in [*taken[0][1:size], *taken[1], *taken[2]]:
        assert not os.get_inheritable(fd)
        stack.callback(os.close, fd)
    for rank in range(size):
        assert len(taken[rank]) == size + extra
        for number in range(size):
            os.eventfd_write(taken[rank][number], 1 + number)
    assert [os.eventfd_read(fd) for fd in bells] == [size * (1 + number) for number in range(size)]
    for number in range(extra):
        reader = taken[number % size][size + number]
        assert os.eventfd_read(reader) == 100 + number


def test_a_local_rank_that_does_not_come_ends_the_wait(stack: ExitStack) -> None:
    listener, path = link_sharing.listen(3, stack)
    mine, theirs = bell(stack), bell(stack)
    before = open_descriptors()
    until = time.monotonic() + 0.3
    errors: list[BaseException] = []

    def follow() -> None:
        try:
            link_sharing.follow(path, 1, [theirs], 3, until)
        except OSError as exc:
            errors.append(exc)

    thread = threading.Thread(target=follow)
    thread.start()
    with pytest.raises(OSError, match="timed out"):
        link_sharing.lead(listener, [mine], 3, [], until)
    thread.join(LONG)
    assert len(errors) == 1
    assert open_descriptors() == before


@pytest.mark.parametrize("number", [0, 2, 1 << 31])
def test_a_wrong_local_rank_is_refused(stack: ExitStack, number: int) -> None:
    listener, path = link_sharing.listen(2, stack)
    mine, theirs = bell(stack), bell(stack)
    before = open_descriptors()
    peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    peer.connect(path)
    socket.send_fds(peer, [number.to_bytes(4, "big")], [theirs])
    with pytest.raises(OSError, match=f"local rank {number} of 2 sent 1 descriptors, not 1"):
        link_sharing.lead(listener, [mine], 2, [], time.monotonic() + LONG)
    peer.close()
    assert open_descriptors() == before


def test_other_users_are_not_served(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    listener, path = link_sharing.listen(2, stack)
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
    mine, theirs = bell(stack), bell(stack)
    peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    peer.connect(path)
    socket.send_fds(peer, [(1).to_bytes(4, "big")], [theirs])
    monkeypatch.setattr(os, "getuid", lambda: 123456789)
    with pytest.raises(OSError, match="timed out"):
        link_sharing.lead(listener, [mine], 2, [], time.monotonic() + 0.3)


def test_the_folder_is_removed() -> None:
    with ExitStack() as stack:
        _, path = link_sharing.listen(2, stack)
        assert os.path.exists(path)
    assert not os.path.exists(os.path.dirname(path))

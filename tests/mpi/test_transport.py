"""Messages under way while the sender is outside MPI."""

from __future__ import annotations

import os
import tempfile
import time

from mpi4py import MPI

from pyhvd.transport.mpi.control import MpiTransport
from pyhvd.transport.tree import Tree
from tests.mpi.harness import on_ranks


class Silent:
    """A bell that never rings."""

    shortest = 1e-3

    def ring(self, address: object = None) -> None:
        """Ring nothing."""

    def wait(self, timeout: float | None) -> bool:
        """Sleep."""
        time.sleep(timeout or 0.0)
        return False

    def close(self) -> None:
        """Nothing to take down."""


@on_ranks(2)
def test_who_receives_does_not_wait_for_who_is_elsewhere() -> None:
    """The sender may wait in shared memory for this rank, and return to MPI only after this rank goes on."""
    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    flag = world.bcast(os.path.join(tempfile.mkdtemp(), "flag") if rank == 0 else None)
    transport = MpiTransport(world.Dup(), Silent(), [None, None], Tree.of(rank, [0, 0]))
    payloads = [bytes([k]) * size for k, size in enumerate([10, 30_000, 100_000, 3_000_000, 20] * 20)]
    world.Barrier()
    if rank == 1:
        sendings = [transport.send(0, payload) for payload in payloads]
        deadline = time.monotonic() + 10
        while not os.path.exists(flag):
            assert time.monotonic() < deadline, "rank 0 waits inside MPI"
        assert transport.drain(20)
        assert all(sending.gone() for sending in sendings)
    else:
        arrived: list[bytes] = []
        deadline = time.monotonic() + 20
        while len(arrived) < len(payloads):
            arrived += [bytes(payload) for _, payload in transport.receive()]
            with open(flag, "w", encoding="ascii"):
                pass
            transport.wait(0.01)
            assert time.monotonic() < deadline
        assert arrived == payloads
    transport.close()


class Counted(Silent):
    """A bell that counts its rings."""

    def __init__(self) -> None:
        self.rings = 0

    def ring(self, address: object = None) -> None:
        """Count."""
        self.rings += 1


@on_ranks(2)
def test_who_finds_that_a_message_has_gone_rings() -> None:
    """gone() rings again when a long message has gone: at the first ring it was not readable yet."""
    world = MPI.COMM_WORLD
    bell = Counted()
    transport = MpiTransport(world.Dup(), bell, [0, 1], Tree.of(world.Get_rank(), [0, 0]))
    world.Barrier()
    if world.Get_rank() == 0:
        sending = transport.send(1, bytes(3_000_000))
        assert bell.rings == 1
        deadline = time.monotonic() + 20
        assert not sending.gone()
        world.Barrier()
        while not sending.gone():
            assert time.monotonic() < deadline
        assert bell.rings == 2
        assert sending.gone()
        assert transport.drain(20)
        assert bell.rings == 2
        transport.send(1, b"short")
        assert bell.rings == 3
    else:
        world.Barrier()
        arrived: list[bytes] = []
        while len(arrived) < 2:
            arrived += [bytes(payload) for _, payload in transport.receive()]
        assert arrived == [bytes(3_000_000), b"short"]
    transport.close()


class Recording(Silent):
    """A bell that notes when each sleep begins, and its limit."""

    def __init__(self) -> None:
        self.sleeps: list[tuple[float, float]] = []

    def wait(self, timeout: float | None) -> bool:
        """Note it, and sleep."""
        assert timeout is not None
        self.sleeps.append((time.monotonic(), timeout))
        return super().wait(timeout)


@on_ranks(2)
def test_sleeps_grow_with_the_time_since_the_last_event() -> None:
    """A message that MPI queued is at most twice as late, and a rank without work wakes ever more rarely."""
    world = MPI.COMM_WORLD
    rank = world.Get_rank()
    bell = Recording()
    transport = MpiTransport(world.Dup(), bell, [0, 1], Tree.of(rank, [0, 0]))
    for _ in range(2):
        sent = time.monotonic()
        sending = transport.send(1 - rank, b"event")
        while not transport.receive() or not sending.gone():
            assert time.monotonic() < sent + 20
        world.Barrier()
        event = time.monotonic()
        bell.sleeps.clear()
        transport.wait(0.5)
        waits = [timeout for _, timeout in bell.sleeps[:-1]]  # the last one ends at the limit
        assert waits == sorted(waits)
        assert len(waits) <= 12
        since = [begun - sent for begun, _ in bell.sleeps]
        assert all(
            timeout <= max(age, bell.shortest) for (_, timeout), age in zip(bell.sleeps, since, strict=True)
        )
        assert max(waits, default=1.0) >= (time.monotonic() - event) / 8
    transport.close()


@on_ranks(2)
def test_a_rank_that_others_cannot_ring_looks_often() -> None:
    """Rank 0 reaches no bell: its out-of-band messages come without a ring."""
    world = MPI.COMM_WORLD
    bell = Recording()
    transport = MpiTransport(world.Dup(), bell, [0, 1, None], Tree.of(world.Get_rank(), [0, 0]))
    transport.wait(1.0)
    assert max(timeout for _, timeout in bell.sleeps) <= 0.25
    transport.close()

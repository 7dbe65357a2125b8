"""What each rank of a trial does: ``python -m pyhvd.tools.doctor.ranks FOLDER``, under an mpiexec.

Each rank leaves what it is about to do in ``FOLDER/stage.<rank>``, so that whoever waits can say where it has
got stuck; rank 0 leaves the results in ``FOLDER/found.json``.

Clock offsets are found as Cristian does (Probabilistic clock synchronization, Distributed Computing 3, 1989):
the remote clock is read half a round trip after the request, give or take half a round trip; the shortest of
many round trips tells most.
"""

from __future__ import annotations

import logging
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

import pyhvd as hvd
from pyhvd.tools.doctor.trial_facts import ClockFacts, LaneFacts, RankFacts, RingFacts, TrialFacts

if TYPE_CHECKING:
    from mpi4py import MPI

RING_SIZES = [1, 64 << 10, 4 << 20]
LARGE_BYTES = 64 << 20
_HOPS = 8
_PINGS = 30
_SMALL_ROUNDS = 200
_LARGE_ROUNDS = 5
_COPY_BYTES = 32 << 20

Say = Callable[[str], None]


class _Listener(logging.Handler):
    """Keeps what pyhvd warns of; a program that logs has handlers, so nothing is printed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def measure(say: Say, large_bytes: int = LARGE_BYTES) -> TrialFacts:
    """Try out the ranks of this job. Collective; pyhvd is not up before, nor after.

    Parameters
    ----------
    say : callable
        Told what is about to be done.
    large_bytes : int
        Size of the large tensor.
    """
    listener = _Listener()
    logging.getLogger("pyhvd").addHandler(listener)
    say("MPI_Init_thread")
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    say("gathering who is where")
    ranks = comm.allgather(RankFacts(comm.Get_rank(), socket.gethostname(), os.getpid(), _cores()))
    say("ring test")
    ring = go_round(comm, RING_SIZES)
    say("clock test")
    clocks = compare_clocks(comm)
    say("copy test")
    copy_rate = _copy_rate(comm)
    lanes = []
    # The fast lane last: pyhvd's warnings are then those of the way that is in use by default.
    for name, knob in (("MPI", "0"), ("shared memory", "1")):
        if knob == "1" and len({each.host for each in ranks}) > 1:
            continue
        os.environ["PYHVD_FAST_LANE"] = knob
        say(f"init() over {name}")
        hvd.init()
        if knob == "1" and not _has_lane():
            say("shutdown()")
            hvd.shutdown()
            continue
        say(f"latency over {name}")
        latency = _latency()
        say(f"bandwidth over {name}")
        lanes.append(LaneFacts(name, latency, large_bytes, _seconds(large_bytes)))
        say("shutdown()")
        hvd.shutdown()
    say("gathering what pyhvd warned of")
    warnings = sorted({text for texts in comm.allgather(listener.texts) for text in texts})
    return TrialFacts(ranks, ring, clocks, lanes, copy_rate, warnings)


def go_round(comm: MPI.Intracomm, sizes: list[int]) -> RingFacts:
    """Pass random bytes from neighbour to neighbour; every rank checks what arrives.

    Each rank's own payload starts the first hop, and what has arrived is passed on in the next; the bytes
    follow from the rank that they began at, so every receiver knows what they should be.
    """
    rank, ranks = comm.Get_rank(), comm.Get_size()
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    damaged: list[tuple[int, int, int]] = []
    for nbytes in sizes:
        send = payload(rank, nbytes)
        for hop in range(1, min(ranks, _HOPS) + 1):
            receive = np.empty(nbytes, np.uint8)
            comm.Sendrecv(send, right, 0, receive, left, 0)
            if not np.array_equal(receive, payload((rank - hop) % ranks, nbytes)):
                damaged.append((rank, left, nbytes))
                break
            send = receive
        comm.Barrier()
    return RingFacts(sizes, sorted({each for list_ in comm.allgather(damaged) for each in list_}))


def payload(rank: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Return the bytes that begin at a rank."""
    return np.random.default_rng(rank).integers(0, 256, nbytes, np.uint8)


def compare_clocks(comm: MPI.Intracomm) -> list[ClockFacts]:
    """Compare every rank's clock with rank 0's; returns them on rank 0, and nothing on the others."""
    rank = comm.Get_rank()
    found = []
    for other in range(1, comm.Get_size()):
        if rank == 0:
            samples = []
            for _ in range(_PINGS):
                before = time.time()
                comm.send(None, other)
                there = comm.recv(source=other)
                samples.append((before, there, time.time()))
            found.append(offset_of(other, samples))
        elif rank == other:
            for _ in range(_PINGS):
                comm.recv(source=0)
                comm.send(time.time(), 0)
    return found


def offset_of(rank: int, samples: list[tuple[float, float, float]]) -> ClockFacts:
    """Return a clock's offset, from (sent, the other's clock, received) of some round trips."""
    before, there, after = min(samples, key=lambda sample: sample[2] - sample[0])
    return ClockFacts(rank, there - (before + after) / 2, (after - before) / 2)


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _copy_rate(comm: MPI.Intracomm) -> float:
    source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
    comm.Barrier()
    times = []
    for _ in range(_LARGE_ROUNDS):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun)
    rates: list[float] = comm.allgather(_COPY_BYTES / statistics.median(times))
    return min(rates)


def _has_lane() -> bool:
    from pyhvd.engine import context

    return context.current().lane is not None


def _latency() -> float:
    """Seconds for an allreduce of 4 bytes: the median of many, but no more than a second's worth."""
    x = np.ones(1, np.float32)
    times: list[float] = []
    for i in range(20 + _SMALL_ROUNDS):
        begun = time.perf_counter()
        hvd.allreduce_(x, name="doctor/small", op=hvd.Max)
        if i >= 20:
            times.append(time.perf_counter() - begun)
        if i == 20:  # all ranks do the same number
            slowest = float(hvd.allreduce(np.float64(times[0]), op=hvd.Max, name="doctor/slowest"))
            if slowest * _SMALL_ROUNDS > 1.0:
                break
    return statistics.median(times)


def _seconds(nbytes: int) -> float:
    """Seconds for an allreduce of a large tensor, in place; its values are checked."""
    x = np.empty(nbytes // 4, np.float32)
    times = []
    for _ in range(1 + _LARGE_ROUNDS):
        x.fill(1)
        hvd.barrier()
        begun = time.perf_counter()
        hvd.allreduce_(x, name="doctor/large", op=hvd.Sum)
        times.append(time.perf_counter() - begun)
        if not (x == hvd.size()).all():
            raise RuntimeError(f"an allreduce of ones on {hvd.size()} ranks has a wrong sum")
    return statistics.median(times[1:])


def main(argv: list[str]) -> int:
    """Be one rank of a trial."""
    from pyhvd.job.mpi.rank_env import read_rank_env

    folder = Path(argv[0])
    place = read_rank_env()
    rank = place.rank if place is not None else 0

    def say(stage: str) -> None:
        # Renamed into place: whoever reads it finds all of it, or the one before.
        fresh = folder / f".stage.{rank}"
        fresh.write_text(stage)
        fresh.replace(folder / f"stage.{rank}")

    say("starting Python")
    found: Any = measure(say)
    say("ending")
    if rank == 0:
        (folder / "found.json").write_bytes(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""One rank of a trial: ``python -m pyhvd.tools.doctor.ranks FOLDER``, under an mpiexec.

Each rank writes its next stage to ``FOLDER/stage.<rank>``, so that the waiting process can name the
stage of a hung rank. Rank 0 writes the results to ``FOLDER/found.json``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

import pyhvd as hvd
from pyhvd.config import Config
from pyhvd.engine import context
from pyhvd.errors import ConfigError
from pyhvd.observe.trace import clocks
from pyhvd.tools.doctor.links import measure_links, time_calls
from pyhvd.tools.doctor.trial_facts import ClockFacts, LaneFacts, LinkFacts, RankFacts, RingFacts, TrialFacts

if TYPE_CHECKING:
    from mpi4py import MPI

RING_SIZES = [1, 64 << 10, 4 << 20]
LARGE_BYTES = 64 << 20
_HOPS = 8
_WARM_UP, _SMALL_ROUNDS = 20, 200
_LARGE_ROUNDS = 5
_COPY_BYTES = 32 << 20
_MEETING_S = 0.002


def measure(say: Callable[[str], None]) -> TrialFacts:
    """Test the ranks of this job; call ``say`` with the name of each stage before it starts. Collective.

    pyhvd is not initialised before or after.
    """
    # It keeps pyhvd's warnings; with a handler installed, pyhvd prints nothing.
    listener = BufferingHandler(capacity=sys.maxsize)
    listener.setLevel(logging.WARNING)
    logging.getLogger("pyhvd").addHandler(listener)
    say("MPI_Init_thread")
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    say("gathering who is where")
    ranks = comm.allgather(RankFacts(comm.Get_rank(), socket.gethostname(), os.getpid(), _cores()))
    say("ring test")
    ring = _pass_round(comm)
    say("clock test")
    offsets = _compare_clocks(comm)
    say("copy test")
    copy_rate = _copy_rate(comm)
    links = _measure_links(comm, say)
    several = len({each.host for each in ranks}) > 1
    lanes, carrier = [], ""
    # The fast lane last: the warnings and the carrier kept are then those of the default lane.
    for name, knob in (("MPI", "0"), ("links" if several else "shared memory", "1")):
        os.environ["PYHVD_FAST_LANE"] = knob
        say(f"init() over {name}")
        hvd.init()
        if knob == "0" or _has_lane(several=several):
            say(f"latency over {name}")
            latency = _latency()
            say(f"bandwidth over {name}")
            lanes.append(LaneFacts(name, latency, LARGE_BYTES, _seconds(LARGE_BYTES)))
        carrier = context.current().carrier
        say("shutdown()")
        hvd.shutdown()
    say("gathering what pyhvd warned of")
    heard = [record.getMessage() for record in listener.buffer]
    warnings = sorted({text for texts in comm.allgather(heard) for text in texts})
    return TrialFacts(ranks, ring, offsets, lanes, copy_rate, warnings, links, carrier)


def _pass_round(comm: MPI.Intracomm) -> RingFacts:
    """Pass random bytes from neighbour to neighbour; every rank checks each payload.

    Each rank sends its own payload in the first hop, and the payload it received in each later hop. A
    payload is a function of the rank that made it, so every receiver knows the right bytes.
    """
    rank, ranks = comm.Get_rank(), comm.Get_size()
    left, right = (rank - 1) % ranks, (rank + 1) % ranks
    damaged: list[tuple[int, int, int]] = []
    for nbytes in RING_SIZES:
        send = _payload(rank, nbytes)
        for hop in range(1, min(ranks, _HOPS) + 1):
            receive = np.empty(nbytes, np.uint8)
            comm.Sendrecv(send, right, 0, receive, left, 0)
            if not np.array_equal(receive, _payload((rank - hop) % ranks, nbytes)):
                damaged.append((rank, left, nbytes))
                break
            send = receive
        comm.Barrier()
    return RingFacts(RING_SIZES, sorted({each for found in comm.allgather(damaged) for each in found}))


def _payload(rank: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(rank).integers(0, 256, nbytes, np.uint8)


def _compare_clocks(comm: MPI.Intracomm) -> list[ClockFacts]:
    """Compare every rank's clock with rank 0's; return the offsets of the other ranks."""
    from pyhvd.transport.mpi.fabric import MpiFabric

    readings = comm.allgather(clocks.measure(MpiFabric(comm), time.time_ns))
    return [
        ClockFacts(r, readings[r].offset / 1e9, readings[r].uncertainty / 1e9) for r in range(1, comm.size)
    ]


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _copy_rate(comm: MPI.Intracomm) -> float:
    source, target = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
    comm.Barrier()
    times = time_calls(_LARGE_ROUNDS, np.copyto, target, source)
    rates: list[float] = comm.allgather(_COPY_BYTES / statistics.median(times))
    return min(rates)


def _measure_links(comm: MPI.Intracomm, say: Callable[[str], None]) -> list[LinkFacts]:
    """Return the measurements of all pairs of hosts, on every rank; none on one host or without links."""
    from pyhvd.transport.mpi.world import mpi_world

    config: Config | None = None
    if comm.Get_rank() == 0:
        with contextlib.suppress(ConfigError):  # init() will report it
            config = Config.from_env()[0]
    config = comm.bcast(config)

    def meet() -> None:
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(_MEETING_S)

    world = mpi_world(comm)
    try:
        if config is None or not config.links or len(set(world.topology.hosts)) == 1:
            return []
        say("links between hosts")
        found = measure_links(world, config, meet)
    finally:
        world.fabric.close()
    return sorted((each for links in comm.allgather(found) for each in links), key=lambda link: link.ranks)


def _has_lane(*, several: bool) -> bool:
    fast_path = context.current().fast_path
    return (
        fast_path is not None and fast_path.delegates and (not several or bool(hvd.metrics().link_sent_bytes))
    )


def _latency() -> float:
    """Return the median time (s) of an allreduce of 4 bytes, over one second at most."""
    x = np.ones(1, np.float32)
    reduce = partial(hvd.allreduce_, x, name="doctor/small", op=hvd.Max)
    first = time_calls(_WARM_UP + 1, reduce)[-1]
    if _slowest(first) * _SMALL_ROUNDS > 1.0:
        return first
    return statistics.median([first, *time_calls(_SMALL_ROUNDS - 1, reduce)])


def _slowest(seconds: float) -> float:
    """Return the longest time of any rank: all ranks need the same number."""
    return float(hvd.allreduce(np.float64(seconds), op=hvd.Max, name="doctor/slowest"))


def _seconds(nbytes: int) -> float:
    """Return the median time (s) of an allreduce of a large tensor in place; check its values.

    If the first one, which does not count otherwise, takes longer than a second, it is the only one.
    """
    x = np.empty(nbytes // 4, np.float32)
    times: list[float] = []
    for _ in range(1 + _LARGE_ROUNDS):
        x.fill(1)
        hvd.barrier()
        times += time_calls(1, partial(hvd.allreduce_, x, name="doctor/large", op=hvd.Sum))
        if not (x == hvd.size()).all():
            raise RuntimeError(f"an allreduce of ones on {hvd.size()} ranks has a wrong sum")
        if len(times) == 1 and _slowest(times[0]) > 1.0:
            return times[0]
    return statistics.median(times[1:])


def main(argv: list[str]) -> int:
    """Run one rank of a trial."""
    from pyhvd.job.mpi.rank_env import read_rank_env

    folder = Path(argv[0])
    place = read_rank_env()
    rank = place.rank if place is not None else 0

    def say(stage: str) -> None:
        # Renamed into place: a reader finds the whole new file, or the whole previous one.
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

"""The cases of ``python -m benchmarks hosts``, on a rank: ``hosts_ranks.py RUN LABEL ...``.

``hosts.py`` starts the ranks on the hosts of a bed, and chooses the rate of the links. RUN is the file that
rank 0 writes.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

import pyhvd as hvd
from benchmarks import hosts_torchdist, hosts_verbs, peers, waiting
from benchmarks.harness import OURS, Case, Contender, Outcome, Plan, World, interleave
from benchmarks.machine import CorePair, describe_machine, mpi_short
from benchmarks.mpi import MPI
from benchmarks.questions import busy, latency
from benchmarks.raw_tcp import Rails, link_limit
from benchmarks.report import Run, save, show_bytes
from benchmarks.tensors import Tensors, resnet50

CHUNKS = "MPI, 4 MiB chunks"
PIPELINED = "MPI, 4 MiB chunks, Iallreduce"
NEW_TENSORS = "pyhvd, new tensors"
_CHUNK = 4 * peers.MIB
_IN_FLIGHT = 4
_FLOATS = 256


@dataclass(frozen=True)
class Bench:
    """What the cases of a job need; ``tiny`` reduces their sizes, ``slow`` says that the links are slow."""

    world: World
    rails: Rails
    tiny: bool
    slow: bool

    def tensors(self, counts: list[int], loops: int = 1) -> Tensors:
        """Return arrays with these numbers of float32."""
        return Tensors(counts, self.world.rank, self.world.size, loops=loops)


def mpi_chunks(world: World, tensors: Tensors) -> list[Contender]:
    """Return MPI in chunks of 4 MiB: one after the other, and with several in flight."""
    return [replace(peers.mpi_chunks(world, tensors, _CHUNK), name=CHUNKS), mpi_pipelined(world, tensors)]


def mpi_pipelined(world: World, tensors: Tensors) -> Contender:
    """Return a contender that packs the next chunks while MPI_Iallreduce carries out earlier ones."""
    buckets = tensors.pieces(_CHUNK)
    ring = [np.empty(_CHUNK // 4, np.float32) for _ in range(_IN_FLIGHT)]

    def once() -> None:
        begun: deque[Callable[[], None]] = deque()
        for number, pieces in enumerate(buckets):
            if len(begun) == _IN_FLIGHT:
                begun.popleft()()
            begun.append(_begin(world.comm, ring[number % _IN_FLIGHT], pieces))
        for end in begun:
            end()

    return peers.contender(PIPELINED, tensors, once)


def _begin(comm: MPI.Intracomm, buffer: np.ndarray, pieces: list[np.ndarray]) -> Callable[[], None]:
    """Pack a chunk and begin its reduction; return what waits for it and unpacks it."""
    if len(pieces) == 1:
        request = comm.Iallreduce(MPI.IN_PLACE, pieces[0])
        return lambda: request.Wait() and None
    packed = buffer[: sum(piece.size for piece in pieces)]
    np.concatenate(pieces, out=packed)
    request = comm.Iallreduce(MPI.IN_PLACE, packed)

    def end() -> None:
        request.Wait()
        first = 0
        for piece in pieces:
            piece[:] = packed[first : first + piece.size]
            first += piece.size

    return end


class Others:
    """Measures the CPU that other programs use, from its creation to its note; collective."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._before = self._now()

    def note(self) -> str:
        """Return the line for the report."""
        wall, theirs = (now - before for now, before in zip(self._now(), self._before, strict=True))
        share = 100 * theirs / (wall * (os.cpu_count() or 1))
        return f"other programs used {max(share, 0.0):.0f} % of the cores meanwhile (user time)"

    def _now(self) -> tuple[float, float]:
        """Return the time, and the user seconds of all processes on the machine but the ranks."""
        user, nice = map(int, Path("/proc/stat").read_text().split()[1:3])
        ours = self._world.comm.allreduce(os.times().user)
        return time.monotonic(), (user + nice) / os.sysconf("SC_CLK_TCK") - ours


def note_groups(world: World) -> None:
    """Note if the kernel schedules each rank as a group, and ranks share cores; collective."""
    enabled, group = Path("/proc/sys/kernel/sched_autogroup_enabled"), Path("/proc/self/autogroup")
    found = group.read_text() if enabled.exists() and enabled.read_text().strip() == "1" else ""
    if len(set(world.comm.allgather(found))) > 1 and world.size > (os.cpu_count() or 1):
        world.note(
            "each rank has its own session, and so (sched_autogroup) its own scheduling group:"
            " a woken thread waits for the turns of other ranks on its core"
        )


# -- the questions -------------------------------------------------------------------------------------


def four_bytes(bench: Bench) -> Iterator[Case]:
    """One float, synchronous."""
    tensors = bench.tensors([1], loops=3 if bench.tiny else latency.LOOPS)
    yield Case(
        "4 B",
        tensors.nbytes,
        [
            latency.pyhvd_synchronous(tensors, "hosts.latency"),
            peers.mpi_separate(bench.world, tensors, peers.RAW),
            *peers.gloo_singly(bench.world, tensors),
            *peers.horovod(bench.world, tensors, "hosts.latency"),
        ],
    )


def small(bench: Bench) -> Iterator[Case]:
    """Many small tensors, one by one."""
    count = 20 if bench.tiny else 1000
    tensors = bench.tensors([_FLOATS] * count)
    yield Case(
        f"{count} x {_FLOATS} floats",
        tensors.nbytes,
        [
            peers.pyhvd_singly(tensors, "hosts.small"),
            peers.mpi_flat(bench.world, tensors),
            peers.mpi_packed(bench.world, tensors),
            *peers.gloo_buckets(bench.world, tensors),
            *peers.horovod(bench.world, tensors, "hosts.small"),
        ],
    )


def large(bench: Bench) -> Iterator[Case]:
    """One large tensor."""
    for nbytes in (peers.MIB // 4, peers.MIB) if bench.tiny else (16 * peers.MIB, 64 * peers.MIB):
        yield _gradients(bench, show_bytes(nbytes), [nbytes // 4])


def resnet(bench: Bench) -> Iterator[Case]:
    """The gradients of ResNet-50, one by one."""
    yield _gradients(bench, "ResNet-50", resnet50()[: 5 if bench.tiny else None])


def _gradients(bench: Bench, label: str, counts: list[int]) -> Case:
    tensors = bench.tensors(counts)
    name = f"hosts.{label}"
    contenders = [
        peers.pyhvd_singly(tensors, name),
        *mpi_chunks(bench.world, tensors),
        peers.mpi_flat(bench.world, tensors),
        link_limit(bench.rails, tensors),
        *peers.gloo_buckets(bench.world, tensors),
        *peers.horovod(bench.world, tensors, name),
    ]
    return Case(label, tensors.nbytes, contenders)


def computing(bench: Bench) -> Iterator[Case]:
    """Cached tensors while the user's thread runs pure Python."""
    for case in busy.cases(bench.world, [3 if bench.tiny else 20]):
        yield replace(case, label=f"{case.label}, busy thread")


def first_step(bench: Bench) -> Iterator[Case]:
    """The first step with tensors that no rank has seen before; each repetition has new names."""
    count = 5 if bench.tiny else len(resnet50())
    tensors = bench.tensors([_FLOATS] * count)
    steps = itertools.count()
    peers.start_pyhvd()

    def once() -> None:
        step = next(steps)
        handles = [
            hvd.allreduce_async_(array, name=f"first.{step}.{t}", op=hvd.Sum)
            for t, array in enumerate(tensors.arrays)
        ]
        for handle in handles:
            hvd.synchronize(handle)

    yield Case(
        f"first step of {count} tensors",
        tensors.nbytes,
        [peers.contender(NEW_TENSORS, tensors, once, kind=OURS), peers.mpi_packed(bench.world, tensors)],
    )


def every_verb(bench: Bench) -> Iterator[Case]:
    """Each verb at several sizes."""
    return hosts_verbs.cases(bench.world, bench.rails, tiny=bench.tiny, slow=bench.slow)


def torch_distributed(bench: Bench) -> Iterator[Case]:
    """torch.distributed over pyhvd and gloo."""
    return hosts_torchdist.cases(bench.world, tiny=bench.tiny)


CASES: dict[str, Callable[[Bench], Iterator[Case]]] = {
    # First: its repetitions need an empty response cache, or they would also measure evictions.
    "first": first_step,
    "latency": four_bytes,
    "small": small,
    "large": large,
    "resnet": resnet,
    "busy": computing,
    "verbs": every_verb,
    "torchdist": torch_distributed,
}


def _wake(bench: Bench) -> Iterator[Outcome]:
    return waiting.waking(bench.world, 2 if bench.tiny else 40)


def _late(bench: Bench) -> Iterator[Outcome]:
    return waiting.late(bench.world, 1, 0.1) if bench.tiny else waiting.late(bench.world, 2)


# Their figures are no times of a call.
OUTCOMES: dict[str, Callable[[Bench], Iterator[Outcome]]] = {"wake": _wake, "late": _late}


def main(arguments: list[str]) -> None:
    """Measure the questions, and write the run on rank 0."""
    path, label, repeats, seconds, tiny, *questions = arguments
    machine = describe_machine()
    comm = MPI.COMM_WORLD.Dup()
    world = World(comm, CorePair(comm))
    bench = Bench(world, Rails(world), tiny == "tiny", "Gbit" in label)
    outcomes, others = [], Others(world)
    for name, cases in CASES.items():
        for case in cases(bench) if name in questions else ():
            # More steps would fill the response cache.
            limit = min(int(repeats), 3) if name == "first" else int(repeats)
            plan = Plan(limit, float(seconds), least=min(limit, 5))
            outcomes.append(interleave(world, replace(case, label=label.format(case.label)), plan))
            del case  # free the case's arrays before the next case allocates its own
    for name, measure in OUTCOMES.items():
        if name in questions:
            outcomes += [
                msgspec.structs.replace(each, label=label.format(each.label)) for each in measure(bench)
            ]
    world.note(others.note())
    note_groups(world)
    if world.rank == 0:
        save(Path(path), Run(world.size, machine, mpi_short(machine.mpi), outcomes, world.notes))


if __name__ == "__main__":
    main(sys.argv[1:])

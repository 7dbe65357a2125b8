"""verbs: each verb by a remembered name, against mpi4py's upper-case call on the same bytes.

The bytes are those of the larger side: what a rank gets of an allgather, what it gives to a reducescatter.
pyhvd's calls return new arrays, as programs use them, and MPI's write into old ones; a broadcast is in place
in both. Each is called many times in a row if it is small. In broadcasts from one root MPI's root runs ahead
then; those from each rank in turn show how long one takes until it has ended everywhere. A ratio counts
against the best of MPI's ways: the library as it comes, and under Open MPI also its single-copy hierarchical
collectives (xhc).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

import pyhvd as hvd
from benchmarks import peers
from benchmarks.harness import OURS, Case, Contender, World
from benchmarks.mpi import MPI
from benchmarks.question import Question, main
from benchmarks.report import Target, show_bytes
from benchmarks.tensors import Array, WrongResultError

SYNCHRONOUS, SHARED = "pyhvd", "pyhvd, of hvd.empty()"
SMALL, MIDDLE, LARGE = 64, 64 << 10, 64 << 20
SIZES = (SMALL, MIDDLE, 4 << 20, LARGE)
IN_TURN = "broadcast from each in turn"
VERBS = ("allgather", "broadcast", "alltoall", "reducescatter", "allreduce")
MPI_CALL, XHC = "MPI", "MPI, xhc"
NAMED, OBJECTS = "pyhvd, named", "mpi4py, lower case"


@dataclass
class VerbWork:
    """The arrays of one verb and size on one rank, and its call by either library.

    Attributes
    ----------
    given : array
        What the rank gives: integers that say whose they are.
    wanted : array
        What it must get.
    """

    world: World
    verb: str
    given: Array
    wanted: Array

    @classmethod
    def of(cls, world: World, verb: str, nbytes: int) -> VerbWork:
        """Return the work of a verb on float32 arrays."""
        size, rank = world.size, world.rank
        part = max(nbytes // 4 // size, 1)
        whole = np.arange(part * size, dtype=np.float32) % 31
        parts = [slice(q * part, (q + 1) * part) for q in range(size)]
        every = [whole + q for q in range(size)]
        if verb == "allgather":
            return cls(
                world, verb, every[rank][:part].copy(), np.concatenate([each[:part] for each in every])
            )
        if verb == "alltoall":
            return cls(world, verb, every[rank], np.concatenate([each[parts[rank]] for each in every]))
        if verb in ("broadcast", IN_TURN):
            return cls(world, verb, every[rank], every[0])
        total: Array = np.stack(every).sum(axis=0, dtype=np.float32)
        return cls(world, verb, every[rank], total[parts[rank]] if verb == "reducescatter" else total)

    @property
    def nbytes(self) -> int:
        """The bytes of the larger side."""
        return max(self.given.nbytes, self.wanted.nbytes)

    def by_pyhvd(self, name: str, empty: Callable[..., Array] = np.empty) -> Callable[[], Any]:
        """Return a call that returns the result; ``empty`` makes its input."""
        verb, given = self.verb, empty(self.given.shape, self.given.dtype)
        given[:] = self.given
        if verb == "broadcast":
            return lambda: hvd.broadcast_(given, 0, name=name)
        if verb == IN_TURN:
            roots = cycle([(root, f"{name}.{root}") for root in range(self.world.size)])

            def broadcast() -> Array:
                root, of_root = next(roots)
                hvd.broadcast_(given, root, name=of_root)
                return given

            return broadcast
        call = getattr(hvd, verb)
        if verb in ("reducescatter", "allreduce"):
            return lambda: call(given, name=name, op=hvd.Sum)
        return lambda: call(given, name=name)

    def by_mpi(self, comm: MPI.Intracomm) -> Callable[[], Any]:
        """Return a call that returns the result."""
        given, out = self.given, np.ones_like(self.wanted)
        array, roots = given.copy(), cycle(range(self.world.size))
        calls: dict[str, Callable[[], Any]] = {
            "allgather": lambda: comm.Allgather(given, out),
            "alltoall": lambda: comm.Alltoall(given, out),
            "broadcast": lambda: comm.Bcast(array, 0),
            IN_TURN: lambda: comm.Bcast(array, next(roots)),
            "reducescatter": lambda: comm.Reduce_scatter_block(given, out),
            "allreduce": lambda: comm.Allreduce(given, out),
        }
        call, result = calls[self.verb], array if "broadcast" in self.verb else out

        def run() -> Any:
            call()
            return result

        return run

    def contender(self, name: str, call: Callable[[], Any], kind: str) -> Contender:
        """Return a contender that makes a call, many times if it is small."""
        loops = 100 if self.nbytes <= 4096 else 10 if self.nbytes <= 1 << 20 else 1
        last: list[Any] = [None]

        def run() -> None:
            for _ in range(loops):
                last[0] = call()

        def check(_: bool) -> None:
            if not np.array_equal(last[0], self.wanted):
                raise WrongResultError(f"{name}: {self.verb} of {self.nbytes} bytes: {last[0]}")

        return Contender(
            name, run, rehearse=run if loops > 1 else _nothing, check=check, kind=kind, loops=loops
        )


def _nothing() -> None:
    pass


def array_cases(world: World, sizes: Sequence[int], chosen: Sequence[str] = VERBS) -> Iterator[Case]:
    """Yield a case per verb and size."""
    peers.start_pyhvd()
    ways = {MPI_CALL: world.comm, **_xhc(world)}
    for nbytes in sizes:
        for verb in [*chosen, IN_TURN] if nbytes <= MIDDLE else chosen:
            work = VerbWork.of(world, verb, nbytes)
            call = f"verbs.{verb}.{nbytes}"
            contenders = [work.contender(SYNCHRONOUS, work.by_pyhvd(call), OURS)]
            if hvd.local_size() == hvd.size():  # else they are ordinary arrays
                contenders += [work.contender(SHARED, work.by_pyhvd(f"{call}.shared", hvd.empty), OURS)]
            contenders += [work.contender(name, work.by_mpi(comm), "peer") for name, comm in ways.items()]
            yield Case(label(verb, nbytes), work.nbytes, contenders)


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield a case per verb and size, then those without arrays."""
    yield from array_cases(world, sizes)
    ways = {MPI_CALL: world.comm, **_xhc(world)}
    yield Case(
        "barrier",
        0,
        [_looped(SYNCHRONOUS, hvd.barrier, OURS)]
        + [_looped(name, comm.Barrier) for name, comm in ways.items()],
    )
    something = {"a": 1}
    yield Case(
        "broadcast_object",
        0,
        [
            _looped(SYNCHRONOUS, lambda: hvd.broadcast_object(something), OURS),
            _looped(OBJECTS, lambda: world.comm.bcast(something)),
        ],
    )
    yield Case(
        "allgather_object",
        0,
        [
            _looped(SYNCHRONOUS, lambda: hvd.allgather_object(something), OURS),
            _looped(OBJECTS, lambda: world.comm.allgather(something)),
        ],
    )
    one = np.ones(1, np.float32)
    yield Case(
        "allreduce without a name",
        4,
        [
            _looped(SYNCHRONOUS, lambda: hvd.allreduce(one, op=hvd.Sum), OURS),
            _looped(NAMED, lambda: hvd.allreduce(one, op=hvd.Sum, name="verbs.named")),
        ],
    )


def _looped(name: str, call: Callable[[], Any], kind: str = "peer", loops: int = 100) -> Contender:
    def run() -> None:
        for _ in range(loops):
            call()

    return Contender(name, run, rehearse=run, kind=kind, loops=loops)


def _xhc(world: World) -> dict[str, MPI.Intracomm]:
    """Return a communicator with Open MPI's hierarchical collectives, if it has them."""
    if not MPI.Get_library_version().startswith("Open MPI"):
        return {}
    info = MPI.Info.Create()
    info.Set("ompi_comm_coll_preference", "xhc,^tuned")
    made: MPI.Intracomm = world.comm.Dup_with_info(info)
    world.note("MPI, xhc: a communicator that prefers Open MPI's component xhc")
    return {XHC: made}


def label(verb: str, nbytes: int) -> str:
    """Return a case's label."""
    return f"{verb}, {show_bytes(nbytes)}"


def targets() -> Iterator[Target]:
    """Yield the targets on one host."""
    against = (MPI_CALL, XHC)
    for nbytes, bounds in zip(SIZES, ((1.0, 0.5), (1.0, 0.5), (0.9, 0.6), (0.8, 0.5)), strict=True):
        for verb in VERBS[:-1]:
            case = label(verb, nbytes)
            yield Target(f"{case}, times MPI", case, SYNCHRONOUS, against, *bounds, fewer=True)
            if nbytes >= MIDDLE:
                held = f"{case}, of hvd.empty(), times MPI"
                yield Target(held, case, SHARED, against, *bounds, fewer=True)
    yield Target("barrier, times MPI", "barrier", SYNCHRONOUS, against, 1.0, 0.5, fewer=True)
    for case in ("broadcast_object", "allgather_object"):
        yield Target(f"{case}, times mpi4py", case, SYNCHRONOUS, (OBJECTS,), 4.0, 2.0, fewer=True)
    case = "allreduce without a name"
    yield Target(f"{case}, times named", case, SYNCHRONOUS, (NAMED,), 2.0, 1.2, fewer=True)


QUESTION = Question(
    name="verbs",
    title="verbs: each verb, synchronous, by a remembered name, per call",
    sizes_are="bytes of the larger side",
    sizes=SIZES,
    tiny=(SMALL, 64 << 10),
    repeats=40,
    seconds=6.0,
    cases=cases,
    targets=tuple(targets()),
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))

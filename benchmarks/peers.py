"""The contenders of the data questions: pyhvd, MPI used well and badly, gloo, Horovod, and the floor.

Each function takes a case's tensors and returns contenders that reduce them in place. If a peer cannot be
imported, the function adds a note to the report instead. The peers include strong ones on purpose: one
MPI_Allreduce of many megabytes is easy to beat, but MPI_Allreduce in chunks is not.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import pyhvd as hvd
from benchmarks.harness import FLOOR, OURS, Contender, World
from benchmarks.mpi import MPI
from benchmarks.tensors import Array, Tensors

MIB = 1 << 20
SINGLY = "pyhvd, in place"
SHARED = "pyhvd, in place, of pyhvd.empty()"
GROUP = "pyhvd, one group"
RAW = "MPI Allreduce"
FLAT = "MPI, one flat Allreduce"
PACKED = "MPI, pack + Allreduce + unpack"
CHUNKS = "MPI, 2 MiB chunks"
SEPARATE = "MPI, an Allreduce per tensor"
GLOO = "gloo, singly"
GLOO_BUCKETS = "gloo, 25 MiB buckets"
HOROVOD = "Horovod"
MEMORY = "memory floor"


def contender(name: str, tensors: Tensors, once: Callable[[], None], **more: Any) -> Contender:
    """Return a contender that reduces the tensors in place, ``tensors.loops`` times per repetition.

    With one loop, each repetition fills the tensors before the call and checks them after it. With several
    loops, the tensors hold zeros, and as many untimed calls precede: the first calls after other work take up
    to ten times as long. The contender then fills the tensors, reduces them once more, and checks them.
    """
    if tensors.loops == 1:
        return Contender(name, once, prepare=tensors.fill, check=tensors.check, **more)

    def run() -> None:
        for _ in range(tensors.loops):
            once()

    def finish() -> None:
        tensors.fill()
        once()

    return Contender(
        name,
        run,
        prepare=tensors.zero,
        rehearse=run,
        finish=finish,
        check=tensors.check,
        loops=tensors.loops,
        **more,
    )


# -- pyhvd ---------------------------------------------------------------------------------------------


def start_pyhvd() -> None:
    """Start pyhvd on this rank, once."""
    hvd.init()


def pyhvd_singly(tensors: Tensors, prefix: str, name: str = SINGLY) -> Contender:
    """Return a contender that submits the tensors one by one, then waits for each."""
    start_pyhvd()
    named = [(array, f"{prefix}.{t}") for t, array in enumerate(tensors.arrays)]

    def once() -> None:
        handles = [hvd.allreduce_async_(array, name=label, op=hvd.Sum) for array, label in named]
        for handle in handles:
            hvd.synchronize(handle)

    return contender(name, tensors, once, kind=OURS)


def pyhvd_shared(world: World, tensors: Tensors, prefix: str) -> Contender:
    """Return the same contender with arrays of ``pyhvd.empty()``, which pyhvd reduces without a copy."""
    start_pyhvd()
    counts = [array.size for array in tensors.arrays]
    dtype = tensors.arrays[0].dtype
    shared = Tensors(counts, world.rank, world.size, dtype, tensors.loops, hvd.empty)
    return pyhvd_singly(shared, f"{prefix}.shared", SHARED)


def pyhvd_group(tensors: Tensors, prefix: str) -> Contender:
    """Return a contender that submits the tensors as one group."""
    start_pyhvd()

    def once() -> None:
        hvd.grouped_allreduce_(tensors.arrays, name=f"{prefix}.group", op=hvd.Sum)

    return contender(GROUP, tensors, once, kind=OURS)


# -- MPI -----------------------------------------------------------------------------------------------


def reduce_in_place(comm: MPI.Intracomm, array: Array) -> None:
    """Run MPI_Allreduce of one array by mpi4py."""
    comm.Allreduce(MPI.IN_PLACE, array)


def mpi_separate(world: World, tensors: Tensors, name: str = SEPARATE, beside: str = "") -> Contender:
    """Return a contender that calls MPI_Allreduce once per tensor."""

    def once() -> None:
        for array in tensors.arrays:
            reduce_in_place(world.comm, array)

    return contender(name, tensors, once, beside=beside)


def mpi_packed(world: World, tensors: Tensors) -> Contender:
    """Return a contender without a library: a numpy loop packs, one MPI_Allreduce, a loop unpacks."""
    buffer = np.empty(sum(array.size for array in tensors.arrays), tensors.arrays[0].dtype)
    pieces = _places(buffer, tensors.arrays)

    def once() -> None:
        _through(world.comm, buffer, pieces)

    return contender(PACKED, tensors, once)


def mpi_chunks(world: World, tensors: Tensors, nbytes: int = 2 * MIB) -> Contender:
    """Return a strong peer: its chunks stay in the cache, and it packs only chunks of several tensors."""
    buffer = np.empty(max(1, nbytes // tensors.arrays[0].itemsize), tensors.arrays[0].dtype)
    buckets = [
        (sum(piece.size for piece in bucket), _places(buffer, bucket)) for bucket in tensors.pieces(nbytes)
    ]

    def once() -> None:
        for used, pieces in buckets:
            if len(pieces) == 1:
                reduce_in_place(world.comm, pieces[0][1])
            else:
                _through(world.comm, buffer[:used], pieces)

    return contender(CHUNKS, tensors, once)


def mpi_flat(world: World, tensors: Tensors) -> Contender:
    """Return a contender that calls MPI_Allreduce on as many contiguous bytes, without packing."""
    count = sum(array.size for array in tensors.arrays)
    flat = Tensors([count], world.rank, world.size, loops=tensors.loops)
    return contender(FLAT, flat, lambda: reduce_in_place(world.comm, flat.arrays[0]))


def _places(buffer: Array, arrays: Sequence[Array]) -> list[tuple[Array, Array]]:
    """Pair each array with its part of the buffer."""
    places, first = [], 0
    for array in arrays:
        places.append((buffer[first : first + array.size], array))
        first += array.size
    return places


def _through(comm: MPI.Intracomm, buffer: Array, pieces: list[tuple[Array, Array]]) -> None:
    for place, array in pieces:
        place[:] = array
    reduce_in_place(comm, buffer)
    for place, array in pieces:
        array[:] = place


def memory_floor(tensors: Tensors) -> Contender:
    """Return the floor: all ranks read and write their bytes once, and no in-place allreduce does less."""

    def once() -> None:
        for array in tensors.arrays:
            np.negative(array, out=array)

    return replace(contender(MEMORY, tensors, once), check=lambda _: None, finish=lambda: None, kind=FLOOR)


# -- others --------------------------------------------------------------------------------------------


def start_gloo(world: World) -> Any:
    """Start gloo and return torch.distributed, or add a note and return None."""
    if importlib.util.find_spec("torch") is None:
        world.note("torch.distributed gloo: torch is not installed")
        return None
    return start_torch_distributed(world, "gloo")


def start_torch_distributed(world: World, backend: str) -> Any:
    """Return torch.distributed; make its default group of a backend if there is none."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    if not distributed.is_initialized():
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        folder = world.comm.bcast(tempfile.mkdtemp(prefix="bench-") if world.rank == 0 else "")
        store = os.path.join(folder, "store")
        distributed.init_process_group(
            backend, init_method=f"file://{store}", rank=world.rank, world_size=world.size
        )
        atexit.register(_end_torch_distributed, distributed, folder)
    return distributed


def _end_torch_distributed(distributed: Any, folder: str) -> None:
    """End its threads before the interpreter ends, and after every peer is done with them."""
    distributed.barrier()
    distributed.destroy_process_group()
    shutil.rmtree(folder, ignore_errors=True)


def gloo_singly(world: World, tensors: Tensors, name: str = GLOO, beside: str = "") -> list[Contender]:
    """Return a contender that submits the tensors one by one, asynchronously, then waits for each."""
    distributed = start_gloo(world)
    if distributed is None:
        return []
    members = [torch_view(array) for array in tensors.arrays]

    def once() -> None:
        for work in [distributed.all_reduce(member, async_op=True) for member in members]:
            work.wait()

    return [contender(name, tensors, once, beside=beside)]


def gloo_buckets(world: World, tensors: Tensors, nbytes: int = 25 * MIB) -> list[Contender]:
    """Return a contender like DistributedDataParallel: it packs buckets, and reduces them concurrently."""
    distributed = start_gloo(world)
    if distributed is None:
        return []
    buckets = []
    for pieces in tensors.pieces(nbytes):
        buffer = np.empty(sum(piece.size for piece in pieces), pieces[0].dtype)
        buckets.append((torch_view(buffer), _places(buffer, pieces)))

    def once() -> None:
        works = []
        for member, pieces in buckets:
            for place, array in pieces:
                place[:] = array
            works.append(distributed.all_reduce(member, async_op=True))
        for work, (_, pieces) in zip(works, buckets, strict=True):
            work.wait()
            for place, array in pieces:
                array[:] = place

    return [contender(GLOO_BUCKETS, tensors, once)]


def torch_view(array: Array) -> Any:
    """Return a torch tensor that shares an array's memory; bfloat16 passes as 16-bit words."""
    torch: Any = importlib.import_module("torch")
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def load_horovod(world: World) -> Any:
    """Return horovod.torch before hvd.init(), or add a note and return None.

    Start Horovod only when its turn comes: its background thread wakes each millisecond from then on.
    """
    if any(importlib.util.find_spec(name) is None for name in ("horovod", "torch")):
        world.note("Horovod: not installed")
        return None
    if hasattr(importlib.import_module("horovod"), "__pyhvd__"):
        world.note("Horovod: not installed; import horovod finds pyhvd under its name")
        return None
    world.note("Horovod: measured after the others, as its background thread wakes each millisecond")
    return importlib.import_module("horovod.torch")


def horovod(world: World, tensors: Tensors, prefix: str, group: bool = False) -> list[Contender]:
    """Return contenders that submit the tensors one by one and as one group, and wait."""
    module = load_horovod(world)
    if module is None:
        return []
    members = [torch_view(array) for array in tensors.arrays]

    def once() -> None:
        if group:
            module.grouped_allreduce_(members, name=f"{prefix}.group", op=module.Sum)
            return
        handles = [
            module.allreduce_async_(member, name=f"{prefix}.{t}", op=module.Sum)
            for t, member in enumerate(members)
        ]
        for handle in handles:
            module.synchronize(handle)

    made = contender(HOROVOD, tensors, once, noisy=True)

    def prepare() -> None:
        module.init()  # no effect the second time
        made.prepare()

    return [replace(made, prepare=prepare)]

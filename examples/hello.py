"""Run every collective once, on any number of ranks; rank 0 prints the results.

Start it with ``pyhvdrun -n 3 examples/hello.py``. In the printed texts, r is the rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import pyhvd as hvd


def show(what: str, result: Any) -> None:
    """Print, on rank 0, a result that is the same on every rank."""
    if hvd.rank() == 0:
        shown = [each.tolist() if hasattr(each, "tolist") else each for each in _as_list(result)]
        print(f"{what:<44} {', '.join(map(str, shown))}", flush=True)


def show_each(what: str, result: Any) -> None:
    """Print, on rank 0, the result of each rank."""
    shown = [each.tolist() for each in _as_list(result)]
    for rank, theirs in enumerate(hvd.allgather_object(shown)):
        if hvd.rank() == 0:
            print(f"{what:<44} {', '.join(map(str, theirs))}   on rank {rank}", flush=True)
            what = ""


def _as_list(result: Any) -> list[Any]:
    return result if isinstance(result, list) else [result]


def reductions(rank: int, size: int) -> None:
    """Reduce the ranks' arrays element by element."""
    mine = np.array([rank + 1.0, 10.0 * (rank + 1)])
    for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
        show(f"allreduce, {op.name.title()} of [r+1, 10(r+1)]", hvd.allreduce(mine, op=op, name="mine"))
    hvd.allreduce_(mine, op=hvd.Sum, name="mine")
    show("allreduce_, the same in place", mine)
    pair = [np.array([rank]), np.array([1.0, 0.5])]
    show("grouped_allreduce, Sum of [r], [1, 0.5]", hvd.grouped_allreduce(pair, op=hvd.Sum, name="pair"))
    rows = np.arange(size + 1)
    show_each("reducescatter, Sum of [0 ... size]", hvd.reducescatter(rows, op=hvd.Sum, name="rows"))
    both = [rows, 10 * rows]
    scattered = hvd.grouped_reducescatter(both, op=hvd.Sum, name="both")
    show_each("grouped_reducescatter of it and 10 times it", scattered)


def movements(rank: int, size: int) -> None:
    """Move the ranks' arrays without a reduction."""
    own = np.full(rank + 1, rank)  # each rank chooses its number of rows
    show("allgather of r+1 rows [r]", hvd.allgather(own, name="own"))
    show("grouped_allgather of [r], [-r]", hvd.grouped_allgather([own[:1], -own[:1]], name="both signs"))
    array = np.array([rank, rank])
    show("broadcast of [r, r] from the last rank", hvd.broadcast(array, size - 1, name="array"))
    hvd.broadcast_(array, 0, name="array")
    show("broadcast_, in place, from rank 0", array)
    show_each("alltoall of [10r, 10r+1, ...]", hvd.alltoall(10 * rank + np.arange(size), name="letters"))
    splits = np.arange(size)  # no row for rank 0, one row for rank 1, ...
    received, _ = hvd.alltoall(np.full(splits.sum(), rank), splits, name="more letters")
    show_each("alltoall of [r, ...], d rows to rank d", received)


def others(rank: int, size: int) -> None:
    """Broadcast and gather objects, use a handle, and join."""
    show("broadcast_object from rank 0", hvd.broadcast_object({"from": rank}, name="note"))
    show("allgather_object, sizes may differ", [hvd.allgather_object("abcdefgh"[: rank + 1], name="strings")])
    handle = hvd.allreduce_async(np.float32(0.5), op=hvd.Sum, name="later")
    hvd.poll(handle)  # True once the allreduce has ended; the rank may compute until then
    show("allreduce_async of 0.5, then synchronize", hvd.synchronize(handle))
    hvd.barrier()
    show("barrier", "passed")
    for step in range(size - rank):  # each rank has a different number of steps
        left = hvd.allreduce(1, op=hvd.Sum, name="step")
        show(f"ranks that take part in step {step}", left)
    show("join: the last rank to join was", hvd.join())


def main() -> None:
    """Run every collective once."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    show("ranks", size)
    reductions(rank, size)
    movements(rank, size)
    others(rank, size)
    hvd.shutdown()


if __name__ == "__main__":
    main()

"""Random programs that never end by themselves: what ranks do when a fault strikes.

``python -m tests.hosts.fault_programs FOLDER SEED SIZE [VERB LENGTH]`` is one of SIZE ranks. With VERB, one
of :data:`VERBS`, it makes only such steps, with tensors of LENGTH floats. All hosts share FOLDER: each rank
counts its steps in a file there, and writes how its steps ended to another one. It ends when there is a file
``leave``.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import pyhvd as hvd
from tests.hosts.connections import own_ports

_SMALL = (1, 1000, 20_000)
_LARGE = (300_000, 4_000_000)
_LATE_S = 0.2
LARGE = 3 << 20  # floats, so that ranks are inside the verb most of the time

VERBS = ("allgather", "broadcast", "alltoall", "reducescatter", "adasum")


class Program:
    """The steps of one rank. Every rank draws the same steps from ``plan``, and waits as it likes."""

    def __init__(self, seed: int, some: hvd.ProcessSet, verb: str = "", length: int = LARGE) -> None:
        self._plan = random.Random(seed)
        self._own = random.Random(f"{seed} {hvd.rank()}")
        self._some = some
        self._number = 0
        self._verb, self._length = verb, length
        self._steps: tuple[Callable[[], None], ...] = (
            *(self._reduce, self._reduce_many, self._reduce_group, self._reduce_large, self._reduce_new),
            *(self._wait_for_a_late_rank, self._poll, self._reduce_on_some, self._join, self._move),
        )

    def step(self) -> None:
        """Make the next step."""
        self._number += 1
        if self._verb:
            self._move(self._verb, self._length)
        else:
            self._plan.choice(self._steps)()

    def _check(self, out: np.ndarray, ranks: list[int]) -> None:
        assert (out[0], out[-1]) == (sum(ranks), sum(ranks)), f"step {self._number}: {out} of {ranks}"

    def _reduce(self, length: int = 0, name: str = "small") -> None:
        length = length or self._plan.choice(_SMALL)
        mine = np.full(length, hvd.rank(), np.float32)
        self._check(hvd.allreduce(mine, op=hvd.Sum, name=f"{name}{length}"), [*range(hvd.size())])

    def _reduce_large(self) -> None:
        self._reduce(self._plan.choice(_LARGE), "large")

    def _reduce_new(self) -> None:
        self._reduce(name=f"new{self._number}.")

    def _reduce_many(self) -> None:
        mine = np.full(256, hvd.rank(), np.float32)
        handles = [hvd.allreduce_async(mine, op=hvd.Sum, name=f"many{k}") for k in range(20)]
        for handle in self._own.sample(handles, len(handles)):
            self._check(handle.result(), [*range(hvd.size())])

    def _reduce_group(self) -> None:
        mine = [np.full(length, hvd.rank(), np.float32) for length in _SMALL]
        for out in hvd.grouped_allreduce(mine, op=hvd.Sum, name="group"):
            self._check(out, [*range(hvd.size())])

    def _move(self, verb: str = "", length: int = 0) -> None:
        verb = verb or self._plan.choice(VERBS[:-1])  # Adasum needs a power of two of ranks
        length = length or self._plan.choice((60, 12_000))
        size, root = hvd.size(), self._plan.randrange(hvd.size())
        length -= length % size  # for alltoall
        mine, name = np.full(length, hvd.rank() + 1, np.float32), f"{verb}{length}"
        if verb == "allgather":
            assert (hvd.allgather(mine, name=name)[::length] == np.arange(size) + 1).all()
        elif verb == "broadcast":
            assert hvd.broadcast(mine, root, name=f"{name}.{root}")[-1] == root + 1
        elif verb == "alltoall":
            out = hvd.alltoall(mine, name=name)
            assert (out[:: length // size] == np.arange(size) + 1).all()
        elif verb == "reducescatter":
            assert hvd.reducescatter(mine, op=hvd.Sum, name=name)[-1] == size * (size + 1) // 2
        else:
            assert hvd.allreduce(mine, op=hvd.Adasum, name=name)[-1] > 0

    def _wait_for_a_late_rank(self) -> None:
        late = self._plan.randrange(hvd.size())
        if hvd.rank() == late:
            time.sleep(self._own.uniform(0, _LATE_S))
        self._reduce()

    def _poll(self) -> None:
        mine = np.full(1000, hvd.rank(), np.float32)
        handle = hvd.allreduce_async(mine, op=hvd.Sum, name="polled")
        while not hvd.poll(handle):
            time.sleep(0.001)
        self._check(handle.result(), [*range(hvd.size())])

    def _reduce_on_some(self) -> None:
        if not self._some.included():
            return
        for length in _SMALL:
            mine = np.full(length, hvd.rank(), np.float32)
            out = hvd.allreduce(mine, op=hvd.Sum, name=f"some{length}", process_set=self._some)
            self._check(out, list(self._some.ranks or ()))

    def _join(self) -> None:
        leaver = self._plan.randrange(hvd.size())
        for _ in range(3):
            length = self._plan.choice(_SMALL)
            if hvd.rank() != leaver:
                mine = np.full(length, hvd.rank(), np.float32)
                out = hvd.allreduce(mine, op=hvd.Sum, name=f"small{length}")
                self._check(out, [rank for rank in range(hvd.size()) if rank != leaver])
        hvd.join()


def run_until_an_error(folder: Path, seed: int, size: int, verb: str = "", length: str = "0") -> None:
    """Make steps until a call raises; write the error, and raise it when all ranks may leave."""
    some = hvd.ProcessSet([0, size - 1])  # of the first and of the last host
    hvd.init(process_sets=[some])
    if some.included():  # a host that is lost while MPI opens the set's links is none of these faults
        hvd.allreduce(np.ones(1), name="opens", process_set=some)
    program = Program(seed, some, verb, int(length))
    (folder / f"ports{hvd.rank()}").write_text(json.dumps(own_ports()))
    with noted_steps(folder) as note:
        while True:
            note()
            program.step()


@contextmanager
def noted_steps(folder: Path) -> Iterator[Callable[[], None]]:
    """Yield what notes a step; write the block's error, and raise it when all ranks may leave."""
    with (folder / f"steps{hvd.rank()}").open("ab", buffering=0) as steps:
        try:
            yield lambda: (steps.write(b"."), None)[1]
        except hvd.HorovodInternalError as error:
            text = json.dumps({"error": type(error).__name__, "text": str(error), "time": time.time()})
            part = folder / f"part{hvd.rank()}"
            part.write_text(text)
            part.rename(folder / f"ending{hvd.rank()}")
            while not (folder / "leave").exists():
                time.sleep(0.01)
            raise


if __name__ == "__main__":
    run_until_an_error(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])

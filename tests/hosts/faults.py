"""Faults while ranks on several hosts reduce: the ranks' side, and what a test does to a host.

``python -m tests.hosts.faults FOLDER`` is a rank. It counts its steps in a file of FOLDER, and writes the
error that ends them to another one: all hosts share files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import pyhvd as hvd
from tests.bed import Bed, Host
from tests.hosts.launch import Site
from tests.mpi.launch import ROOT, MpiJob, job_directory

KINDS = ("kill", "crash", "cut", "power", "freeze")
"""A rank is killed; all processes of a host are; a host loses its network, its power, its processors."""

_LENGTHS = (1, 1000, 300_000)


@dataclass(frozen=True)
class Ending:
    """How a rank's steps ended: the error's type and text, and the time (``time.time()``)."""

    error: str
    text: str
    time: float


class ReducingJob:
    """A job whose ranks reduce small and large tensors until a call raises; close it after use."""

    def __init__(self, site: Site, shape: Sequence[int], env: Mapping[str, str] | None = None) -> None:
        self._size = sum(shape)
        self._place = job_directory()
        self._folder = self._place.__enter__()
        command = site.command(shape, sys.executable, "-m", __name__, str(self._folder))
        settings = {"PYTHONPATH": str(ROOT), **(env or {})}
        self._job = MpiJob(command, self._folder, settings, ROOT)

    def steps(self) -> list[int]:
        """Return each rank's number of steps so far."""
        files = [self._folder / f"steps{rank}" for rank in range(self._size)]
        return [path.stat().st_size if path.exists() else 0 for path in files]

    def wait_for_steps(self, count: int, within: float = 30.0) -> None:
        """Wait until every rank has made that many steps."""
        self._wait(lambda: min(self.steps()) >= count, within, f"{count} steps of every rank")

    def wait_until_still(self, within: float = 15.0) -> None:
        """Wait until no rank has made a step for half a second."""
        last: list[tuple[float, list[int]]] = [(time.monotonic(), [])]

        def is_still() -> bool:
            if (now := self.steps()) != last[0][1]:
                last[0] = time.monotonic(), now
            return time.monotonic() - last[0][0] > 0.5

        self._wait(is_still, within, "the ranks stand still")

    def endings(self, ranks: Sequence[int], within: float) -> dict[int, Ending]:
        """Return how these ranks' steps ended; wait for all of them."""
        files = {rank: self._folder / f"ending{rank}" for rank in ranks}
        self._wait(
            lambda: all(path.exists() for path in files.values()), within, f"an error on ranks {ranks}"
        )
        return {rank: Ending(**json.loads(path.read_text())) for rank, path in files.items()}

    def pid_of(self, rank: int) -> int:
        """Return a rank's process id, in the tests' numbering."""
        return next(pid for pid, number in self._job.processes().items() if number == rank)

    def close(self) -> None:
        """End all of the job's processes."""
        self._job.kill()
        self._place.__exit__(None, None, None)

    def _wait(self, true: Callable[[], bool], within: float, what: str) -> None:
        until = time.monotonic() + within
        while not true():
            if time.monotonic() > until:
                self._job.dump_stacks()
                raise AssertionError("\n".join([f"not in {within:g} s: {what}", *self._job.output()]))
            time.sleep(0.01)


def strike(made: Bed, kind: str, host: Host, job: ReducingJob, rank: int) -> None:
    """Do what `kind` says to a host, or to a rank on it."""
    if kind == "kill":
        os.kill(job.pid_of(rank), signal.SIGKILL)
    elif kind == "crash":
        host.crash()
    elif kind == "cut":
        made.cut_off(host)
    elif kind == "power":
        made.power_off(host)
    else:
        host.freeze()


def heal(made: Bed, kind: str, host: Host) -> None:
    """Make a struck host usable for the next job; its old one must have been closed, unless it is frozen."""
    if kind in ("crash", "power"):
        made.start_host(host)
    elif kind == "cut":
        made.rejoin(host)
    elif kind == "freeze":
        host.thaw()


def reduce_until_an_error(folder: Path) -> None:
    """Reduce tensors until a call raises, and write the error."""
    hvd.init()
    arrays = [np.full(length, hvd.rank(), np.float32) for length in _LENGTHS]
    total = sum(range(hvd.size()))
    with (folder / f"steps{hvd.rank()}").open("ab", buffering=0) as steps:
        try:
            while True:
                for array in arrays:
                    out = hvd.allreduce(array, name=f"t{array.size}", op=hvd.Sum)
                    assert out[-1] == total
                steps.write(b".")
        except hvd.HorovodInternalError as error:
            text = json.dumps({"error": type(error).__name__, "text": str(error), "time": time.time()})
            part = folder / f"part{hvd.rank()}"
            part.write_text(text)
            part.rename(folder / f"ending{hvd.rank()}")


if __name__ == "__main__":
    reduce_until_an_error(Path(sys.argv[1]))

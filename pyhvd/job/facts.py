"""What a host lacks for its ranks. The driver compares, as it knows the job."""

from __future__ import annotations

import sys
import time

from pyhvd._version import __version__
from pyhvd.job.messages import Facts, Hello
from pyhvd.job.spec import DIRECTORY, PYTHON, NameOf, flag_of


def hello() -> Hello:
    """Return this process's versions and time."""
    return Hello(__version__, ".".join(map(str, sys.version_info[:3])), time.time())


def version_problem(own: Hello, other: Hello, name_of: NameOf = flag_of) -> str:
    """Return what is wrong with a host's software, and the remedy; empty if nothing is."""
    if own.pyhvd != other.pyhvd:
        return (
            f"it has pyhvd {other.pyhvd}, the launcher has {own.pyhvd}: install the same version there, with"
            f" pip install pyhvd=={own.pyhvd}"
        )
    if own.python.rpartition(".")[0] != other.python.rpartition(".")[0]:
        return (
            f"it has Python {other.python}, the launcher has {own.python}: give the path of the same Python"
            f" with {name_of(PYTHON)}"
        )
    return ""


def problem(own: Facts, other: Facts, directory: str, script: str, name_of: NameOf = flag_of) -> str:
    """Return what a host lacks, and the remedy; empty if it lacks nothing."""
    if not other.mpi:
        return other.mpi_name
    if other.mpi != own.mpi:
        return (
            f"mpi4py is built on {other.mpi_name} there, which is another MPI family than the launcher's"
            f" {own.mpi_name}: install the same MPI on all hosts"
        )
    if not other.has_directory:
        return (
            f"there is no directory {directory}, or it is closed to this user: make it there, share it, or"
            f" name another with {name_of(DIRECTORY)}"
        )
    if script and not other.script:
        return f"there is no script {script} in {directory}: copy it there, or share the directory"
    if script and other.script != own.script:
        return f"the script {script} in {directory} is another than the launcher's: copy it there again"
    return ""

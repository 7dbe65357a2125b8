"""What a host has for its ranks, and what it lacks. The driver compares, as it knows the job."""

from __future__ import annotations

import hashlib
import os
import sys
import time

from pyhvd import __version__
from pyhvd.job.errors import LaunchError
from pyhvd.job.interfaces import describe_network
from pyhvd.job.messages import Facts, Hello
from pyhvd.job.mpi.flavour import Flavour, find_library


def hello() -> Hello:
    """Return this process's versions and time."""
    return Hello(__version__, ".".join(map(str, sys.version_info[:3])), time.time())


def gather(directory: str, script: str, library: Flavour | None = None) -> Facts:
    """Return what this host has for ranks that run in a directory, and read a script relative to it.

    `library` is its MPI, if that is known.
    """
    try:
        library = library or find_library()
    except LaunchError as exc:
        family, name = "", str(exc)
    else:
        family, name = library.family, library.name
    has_directory = os.path.isdir(directory) and os.access(directory, os.X_OK)
    digest = _digest(os.path.join(directory, script)) if script else ""
    return Facts(family, name, has_directory, digest, describe_network())


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def version_problem(own: Hello, other: Hello) -> str:
    """Return what is wrong with a host's software, and the remedy; empty if nothing is."""
    if own.pyhvd != other.pyhvd:
        return (
            f"it has pyhvd {other.pyhvd}, the launcher has {own.pyhvd}: install the same version there, with"
            f" pip install pyhvd=={own.pyhvd}"
        )
    if own.python.rpartition(".")[0] != other.python.rpartition(".")[0]:
        return (
            f"it has Python {other.python}, the launcher has {own.python}: give the path of the same Python"
            " with --python"
        )
    return ""


def problem(own: Facts, other: Facts, directory: str, script: str) -> str:
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
            " name another with --chdir"
        )
    if script and not other.script:
        return f"there is no script {script} in {directory}: copy it there, or share the directory"
    if script and other.script != own.script:
        return f"the script {script} in {directory} is another than the launcher's: copy it there again"
    return ""

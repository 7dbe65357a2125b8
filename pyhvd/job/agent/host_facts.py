"""What this host has for ranks: its MPI, the directory, the script, and its networks."""

from __future__ import annotations

import hashlib
import os

from pyhvd.job.errors import LaunchError
from pyhvd.job.messages import Facts
from pyhvd.job.mpi.flavour import Flavour, find_library
from pyhvd.job.network.interfaces import describe_network


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

"""Open MPI's settings for a job of pyhvd, as variables; what the user has set wins."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

PARAMETERS = ("OMPI_MCA_", "PRTE_MCA_")
"""How names of variables begin that set Open MPI's parameters."""
# Open MPI creates sockets below its temporary directory; the path of a socket has at most 108 bytes.
_LONGEST_DIRECTORY = 60


def mpiexec_settings(mapping_policy: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of mpiexec that the user has not set in `environ`; its arguments win too."""
    settings = {
        "PRTE_MCA_rmaps_default_mapping_policy": mapping_policy,
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        # Looking for other networks costs 1 s or more of every start. The btl list needs this pml.
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        **root_settings("OMPI"),
    }
    return {name: value for name, value in settings.items() if name not in environ}


def root_settings(prefix: str) -> dict[str, str]:
    """Return the variables that let Open MPI (OMPI) or its daemons (PRTE) run as root, if this is root."""
    if os.getuid() != 0:
        return {}
    return {f"{prefix}_ALLOW_RUN_AS_ROOT": "1", f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def short_temporary_directory() -> str:
    """Return the temporary directory, or /tmp if its path is too long for Open MPI's sockets."""
    path = tempfile.gettempdir()
    return path if len(os.fsencode(path)) < _LONGEST_DIRECTORY else "/tmp"

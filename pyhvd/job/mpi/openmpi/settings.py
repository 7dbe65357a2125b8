"""Open MPI's settings for a job of pyhvd, as variables; what the user has set wins."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

PARAMETERS = ("OMPI_MCA_", "PRTE_MCA_")
"""How names of variables begin that set Open MPI's parameters."""
# Open MPI creates sockets below its temporary directory; the path of a socket has at most 108 bytes.
_LONGEST_DIRECTORY = 60


# The parameters of PRRTE, and what they are called by Open MPI's own launcher, before version 5.
_BEFORE_5 = {
    "PRTE_MCA_rmaps_default_mapping_policy": "OMPI_MCA_rmaps_base_mapping_policy",
    "PRTE_MCA_hwloc_default_binding_policy": "OMPI_MCA_hwloc_base_binding_policy",
    "PRTE_MCA_prte_tmpdir_base": "OMPI_MCA_orte_tmpdir_base",
}


def mpiexec_settings(
    mapping_policy: str, environ: Mapping[str, str], version: str, folder: str = ""
) -> dict[str, str]:
    """Return the variables of mpiexec that the user has not set in `environ`; its arguments win too.

    Parameters
    ----------
    mapping_policy : str
        How ranks are placed.
    environ : mapping of str to str
        The user's environment.
    version : str
        Open MPI's version, such as ``"5.0.11"``.
    folder : str
        Where mpiexec makes its session directory; empty: in the default place.
    """
    before_5 = is_before_5(version)
    settings = {
        "PRTE_MCA_rmaps_default_mapping_policy": mapping_policy,
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        **({"PRTE_MCA_prte_tmpdir_base": folder} if folder else {}),
        # Looking for other networks costs 1 s or more of every start. The btl list needs this pml.
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,vader,tcp" if before_5 else "self,sm,tcp",
        **root_settings("OMPI"),
    }
    if before_5:
        settings = {_BEFORE_5.get(name, name): value for name, value in settings.items()}
        settings["OMPI_MCA_orte_execute_quiet"] = "1"  # no page of text after each failed rank
    return {name: value for name, value in settings.items() if name not in environ}


def is_before_5(version: str) -> bool:
    """Return whether Open MPI has its own launcher, and not PRRTE."""
    return version.partition(".")[0] in ("3", "4")


def root_settings(prefix: str) -> dict[str, str]:
    """Return the variables that let Open MPI (OMPI) or its daemons (PRTE) run as root, if this is root."""
    if os.getuid() != 0:
        return {}
    return {f"{prefix}_ALLOW_RUN_AS_ROOT": "1", f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def short_temporary_directory() -> str:
    """Return the temporary directory, or /tmp if its path is too long for Open MPI's sockets."""
    path = tempfile.gettempdir()
    return path if len(os.fsencode(path)) < _LONGEST_DIRECTORY else "/tmp"

"""MPI as the carrier of links: finds its functions in the library that mpi4py has loaded.

The extension gets addresses and handles, so it is never linked to an MPI. `native/src/links/mpi.h` states how
it uses them.
"""

from __future__ import annotations

import ctypes
import os

from mpi4py import MPI

from pyhvd.native.shared_memory import MpiCarrier
from pyhvd.transport.fabric import Fabric
from pyhvd.transport.link_carrier import OpenCarrier
from pyhvd.transport.mpi.fabric import MpiFabric

_NAMES = ("MPI_Isend", "MPI_Issend", "MPI_Irecv", "MPI_Improbe", "MPI_Imrecv", "MPI_Test")


def _find_functions() -> dict[str, int]:
    """Return the functions' addresses.

    Raises
    ------
    OSError, AttributeError
        mpi4py's module, or a function, is not there.
    """
    # A lookup in this module's handle also searches the libraries that the module is linked to.
    library = ctypes.CDLL(MPI.__file__, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _NAMES}


def open_mpi_carrier(fabric: Fabric) -> OpenCarrier | str:
    """Open MPI as the carrier of a set's links, or return why not; collective, one outcome for all ranks."""
    assert isinstance(fabric, MpiFabric)
    cause, functions = "", {}
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        cause = "MPI's thread level is below MPI_THREAD_MULTIPLE"
    try:
        functions = _find_functions()
    except (OSError, AttributeError) as exc:
        cause = f"a function of MPI is not found: {exc}"
    causes: list[str] = [text for text in fabric.comm.allgather(cause) if text]
    if causes:
        return causes[0]
    comm = fabric.comm.Dup()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    handles = (MPI._handleof(each) for each in (comm, MPI.BYTE, MPI.REQUEST_NULL))
    return OpenCarrier(MpiCarrier(functions, *handles), comm.Free)

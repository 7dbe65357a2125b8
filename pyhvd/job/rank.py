"""The rank proper: gets the function from its task, runs it, and says what came of it.

On the control socket come the length (8 bytes) and the pickle of function, args and kwargs. Back goes, when
the rank is about to call MPI_Init, a note without a payload; and then one answer: the pickled result or a
:class:`~pyhvd.job.messages.Failed`. Each has its kind and its length in front.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from pyhvd.common import launcher_hooks
from pyhvd.common.text import describe_exception, describe_traceback
from pyhvd.errors import TransportError
from pyhvd.job.messages import Failed, encode
from pyhvd.job.mpi.import_check import watch_mpi_import
from pyhvd.job.mpi.rank_env import OPENMPI, Place, find_place
from pyhvd.job.process.environment import set_defaults
from pyhvd.job.process.exit_report import EXCEPTION, EXIT, INTERRUPT, SECONDARY, is_secondary

LENGTH = struct.Struct("!Q")
RESULT = b"R"
FAILURE = b"F"
ENTERS = b"E"
_FLUSH_S = 0.5


def run_rank(control: socket.socket) -> int:
    """Run the function; return the exit code, having said why it is not 0."""
    launcher_hooks.supervised = True
    place = find_place()
    assert place is not None
    set_defaults(place, os.environ)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    watch_mpi_import(place, _ignore, _describe_foreign, lambda: _send(control, ENTERS, b""))
    import cloudpickle

    try:
        function, args, kwargs = cloudpickle.loads(_read(control))
        payload = cloudpickle.dumps(function(*args, **kwargs))
    except BaseException as exc:
        failed = describe_failure(exc, time.time())
        _flush()
        _send(control, FAILURE, encode(failed))
        _leave(failed.code)
    _send(control, RESULT, payload)
    return 0


def describe_failure(exc: BaseException, when: float) -> Failed:
    """Return what ended the function, as the driver will show it."""
    if isinstance(exc, SystemExit):
        number = exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
        said = f": {exc.code}" if isinstance(exc.code, str) else ""
        return Failed(EXIT, f"called sys.exit({number}) and returned nothing{said}", "", when, number & 0xFF)
    if isinstance(exc, KeyboardInterrupt):
        return Failed(INTERRUPT, "was interrupted", "", when, 130)
    # What MPI reports is most often that it has lost another rank.
    kind = SECONDARY if is_secondary(exc) or isinstance(exc, TransportError) else EXCEPTION
    # The frame of run_rank is not the user's.
    return Failed(kind, describe_exception(exc), describe_traceback(exc, skip=1), when)


def _read(control: socket.socket) -> bytearray:
    (length,) = LENGTH.unpack(_read_exactly(control, LENGTH.size))
    return _read_exactly(control, length)


def _read_exactly(control: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = control.recv_into(view)
        if not count:
            raise EOFError("the task is gone")
        view = view[count:]
    return data


def _send(control: socket.socket, kind: bytes, payload: bytes) -> None:
    control.sendall(kind + LENGTH.pack(len(payload)))
    control.sendall(payload)


def _flush() -> bool:
    """Write what is buffered; not for long: who reads it may stand still, and there is a failure to tell.

    False where that cannot be, as the process has no room for a thread.
    """
    thread = threading.Thread(target=_flush_both, daemon=True)
    try:
        thread.start()
    except Exception:
        return False
    thread.join(_FLUSH_S)
    return True


def _flush_both() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _leave(code: int) -> Any:
    """Go before exit handlers wait for the other ranks: the driver has been told, and ends them all."""
    if not _flush():
        _flush_both()
    os._exit(code or 1)


def _ignore(text: str) -> None:
    """An MPI that ends the process as it starts says so itself."""


def _describe_foreign(place: Place) -> str:
    from pyhvd.job.mpi.flavour import find_library

    if place.launcher == OPENMPI:
        return (
            f"mpi4py is built on {find_library().name}, but the driver's mpiexec is Open MPI's: the"
            f" {place.size} ranks would each be alone in a world of size 1; install Open MPI for them:"
            ' pip install "pyhvd[openmpi]"'
        )
    return (
        f"mpi4py is built on {find_library().name}, which does not speak PMI-1: the {place.size} ranks would"
        ' each be alone in a world of size 1; install MPICH for them: pip install "pyhvd[mpich]"'
    )

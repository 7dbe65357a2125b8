"""The end of MPI: this process calls MPI_Finalize when it exits, and its forked children do not.

mpi4py's own exit handler also runs in a forked child that ends by ``sys.exit``, by an exception or by its
last line. There MPI_Finalize would speak in the rank's name. So mpi4py gets ``rc.finalize = False``, and a
handler of this module ends MPI in the process that has started it.

If the program imports ``mpi4py.MPI`` before :func:`take_over` is called, mpi4py keeps its handler. A forked
child then leaves before that handler, with its exit code as far as Python tells it: ``sys.exit`` and uncaught
exceptions do, a bare ``raise SystemExit(n)`` does not.

Importing this module does not import MPI.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any, NoReturn

from pyhvd.common.standard_files import flush_standard_files

_taken = False
_late = False  # mpi4py keeps its handler
_inherited = False  # a parent of this forked process has started MPI
_aborts = False  # mpi4py's handler calls MPI_Abort
_status: object = None  # of the last sys.exit in a forked child


def take_over() -> None:
    """Take MPI's end over from mpi4py. A later call does nothing.

    Call it before handlers are registered by ``atexit`` that must run before MPI ends.
    """
    global _taken, _late
    if _taken:
        return
    _taken = True
    _late = "mpi4py.MPI" in sys.modules
    if not _late:
        import mpi4py

        if mpi4py.rc.finalize is None:
            mpi4py.rc.finalize = False
            atexit.register(_finalize)
    os.register_at_fork(after_in_child=_note_fork)


def end_at_exit() -> None:
    """Finalize MPI at exit, because pyhvd has called MPI_Init and mpi4py has not, unless the program will."""
    import mpi4py

    if _late and mpi4py.rc.finalize is None:
        atexit.register(_finalize)


def watch_abort() -> None:
    """Learn of mpi4py's orders to abort, as ``python -m mpi4py.run`` gives them, once MPI is imported."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    order = getattr(mpi, "_set_abort_status", None)
    if order is None or getattr(order, "__module__", "") == __name__:
        return

    def set_abort_status(status: int) -> None:
        global _aborts
        if not _inherited:  # else the child's failure would end the rank's job
            _aborts = bool(status)
            order(status)

    mpi._set_abort_status = set_abort_status


def _active() -> Any:
    """Return ``mpi4py.MPI`` if MPI is up in this process, or was in the parent that forked it; else None."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def _finalize() -> None:
    mpi = _active()
    if mpi is not None and not _inherited and not _aborts:
        mpi.Finalize()


def _note_fork() -> None:
    global _inherited
    if _inherited or _active() is None:
        return
    _inherited = True
    if _late:
        _keep_status()
        atexit.register(_leave)


def _keep_status() -> None:
    leave = sys.exit

    def keep(status: Any = None, /) -> NoReturn:
        global _status
        _status = status
        leave(status)

    sys.exit = keep


def _leave() -> None:
    """End a forked child: call the other exit handlers, but not mpi4py's, which is not one of Python."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    flush_standard_files()
    failed = getattr(sys, "last_value", None) is not None or not isinstance(_status, int | None)
    os._exit(1 if failed else int(_status or 0) & 0xFF)  # type: ignore[call-overload]

"""The shared-memory path of one node: windows, and the fast lane over them, without the GIL.

Owns: :class:`Window`, a rank's view of memory that the ranks of a node share; :class:`FastPath`, a rank's
end of the fast lane (``fast_path/progress.h``) and of the ready table (``agreement/ready_table.h``); the
calls that it remembers; and :class:`Handle`, the promise that a caller gets. Knows addresses, slots and
codes, but not MPI.

1. Every method of a window is collective: the window's ranks call the same methods in the same order.
2. One thread at a time may use a window.
3. The fast path's mutex guards its calls, with or without the GIL. It is held for a few instructions,
   and no Python code runs under it.
"""

import collections
import logging
import os
import threading
import time

cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_Clear, PyErr_SetFromErrno
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Malloc
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF, PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

from pyhvd.errors import HorovodInternalError, copy_error

cnp.import_array()

_log = logging.getLogger("pyhvd")


cdef extern from "Python.h":
    int PyErr_CheckSignals() except -1
    unsigned long PyThread_get_thread_ident()


include "window.pxi"
include "numpy_objects.pxi"
include "results.pxi"
include "sampler.pxi"
include "host_tree.pxi"
include "agreement.pxi"
include "ready_table.pxi"
include "handle.pxi"
include "tensors.pxi"
include "pieces.pxi"
include "cached_call.pxi"
include "turns.pxi"
include "fast_path.pxi"
include "submit.pxi"
include "call_order.pxi"
include "call_ids.pxi"

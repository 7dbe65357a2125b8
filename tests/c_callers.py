"""C code that uses pyhvd.h, built apart from pyhvd, and called through ctypes, which releases the GIL."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import pyhvd as hvd
from pyhvd.api import c_api

SUBMITTED, BY_PYTHON, STALE, INVALID, PENDING, NOT_HERE = 0, 1, 2, 3, 4, 5
WAITS = 1
LONG_NS = 20_000_000_000
WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror"]


def table() -> int:
    """Return the address of the table of functions."""
    read = ctypes.pythonapi.PyCapsule_GetPointer
    read.restype, read.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(read(c_api.capsule(), b"pyhvd.c_api"))


class Layout(ctypes.Structure):
    """``pyhvd_tensor_layout``."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("n", ctypes.c_uint32),
        ("type", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("in_arena", ctypes.c_int32),
        ("dims", ctypes.c_int64 * 32),
        ("source_bytes", ctypes.c_int64),
        ("target_bytes", ctypes.c_int64),
    ]


def compile_library(source: Path, folder: Path, standard: str = "c99") -> Path:
    """Compile a C file that includes pyhvd.h; return the library."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    made = folder / f"{source.stem}.so"
    include = f"-I{c_api.include_dir()}"
    flags = [f"-std={standard}", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-pthread", *WARNINGS]
    subprocess.run(["gcc", *flags, include, str(source), "-o", str(made)], check=True)
    return made


class Callers:
    """The functions of callers.c."""

    def __init__(self, library: Path) -> None:
        self.c = ctypes.CDLL(str(library))
        self.api = ctypes.c_void_p(table())
        self.c.begin.restype = ctypes.c_void_p
        self.c.error_of.restype = ctypes.c_char_p
        self.c.generation.restype = ctypes.c_uint64

    def begin(
        self, call_id: int, sources: Sequence[Any], targets: Sequence[Any], flags: int = 0
    ) -> tuple[int, int | None]:
        """Submit arrays; return the status and the outcome to come."""
        status = ctypes.c_int(-1)
        many = ctypes.c_void_p * max(len(sources), 1)
        outcome = self.c.begin(
            self.api,
            ctypes.c_uint64(call_id),
            len(sources) or 1,
            many(*(each.ctypes.data for each in sources)),
            many(*(each.ctypes.data for each in targets)),
            flags,
            ctypes.byref(status),
        )
        if status.value:
            assert self.c.await_end(ctypes.c_void_p(outcome), 0, 0) == 0
            return status.value, None
        return status.value, outcome

    def end(self, outcome: int | None, *, helps: bool = True) -> str:
        """Wait until the done function was called, once; return its error."""
        at = ctypes.c_void_p(outcome)
        assert self.c.await_end(at, ctypes.c_int64(LONG_NS), int(helps)) == 1
        assert self.c.waited_in_done(at) == NOT_HERE
        return str(self.c.error_of(at).decode())

    def run(self, call_id: int, sources: Sequence[Any], targets: Sequence[Any], flags: int = WAITS) -> str:
        """Submit arrays, now or soon, and wait; return the error."""
        status, outcome = BY_PYTHON, None
        while status == BY_PYTHON:  # calls of other names may be going by message
            status, outcome = self.begin(call_id, sources, targets, flags)
        assert status == SUBMITTED
        return self.end(outcome)

    def repeat(self, call_id: int, turns: int, waits: bool, took: Any = None) -> int:
        """Submit a number many times from a thread of C; return 0 if all was right."""
        at = ctypes.c_void_p(None if took is None else took.ctypes.data)
        where = (hvd.rank(), hvd.size(), int(waits), at)
        return int(self.c.repeat(self.api, ctypes.c_uint64(call_id), turns, *where))

    def wait(self, call_id: int, ns: int = 0) -> int:
        return int(self.c.wait_for(self.api, ctypes.c_uint64(call_id), ctypes.c_int64(ns)))

    def generation(self) -> int:
        return int(self.c.generation(self.api))

    def describe(self, call_id: int, k: int) -> tuple[int, Layout]:
        layout = Layout()
        return int(self.c.describe(self.api, ctypes.c_uint64(call_id), k, ctypes.byref(layout))), layout


def compile_callers(folder: Path) -> Callers:
    """Compile callers.c in a folder, and load it."""
    return Callers(compile_library(Path(__file__).resolve().parent / "c_sources" / "callers.c", folder))


def id_of(verb: str, tensors: Any, name: str, **terms: Any) -> int:
    """Submit a call in Python until it has an id."""
    for _ in range(3):
        getattr(hvd, verb)(tensors, name=name, **terms)
    hvd.barrier()
    found = None
    deadline = time.monotonic() + 10
    while found is None and time.monotonic() < deadline:
        found = c_api.call_id(verb, tensors, name, **terms)
    assert found is not None, f"{verb} is not remembered"
    hvd.barrier()  # a rank that shuts down makes the others' ids stale
    return found

"""Build and load the fakes of CUDA's driver and of NCCL, ``tests/devices/fakes``: libraries for host memory.

They report violations of the rules of both libraries, with the sites of both calls. One process has one copy
of each. ``fake_cuda.h`` and ``fake_nccl.h`` state what the fakes check.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

FAKES = Path(__file__).parent / "fakes"
BUILD = Path(__file__).resolve().parents[2] / "build" / "fakes"
_FLAGS = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread")
_CUDA = ("checks.c", "driver.c", "streams.c")
_NCCL = ("nccl_comms.c", "nccl_values.c", "nccl_work.c")

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the fake libraries")

FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """``ncclConfig_t``, as far as the fake reads it."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


# The functions that tests call by themselves. p: pointer or handle, u: 64 bits, i: int, t: text, I: UniqueId.
_KINDS = {"p": ctypes.c_void_p, "u": ctypes.c_uint64, "i": ctypes.c_int, "t": ctypes.c_char_p, "I": UniqueId}
_CUDA_ARGUMENTS = {
    "cuInit": "i",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuCtxPushCurrent_v2": "p",
    "cuCtxPopCurrent_v2": "p",
    "cuStreamCreateWithPriority": "pii",
    "cuStreamDestroy_v2": "p",
    "cuStreamSynchronize": "p",
    "cuStreamBeginCapture_v2": "pi",
    "cuStreamEndCapture": "pp",
    "cuStreamIsCapturing": "pp",
    "cuStreamWaitEvent": "ppi",
    "cuThreadExchangeStreamCaptureMode": "p",
    "cuEventCreate": "pi",
    "cuEventDestroy_v2": "p",
    "cuEventRecord": "pp",
    "cuEventQuery": "p",
    "cuMemAlloc_v2": "pu",
    "cuMemFree_v2": "u",
    "cuMemAllocAsync": "pup",
    "cuMemFreeAsync": "up",
    "cuMemAllocHost_v2": "pu",
    "cuMemFreeHost": "p",
    "cuMemcpyAsync": "uuup",
    "cuMemsetD8Async": "uiup",
    "fake_cuda_allow_ordinal": "i",
    "fake_cuda_call": "ptpupi",
    "fake_cuda_count": "t",
    "fake_cuda_drain": "i",
    "fake_cuda_forbid_blocking": "i",
    "fake_cuda_label": "t",
    "fake_cuda_seed": "u",
}
_NCCL_ARGUMENTS = {
    "ncclGetUniqueId": "p",
    "ncclCommInitRankConfig": "piIip",
    "ncclCommGetAsyncError": "pp",
    "ncclAllReduce": "ppuiipp",
    "ncclBroadcast": "ppuiipp",
    "ncclSend": "puiipp",
    "ncclRecv": "puiipp",
    "ncclCommAbort": "p",
    "ncclCommDestroy": "p",
    "ncclCommRevoke": "pi",
    "fake_nccl_fault": "t",
}


class Range(ctypes.Structure):
    """Memory that work reads or writes; ``struct fake_range``."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_size_t),
        ("writes", ctypes.c_int),
        ("may_be_foreign", ctypes.c_int),
    )


@functools.cache
def folder() -> Path:
    """Return the folder with libfakecuda.so and libfakenccl.so; build them if their sources have changed."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(FAKES.iterdir()))).hexdigest()
    kept = BUILD / digest[:16]
    if not kept.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        into = Path(tempfile.mkdtemp(dir=BUILD))
        _gcc(into / "libfakecuda.so", *(FAKES / name for name in _CUDA), "-ldl")
        rest = (f"-L{into}", "-lfakecuda", "-Wl,-rpath,$ORIGIN", "-lm")
        _gcc(into / "libfakenccl.so", *(FAKES / name for name in _NCCL), *rest)
        with contextlib.suppress(OSError):  # another process was faster
            into.rename(kept)
        shutil.rmtree(into, ignore_errors=True)
    return kept


def _gcc(library: Path, *arguments: str | Path) -> None:
    command = ["gcc", *_FLAGS, *map(str, arguments), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


@functools.cache
def fake_cuda() -> ctypes.CDLL:
    """Return the fake driver, initialized, with eight devices."""
    os.environ["FAKE_CUDA_DEVICES"] = "8"
    library = _load("libfakecuda.so", _CUDA_ARGUMENTS)
    library.fake_cuda_reports.restype = ctypes.c_char_p
    library.fake_cuda_count.restype = ctypes.c_long
    assert library.cuInit(0) == 0
    return library


@functools.cache
def fake_nccl() -> ctypes.CDLL:
    """Return the fake NCCL, which works on the streams of :func:`fake_cuda`."""
    fake_cuda()
    return _load("libfakenccl.so", _NCCL_ARGUMENTS)


def _load(name: str, functions: dict[str, str]) -> ctypes.CDLL:
    library = ctypes.CDLL(str(folder() / name))
    for function, kinds in functions.items():
        entry = getattr(library, function)  # the same object each time, unlike that of an index
        entry.argtypes = [_KINDS[kind] for kind in kinds]
    return library


def reports() -> list[str]:
    """Wait for the queued work, for at most 5 s; return the reports since :func:`forget`."""
    text: bytes = fake_cuda().fake_cuda_reports()
    return text.decode().splitlines()


def forget() -> None:
    """Forget all reports and counts, and lift all faults."""
    fake_cuda().fake_cuda_reset()
    fake_nccl().fake_nccl_fault(b"")


def calls(name: str) -> int:
    """Return how often a function was called since :func:`forget`."""
    return int(fake_cuda().fake_cuda_count(name.encode()))


def ranges(reads: Sequence[tuple[int, int]], writes: Sequence[tuple[int, int]]) -> ctypes.Array[Range]:
    """Return the ranges of (address, bytes) that work reads and writes."""
    both = [Range(*span, 0, 0) for span in reads] + [Range(*span, 1, 0) for span in writes]
    return (Range * len(both))(*both)


def checked(call: Callable[..., int], *arguments: object) -> None:
    """Call a function of the driver or of NCCL, which must succeed."""
    status = call(*arguments)
    assert status == 0, f"{call.__name__} returned {status}"

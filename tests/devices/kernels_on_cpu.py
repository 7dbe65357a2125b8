"""Run the CUDA kernels of ``pack_kernels.cu`` on the CPU: a C++ compiler compiles the same source.

A thread's work depends only on its number and its block's number. One loop over both therefore gives the
GPU's result.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyhvd.devices.base import Stream
from pyhvd.devices.pack_plan import THREADS
from pyhvd.devices.packing import Argument, Compile, Launch
from tests.devices.fake import FakeDevice

SOURCE = Path(__file__).resolve().parents[2] / "pyhvd" / "devices" / "pack_kernels.cu"

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="no g++ to compile the kernels for the CPU"
)

_SHIM = r"""
#define __global__
#define __device__
#define __launch_bounds__(n)
struct Dim { int x; };
static Dim blockIdx, threadIdx;
struct alignas(16) uint4 { unsigned x, y, z, w; };
#include "pack_kernels.cu"

#define RUN(SUFFIX) \
    extern "C" void run_pyhvd_pack_##SUFFIX( \
        int blocks, u64 b, u64 e, u64 f, long long v, u64 low, u64 high, double x) \
    { \
        for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) \
            for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) \
                pyhvd_pack_##SUFFIX(b, e, f, v, low, high, x); \
    } \
    extern "C" void run_pyhvd_unpack_##SUFFIX(int blocks, u64 b, u64 e, u64 f, long long v, double x) \
    { \
        for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) \
            for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) \
                pyhvd_unpack_##SUFFIX(b, e, f, v, x); \
    }
RUN(small)
RUN(large)
extern "C" int threads() { return THREADS; }
"""

# A GPU faults on a misaligned access; here the access is a trap.
_FLAGS = (
    *("-O1", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w"),
    *("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"),
)
_TYPES: dict[type, Any] = {np.uint64: ctypes.c_uint64, np.int64: ctypes.c_int64, np.float64: ctypes.c_double}


_BUILDING = threading.Lock()  # ranks are threads, which share one folder and build each kernel once


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pyhvd-kernels-")


def compiler_of(device: FakeDevice) -> Compile:
    """Return a compiler of kernels whose launches are queued on a fake device."""

    def compile_type(name: str) -> Launch:
        with _BUILDING:
            library = _build(name)

        def launch(kernel: str, blocks: int, arguments: tuple[Argument, ...], stream: Stream) -> None:
            function = library[f"run_{kernel}"]
            function.restype = None
            function.argtypes = (ctypes.c_int, *(_TYPES[type(value)] for value in arguments))
            device.call(lambda: function(blocks, *(value.item() for value in arguments)), stream)

        return launch

    return compile_type


@functools.cache
def _build(name: str) -> ctypes.CDLL:
    folder = Path(_folder().name)
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(_SHIM)
    command = ["g++", *_FLAGS, f"-I{SOURCE.parent}", f"-DPYHVD_TYPE={name}", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    assert loaded.threads() == THREADS
    return loaded

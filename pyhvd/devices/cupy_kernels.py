"""Compile the kernels of ``pack_kernels.cu`` by CuPy, when they are first needed.

NVRTC needs about 0.5 s for a type. CuPy caches the result for all processes.
"""

from __future__ import annotations

import functools
from importlib import resources

import cupy

from pyhvd.devices.base import Stream
from pyhvd.devices.pack_plan import THREADS
from pyhvd.devices.packing import Argument, Launch


@functools.cache
def source() -> str:
    """Return the kernels' source."""
    return resources.files("pyhvd.devices").joinpath("pack_kernels.cu").read_text(encoding="utf-8")


def compile_kernels(name: str) -> Launch:
    """Return the kernels for a type; a :data:`pyhvd.devices.packing.Compile`."""
    module = cupy.RawModule(code=source(), options=("--std=c++14", f"-DPYHVD_TYPE={name}"))

    def launch(kernel: str, blocks: int, arguments: tuple[Argument, ...], stream: Stream) -> None:
        queue = cupy.cuda.ExternalStream(stream) if stream else cupy.cuda.Stream.null
        with queue:
            module.get_function(kernel)((blocks,), (THREADS,), arguments)

    return launch

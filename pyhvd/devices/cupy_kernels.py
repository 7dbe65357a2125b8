"""Compile the kernels of ``pack_kernels.cu`` by CuPy, when they are first needed.

NVRTC needs about 0.5 s for a pair of types. CuPy caches the result for all processes.
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


def options(tensor: str, wire: str) -> tuple[str, ...]:
    """Return the compiler's options for a pair of types."""
    return ("--std=c++14", f"-DPYHVD_TENSOR={tensor}", f"-DPYHVD_WIRE={wire}")


def compile_kernels(tensor: str, wire: str) -> Launch:
    """Return the kernels for a pair of types; a :data:`pyhvd.devices.packing.Compile`."""
    module = cupy.RawModule(code=source(), options=options(tensor, wire))

    def launch(name: str, blocks: int, arguments: tuple[Argument, ...], stream: Stream) -> None:
        queue = cupy.cuda.ExternalStream(stream) if stream else cupy.cuda.Stream.null
        with queue:
            module.get_function(name)((blocks,), (THREADS,), arguments)

    return launch

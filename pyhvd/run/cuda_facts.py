"""Facts for arrays on GPUs: CuPy, NCCL, devices, and the way by which arrays would be reduced.

:func:`probe_cuda` runs this module as a program, which prints the facts as JSON: with a broken driver, CUDA
may hang or crash the process that starts it.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from pyhvd.job.process.signals import describe_exit

_PROBE_S = 30.0


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device that CUDA sees; memory in bytes."""

    name: str
    memory: int
    capability: str


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """Facts from CuPy; a version that is not found is empty.

    Attributes
    ----------
    driver, runtime : str
        The newest CUDA version that the driver supports, and the CUDA version that CuPy uses.
    compiler : str
        NVRTC's version; without NVRTC pyhvd's kernels cannot be compiled.
    devices : list of CudaDevice
        Devices visible to this process (CUDA_VISIBLE_DEVICES).
    errors : dict of str to str
        The reason for each fact that could not be found.
    """

    cupy: str = ""
    driver: str = ""
    runtime: str = ""
    compiler: str = ""
    nccl: str = ""
    devices: list[CudaDevice] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)

    def way(self) -> str:
        """Return how arrays on GPUs would be reduced."""
        if not self.cupy:
            return "not taken: CuPy is missing, or cannot be imported"
        if not self.devices:
            return "none, as CUDA sees no device"
        if not self.nccl or not self.compiler:
            return f"through the host: CuPy finds no {'NVRTC' if self.nccl else 'NCCL'}"
        many = len(self.devices)
        which = f"{many} ranks" if many > 1 else "1 rank"
        return f"by NCCL for up to {which} on this host, a device for each; for more through the host"


def probe_cuda(timeout: float = _PROBE_S) -> CudaFacts:
    """Call :func:`look` in a child process, for at most `timeout` seconds."""
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return CudaFacts(errors={"CuPy": f"the process that asked it did not answer within {timeout:g} s"})
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        ended = describe_exit(done.returncode)
        return CudaFacts(errors={"CuPy": f"the process that asked it {ended}: {last}"})
    return msgspec.json.decode(done.stdout, type=CudaFacts)


def look() -> CudaFacts:
    """Ask CuPy in this process; for each fact that fails, note the reason in `errors`."""
    try:
        import cupy
    except ImportError as exc:
        installed = not isinstance(exc, ModuleNotFoundError)
        return CudaFacts(errors={"CuPy": f"cannot be imported: {exc}"} if installed else {})
    errors: dict[str, str] = {}
    found: dict[str, str] = {}

    @contextlib.contextmanager
    def asking(what: str) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            errors[what] = f"{type(exc).__name__}: {exc}".splitlines()[0]

    with asking("driver"):
        found["driver"] = _cuda_version(cupy.cuda.runtime.driverGetVersion())
    with asking("runtime"):
        found["runtime"] = _cuda_version(cupy.cuda.runtime.runtimeGetVersion())
    with asking("NVRTC"):
        found["compiler"] = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    with asking("NCCL"):
        from pyhvd.backends.gpu.nccl_bindings import load_library, version_text

        found["nccl"] = version_text(load_library().get_version())
    devices: list[CudaDevice] = []
    with asking("devices"):
        for index in range(cupy.cuda.runtime.getDeviceCount()):
            said = cupy.cuda.runtime.getDeviceProperties(index)
            capability = f"{said['major']}.{said['minor']}"
            devices.append(CudaDevice(said["name"].decode(), said["totalGlobalMem"], capability))
    return CudaFacts(cupy.__version__, devices=devices, errors=errors, **found)


def _cuda_version(number: int) -> str:
    """Return the text of a CUDA version: ``"12.8"`` for 12080; empty for 0, which means none."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else ""


if __name__ == "__main__":
    print(msgspec.json.encode(look()).decode())

"""Measure rates on a GPU, and write benchmarks/results/gpu.json.

The record names the device, the versions and the commit. CUDA events take the times, and a rate counts the
bytes of the tensors once. The upper bound is the rate of a plain copy in the same run. ``make gpu-check``
runs this module.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tensors import resnet50
from pyhvd import __version__
from pyhvd.devices.pack_plan import lay_out
from pyhvd.dtypes import Code, ReduceOp
from pyhvd.run.cuda_facts import CudaFacts, probe_cuda
from pyhvd.tools.doctor.facts import gpus

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "gpu.json"
SETS = {"resnet": resnet50(), "1000 x 1 KiB": [256] * 1000}
"""Elements of float32."""

REPETITIONS = 30
WORKS = 10
"""Number of operations between two events."""

BALLAST_BYTES = 1024 * 1024 * 1024
BALLAST_COPIES = 10
"""Number of copies before the first event: each keeps the device busy for 0.5 ms at 4 TB/s."""

STAGED_BYTES = 256 * 1024 * 1024

LEAST_OF_COPY = {"resnet": 0.8, "1000 x 1 KiB": 0.5}
"""Least rate of packing and unpacking, as a share of a plain copy's rate."""


def seconds_of(work: Callable[[], None], stream: Any) -> float:
    """Return the device's time for one operation, as the median of several repetitions.

    The stream is busy while the host queues the operations, so the figure excludes the host's time.
    """
    import cupy

    with stream:
        ballast = cupy.zeros((2, BALLAST_BYTES), np.uint8)
    for _ in range(3):
        work()
    times = []
    for _ in range(REPETITIONS):
        begun, ended = cupy.cuda.Event(), cupy.cuda.Event()
        with stream:
            for _ in range(BALLAST_COPIES):
                ballast[1] = ballast[0]
        begun.record(stream)
        for _ in range(WORKS):
            work()
        ended.record(stream)
        ended.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begun, ended) / 1e3 / WORKS)
    return float(statistics.median(times))


def packing(counts: Sequence[int]) -> dict[str, float]:
    """Return the rates of pack, unpack and a plain copy, in bytes of the tensors per second."""
    import cupy

    from pyhvd.devices.cupy_device import cuda_device, cupy_stream

    device = cuda_device(0)
    packer = device.packer()
    ptr = device.make_stream()
    stream = cupy_stream(ptr)
    tensors = [cupy.ones(count, np.float32) for count in counts]
    offsets, total = lay_out(counts, 4)
    buffer, other = cupy.empty(total, np.float32), cupy.empty(total, np.float32)
    ptrs = np.array([int(tensor.data.ptr) for tensor in tensors], np.int64)
    numbers = np.array(counts, np.int64)
    where = int(buffer.data.ptr), offsets, ptrs, numbers
    code = Code.FLOAT32
    cupy.cuda.Device().synchronize()
    works: dict[str, Callable[[], None]] = {
        "pack": lambda: packer.pack(*where, code, ReduceOp.SUM, 1.0, ptr),
        "pack and scale": lambda: packer.pack(*where, code, ReduceOp.SUM, 0.5, ptr),
        "unpack": lambda: packer.unpack(*where, code, 1.0, ptr),
        "copy": lambda: device.copy(int(other.data.ptr), int(buffer.data.ptr), total * 4, ptr),
    }
    nbytes = sum(counts) * 4
    rates = {name: nbytes / seconds_of(work, stream) for name, work in works.items()}
    with stream:
        stream.begin_capture()
        works["pack"]()
        graph = stream.end_capture()
    rates["pack in a CUDA graph"] = nbytes / seconds_of(lambda: graph.launch(stream), stream)
    return rates


def host_link() -> dict[str, float]:
    """Return the rates of copies from and to page-locked memory, in bytes per second."""
    import cupy

    from pyhvd.arrays import address
    from pyhvd.devices.cupy_device import cuda_device, cupy_stream

    device = cuda_device(0)
    ptr = device.make_stream()
    stream = cupy_stream(ptr)
    there = int(cupy.empty(STAGED_BYTES, np.uint8).data.ptr)
    here = address(device.allocate_pinned(STAGED_BYTES))
    down = seconds_of(lambda: device.copy(here, there, STAGED_BYTES, ptr), stream)
    up = seconds_of(lambda: device.copy(there, here, STAGED_BYTES, ptr), stream)
    return {"device to host": STAGED_BYTES / down, "host to device": STAGED_BYTES / up}


def staged() -> None:
    """Reduce, on each rank, an array on the device and one in host memory; rank 0 prints the rates."""
    import cupy

    import pyhvd as hvd

    hvd.init()
    rates = {}
    count = STAGED_BYTES // 4
    for name, array in (("device", cupy.ones(count, np.float32)), ("host", np.ones(count, np.float32))):
        times = []
        for _ in range(7):
            hvd.barrier()
            begun = time.perf_counter()
            hvd.allreduce_(array, name=name)
            if name == "device":
                cupy.cuda.get_current_stream().synchronize()
            times.append(time.perf_counter() - begun)
        rates[name] = STAGED_BYTES / statistics.median(times[2:])
    if hvd.rank() == 0:
        print(json.dumps(rates), flush=True)
    hvd.shutdown()


def run_staged() -> dict[str, float]:
    """Return the rates of an allreduce of two ranks that share the device."""
    command = [sys.executable, "-m", "pyhvd.run", "-np", "2", "-m", "benchmarks.gpu", "--staged"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"the staged allreduce failed:\n{done.stdout}{done.stderr}")
    rates: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return rates


def commit() -> str:
    """Return the commit, with a mark if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False
        ).stdout.strip()

    changed = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return git("rev-parse", "--short=12", "HEAD") + changed


def described(facts: CudaFacts) -> dict[str, Any]:
    """Return what runs."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "pyhvd": __version__,
        "python": sys.version,
        "gpus": gpus(),
        "cuda": asdict(facts),
    }


def measured() -> dict[str, Any]:
    """Measure, and return the rates."""
    rates = {name: packing(counts) for name, counts in SETS.items()}
    return {
        "packing_bytes_per_second": rates,
        "packing_of_a_copy": {name: ratios(each) for name, each in rates.items()},
        "host_link_bytes_per_second": host_link(),
        "allreduce_2_ranks_256_mib_bytes_per_second": run_staged(),
    }


def ratios(rates: dict[str, float]) -> dict[str, float]:
    """Return the kernels' rates as shares of a plain copy's."""
    return {name: rate / rates["copy"] for name, rate in rates.items() if name != "copy"}


def shortfalls(made: dict[str, Any]) -> list[str]:
    """Return the rates of a record that are too low, one text each."""
    return [
        f"{work} of {name}: {made['packing_of_a_copy'][name][work]:.2f} of a copy's rate, less than {least}"
        for name, least in LEAST_OF_COPY.items()
        for work in ("pack", "unpack")
        if made["packing_of_a_copy"][name][work] < least
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  python -m benchmarks.gpu --output /tmp/gpu.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=RESULT, metavar="PATH", help=f"default: {RESULT.name}")
    parser.add_argument("--facts", action="store_true", help="write what would run, and measure nothing")
    parser.add_argument("--staged", action="store_true", help="run as a rank of the staged allreduce")
    options = parser.parse_args(argv)
    if options.staged:
        staged()
        return 0
    facts = probe_cuda()
    if not facts.devices:
        why = "; ".join(f"{what}: {text}" for what, text in facts.errors.items()) or "CuPy is not installed"
        print(f"no GPU to check: {why}", file=sys.stderr)
        return 1
    rates = {} if options.facts else measured()
    options.output.write_text(json.dumps(described(facts) | rates, indent=1) + "\n")
    print(f"==> {options.output}")
    slow = shortfalls(rates) if rates else []
    for line in slow:
        print(f"too slow: {line}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())

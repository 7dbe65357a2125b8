"""Overlap the reduction of gradients with their computation, and time a step with and without overlap.

A step computes one "gradient" per layer. The example runs three kinds of step:

1. The step only computes.
2. The step reduces each gradient before it computes the next one.
3. The step submits each gradient as soon as it is computed, and waits for all of them at the end.

Overlap needs idle cores, and a job with one busy rank per core has few. With --wait, the step sleeps instead
of computing, like a program whose gradients come from an accelerator.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import pyhvd as hvd

Array = npt.NDArray[np.float64]
Reduce = Callable[[str, Array], None]


class Step:
    """One step's computation: a gradient per layer, passed to `reduce` as soon as it is computed."""

    def __init__(self, layers: int, size: int, wait: float) -> None:
        self._layers = layers
        self._wait = wait
        self._weights = np.full((size, size), size**-0.5)  # the matrix's square is all ones

    def run(self, reduce: Reduce) -> None:
        """Compute the gradients: every element of rank r's gradient of layer l is (r + 1) * l."""
        for layer in range(self._layers):
            if self._wait:
                time.sleep(self._wait)
                gradient = np.ones_like(self._weights)
            else:
                gradient = self._weights @ self._weights
            gradient *= (hvd.rank() + 1) * layer
            reduce(f"layer {layer}", gradient)


def computation_alone(step: Step) -> list[Array]:
    """Compute the gradients, and reduce nothing."""
    gradients: list[Array] = []
    step.run(lambda _, gradient: gradients.append(gradient))
    return []


def one_after_the_other(step: Step) -> list[Array]:
    """Wait for each reduction before computing the next gradient."""
    sums: list[Array] = []
    step.run(lambda name, gradient: sums.append(hvd.allreduce_(gradient, name=name, op=hvd.Sum)))
    return sums


def overlapped(step: Step) -> list[Array]:
    """Submit each gradient and go on computing; wait once, at the end."""
    handles: list[hvd.Handle] = []
    step.run(lambda name, gradient: handles.append(hvd.allreduce_async_(gradient, name=name, op=hvd.Sum)))
    early.append(sum(map(hvd.poll, handles)))
    return [hvd.synchronize(handle) for handle in handles]


early: list[int] = []
"""Number of reductions of each overlapped step that had ended before its computation ended."""


def check(sums: list[Array]) -> None:
    """Raise unless the reduced gradients are the sums of the ranks' gradients."""
    ranks = hvd.size() * (hvd.size() + 1) / 2
    for layer, total in enumerate(sums):
        np.testing.assert_allclose(total, ranks * layer, rtol=1e-12)


def seconds(kind: Callable[[Step], list[Array]], step: Step) -> float:
    """Return the seconds of one step on this rank, counted from a barrier of all ranks."""
    hvd.barrier()
    start = time.perf_counter()
    sums = kind(step)
    spent = time.perf_counter() - start
    check(sums)
    return spent


def report(options: argparse.Namespace, times: dict[str, list[float]]) -> None:
    """Print the medians without each kind's first step, which is a warm-up."""
    megabytes = options.layers * options.size**2 * 8 / 1e6
    print(f"{options.layers} gradients, {megabytes:.1f} MB in all, {hvd.size()} ranks; median of a step:")
    for kind, spent in times.items():
        print(f"  {kind.replace('_', ' '):<20} {1e3 * statistics.median(spent[1:]):7.1f} ms")
    ended = statistics.median(early[1:])
    print(f"when the overlapped computation ended, {ended:g} of {options.layers} reductions had ended")
    print("all sums are right", flush=True)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  pyhvdrun -n 2 examples/async_overlap.py --wait 4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=20, help="gradients per step (default: 20)")
    parser.add_argument("--size", type=int, default=400, help="rows and columns of each (default: 400)")
    parser.add_argument("--repeats", type=int, default=7, help="steps of each kind (default: 7)")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="MS", help="per gradient, sleep instead of computing"
    )
    options = parser.parse_args()
    if min(options.layers, options.size, options.repeats) < 1 or options.wait < 0:
        parser.error("--layers, --size and --repeats must be at least 1, --wait at least 0")
    return options


def main() -> None:
    """Run the three kinds of step in turn; rank 0 prints the times."""
    options = parse()
    hvd.init()
    step = Step(options.layers, options.size, options.wait / 1e3)
    kinds = (computation_alone, one_after_the_other, overlapped)
    times: dict[str, list[float]] = {kind.__name__: [] for kind in kinds}
    for _ in range(options.repeats + 1):
        for kind in kinds:
            times[kind.__name__].append(seconds(kind, step))
    hvd.barrier()  # every rank has checked its sums
    if hvd.rank() == 0:
        report(options, times)
    hvd.shutdown()


if __name__ == "__main__":
    main()

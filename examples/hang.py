"""Hang a job, so that pyhvd prints its hang report: the last rank sleeps in load_batch().

    pyhvdrun -n 4 --stall-check-warning-time-seconds 2 examples/hang.py

After 2 s, rank 0 reports the missing tensors, the rank that has not submitted them, and its stack; see
docs/hangs.md. The last rank then wakes up, and the job succeeds. With ``--forever`` the rank never wakes up:
end the job with Ctrl-C, or add ``--stall-check-shutdown-time-seconds 4``.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import pyhvd as hvd


def load_batch(step: int, seconds: float) -> np.ndarray:
    """Return a batch; on the last rank, sleep in step 3."""
    if step == 3 and hvd.rank() == hvd.size() - 1:
        time.sleep(seconds)
    return np.full(4, float(step))


def train(seconds: float) -> None:
    """Average two gradients in each of 5 steps."""
    for step in range(5):
        batch = load_batch(step, seconds)
        handles = [hvd.allreduce_async(batch * k, name=f"grad/w{k}") for k in (1, 2)]
        for handle in handles:
            hvd.synchronize(handle)


def main() -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description="Show the hang report: one rank sleeps, the others wait.")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long it sleeps (default: 3)")
    parser.add_argument("--forever", action="store_true", help="sleep for ever")
    options = parser.parse_args()
    hvd.init()
    train(1e6 if options.forever else options.seconds)
    if hvd.rank() == 0:
        print("all ranks have ended", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()

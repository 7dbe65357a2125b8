"""Train on handwritten digits inside Ray: each rank has a trainer, which keeps its network between two calls.

The network, its gradients and the data are those of ``digits.py``. Without arguments, the example starts Ray
in this process.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

# The ranks import digits too: they look for modules where this process does.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import digits

import pyhvd as hvd

GOOD = 0.9


class Trainer:
    """The network of one rank, and its part of the training."""

    def __init__(self, hidden: int, batch_size: int, rate: float) -> None:
        hvd.init()
        self.images, self.labels, *self.held_out = digits.load(seed=0)
        self.parameters = digits.new_parameters(self.images.shape[1], hidden, seed=hvd.rank())
        self.optimizer = digits.DistributedOptimizer(digits.Momentum(self.parameters, rate))
        self.optimizer.broadcast(0)
        self.batch_size = batch_size
        self.epoch = 0

    def train(self, epochs: int) -> tuple[int, float]:
        """Train; return the number of epochs so far, and the accuracy on the held-out digits."""
        for _ in range(epochs):
            shares = digits.own_share(len(self.labels), self.batch_size, seed=self.epoch)
            digits.train_epoch(self.parameters, self.optimizer, self.images, self.labels, shares)
            self.epoch += 1
        return self.epoch, digits.accuracy(self.parameters, *self.held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--address", help="of a Ray cluster; by default Ray starts in this process")
    options = parser.parse_args()
    import ray

    from pyhvd.ray import RayExecutor

    cpus = None if options.address else options.workers
    ray.init(options.address, num_cpus=cpus, log_to_driver=False)
    executor = RayExecutor(num_workers=options.workers)
    begun = time.perf_counter()
    executor.start(Trainer, (32, 64, 0.1), extra_env_vars={"OPENBLAS_NUM_THREADS": "1"})
    print(f"{options.workers} ranks are up after {time.perf_counter() - begun:.1f} s")
    reached = 0.0
    try:
        for _ in range(4):
            begun = time.perf_counter()
            (epoch, reached), *_ = executor.execute(lambda trainer: trainer.train(5))
            seconds = time.perf_counter() - begun
            print(f"epoch {epoch:3d}  held-out accuracy {reached:.1%}  {seconds:.2f} s for 5 epochs")
    finally:
        executor.shutdown()
    if reached < GOOD:
        sys.exit(f"the accuracy is less than {GOOD:.0%}")


if __name__ == "__main__":
    main()

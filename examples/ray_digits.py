"""Train on handwritten digits inside Ray: each rank has a trainer, which keeps its network between two calls.

The network, its gradients and the data are those of ``digits.py``. Without an address, the example starts
Ray on this host, with two nodes.
"""

from __future__ import annotations

import argparse
import atexit
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

    def host(self) -> str | None:
        """Return the name of this rank's host."""
        return os.environ.get("HOROVOD_HOSTNAME")

    def train(self, epochs: int) -> tuple[int, float]:
        """Train; return the number of epochs so far, and the accuracy on the held-out digits."""
        for _ in range(epochs):
            shares = digits.own_share(len(self.labels), self.batch_size, seed=self.epoch)
            digits.train_epoch(self.parameters, self.optimizer, self.images, self.labels, shares)
            self.epoch += 1
        return self.epoch, digits.accuracy(self.parameters, *self.held_out)


def start_nodes(count: int, cpus: int) -> str:
    """Start a Ray cluster on this host; return its address. The cluster ends with this process."""
    import ray
    from ray.cluster_utils import Cluster

    args = {"num_cpus": cpus, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**args, "include_dashboard": False})
    for _ in range(count - 1):
        cluster.add_node(**args)
    atexit.register(cluster.shutdown)
    atexit.register(ray.shutdown)  # before the cluster: the last to be registered is the first to be called
    return str(cluster.address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--workers-per-host", type=int, default=2)
    parser.add_argument("--address", help="of a Ray cluster; by default Ray starts on this host")
    options = parser.parse_args()
    import ray

    from pyhvd.ray import RayExecutor

    address = options.address or start_nodes(options.hosts, options.workers_per_host)
    ray.init(address, log_to_driver=False)
    settings = RayExecutor.create_settings(timeout_s=120)
    executor = RayExecutor(settings, num_hosts=options.hosts, num_workers_per_host=options.workers_per_host)
    begun = time.perf_counter()
    executor.start(Trainer, (32, 64, 0.1), extra_env_vars={"OPENBLAS_NUM_THREADS": "1"})
    up_s, hosts = time.perf_counter() - begun, executor.execute(Trainer.host)
    print(f"{len(hosts)} ranks on {len(set(hosts))} hosts are up after {up_s:.1f} s")
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

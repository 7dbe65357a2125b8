"""The settings and arguments of the executors, with Horovod's errors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RaySettings:
    """What ``create_settings`` returns.

    Attributes
    ----------
    timeout_s : float
        The time limit for the start of agents and ranks, in seconds.
    placement_group_timeout_s : float
        The time limit for Ray to make a placement group, in seconds.
    nics : sequence of str or None
        The network interfaces of driver and ranks; None for any.
    """

    timeout_s: float = 30.0
    placement_group_timeout_s: float = 100.0
    nics: Sequence[str] | None = None


@dataclass(frozen=True)
class WorkerShape:
    """How many ranks are wanted, and what each needs.

    Attributes
    ----------
    workers : int
        The number of ranks, of each host if `hosts` is given.
    hosts : int or None
        The number of hosts; None if Ray chooses them.
    cpus, gpus : float
        Of one rank.
    """

    workers: int
    hosts: int | None
    cpus: float
    gpus: float

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.workers * (self.hosts or 1)

    def resources(self, workers: int) -> dict[str, float]:
        """Return what some ranks need, by Ray's names."""
        wanted = {"CPU": self.cpus * workers, "GPU": self.gpus * workers}
        return {name: amount for name, amount in wanted.items() if amount}

    def room(self, bundle: Mapping[str, float]) -> int:
        """Return how many ranks a bundle has room for."""
        needs = self.resources(1)
        room = [math.floor(bundle.get(name, 0) / amount + 1e-9) for name, amount in needs.items()]
        return min(room, default=self.workers)


def warn_of_ssh(ssh_identity_file: str | None, ssh_str: str | None) -> None:
    """Warn if arguments for ssh are given."""
    if ssh_identity_file is not None or ssh_str is not None:
        warnings.warn(
            "ssh_identity_file and ssh_str have no effect: Ray's actors start the ranks", stacklevel=3
        )


def check_counts(num_workers: int | None, num_hosts: int | None, num_workers_per_host: int) -> None:
    """Raise ValueError if these numbers of an executor do not fit together."""
    given = {
        "num_workers": num_workers,
        "num_hosts": num_hosts,
        "num_workers_per_host": num_workers_per_host,
    }
    for name, value in given.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: expected a whole number, 1 at least")
    if num_workers is not None and num_hosts is not None:
        raise ValueError("both num_workers and num_hosts are given: give one of them")
    if num_workers is None and num_hosts is None:
        raise ValueError("give num_workers or num_hosts")


def count_gpus(gpus_per_worker: float | None, *, use_gpu: bool) -> float:
    """Return the GPUs of a rank; raise ValueError if the arguments do not fit together."""
    if gpus_per_worker and not use_gpu:
        raise ValueError("gpus_per_worker is set, but use_gpu is False: set use_gpu=True")
    if use_gpu and gpus_per_worker is not None and gpus_per_worker <= 0:
        raise ValueError(f"gpus_per_worker={gpus_per_worker!r}: expected a number above 0")
    return float(1 if gpus_per_worker is None else gpus_per_worker) if use_gpu else 0.0

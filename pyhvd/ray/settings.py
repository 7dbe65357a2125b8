"""The settings and arguments of the executors, with Horovod's errors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyhvd.job.driver.discovery import FindsHosts
from pyhvd.job.machines.roster import ElasticLimits
from pyhvd.job.rank.call import expect
from pyhvd.job.spec import argument_of
from pyhvd.run.launchers.launch_elastic import read_elastic
from pyhvd.run.options import ElasticOptions


@dataclass
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
    elastic : mapping of str to object
        The arguments of a :class:`RayExecutor` that only elastic ranks have.
    discovery : FindsHosts or None
        Finds the nodes of elastic ranks and their slots, if ``override_discovery`` is False: an object with
        ``find_available_hosts_and_slots()``, which names nodes by address or host name.
    """

    timeout_s: float = 30.0
    placement_group_timeout_s: float = 100.0
    nics: Sequence[str] | None = None
    elastic: Mapping[str, Any] = field(default_factory=dict)
    discovery: FindsHosts | None = None


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


def check_counts(num_hosts: Any = None, **workers: Any) -> None:
    """Raise ValueError if these numbers of an executor do not fit together."""
    for name, value in {"num_hosts": num_hosts, **workers}.items():
        right = value is None or (type(value) is int and value >= 1)
        expect(right, name, value, "a whole number, 1 at least")
    named = {"num_hosts": num_hosts, **{each: workers.get(each) for each in ("num_workers", "min_workers")}}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"both {given[0]} and {given[1]} are given: give one of them")
    if not given:
        missing = "max_workers needs min_workers" if workers.get("max_workers") else "no number of ranks"
        raise ValueError(f"{missing}: give num_workers or num_hosts, or min_workers for an elastic job")


def elastic_limits(least: int, most: int | None, **others: Any) -> ElasticLimits:
    """Return the limits of an elastic job; raise ValueError for values that do not fit.

    `others` are reset_limit, elastic_timeout and cooldown_range of :func:`pyhvd.launch`.
    """
    expect(most is None or least <= most, "max_workers", most, f"no fewer than min_workers, {least}")
    given: ElasticOptions = read_elastic({"min_num_proc": least, "max_num_proc": most, **others})["elastic"]
    times = given.reset_limit, given.timeout, given.cooldown
    return ElasticLimits(least, most, least, *times, name_of=argument_of)


def count_gpus(gpus_per_worker: float | None, *, use_gpu: bool) -> float:
    """Return the GPUs of a rank; raise ValueError if the arguments do not fit together."""
    if gpus_per_worker and not use_gpu:
        raise ValueError("gpus_per_worker is set, but use_gpu is False: set use_gpu=True")
    if use_gpu and gpus_per_worker is not None and gpus_per_worker <= 0:
        raise ValueError(f"gpus_per_worker={gpus_per_worker!r}: expected a number above 0")
    return float(1 if gpus_per_worker is None else gpus_per_worker) if use_gpu else 0.0

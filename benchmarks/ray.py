"""Start Ray on this host, and ranks in it; measure the time and the processor time of their start.

Owns the driver's side; `ray_ranks` holds what ranks run. Processes of a start are known by a variable that
they inherit: Ray's own, actors, agents, guardians and ranks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyhvd
from benchmarks.ray_ranks import add_up, lose_a_rank

RAY, HOSTS = "pyhvd", "pyhvd.Hosts, without Ray"
_MARK = "PYHVD_BENCHMARK_RAY"
_STORE = 80 << 20
_START_S = 120.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Start(NamedTuple):
    """Seconds of one start: until the first sum, of processors until then, and of two calls."""

    wall: float
    cpu: float
    first_run: float
    later_run: float


@contextlib.contextmanager
def ray_here(ranks: int) -> Iterator[None]:
    """Run Ray on this host, with a CPU for each rank."""
    if importlib.util.find_spec("ray") is None:
        raise SystemExit('ray is not installed: pip install "pyhvd[ray]", or make bench-ray')
    os.environ |= {"RAY_AUTH_MODE": "disabled", _MARK: str(uuid.uuid4())}
    import ray

    ray.init(
        "local", num_cpus=ranks, object_store_memory=_STORE, include_dashboard=False, log_to_driver=False
    )
    try:
        yield
    finally:
        ray.shutdown()


def describe_ray() -> str:
    """Return Ray's version and the cluster's layout, for the report."""
    import ray

    return f"Ray {ray.__version__}: one node, on this host"


def start_on_ray(ranks: int) -> Start:
    """Start ranks by a RayExecutor, and end them."""
    from pyhvd.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=_START_S), num_workers=ranks)

    def start() -> Callable[..., Any]:
        executor.start()
        return executor.run

    try:
        return _measure(start, ranks)
    finally:
        executor.shutdown()


def start_on_hosts(ranks: int) -> Start:
    """Start ranks that live on by pyhvd.Hosts, and end them."""
    with contextlib.ExitStack() as stack:

        def start() -> Callable[..., Any]:
            hosts = stack.enter_context(pyhvd.Hosts(np=ranks, start_timeout=_START_S))
            return stack.enter_context(hosts.start()).run

        return _measure(start, ranks)


def _measure(start: Callable[[], Callable[..., Any]], ranks: int) -> Start:
    before, own, began = _ticks(), time.process_time(), time.perf_counter()
    run = start()
    up = time.perf_counter()
    _check(run(add_up), ranks)
    done = time.perf_counter()
    used = _seconds_since(before) + time.process_time() - own
    again = time.perf_counter()
    _check(run(add_up), ranks)
    return Start(done - began, used, done - up, time.perf_counter() - again)


def _check(sums: list[float], ranks: int) -> None:
    if sums != [float(ranks)] * ranks:
        raise ValueError(f"sums of ones over {ranks} ranks are {sums}")


def time_restart(ranks: int) -> float:
    """Return the seconds from the end of a rank to the next allreduce of elastic ranks."""
    from pyhvd.ray import RayExecutor

    settings = RayExecutor.create_settings(timeout_s=_START_S)
    executor = RayExecutor(settings, min_workers=ranks, max_workers=ranks)
    executor.start()
    try:
        seconds: list[float] = executor.run(lose_a_rank)
        return max(seconds)
    finally:
        executor.shutdown()


def _ticks() -> dict[str, tuple[int, int]]:
    """Return the clock ticks of each process with the mark, and of its ended children, by its id."""
    mark = f"{_MARK}={os.environ[_MARK]}".encode()
    found = {}
    for process in Path("/proc").iterdir():
        try:
            if mark in (process / "environ").read_bytes():
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                user, system, children_user, children_system = map(int, fields[11:15])
                found[process.name] = user + system, children_user + children_system
        except OSError:
            continue
    return found


def _seconds_since(before: dict[str, tuple[int, int]]) -> float:
    """Return the processor time since then of all processes with the mark that are alive.

    Processes that end meanwhile, and children of older processes, belong to an earlier start.
    """
    ticks = 0
    for process, (own, children) in _ticks().items():
        ticks += own - before[process][0] if process in before else own + children
    return ticks / _TICKS

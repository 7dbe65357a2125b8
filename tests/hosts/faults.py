"""Faults of hosts and ranks while the ranks of a job run a random program.

:func:`try_fault` makes one fault, and returns what must not be. ``python -m tests.hosts.faults`` makes many,
on several beds side by side, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.bed import Bed, Host, bed
from tests.hosts.connections import CONNECTIONS, kill_sockets
from tests.hosts.fault_programs import LARGE
from tests.hosts.jobs import DAEMON_CRASHED, Shape, name_of
from tests.hosts.launch import Site
from tests.mpi.launch import ROOT, MpiJob, job_directory, mpi_version

KINDS = ("kill", "crash", "cut", "power", "freeze", "reset")
"""A rank is killed; all processes of a host are; a host loses its network, its power, its processors; one TCP
connection of a rank is reset.
"""

SHAPES: tuple[Shape, ...] = ((2, 2), (1, 1, 1))
SILENT = ("cut", "power", "freeze", "reset")
"""What mpiexec does not notice; after the others it may end the job before a rank has its error.

Exception: Open MPI ends the job when a launch agent ends, which on the bed has no power without its host.
"""

WITHIN_S = 6.0
"""From a fault to the error of the last rank.

A host is lost 5 s after its last frame was read, which takes up to 0.5 s (fast_path/agreement.h).
"""
SLACK_S = 3.0
"""More for a busy machine, on which ranks read frames, and wake up, seconds late."""

_KNOBS: tuple[dict[str, str], ...] = ({}, {}, {"PYHVD_CACHE_CAPACITY": "0"}, {"PYHVD_CHECK": "results"})
_START_S = 120.0  # the kernel makes and removes network namespaces one after the other
_LEFT_S = 2.0
_LEAVE_S = 8.0  # from the last rank's error to the end of all ranks on hosts that still run
_MOMENTS_S = (0.03, 0.3, 1.5)  # after the first step: in the first steps, soon, or later


@dataclass(frozen=True)
class Fault:
    """A fault, drawn from a seed.

    Attributes
    ----------
    seed : int
        Also the program's.
    kind : str
        One of :data:`KINDS`.
    shape : tuple of int
        The number of ranks on each host.
    host, rank : int
        The struck host, and a rank on it.
    moment : float
        Seconds from the first step of the last rank to the fault.
    knobs : dict of str to str
        The job's knobs: without a response cache, and with checks, messages agree on all tensors.
    connection : str
        The kind of the connection that is reset; of :data:`tests.hosts.connections.CONNECTIONS`.
    verb, length : str, int
        A verb of :data:`tests.hosts.fault_programs.VERBS`, if the program makes only its steps, with so many
        floats.
    program : str
        The module that each rank runs, by default :mod:`tests.hosts.fault_programs`.
    holds : bool
        Whether mpiexec is stopped while the ranks get their errors: after some faults it may end them first.
    """

    seed: int
    kind: str
    shape: Shape
    host: int
    rank: int
    moment: float
    knobs: dict[str, str] = field(default_factory=dict)
    connection: str = CONNECTIONS[0]
    verb: str = ""
    length: int = LARGE
    program: str = "tests.hosts.fault_programs"
    holds: bool = False

    @classmethod
    def of(cls, seed: int) -> Fault:
        """Return the fault of a seed; successive seeds have all kinds and shapes in turn."""
        draw = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        shape = SHAPES[seed // len(KINDS) % len(SHAPES)]
        host = draw.randrange(len(shape))
        rank = sum(shape[:host]) + draw.randrange(shape[host])
        moment = draw.uniform(0, draw.choice(_MOMENTS_S))
        return cls(seed, kind, shape, host, rank, moment, draw.choice(_KNOBS), draw.choice(CONNECTIONS))

    def ranks_of(self, host: int) -> list[int]:
        """Return the ranks of a host."""
        first = sum(self.shape[:host])
        return list(range(first, first + self.shape[host]))

    def survivors(self) -> dict[int, list[int]]:
        """Return the ranks that go on, with the hosts that their errors may name."""
        hosts = range(len(self.shape))
        others = [host for host in hosts if host != self.host]
        found = {rank: [self.host] for host in others for rank in self.ranks_of(host)}
        if self.kind == "cut":  # the host is alone, and loses the others
            found |= dict.fromkeys(self.ranks_of(self.host), others)
        elif self.kind == "kill":
            found |= {rank: [self.host] for rank in self.ranks_of(self.host) if rank != self.rank}
        elif self.kind == "reset":  # either end may find it first
            found = {rank: list(hosts) for rank in range(sum(self.shape))}
        return found


@dataclass(frozen=True)
class Ending:
    """How a rank's steps ended: the error's type and text, and the time (``time.time()``)."""

    error: str
    text: str
    time: float


class FaultyJob:
    """A job whose ranks run a random program until a call raises; close it after use."""

    def __init__(self, site: Site, fault: Fault) -> None:
        self._size = sum(fault.shape)
        self._place = job_directory()
        self._folder = self._place.__enter__()
        program = [fault.program, str(self._folder), str(fault.seed), str(self._size)]
        only = [fault.verb, str(fault.length)] if fault.verb else []
        command = site.command(fault.shape, sys.executable, "-m", *program, *only)
        self._job = MpiJob(command, self._folder, {"PYTHONPATH": str(ROOT), **fault.knobs}, ROOT)

    def wait_for_steps(self) -> bool:
        """Wait until every rank has begun a step; return whether so."""
        files = [self._folder / f"steps{rank}" for rank in range(self._size)]

        def have_begun() -> bool:
            return all(path.exists() and path.stat().st_size for path in files)

        return self.wait(have_begun, time.time() + _START_S) and not self.has_ended()

    def wait(self, true: Callable[[], bool], until: float) -> bool:
        """Wait until a condition holds or the job has ended, at most until a time; return whether so."""
        while not (true() or self.has_ended()):
            if time.time() > until:
                return False
            time.sleep(0.01)
        return True

    def port(self, fault: Fault) -> int:
        """Return the port, on the struck host, of the connection that is to be reset."""
        rank = fault.rank if fault.connection == "rail" else fault.ranks_of(fault.host)[0]
        ports = json.loads((self._folder / f"ports{rank}").read_text())[fault.connection]
        return int(ports[0])

    def endings(self) -> dict[int, Ending]:
        """Return how ranks' steps have ended so far."""
        files = {rank: self._folder / f"ending{rank}" for rank in range(self._size)}
        return {rank: Ending(**json.loads(path.read_text())) for rank, path in files.items() if path.exists()}

    def let_ranks_leave(self) -> None:
        """Let the ranks whose steps have ended end."""
        (self._folder / "leave").touch()

    def has_ended(self) -> bool:
        """Return whether mpiexec has ended."""
        return self._job.process.poll() is not None

    def ranks(self) -> dict[int, int]:
        """Return the process id of each rank that runs, in the tests' numbering."""
        return {rank: pid for pid, rank in self._job.processes().items() if rank is not None}

    def signal_mpiexec(self, number: signal.Signals) -> None:
        """Send a signal to mpiexec and its daemons."""
        for pid, rank in self._job.processes().items():
            if rank is None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def output(self) -> str:
        """Return the job's output, with the stacks of ranks that still run."""
        if self.ranks():
            self._job.dump_stacks()
        return "\n".join(["", *self._job.output()])

    def close(self) -> list[int]:
        """End all of the job's processes; return those that live on."""
        self._job.kill()
        left = list(self._job.processes())
        self._place.__exit__(None, None, None)
        return left


def strike(made: Bed, kind: str, host: Host, victim: int) -> None:
    """Do what `kind` says to a host, or to a process on it."""
    if kind == "kill":
        os.kill(victim, signal.SIGKILL)
    elif kind == "crash":
        host.crash()
    elif kind == "cut":
        made.cut_off(host)
    elif kind == "power":
        made.power_off(host)
    else:
        host.freeze()


def heal(made: Bed, kind: str, host: Host) -> None:
    """Make a struck host usable for the next job; its old one must have been closed, unless it is frozen."""
    if kind in ("crash", "power"):
        made.start_host(host)
    elif kind == "cut":
        made.rejoin(host)
    elif kind == "freeze":
        host.thaw()


@dataclass
class Outcome:
    """What a fault did: seconds until all ranks had errors or mpiexec had ended the job; what went wrong."""

    fault: Fault
    seconds: float = 0.0
    errors: int = 0
    wrong: list[str] = field(default_factory=list)


def try_fault(site: Site, fault: Fault, slack: float = 0.0) -> Outcome:
    """Run a program, strike, and look at the ends of all ranks; the hosts are whole afterwards.

    The errors of a silent fault may come `slack` seconds later than :data:`WITHIN_S`.
    """
    outcome = _try_once(site, fault, slack)
    if any(DAEMON_CRASHED in text for text in outcome.wrong):
        return _try_once(site, fault, slack)
    return outcome


def _try_once(site: Site, fault: Fault, slack: float) -> Outcome:
    outcome = Outcome(fault)
    hosts = list(site.bed.hosts.values())[: len(fault.shape)]
    before = {host.name: len(host.processes()) for host in hosts}
    job = FaultyJob(site, fault)
    struck = False
    try:
        begun = job.wait_for_steps()
        time.sleep(fault.moment if begun else 0)
        victim = job.ranks().get(fault.rank)
        if not begun or victim is None:
            outcome.wrong.append(f"not every rank makes steps{job.output()}")
            return outcome
        struck = True
        if fault.holds:
            job.signal_mpiexec(signal.SIGSTOP)
        if fault.kind == "reset":
            hosts[fault.host].do(*kill_sockets("sport", "=", f":{job.port(fault)}"))
        else:
            strike(site.bed, fault.kind, hosts[fault.host], victim)
        within = WITHIN_S + (slack if fault.kind in SILENT else 0)
        _look_at_errors(outcome, job, time.time(), within, [host.name for host in hosts])
        if fault.holds:
            job.signal_mpiexec(signal.SIGCONT)
        if not outcome.wrong:
            _look_at_ranks(outcome, job)
    finally:
        left = job.close()
        if struck:
            heal(site.bed, fault.kind, hosts[fault.host])
    until = time.time() + _LEFT_S
    while (after := {host.name: len(host.processes()) for host in hosts}) != before and time.time() < until:
        time.sleep(0.05)
    if left or after != before:
        outcome.wrong.append(f"left: processes {left}; on the hosts {after}, before {before}")
    return outcome


def _look_at_errors(
    outcome: Outcome, job: FaultyJob, struck: float, within: float, names: Sequence[str]
) -> None:
    survivors = outcome.fault.survivors()
    told = job.wait(lambda: set(survivors) <= set(job.endings()), struck + within)
    now, endings = time.time(), job.endings()
    missing = sorted(set(survivors) - set(endings))
    ends = [now] if missing else [each.time for each in endings.values()]
    outcome.seconds, outcome.errors = max(0.0, max(ends) - struck), len(endings)
    silent = outcome.fault.kind in SILENT and not (outcome.fault.kind == "power" and _is_openmpi())
    if missing and (silent or not job.has_ended()):
        outcome.wrong.append(f"no error of ranks {missing}{job.output()}")
    elif not told or outcome.seconds > within:
        outcome.wrong.append(f"an error came after {outcome.seconds:.2f} s")
    # Open MPI's mpiexec ends all ranks after a killed one, so another host may seem to have ended first.
    ends_all = outcome.fault.kind == "kill" and _is_openmpi()
    for rank in set(survivors) & set(endings):
        ending = endings[rank]
        lost = names if ends_all else [names[host] for host in survivors[rank]]
        ours = [f" to host {name} (" in ending.text for name in lost]
        if ending.error != "RankFailedError" or not any(ours):
            outcome.wrong.append(f"rank {rank}: {ending.error}: {ending.text}")


def _is_openmpi() -> bool:
    return mpi_version().startswith("Open MPI")


def _look_at_ranks(outcome: Outcome, job: FaultyJob) -> None:
    """Let the ranks raise their errors, and look whether their processes end."""
    job.let_ranks_leave()
    until = time.time() + _LEAVE_S
    survivors = outcome.fault.survivors()
    while left := [rank for rank in job.ranks() if rank in survivors]:
        if time.time() > until:
            outcome.wrong.append(f"ranks {left} have not ended{job.output()}")
            return
        time.sleep(0.05)


@contextmanager
def faulty_site() -> Iterator[Site]:
    """Yield a site whose hosts can be struck without harm to other jobs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with bed([f"h{number}" for number in range(max(map(len, SHAPES)))], folder) as made:
            yield Site(made, folder)


def describe(outcomes: Sequence[Outcome]) -> str:
    """Return a table: for each kind, the seconds from the faults to the last error or the job's end."""
    lines = [f"{'fault':<8}{'jobs':>6}{'min':>8}{'median':>8}{'max':>8}{'errors':>8}{'wrong':>7}"]
    for kind in KINDS:
        some = [each for each in outcomes if each.fault.kind == kind]
        if times := [each.seconds for each in some]:
            figures = f"{min(times):>8.2f}{statistics.median(times):>8.2f}{max(times):>8.2f}"
            counts = sum(each.errors for each in some), sum(bool(each.wrong) for each in some)
            lines.append(f"{kind:<8}{len(some):>6}{figures}{counts[0]:>8}{counts[1]:>7}")
    return "\n".join(lines)


def main() -> int:
    """Make faults, and print what went wrong, and a table."""
    parser = argparse.ArgumentParser(description="Strike hosts of a bed while ranks run random programs.")
    parser.add_argument("--count", type=int, default=200, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="of the first fault; the others follow")
    parser.add_argument("--beds", type=int, default=3, help="faults side by side")
    options = parser.parse_args()
    seeds = iter(range(options.seed, options.seed + options.count))
    outcomes: list[Outcome] = []
    lock = threading.Lock()

    def work() -> None:
        with faulty_site() as site:
            while True:
                with lock:
                    seed = next(seeds, None)
                if seed is None:
                    return
                outcome = try_fault(site, Fault.of(seed))
                with lock:
                    outcomes.append(outcome)
                    for text in outcome.wrong:
                        print(f"{outcome.fault}: {text}", flush=True)

    workers = [threading.Thread(target=work) for _ in range(options.beds)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    shapes = ", ".join(name_of(shape) for shape in SHAPES)
    print(f"{len(outcomes)} faults, {shapes}, {mpi_version()}\n{describe(outcomes)}")
    return int(len(outcomes) < options.count or any(each.wrong for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())

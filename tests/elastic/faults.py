"""``python -m tests.elastic.faults``: random faults of elastic jobs, held against a run without faults.

Jobs of 4 ranks run side by side: on one host, there also with two agents, and on two simulated hosts over
ssh. Some faults are at points of their program, the others come from outside, at random moments. The counts,
and the seconds to the next step, are saved for docs/elastic.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.bed import bed, why_not
from tests.elastic.jobs import ROOT
from tests.elastic.running import ONE_HOST, TWO_NAMES, Ground, two_hosts
from tests.elastic.trials import HANG, LEFT, LOST, OTHER, WRONG, Trial, shared_memory, try_job
from tests.hosts import sshd
from tests.hosts.sshd import Sshd
from tests.mpi.launch import mpi_version

RESULTS = ROOT / "benchmarks" / "results" / "faults" / "elastic-random.json"
PLACES = ("one host", "two hosts")
_STEPS = 120
_ORPHAN_S = 2.0


@contextmanager
def grounds(hosts: bool) -> Iterator[Sequence[Ground]]:
    """Yield where jobs run: one host, also under two names; or two simulated hosts."""
    if not hosts:
        yield (ONE_HOST, TWO_NAMES)
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyhvd-site-")))
        made = stack.enter_context(bed(["east", "west"], folder))
        yield (two_hosts(sshd.Site(made, Sshd(made, folder, stack))),)


class Hunt:
    """Jobs side by side, until so many faults were made.

    Parameters
    ----------
    count : int
        The number of faults.
    seed : int
        Of the first job; the others follow.
    until : float
        No job begins after this time.
    """

    def __init__(self, count: int, seed: int, until: float) -> None:
        self._count = count
        self._seed = seed
        self._until = until
        self._lock = threading.Lock()
        self.wrong: Counter[str] = Counter(dict.fromkeys((LOST, WRONG, HANG, LEFT, OTHER), 0))
        self.jobs = dict.fromkeys(PLACES, 0)
        self.faults: dict[str, Counter[str]] = {place: Counter() for place in PLACES}
        self.seconds: dict[str, dict[str, list[float]]] = {place: {} for place in PLACES}
        self.errors = 0

    @property
    def total(self) -> int:
        """How many faults were made."""
        return sum(counter.total() for counter in self.faults.values())

    def work(self, hosts: bool) -> None:
        """Run jobs, one after the other."""
        with grounds(hosts) as places:
            while (seed := self._next()) is not None:
                self._note(PLACES[hosts], try_job(places[seed % len(places)], seed, _STEPS))

    def _next(self) -> int | None:
        with self._lock:
            if self.total >= self._count or time.monotonic() > self._until:
                return None
            self._seed += 1
            return self._seed - 1

    def _note(self, place: str, trial: Trial) -> None:
        with self._lock:
            self.jobs[place] += 1
            self.faults[place].update(trial.faults)
            for kind, seconds in trial.seconds:
                self.seconds[place].setdefault(kind, []).append(seconds)
            for kind, text in trial.wrong:
                print(f"{kind}: {text}", flush=True)
                self.wrong[kind] += 1
            if trial.log:
                print(trial.log, flush=True)
            self.errors += bool(trial.wrong)
            if sys.stdout.isatty():
                print(f"\r{self.total} of {self._count} faults", end="", flush=True)

    def look_for_shared_memory(self, before: set[str]) -> None:
        """Count the files of shared memory that no process has, but for those that were there before."""
        time.sleep(_ORPHAN_S)
        for name in sorted(shared_memory() - before):
            print(f"{LEFT}: /dev/shm/{name}", flush=True)
            self.wrong[LEFT] += 1
            self.errors += 1

    def report(self) -> dict[str, Any]:
        """Return what to save."""
        return {
            "mpi": mpi_version(),
            "wrong": dict(self.wrong),
            "places": {
                place: {
                    "jobs": self.jobs[place],
                    "faults": dict(sorted(self.faults[place].items())),
                    "seconds": dict(sorted(self.seconds[place].items())),
                }
                for place in PLACES
            },
        }


def add(saved: Any, new: Any) -> Any:
    """Return two reports as one: counts are added, lists joined, and texts are those of the new one."""
    if isinstance(new, dict):
        both = {**saved, **new}
        return {
            key: add(saved[key], new[key]) if key in saved and key in new else both[key]
            for key in sorted(both)
        }
    return new if isinstance(new, str) else saved + new


def describe(report: dict[str, Any]) -> str:
    """Return a table: for each place and kind, the faults, and the seconds to the next step."""
    lines = [f"{'fault':<14}{'place':<10}{'count':>6}{'min':>8}{'median':>8}{'max':>8}"]
    for place, found in report["places"].items():
        for kind, count in found["faults"].items():
            times = found["seconds"].get(kind, [])
            figures = [f"{each(times):>8.2f}" for each in (min, statistics.median, max)] if times else []
            lines.append(f"{kind:<14}{place:<10}{count:>6}{''.join(figures)}")
    return "\n".join(lines)


def main() -> int:
    """Make faults; print what went wrong, and a table."""
    parser = argparse.ArgumentParser(description="Make random faults in elastic jobs.")
    parser.add_argument("--count", type=int, default=100, help="number of faults (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the first job; the others follow")
    parser.add_argument("--jobs", type=int, default=2, help="jobs side by side on one host (default: 2)")
    parser.add_argument("--beds", type=int, default=2, help="jobs on two hosts; needs root (default: 2)")
    parser.add_argument("--minutes", type=float, default=30, help="begin no job later (default: 30)")
    parser.add_argument("--add", action="store_true", help="add to the figures that are saved")
    options = parser.parse_args()
    if options.beds and (reason := why_not() or sshd.why_not()):
        raise SystemExit(f"no simulated hosts with ssh on this machine (--beds 0 does without): {reason}")
    before = shared_memory()
    hunt = Hunt(options.count, options.seed, time.monotonic() + 60 * options.minutes)
    on_hosts = [False] * options.jobs + [True] * options.beds
    workers = [threading.Thread(target=hunt.work, args=(hosts,)) for hosts in on_hosts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    hunt.look_for_shared_memory(before)
    print(f"{hunt.total} faults in {sum(hunt.jobs.values())} jobs, {mpi_version()}: {dict(hunt.wrong)}")
    report = hunt.report()
    print(describe(report))
    if options.add and RESULTS.exists():
        report = add(json.loads(RESULTS.read_text()), report)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    return int(hunt.errors or hunt.total < options.count)


if __name__ == "__main__":
    sys.exit(main())

"""``python -m benchmarks elastic``: how fast elastic jobs go on after a fault, and what commits cost.

A time runs from the fault to the end of the next allreduce, by the wall clock of this machine, on which all
hosts are. Faults of hosts are made on two simulated ones, over ssh; there the time runs to the next committed
step, and steps last 0.2 s.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.harness import OURS, Figures, Outcome
from benchmarks.hosts import publish
from benchmarks.machine import Machine, mpi_short
from benchmarks.report import Report, Run, Target, judge
from tests.bed import why_not
from tests.elastic.fault_times import FAULTS, measure
from tests.elastic.faults import grounds
from tests.hosts import sshd
from tests.many_hosts import LOCAL
from tests.mpi.launch import ROOT

TITLE = "elastic: jobs whose ranks are killed"
_PYHVD = "pyhvdrun"
PROGRAM = ROOT / "benchmarks" / "elastic_program.py"
_PATIENCE_S = 120.0
_SETTLE_S = 3.0
_ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
KILLED, KILLED_TORCH = "1 of 4 ranks is killed", "1 of 4 ranks is killed, torch imported"
ADDED, WEST = "a host is printed, first allreduce with it", "east:2\nwest:2\n"
COMMIT, CHECK = "commit of 100 MB, times a copy", "check_host_updates"

# The faults on two hosts, by their names there, with the seconds that are asked for.
ON_HOSTS = {
    "on two hosts a rank is killed": (3.0, 0.6),
    "a host crashes": (3.0, 0.8),
    "a host is frozen": (5.0, 3.5),
    "a host is cut off": (5.0, 3.5),
    "a host loses its power": (5.0, 3.5),
}


def _target(label: str, least: float, moonshot: float) -> Target:
    return Target(label, f"elastic, {label}", _PYHVD, (), least, moonshot, True)


TARGETS = [
    _target(KILLED, 1.0, 0.25),
    _target(KILLED_TORCH, 1.5, 0.4),
    _target(ADDED, 5.0, 2.0),
    _target(COMMIT, 2.0, 1.2),
    _target(CHECK, 5e-6, 1e-6),
    *(_target(name, *asked) for name, asked in ON_HOSTS.items()),
]


class Table:
    """The cases, with the samples of all runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.samples: dict[tuple[str, str], list[float]] = {}

    def run(self, restarts: int) -> None:
        """Measure each case; a job whose rank is killed so many times."""
        self._kill(KILLED, restarts)
        if importlib.util.find_spec("torch") is not None:
            self._kill(KILLED_TORCH, restarts, "import torch\n")
        self._add()
        times = self._times(["calls", "0"], "2")
        self._note(COMMIT, "x", times["commit"])
        self._note(CHECK, "s", times["check"])

    def run_on_hosts(self, trials: int) -> None:
        """Make each fault of a host so many times."""
        known = {fault.name: fault for fault in FAULTS}
        with grounds(hosts=True) as (ground,):
            for _ in range(trials):
                for name in ON_HOSTS:
                    self._note(name, "s", measure(ground, known[name]))

    def _note(self, label: str, unit: str, value: float) -> None:
        self.samples.setdefault((label, unit), []).append(value)

    def _kill(self, label: str, restarts: int, first: str = "") -> None:
        times = self._times(["kill", str(restarts)], "4", first)
        for number in range(restarts):
            self._note(label, "s", times[f"first{number + 1}"] - times[f"killed{number}"])

    def _add(self) -> None:
        """Measure the time from a host's line in the discovery script's output; both hosts are this one."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        hosts, script = folder / "hosts", folder / "discover"
        hosts.write_text("east:2\n")
        script.write_text(f"#!/bin/sh\ncat {hosts}\n")
        script.chmod(0o700)
        flags = ["--min-np", "2", "--host-discovery-script", str(script), "--launch-agent", LOCAL]
        job = subprocess.Popen(
            [sys.executable, "-m", "pyhvd.run", *flags, str(PROGRAM), "grow", "0"], cwd=folder, env=_ENV
        )
        try:
            _wait_for(folder, "first0")
            time.sleep(_SETTLE_S)
            begin = time.time()
            hosts.write_text(WEST)
            self._note(ADDED, "s", _wait_for(folder, "first1") - begin)
        finally:
            job.terminate()
            job.wait()

    def _times(self, arguments: Sequence[str], ranks: str, first: str = "") -> dict[str, float]:
        """Run a job, whose program begins with some text, and return what its ranks have logged."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        program = folder / "program.py"
        program.write_text(first + PROGRAM.read_text())
        command = [
            sys.executable,
            "-m",
            "pyhvd.run",
            "-n",
            ranks,
            "--min-np",
            ranks,
            str(program),
            *arguments,
        ]
        subprocess.run(command, cwd=folder, env=_ENV, check=True, timeout=_PATIENCE_S)
        return _read(folder)

    def outcomes(self) -> list[Outcome]:
        """Return the figures of all runs."""
        return [
            Outcome(f"elastic, {label}", 0, unit, [Figures.of(_PYHVD, OURS, samples)])
            for (label, unit), samples in self.samples.items()
        ]


def _read(folder: Path) -> dict[str, float]:
    """Return what ranks have logged, by its kind."""
    path = folder / "times"
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: float(value) for name, value in map(str.split, lines)}


def _wait_for(folder: Path, kind: str) -> float:
    """Return what ranks log of one kind, when they do."""
    until = time.monotonic() + _PATIENCE_S
    while kind not in (found := _read(folder)):
        if time.monotonic() > until:
            raise SystemExit(f"no rank has logged {kind} within {_PATIENCE_S:g} s")
        time.sleep(0.01)
    return found[kind]


def main(arguments: Sequence[str]) -> int:
    """Measure, print and save; return 0 also if a target is missed."""
    given = _parse(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        table = Table(folder)
        for number in range(given.runs):
            if sys.stderr.isatty():
                print(f"\r\x1b[Krun {number + 1} of {given.runs}", end="", file=sys.stderr)
            table.run(given.restarts)
        if reason := why_not() or sshd.why_not():
            print(f"no faults of hosts: {reason}", file=sys.stderr)
        else:
            table.run_on_hosts(given.trials)
        path = folder / "machine.json"
        here = [sys.executable, "-m", "pyhvd.run", "-n", "1", "-m", "benchmarks.machine", str(path)]
        subprocess.run(here, check=True, cwd=ROOT)
        machine = msgspec.json.decode(path.read_bytes(), type=Machine)
    run = Run(4, machine, mpi_short(machine.mpi), table.outcomes(), [])
    report = Report("elastic", TITLE, run.mpi, [run], judge(TARGETS, [run]))
    publish(report, given.results / f"elastic-{run.mpi}.json")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks elastic",
        description=f"{TITLE}: times from a fault to the next finished allreduce, and the cost of commits.",
        epilog="example: python -m benchmarks elastic --runs 3",
    )
    parser.add_argument("--runs", type=int, default=2, metavar="N", help="jobs of each case (default: 2)")
    parser.add_argument(
        "--restarts", type=int, default=10, metavar="N", help="killed ranks of each job (default: 10)"
    )
    parser.add_argument(
        "--trials", type=int, default=5, metavar="N", help="of each fault of a host (default: 5)"
    )
    parser.add_argument(
        "--results",
        type=lambda text: Path(text).absolute(),
        default=ROOT / "benchmarks" / "results",
        metavar="DIR",
        help="write elastic-<mpi>.json and .png to this folder (default: benchmarks/results)",
    )
    return parser.parse_args(arguments)

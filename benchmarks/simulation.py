"""``python -m benchmarks simulation``: steps between hosts, measured and by pyhvd.testing.simulate.

The hosts are namespaces of this machine (tests/bed.py), which share its cores. The machine's rates and
latency are measured beside the steps, by programs that know nothing of them (simulation_probe.py): nothing is
fitted to the steps. The value of a target says how many times too long, or too short, the simulated step is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks import hosts
from benchmarks.harness import OURS, PEER, Figures, Outcome
from benchmarks.machine import Machine as Described, mpi_short
from benchmarks.report import Report, Run, Verdict
from benchmarks.simulation_ranks import KINDS, Kind
from pyhvd.simulation import Machine, Network, StepReport, Tensor, simulate, training
from tests.bed import Bed, bed, why_not
from tests.hosts.launch import Site
from tests.mpi.launch import ROOT, job_directory, mpi_version

TITLE = "simulation: steps on simulated hosts, measured, and predicted by pyhvd.testing.simulate"
SHAPES = ("2x1", "2x2", "4x1")
MEASURED, SIMULATED = "measured", "simulated"
# Steps until every tensor is agreed on in the ready tables, and steps that count.
_FIRST_STEPS, _STEPS = 3, 3
# Bytes that a link of the bed sends at once after it was idle.
_BURST = 512_000
_UNLIMITED = 1e12
# The links' rates in the names of cases, and in bytes per second; without a limit the cores alone limit them.
RATES = {"": ("", _UNLIMITED), "1gbit": (", 1 Gbit/s", 1e9 / 8)}
_PORT = 7900
_PROBE = ("env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "benchmarks.simulation_probe")
_PROBE_S = 60.0
# How many times too long or too short a simulated step may be, and should be.
_ASKED, _HOPED = 1.25, 1.1


@dataclass(frozen=True)
class Measures:
    """What the probes found.

    Attributes
    ----------
    machine : dict of str to float
        Rates and CPU times, by their names in simulation_probe.py.
    latency : list of (float, float)
        How many processes share a core, and the seconds of a message, apart from the calls at both ends.
    """

    machine: dict[str, float]
    latency: list[tuple[float, float]]

    def jitter(self, sharers: float) -> float:
        """Return the seconds by which a message may be later, if so many ranks share a core.

        It waits until its receiver's turn comes, which may be at once.
        """
        (few, fast), (many, slow) = self.latency
        return 2 * max(slow - fast, 0.0) * min((sharers - few) / (many - few), 1.0)

    def predict(self, shape: str, kind: Kind, rate: float) -> float:
        """Return the seconds of a step, by the simulator.

        A link of the bed is a token bucket (tests/bed.py): what it did not send while it was idle, it sends
        later at once, up to its burst. So small steps take the link's time, or their other time.
        """
        step = self._simulate(shape, kind, rate)
        if step.link * rate >= _BURST:
            return step.seconds
        return max(step.link, self._simulate(shape, kind, _UNLIMITED).seconds)

    def _simulate(self, shape: str, kind: Kind, rate: float) -> StepReport:
        """Return a step in the middle of those of a simulated job, by its length."""
        ranks, cores, has = hosts.ranks_of(shape), os.cpu_count() or 1, self.machine
        machine = Machine(
            copy=has["copy"],
            reduce=has["reduce"],
            tcp=has["tcp"],
            frame=has["frame"],
            cores=cores,
            shared_cores=True,
        )
        network = Network(
            latency=self.latency[0][1],
            jitter=self.jitter(machine.sharers(len(ranks), ranks[0])),
            rate=rate,
            wake=has["wake"],
            message_cpu=has["message"],
        )
        tensors = [Tensor(str(t), 4 * count) for t, count in enumerate(kind.counts)]
        program = training(tensors, kind.compute, _FIRST_STEPS + _STEPS, kind.parts)
        job = simulate(len(ranks), ranks[0], program, network, machine=machine, cpu=has["call"])
        steps = sorted(job.steps[-_STEPS:], key=lambda step: step.seconds)
        return steps[_STEPS // 2]


class Bench:
    """Measures steps and the machine, in turns."""

    def __init__(self, made: Bed, folder: Path, given: argparse.Namespace) -> None:
        self._bed = made
        self._site = Site(made, folder)
        self._given = given
        self.samples: dict[tuple[str, str, str], dict[str, list[float]]] = {}
        self.measures: dict[str, list[Measures]] = {}
        self._begun = user_time()

    def run(self) -> None:
        """Measure the machine, whose speed drifts, and each job once, for each shape in turn."""
        for shape in self._given.shapes:
            found = self.measure_machine()
            self.measures.setdefault(shape, []).append(found)
            for rate, (text, speed) in RATES.items():
                times = self._times(shape, rate)
                for kind in KINDS:
                    of = self.samples.setdefault((shape, kind.name, text), {MEASURED: [], SIMULATED: []})
                    of[MEASURED] += times[kind.name]
                    of[SIMULATED].append(found.predict(shape, kind, speed))

    def _times(self, shape: str, rate: str) -> dict[str, list[float]]:
        """Run a job; return the times of the steps of each kind, by its name."""
        with job_directory() as folder:
            path = folder / "times.json"
            self._bed.limit(rate)
            try:
                pace = "tiny" if self._given.tiny else "slow" if rate else "fast"
                module = ["benchmarks.simulation_ranks", str(path), pace]
                hosts.run_job(self._site, shape, module, folder)
            finally:
                self._bed.limit("")
            times: dict[str, list[float]] = json.loads(path.read_text())
        return times

    def report(self) -> list[Run]:
        """Return the figures of all runs, for each shape."""
        with job_directory() as folder:
            path = folder / "machine.json"
            hosts.run_job(self._site, self._given.shapes[0], ["benchmarks.machine", str(path)], folder)
            machine = msgspec.json.decode(path.read_bytes(), type=Described)
        found = []
        for shape in self._given.shapes:
            outcomes = [
                Outcome(
                    f"{shape}, {name}{rate}",
                    4 * sum(next(kind.counts for kind in KINDS if kind.name == name)),
                    "s",
                    [Figures.of(MEASURED, OURS, of[MEASURED]), Figures.of(SIMULATED, PEER, of[SIMULATED])],
                )
                for (of_shape, name, rate), of in self.samples.items()
                if of_shape == shape
            ]
            ranks = sum(hosts.ranks_of(shape))
            notes = [note_of(self.measures[shape]), others_share(self._begun)]
            found.append(Run(ranks, machine, mpi_short(machine.mpi), outcomes, notes))
        return found

    def measure_machine(self) -> Measures:
        """Measure the machine with every core busy; the latency with one process on a core, and with two."""
        cores = os.cpu_count() or 1
        pairs = max(cores // 2, 1)
        found = run_probes([[*_PROBE, "memory"]] * cores) | run_probes([[*_PROBE, "calls"]])
        found |= self._probe_pairs("bulk", 2 * pairs)
        fast, slow = (self._probe_pairs("latency", count) for count in (pairs, 2 * pairs))
        found["message"] = fast["message"]
        found["wake"] = max(self._probe_pairs("waking", 1)["woken"] - 2 * fast["latency"], 0.0)
        latency = [
            (2 * count / cores, max(each["latency"] - 2 * fast["message"], 0.0))
            for count, each in ((pairs, fast), (2 * pairs, slow))
        ]
        return Measures(found, latency)

    def _probe_pairs(self, kind: str, pairs: int) -> dict[str, float]:
        """Run a probe between so many pairs of hosts at once."""
        at, commands = list(self._bed.hosts.values()), []
        for pair in range(pairs):
            one, other = at[2 * pair % len(at)], at[(2 * pair + 1) % len(at)]
            arguments = [*_PROBE, kind, str(_PORT + pair)]
            commands += [one.command(arguments), other.command([*arguments, one.address])]
        return run_probes(commands)


def run_probes(commands: Sequence[Sequence[str]]) -> dict[str, float]:
    """Run probes at once; return the median of each figure."""
    started = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True, cwd=ROOT) for each in commands]
    try:
        found = [json.loads(each.communicate(timeout=_PROBE_S)[0]) for each in started]
    finally:
        for each in started:
            each.kill()
    names = dict.fromkeys(name for each in found for name in each)
    return {name: statistics.median(each[name] for each in found if name in each) for name in names}


def note_of(measures: Sequence[Measures]) -> str:
    """Return the line for the report on a machine: the median of each figure, and the least and the most."""

    def text(form: str, scale: float, found: Sequence[float]) -> str:
        shown = (min(found), statistics.median(found), max(found))
        return ", ".join(format(scale * each, form) for each in shown)

    def of(name: str, form: str, scale: float) -> str:
        return text(form, scale, [each.machine[name] for each in measures])

    delays = ", ".join(
        f"{text('.1f', 1e6, [each.latency[k][1] for each in measures])} us with {sharers:g} to a core"
        for k, (sharers, _) in enumerate(measures[0].latency)
    )
    return (
        f"least, median and most: a core copies {of('copy', '.0f', 1e-9)} GB/s and reduces"
        f" {of('reduce', '.0f', 1e-9)} GB/s; TCP takes it {of('tcp', '.3f', 1e9)} ns a byte and"
        f" {of('frame', '.1f', 1e6)} us a frame; a call takes {of('call', '.2f', 1e6)} us, a message"
        f" {of('message', '.1f', 1e6)} us at each end and {delays} in between; a sleeper wakes"
        f" {of('wake', '.0f', 1e6)} us later"
    )


def verdicts_of(runs: Sequence[Run]) -> list[Verdict]:
    """Return for each case how far the simulation is off; within 25 % is asked for."""
    found = []
    for run in runs:
        for outcome in run.outcomes:
            measured, simulated = (outcome.find(name) for name in (MEASURED, SIMULATED))
            assert measured is not None
            assert simulated is not None
            ratio = simulated.median / measured.median
            off = max(ratio, 1 / ratio)
            text = f"{outcome.label}: simulated {ratio:.2f} times measured"
            met, moon = off <= _ASKED, off <= _HOPED
            found.append(Verdict(text, run.ranks, off, None, _ASKED, _HOPED, True, "x", met, moon))
    return found


def others_share(begun: tuple[float, float]) -> str:
    """Return the line for the report on what other programs did, since :func:`user_time` returned this."""
    wall, user = (now - then for now, then in zip(user_time(), begun, strict=True))
    share = 100 * max(user, 0.0) / (wall * (os.cpu_count() or 1))
    return f"other programs used {share:.0f} % of the cores meanwhile (user time)"


def user_time() -> tuple[float, float]:
    """Return the time, and the user seconds of all processes on the machine but this and its children."""
    user, nice = map(int, Path("/proc/stat").read_text().split()[1:3])
    own = os.times()
    return time.monotonic(), (user + nice) / os.sysconf("SC_CLK_TCK") - own.user - own.children_user


def main(arguments: Sequence[str]) -> int:
    """Measure and predict all steps; return 0 also if one is far off."""
    given = _parse(arguments)
    if reason := why_not("1gbit"):
        raise SystemExit(f"no simulated hosts on this machine: {reason}")
    names = [f"h{number}" for number in range(max(4, *(len(hosts.ranks_of(each)) for each in given.shapes)))]
    with tempfile.TemporaryDirectory(prefix="bench-") as place, bed(names, Path(place)) as made:
        bench = Bench(made, Path(place), given)
        for _ in range(given.runs):
            bench.run()
        runs = bench.report()
    mpi = "openmpi" if mpi_version().startswith("Open MPI") else "mpich"
    report = Report("simulation", TITLE, mpi, runs, verdicts_of(runs))
    hosts.publish(report, given.results / f"simulation-{mpi}.json")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks simulation",
        description="Compare steps on hosts simulated by namespaces with what pyhvd.testing.simulate says of"
        " them. Needs root and iproute2.",
        epilog="example: python -m benchmarks simulation --shapes 2x1 --runs 1",
    )
    text = f"hosts x ranks (default: {','.join(SHAPES)})"
    parser.add_argument("--shapes", type=hosts.shapes_of, default=SHAPES, help=text)
    parser.add_argument("--runs", type=int, metavar="N", help="jobs of each kind (default: 5)")
    parser.add_argument("--tiny", action="store_true", help="few steps and one run, as a test")
    parser.add_argument(
        "--results",
        type=lambda text: Path(text).absolute(),
        default=ROOT / "benchmarks" / "results",
        metavar="DIR",
        help="write simulation-<mpi>.json and .png to this folder (default: benchmarks/results)",
    )
    given = parser.parse_args(arguments)
    given.runs = given.runs or (1 if given.tiny else 5)
    return given

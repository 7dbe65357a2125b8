"""Run a question: parse its flags, start its ranks, and build its report.

Outside mpiexec, a question starts one job per rank count, one after the other, and prints their figures. It
uses pyhvd's launcher, which makes waiting ranks yield if there are more ranks than cores. Under the user's
mpiexec, rank 0 prints. Probes answer the questions about start-up and idle ranks: fresh processes that load
one contender only (see probe.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from benchmarks.harness import Case, Outcome, Plan, World, interleave
from benchmarks.machine import CorePair, Machine, describe_machine, mpi_short
from benchmarks.mpi import MPI
from benchmarks.plot import plot
from benchmarks.report import (
    Report,
    Run,
    Target,
    judge,
    load_run,
    print_by_size,
    print_run,
    print_verdicts,
    save,
)
from pyhvd.job.mpi.rank_env import read_rank_env

ROOT = Path(__file__).resolve().parents[1]
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_JOB_SECONDS = 1800


@dataclass(frozen=True)
class Options:
    """The flags of every question."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    repeats: int
    seconds: float


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes
    ----------
    name, title : str
        The name in file names, and the printed title.
    sizes_are : str
        The unit that ``--sizes`` counts.
    sizes, tiny : tuple of int
        The default sizes, and the sizes of ``--tiny``.
    ranks : tuple of int
        Rank counts, one job each.
    repeats : int
        Largest number of repetitions.
    seconds : float
        Time limit of a case.
    cases : callable, optional
        ``cases(world, sizes)`` yields cases; called on every rank.
    probe : callable, optional
        ``probe(ranks, options)`` returns outcomes and notes; called outside mpiexec.
    targets : tuple of Target
        The targets of pyhvd.
    log_sizes : bool
        Whether to plot against size instead of as bars.
    by_size : bool
        Whether to print one table with a column for each size.
    """

    name: str
    title: str
    sizes_are: str
    sizes: tuple[int, ...]
    tiny: tuple[int, ...]
    ranks: tuple[int, ...] = (2,)
    repeats: int = 30
    seconds: float = 8.0
    cases: Callable[[World, Sequence[int]], Iterable[Case]] | None = None
    probe: Callable[[int, Options], tuple[list[Outcome], list[str]]] | None = None
    targets: tuple[Target, ...] = field(default=())
    log_sizes: bool = False
    by_size: bool = False

    @property
    def module(self) -> str:
        """The question's module, for ``python -m``."""
        return f"benchmarks.questions.{self.name}"


def main(question: Question) -> int:
    """Answer the question by the flags of ``sys.argv``; return the exit code."""
    given = _parse(question)
    options = Options(
        given.sizes or (question.tiny if given.tiny else question.sizes),
        given.ranks or question.ranks[: 1 if given.tiny else None],
        given.repeats or (2 if given.tiny else question.repeats),
        given.seconds or question.seconds,
    )
    if read_rank_env() is not None:
        if question.cases is None:
            raise SystemExit(f"{question.name} starts jobs of its own: run it outside mpiexec")
        run = _measure(question, options)
        if run is not None and given.job:
            save(given.job, run)
        elif run is not None:
            _conclude(question, given, [run])
        return 0
    with tempfile.TemporaryDirectory(prefix="pyhvd-bench-") as folder:
        runs = [_run(question, options, ranks, Path(folder)) for ranks in options.ranks]
    _conclude(question, given, runs)
    return 0


def _conclude(question: Question, given: argparse.Namespace, runs: list[Run]) -> None:
    """Print, save and draw the report."""
    report = Report(question.name, question.title, runs[0].mpi, runs, judge(question.targets, runs))
    for run in runs:
        (print_by_size if question.by_size else print_run)(question.title, run)
    print_verdicts([report])
    stem = f"{report.question}-{report.mpi}"
    data = given.json or (given.results and given.results / f"{stem}.json")
    picture = given.plot or (given.results and given.results / f"{stem}.png")
    if data:
        save(data, report)
    if picture:
        plot(picture, report, question.log_sizes)


def _run(question: Question, options: Options, ranks: int, folder: Path) -> Run:
    """Run one job, or the question's probes."""
    path = folder / f"{ranks}.json"
    if question.probe is not None:
        _started(question, ranks, ["-m", "benchmarks.machine", str(path)])
        machine = msgspec.json.decode(path.read_bytes(), type=Machine)
        return Run(ranks, machine, mpi_short(machine.mpi), *question.probe(ranks, options))
    flags = ["--sizes", ",".join(map(str, options.sizes)), "--repeats", str(options.repeats)]
    flags += ["--seconds", str(options.seconds), "--job", str(path)]
    _started(question, ranks, ["-m", question.module, *flags])
    return load_run(path)


def _started(question: Question, ranks: int, program: Sequence[str]) -> None:
    if code := start_job(ranks, program):
        raise SystemExit(f"{question.name} failed on {ranks} ranks (exit code {code})")


def start_job(ranks: int, program: Sequence[str]) -> int:
    """Run a Python program (``-m module ...``) on ranks of this interpreter's MPI; return its exit code."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    threads = {name: os.environ.get(name, "1") for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    return subprocess.run(
        [sys.executable, "-m", "pyhvd.run", "-n", str(ranks), *program],
        env=os.environ | threads | {"PYTHONPATH": path},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        timeout=_JOB_SECONDS,
        check=False,
    ).returncode


def _measure(question: Question, options: Options) -> Run | None:
    """Measure in a rank; return the figures on rank 0."""
    assert question.cases is not None
    machine = describe_machine()
    comm = MPI.COMM_WORLD.Dup()
    world = World(comm, CorePair(comm))
    plan = Plan(options.repeats, options.seconds)
    outcomes = []
    for case in question.cases(world, options.sizes):
        outcomes.append(interleave(world, case, plan))
        del case  # free the case's arrays before the next case allocates its own
    if world.rank:
        return None
    return Run(world.size, machine, mpi_short(machine.mpi), outcomes, world.notes)


# -- flags ---------------------------------------------------------------------------------------------


def _parse(question: Question) -> argparse.Namespace:
    default = ",".join(_short(size) for size in question.sizes)
    parser = argparse.ArgumentParser(
        prog=f"python -m {question.module}",
        description=question.title,
        epilog=f"example: python -m {question.module} --ranks 2 --sizes {default.split(',')[-1]}"
        f" --json {question.name}.json --plot {question.name}.png",
    )
    parser.add_argument("--sizes", type=sizes, help=f"{question.sizes_are} (default: {default})")
    add_flags(parser, ",".join(map(str, question.ranks)), question.repeats, f"{question.seconds:g}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (needs matplotlib)")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)  # where a rank saves its run
    return parser.parse_args()


def add_flags(parser: argparse.ArgumentParser, ranks: str, repeats: int | str, seconds: str) -> None:
    """Add the flags shared by one question and ``python -m benchmarks``."""
    parser.add_argument("--ranks", type=sizes, help=f"rank counts, one job each (default: {ranks})")
    parser.add_argument("--repeats", type=int, metavar="N", help=f"repetitions at most (default: {repeats})")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help=f"time limit of a case, S seconds (default: {seconds})",
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes and few repetitions, as a test")
    parser.add_argument(
        "--results", type=Path, metavar="DIR", help="write <question>-<mpi>.json and .png to this folder"
    )


def sizes(text: str) -> tuple[int, ...]:
    """Parse numbers such as ``4,64K,1M``."""
    found = []
    for word in text.split(","):
        unit = _UNITS.get(word[-1:].upper(), 1)
        digits = word[:-1] if unit > 1 else word
        if not digits.isdecimal() or not int(digits):
            raise argparse.ArgumentTypeError(f"expected numbers such as 4,64K,1M, not {text!r}")
        found.append(int(digits) * unit)
    return tuple(found)


def _short(size: int) -> str:
    for name, unit in reversed(_UNITS.items()):
        if size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)

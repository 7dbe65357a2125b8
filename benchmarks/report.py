"""Print and save figures: tables, targets, and the JSON files.

A target compares medians of one run. The tables also show absolute times, which vary with the machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.harness import OURS, Outcome, paired_ratio, ratio
from benchmarks.machine import Machine

SCHEMA = 1


@dataclass(frozen=True)
class Target:
    """A question's target for pyhvd.

    Attributes
    ----------
    text : str
        The printed text.
    case : str
        Label of the case.
    ours : str
        Name of pyhvd's contender.
    against : tuple of str
        Peers, of which the fastest counts. If empty, the value is that of ``ours``, in its case's unit.
    least, moonshot : float
        The bound to meet, and the ambition.
    fewer : bool
        If true, the value is ours, or ours over the peer, and the bound is the largest value that meets the
        target. Otherwise the value is the peer over ours, and the bound is the smallest.
    ranks : tuple of int
        Rank counts of the target; if empty, all.
    mpi : tuple of str
        MPI implementations of the target; if empty, all.
    difference : bool
        If true, the value is the median of ours minus the peer of each repetition, and ``fewer`` is true.
    over : str
        Name of a contender by whose median the difference is divided; if empty, the difference is a time.
    """

    text: str
    case: str
    ours: str
    against: tuple[str, ...]
    least: float
    moonshot: float
    fewer: bool = False
    ranks: tuple[int, ...] = (2,)
    mpi: tuple[str, ...] = ()
    difference: bool = False
    over: str = ""


class Verdict(msgspec.Struct):
    """A target's outcome; ``paired`` is the median of the ratios of each repetition.

    After several runs, ``values`` has the value of each, and ``value`` is their median.
    """

    text: str
    ranks: int
    value: float
    paired: float | None
    least: float
    moonshot: float
    fewer: bool
    unit: str
    met: bool
    moon: bool
    values: list[float] = []


class Run(msgspec.Struct):
    """One job: a question on one number of ranks."""

    ranks: int
    machine: Machine
    mpi: str
    outcomes: list[Outcome]
    notes: list[str]


class Report(msgspec.Struct):
    """The contents of a JSON file."""

    question: str
    title: str
    mpi: str
    runs: list[Run]
    verdicts: list[Verdict]
    schema: int = SCHEMA


def judge(targets: Iterable[Target], runs: Iterable[Run]) -> list[Verdict]:
    """Return the verdicts of the targets that apply to the runs and whose contenders took part."""
    verdicts = []
    targets = list(targets)
    for run in runs:
        for target in targets:
            if (target.mpi and run.mpi not in target.mpi) or (target.ranks and run.ranks not in target.ranks):
                continue
            outcome = next((each for each in run.outcomes if each.label == target.case), None)
            if outcome is not None and (verdict := _judge(target, run.ranks, outcome)) is not None:
                verdicts.append(verdict)
    return verdicts


def _judge(target: Target, ranks: int, outcome: Outcome) -> Verdict | None:
    ours = outcome.find(target.ours)
    peers = [found for name in target.against if (found := outcome.find(name)) is not None]
    if ours is None or (target.against and not peers):
        return None
    paired, unit = None, outcome.unit
    value = ours.median
    if target.difference:
        best = min(peers, key=lambda peer: peer.median)
        value = statistics.median(a - b for a, b in zip(ours.samples, best.samples, strict=False))
        if target.over:
            whole = outcome.find(target.over)
            if whole is None:
                return None
            value, unit = value / whole.median, "x"
    elif peers:
        best = min(peers, key=lambda peer: peer.median)
        above, below = (ours, best) if target.fewer else (best, ours)
        value, paired, unit = ratio(above, below), paired_ratio(above, below), "x"

    def reaches(limit: float) -> bool:
        return value <= limit if target.fewer else value >= limit

    return Verdict(
        text=target.text,
        ranks=ranks,
        value=value,
        paired=paired,
        least=target.least,
        moonshot=target.moonshot,
        fewer=target.fewer,
        unit=unit,
        met=reaches(target.least),
        moon=reaches(target.moonshot),
    )


# -- text ----------------------------------------------------------------------------------------------


def show(value: float, unit: str) -> str:
    """Return a value with its unit, to three digits."""
    if unit == "x":
        return f"{_three(value)}x"
    if unit != "s":
        return f"{_three(value)} {unit}"
    if value < 0:
        return f"-{show(-value, unit)}"
    for factor, name in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1:
            return f"{_three(value * factor)} {name}"
    return f"{_three(value * 1e9)} ns"


def _three(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(digits, 0), 4)}f}"


def show_bytes(count: int) -> str:
    """Return a size such as ``64 KiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:g} {name}" if count % unit == 0 else f"{count / unit:.1f} {name}"
    return f"{count} B"


def console() -> Console:
    """Return a console that is wide enough for every table."""
    return Console(width=max(118, Console().width), highlight=False)


def print_run(title: str, run: Run) -> None:
    """Print a job's figures."""
    out = console()
    machine = run.machine
    out.print(
        f"\n{title}\n{run.ranks} ranks, {machine.mpi}, Python {machine.python}, {machine.cores} cores:"
        f" {machine.cpu}, load {machine.load[0]}, commit {machine.commit or 'unknown'}"
    )
    for outcome in run.outcomes:
        out.print(_table(outcome))
        for name, values in (("spinning in Python", "spin"), ("MPI ping-pong", "mpi")):
            found = [v for each in outcome.latencies if (v := getattr(each, values)) is not None]
            if found:
                shown = ", ".join(show(value, "s") for value in found)
                out.print(f"  core to core, one way, {name}, before and after: {shown}")
    for note in run.notes:
        out.print(f"  {note}")


def print_by_size(title: str, run: Run) -> None:
    """Print a job's medians in one table: a column for each size, a row for each figure."""
    sizes = list(dict.fromkeys(each.nbytes for each in run.outcomes if each.nbytes))
    machine = run.machine
    about = f"{machine.cores} cores: {machine.cpu}, {machine.mpi}, commit {machine.commit or 'unknown'}"
    table = Table(title=f"{title}\n{about}", title_justify="left")
    table.add_column("")
    for size in sizes:
        table.add_column(f"{size:,}", justify="right")
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for outcome in run.outcomes:
        for each in outcome.figures:
            shown = show(each.median, "s") if outcome.unit == "s" else _three(each.median)
            rows.setdefault((outcome.unit, each.name), {})[outcome.nbytes] = shown
    for (unit, name), by_size in rows.items():
        if any(by_size.get(size) for size in sizes):
            name = name if unit == "s" else f"{name}, {unit}"
            table.add_row(name, *(by_size.get(size, "") for size in sizes))
    console().print(table, *run.notes, sep="\n")


def _table(outcome: Outcome) -> Table:
    table = Table(title=outcome.label, title_justify="left", title_style="bold", min_width=100)
    table.add_column("", no_wrap=True)
    for head in ("min", "median", "p99", "max", "n", "to pyhvd", "pairwise"):
        table.add_column(head, justify="right")
    first = next((each for each in outcome.figures if each.kind == OURS), None)
    for each in outcome.figures:
        ratios = ("", "")
        ours = outcome.find(each.beside) or first
        if ours is not None and each is not ours and outcome.unit == "s":
            ratios = (show(ratio(each, ours), "x"), show(paired_ratio(each, ours), "x"))
        values = (each.min, each.median, each.p99, each.max)
        style = "bold" if each.kind == OURS else ""
        shown = [show(value, outcome.unit) for value in values]
        table.add_row(each.name, *shown, str(len(each.samples)), *ratios, style=style)
    return table


def print_verdicts(reports: Sequence[Report]) -> None:
    """Print the targets, and whether each is met."""
    table = Table(title="targets (medians)", title_justify="left", title_style="bold")
    for head in ("question", "MPI", "ranks", "target"):
        table.add_column(head)
    for head in ("at least", "moonshot", "measured", "pairwise"):
        table.add_column(head, justify="right")
    table.add_column("")
    for row in _rows(reports):
        table.add_row(*row)
    if table.row_count:
        console().print(table)


def markdown(reports: Sequence[Report]) -> str:
    """Return the table of targets in Markdown."""
    lines = ["| question | MPI | ranks | target | at least | moonshot | measured | pairwise | |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    lines += ["| " + " | ".join(row) + " |" for row in _rows(reports)]
    return "\n".join(lines) + "\n"


def _rows(reports: Sequence[Report]) -> list[list[str]]:
    rows = []
    for report in reports:
        for each in report.verdicts:
            sign = "<= " if each.fewer else ""
            state = "moonshot" if each.moon else "met" if each.met else "MISSED"
            limits = [sign + show(limit, each.unit) for limit in (each.least, each.moonshot)]
            paired = "" if each.paired is None else show(each.paired, each.unit)
            value = show(each.value, each.unit)
            rows.append(
                [report.question, report.mpi, str(each.ranks), each.text, *limits, value, paired, state]
            )
    return rows


# -- files ---------------------------------------------------------------------------------------------


def save(path: Path, report: Report | Run) -> None:
    """Write a report or a run as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(_rounded(report)), indent=1))


def _rounded(report: Report | Run) -> Report | Run:
    """Round samples to six digits: further digits are noise, and the files are under version control."""
    for run in report.runs if isinstance(report, Report) else [report]:
        for outcome in run.outcomes:
            for each in outcome.figures:
                each.samples = [float(f"{value:.6g}") for value in each.samples]
    return report


def load_run(path: Path) -> Run:
    """Read a job that :func:`save` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Run)


def load_report(path: Path) -> Report:
    """Read a question's report that :func:`save` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Report)

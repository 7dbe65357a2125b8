"""Draw reports: times against size, or bars of medians with whiskers from the minimum to p99."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from benchmarks.harness import FLOOR, OURS, Outcome
from benchmarks.report import Report, show

_OURS, _PEERS, _FLOOR = (
    "#c2410c",
    ("#1d4ed8", "#0e7490", "#4d7c0f", "#7e22ce", "#be185d", "#57534e"),
    "#a8a29e",
)


def plot(path: Path, report: Report, by_size: bool) -> None:
    """Draw a report as a PNG; print a note if matplotlib is not installed."""
    if (pyplot := _pyplot(path)) is None:
        return
    panels = [(run, outcome) for run in report.runs for outcome in run.outcomes]
    if by_size and len(report.runs[0].outcomes) > 1:
        sized = [each for each in report.runs[0].outcomes if each.nbytes]
        units = list(dict.fromkeys(each.unit for each in sized))
        lines = [max(len(each.figures) for each in sized if each.unit == unit) for unit in units]
        heights = [2.5 + 0.15 * number for number in lines]
        figure, grid = pyplot.subplots(
            len(units),
            1,
            figsize=(11, 1 + sum(heights)),
            squeeze=False,
            gridspec_kw={"height_ratios": heights},
        )
        for axes, unit in zip(grid[:, 0], units, strict=True):
            _lines(axes, [each for each in sized if each.unit == unit], unit)
    else:
        tall = sum(0.32 * len(outcome.figures) + 0.9 for _, outcome in panels)
        heights = [len(outcome.figures) + 2 for _, outcome in panels]
        figure, grid = pyplot.subplots(
            len(panels), 1, figsize=(8, tall), squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for axes, (run, outcome) in zip(grid[:, 0], panels, strict=True):
            _bars(axes, outcome)
            axes.set_title(f"{outcome.label}, {run.ranks} ranks", fontsize=9, loc="left")
    _save(pyplot, figure, path, report)


def plot_grid(path: Path, report: Report) -> None:
    """Draw a report whose labels are "column, row", a panel for each; print a note without matplotlib."""
    if (pyplot := _pyplot(path)) is None:
        return
    panels = {outcome.label.partition(", ")[::2]: outcome for run in report.runs for outcome in run.outcomes}
    columns, rows = (list(dict.fromkeys(key[axis] for key in panels)) for axis in (0, 1))
    heights = [2 + max(len(o.figures) for key, o in panels.items() if key[1] == row) for row in rows]
    figure, grid = pyplot.subplots(
        len(rows),
        len(columns),
        figsize=(6 * len(columns), 0.27 * sum(heights) + 1),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for (column, row), axes in zip(((c, r) for r in rows for c in columns), grid.flat, strict=True):
        if outcome := panels.get((column, row)):
            _bars(axes, outcome)
            axes.set_title(f"{column}: {row}", fontsize=9, loc="left")
        else:
            axes.set_axis_off()
    _save(pyplot, figure, path, report)


def _pyplot(path: Path) -> Any:
    if importlib.util.find_spec("matplotlib") is None:
        print(f"no {path}: matplotlib is not installed (pip install --group bench)")
        return None
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def _save(pyplot: Any, figure: Any, path: Path, report: Report) -> None:
    machine = report.runs[0].machine
    title = f"{report.title}\n{machine.mpi}, {machine.cores} cores"
    figure.suptitle(title, fontsize=10, y=1 - 0.1 / figure.get_figheight(), va="top")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _colour(kind: str, number: int) -> str:
    return _OURS if kind == OURS else _FLOOR if kind == FLOOR else _PEERS[number % len(_PEERS)]


def _bars(axes: Any, outcome: Outcome) -> None:
    figures = outcome.figures[::-1]
    for row, each in enumerate(figures):
        whiskers = [[each.median - each.min], [max(0.0, each.p99 - each.median)]]
        axes.barh(row, each.median, color=_colour(each.kind, 0), xerr=whiskers, ecolor="#44403c", capsize=2)
        text = f"  {show(each.median, outcome.unit)}"
        axes.text(max(each.median, each.p99), row, text, va="center", fontsize=8)
    axes.set_yticks(range(len(figures)), [each.name for each in figures], fontsize=8)
    axes.set_xlim(0, 1.18 * max(1e-12, *(each.p99 for each in figures), *(each.median for each in figures)))
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def _lines(axes: Any, outcomes: list[Outcome], unit: str) -> None:
    names = list(dict.fromkeys(each.name for outcome in outcomes for each in outcome.figures))
    all_ours = all(each.kind == OURS for outcome in outcomes for each in outcome.figures)
    for number, name in enumerate(names):
        points = [(o.nbytes, found) for o in outcomes if (found := o.find(name)) is not None]
        sizes = [nbytes for nbytes, _ in points]
        kind = points[0][1].kind
        colour = f"C{number}" if all_ours else _colour(kind, number)
        dashes = "--" if kind == FLOOR or number > 9 else "-"
        axes.plot(sizes, [f.median for _, f in points], dashes, marker=".", color=colour, label=name)
        axes.fill_between(
            sizes, [f.min for _, f in points], [f.p99 for _, f in points], color=colour, alpha=0.12, lw=0
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every = [outcome.nbytes for outcome in outcomes]
    labels = [outcome.label.removesuffix(f", {unit}") for outcome in outcomes]
    axes.set_xticks(every, labels, rotation=30, ha="right", fontsize=8)
    axes.set_ylabel("seconds" if unit == "s" else unit)
    axes.set_title("median, and from the minimum to p99", fontsize=8, loc="right")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))

"""The picture of simulations: the parts of a step's time, and the efficiency, against the number of hosts."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyhvd.common.units import span
from pyhvd.simulation import Simulation
from pyhvd.simulation.command.cases import efficiency, usual_step
from pyhvd.simulation.command.screen import PARTS, parts_of

NEEDED = 'needs matplotlib: pip install "pyhvd[plot]"'
_COLOURS = {
    "compute": "#a8a29e",
    "late": "#be185d",
    "agreement": "#7e22ce",
    "link": "#1d4ed8",
    "cpu": "#c2410c",
    "latency": "#0e7490",
}
_INK = "#1c1917"
_VISIBLE = 0.3
"""Parts with a smaller share (%) of all bars are left out."""


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, title: str, jobs: Sequence[Simulation]) -> None:
    """Draw jobs on rising numbers of hosts as a PNG."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(max(7.0, 1.8 + 0.75 * len(jobs)), 4.8))
    _bars(axes, jobs)
    _line(axes, [100 * efficiency(jobs[0], job) for job in jobs])
    axes.set_xticks(range(len(jobs)), [f"{job.hosts:,}" for job in jobs], fontsize=9)
    ranks = jobs[0].local_ranks
    axes.set_xlabel(f"hosts, with {ranks} ranks each" if ranks > 1 else "hosts, with 1 rank each")
    axes.set_ylabel("share of a step (%)")
    axes.set_ylim(0, 108)
    axes.set_yticks(range(0, 101, 20))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="lower center", ncols=7, fontsize=8, frameon=False, columnspacing=1.2, handlelength=1.4)
    figure.suptitle(title, fontsize=9, x=0.02, ha="left")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bars(axes: Any, jobs: Sequence[Simulation]) -> None:
    """Draw the parts of each job's step on top of each other, and its time above them."""
    steps = [usual_step(job) for job in jobs]
    shares = [{name: 100 * part / step.seconds for name, part in parts_of(step).items()} for step in steps]
    reached = [0.0] * len(jobs)
    for name, label in PARTS.items():
        heights = [each[name] for each in shares]
        if max(heights) < _VISIBLE:
            continue
        axes.bar(range(len(jobs)), heights, 0.62, bottom=reached, color=_COLOURS[name], label=label)
        reached = [below + height for below, height in zip(reached, heights, strict=True)]
    for place, step in enumerate(steps):
        axes.text(place, 101.5, span(step.seconds), ha="center", fontsize=8, color=_INK)


def _line(axes: Any, heights: Sequence[float]) -> None:
    """Draw the efficiency (%)."""
    axes.plot(
        range(len(heights)), heights, color=_INK, marker="o", markersize=4.5, lw=1.3, markeredgecolor="white",
        label="efficiency: one host's step / this step",
    )  # fmt: skip
    for place, height in enumerate(heights):
        axes.annotate(
            f"{height:.0f} %", (place, min(height, 90)), (0, 6), textcoords="offset points", ha="center",
            fontsize=8, color=_INK, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85},
        )  # fmt: skip

"""Draws a stretch of a merged trace, as a trace viewer shows it: a band per rank, a line per phase.

    python -m pyhvd trace merge traces/ -o merged.json
    python scripts/draw_trace.py merged.json picture.png --begin 40 --length 25

Needs matplotlib (the dependency group ``bench``). For a page of documentation: to look into a trace, open it
in https://ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from pyhvd.tracing.merging import TRACKS

COLOURS = ("#c6d4e8", "#e4d9a8", "#8fb996", "#e8b4a0", "#6a8caf", "#3d5a80", "#98c1d9", "#b8b8b8")
_HEIGHT = 0.86

Event = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Draw; return the exit code."""
    options = _parser().parse_args(arguments)
    events = json.loads(Path(options.trace).read_text())["traceEvents"]
    begin, end = options.begin * 1000, (options.begin + options.length) * 1000
    tracks = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    spans = [e for e in events if e["ph"] == "X" and e["ts"] < end and e["ts"] + e["dur"] > begin]
    if not spans:
        print(f"{options.trace}: nothing happens in these {options.length:g} ms", file=sys.stderr)
        return 1
    lines = _lines(tracks, spans)
    figure, axes = pyplot.subplots(figsize=(13, 0.24 * len(lines) + 1.4), layout="constrained")
    for event in spans:
        _draw_span(axes, event, lines[event["pid"], event["tid"]], tracks, begin)
    _draw_arrows(axes, events, lines, begin, end)
    _label(axes, lines, tracks, options.length)
    figure.savefig(options.picture, dpi=110)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", help="a merged trace")
    parser.add_argument("picture", help="the PNG to write")
    parser.add_argument("--begin", type=float, default=0.0, metavar="MS", help="where to begin (ms)")
    parser.add_argument("--length", type=float, default=20.0, metavar="MS", help="how much to draw (ms)")
    return parser


def _lines(tracks: dict[tuple[int, int], str], spans: Sequence[Event]) -> dict[tuple[int, int], float]:
    """Return where each line lies that something is on: rank by rank from the top, with gaps between them."""
    used = sorted({(event["pid"], event["tid"]) for event in spans} & tracks.keys())
    return {track: number + 0.8 * track[0] for number, track in enumerate(used)}


def _draw_span(
    axes: Axes, event: Event, line: float, tracks: dict[tuple[int, int], str], begin: float
) -> None:
    colour = COLOURS[TRACKS.index(tracks[event["pid"], event["tid"]])]
    left = (event["ts"] - begin) / 1000
    width = event["dur"] / 1000
    axes.barh(line, width, _HEIGHT, left, color=colour, edgecolor="white", linewidth=0.3)


def _draw_arrows(
    axes: Axes,
    events: Sequence[Event],
    lines: dict[tuple[int, int], float],
    begin: float,
    end: float,
) -> None:
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    for event in events:
        if event["ph"] != "f" or not begin <= event["ts"] < end:
            continue
        start = starts[event["id"]]
        ends = [(start["pid"], start["tid"]), (event["pid"], event["tid"])]
        if start["ts"] < begin or any(track not in lines for track in ends):
            continue
        axes.annotate(
            "",
            xy=((event["ts"] - begin) / 1000, lines[ends[1]]),
            xytext=((start["ts"] - begin) / 1000, lines[ends[0]]),
            arrowprops={"arrowstyle": "->", "color": "#aa3333", "linewidth": 0.6, "alpha": 0.7},
        )


def _label(
    axes: Axes, lines: dict[tuple[int, int], float], tracks: dict[tuple[int, int], str], length: float
) -> None:
    axes.set_yticks(list(lines.values()), [tracks[track] for track in lines], fontsize=7)
    first: dict[int, float] = {}
    for (rank, _), line in lines.items():
        first.setdefault(rank, line)
    for rank, line in first.items():
        axes.text(0.003 * length, line - 0.62, f"rank {rank}", fontsize=8, weight="bold", va="center")
    axes.set_ylim(max(lines.values()) + 0.7, -1.2)
    axes.set_xlim(0, length)
    axes.set_xlabel("ms")
    used = sorted({TRACKS.index(name) for track, name in tracks.items() if track in lines})
    patches = [Patch(color=COLOURS[track], label=TRACKS[track]) for track in used]
    axes.legend(
        handles=patches,
        ncols=len(patches),
        loc="lower center",
        bbox_to_anchor=(0.5, 1),
        fontsize=7,
        frameon=False,
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

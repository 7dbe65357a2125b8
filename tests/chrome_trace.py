"""Check the rules of the Chrome trace format, for the tests of the timeline.

Source: "Trace Event Format" (a document of the Catapult project), for the phases used here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

PHASES = frozenset("BEXiMsf")


def check_events(events: Sequence[dict[str, Any]], *, complete: bool = True) -> None:
    """Raise AssertionError unless events have their fields, spans nest, and times never decrease."""
    open_spans: dict[tuple[int, int], list[str]] = {}
    slices: dict[tuple[int, int], list[float]] = {}
    last: dict[tuple[int, int], float] = {}
    flows: dict[object, list[dict[str, Any]]] = {}
    for event in events:
        _check_fields(event)
        kind, track = event["ph"], (event["pid"], event["tid"])
        if kind == "M":
            continue
        if kind in "sf":
            flows.setdefault((event["cat"], event["name"], event["id"]), []).append(event)
            continue
        assert event["ts"] >= last.get(track, 0.0), f"time decreases on {track}: {event}"
        last[track] = event["ts"]
        spans = open_spans.setdefault(track, [])
        if kind == "B":
            spans.append(event["name"])
        elif kind == "E":
            assert spans, f"nothing to end: {event}"
            assert spans.pop() == event["name"], event
        elif kind == "X" and event["dur"] > 0:
            ends = slices.setdefault(track, [])
            while ends and ends[-1] <= event["ts"] + 1e-3:  # times have three decimals
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 2e-3, f"does not nest: {event}"
            ends.append(event["ts"] + event["dur"])
    if complete:
        assert not any(open_spans.values()), open_spans
    for name, pair in flows.items():
        assert [event["ph"] for event in pair] == ["s", "f"], name
        assert pair[0]["ts"] <= pair[1]["ts"], f"an arrow points backwards: {pair}"
        assert pair[0]["pid"] != pair[1]["pid"]


def _check_fields(event: dict[str, Any]) -> None:
    assert event["ph"] in PHASES, event
    assert isinstance(event["name"], str), event
    assert event["name"], event
    assert isinstance(event["pid"], int), event
    assert isinstance(event["tid"], int), event
    if event["ph"] == "M":
        assert isinstance(event["args"], dict), event
        return
    assert isinstance(event["ts"], (int, float)), event
    assert math.isfinite(event["ts"]), event
    assert event["ts"] >= 0, event
    if event["ph"] == "X":
        assert event["dur"] >= 0, event
    if event["ph"] == "i":
        assert event["s"] in "gpt", event

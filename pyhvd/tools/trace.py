"""``python -m pyhvd trace``: merge the ranks' timeline files, or print a table of times."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pyhvd.common.command_line import CommandParser
from pyhvd.common.tables import print_table
from pyhvd.common.text import describe_ranks
from pyhvd.observe.trace.files import TraceError
from pyhvd.observe.trace.loading import RankTrace, load
from pyhvd.observe.trace.merging import merge
from pyhvd.observe.trace.summary import PARTS, Across, Total, summarise, summarise_hosts

_EXAMPLES = """\
examples:
  pyhvdrun -np 4 --timeline-filename traces/ train.py    record: one file per rank in traces/
  python -m pyhvd trace merge traces/ -o merged.json     open merged.json in https://ui.perfetto.dev
  python -m pyhvd trace summary traces/ --top 5          where the time went
  python -m pyhvd trace summary traces/second.json       one of several recordings in a directory
"""

_HEADINGS = {"slowest": "slowest rank", "negotiation": "negotiate", "wait": "wait in data path"}
"""The headings of parts that are not headed by their names."""


def main(argv: list[str]) -> int:
    """Run ``trace merge`` or ``trace summary``; return the exit code."""
    options = _parser().parse_args(argv)
    try:
        traces = load(options.path)
        _tell(traces)
        if options.action == "merge":
            _merge(traces, options.output)
        else:
            _summarise(traces, options.top)
    except TraceError as exc:
        print(f"python -m pyhvd trace: {exc}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    what = "Work with the files that a timeline has left."
    parser = CommandParser(prog="python -m pyhvd trace", description=what, examples=_EXAMPLES)
    actions = parser.add_subparsers(dest="action", required=True, metavar="merge|summary")
    merge_action = _add_action(actions, "merge", "put all ranks on one clock, in one Chrome trace")
    merge_action.add_argument("-o", "--output", required=True, metavar="FILE", help="the merged trace")
    summary = _add_action(actions, "summary", "print where the time went, by tensor")
    summary.add_argument("--top", type=_count, default=10, metavar="N", help="tensors shown (10)")
    return parser


def _add_action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", examples=_EXAMPLES
    )
    action.add_argument("path", nargs="+", help="directory with one recording, or one file of the recording")
    return action


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, not {text!r}") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, and is {value}")
    return value


def _tell(traces: list[RankTrace]) -> None:
    """Print on stderr what limits the accuracy of the files."""
    size = traces[0].size
    missing = sorted(set(range(size)) - {trace.rank for trace in traces})
    if missing:
        print(f"note: of {size} ranks, there is no file of {describe_ranks(missing)}", file=sys.stderr)
    for trace in traces:
        if trace.rank:
            clock = trace.clock
            drift = "drift unknown: not measured at the end"
            if clock.drift is not None:
                drift = f"drift {clock.drift:+.2f} +- {clock.drift_uncertainty:.2f} ppm"
            print(
                f"clock of rank {trace.rank} ({trace.host}): {clock.start.offset / 1000:+.1f} us"
                f" +- {clock.uncertainty / 1000:.1f} us against rank 0's, {drift}",
                file=sys.stderr,
            )
        if not trace.complete:
            cut = ", and its last line is cut off" if trace.cut else ""
            print(f"note: {trace.path}: the recording was not ended (killed?){cut}", file=sys.stderr)
        if trace.dropped:
            print(f"note: {trace.path}: {trace.dropped} events were dropped", file=sys.stderr)
    for trace in traces:
        for label, name, _ in trace.unfinished[:5]:
            print(f"note: rank {trace.rank}: {label} was still in {name}", file=sys.stderr)
        if len(trace.unfinished) > 5:
            print(f"note: rank {trace.rank}: ... and {len(trace.unfinished) - 5} more", file=sys.stderr)


def _merge(traces: list[RankTrace], output: str) -> None:
    if Path(output).resolve() in {trace.path.resolve() for trace in traces}:
        raise TraceError(f"{output}: is a file of the recording: give another file, or this one is lost")
    merged = merge(traces)
    try:
        Path(output).write_bytes(msgspec.json.encode(merged))
    except OSError as exc:
        raise TraceError(f"{output}: cannot be written: {exc.strerror or exc}") from exc
    ranks = describe_ranks([trace.rank for trace in traces])
    uncertainty = merged["metadata"]["pyhvd_uncertainty_us"]
    print(f"{output}: {len(merged['traceEvents'])} events of {ranks}, times +- {uncertainty:.1f} us")


def _summarise(traces: list[RankTrace], top: int) -> None:
    everything, tensors = summarise(traces)
    across = summarise_hosts(traces)
    parts = [part for part in PARTS if part != "between hosts" or across.nbytes]
    times = [f"{_HEADINGS.get(part, part)} ms" for part in parts]
    headings = ["tensor", "turns", "MiB", "total ms", *times, "last"]
    shown = tensors[:top]
    rows = [_row(total, parts) for total in shown]
    if len(tensors) > len(shown):
        rows.append([f"({len(tensors) - len(shown)} more)", *[""] * (len(headings) - 1)])
    rows.append(_row(everything, parts))
    ranks = describe_ranks([trace.rank for trace in traces])
    later = f" of generation {traces[0].generation}" if traces[0].generation else ""
    print_table(f"time by part: ms, summed over turns, mean of {ranks}{later}", headings, rows)
    print(
        "A tensor's share of its batch's time is its share of the bytes. 'all together' counts overlapping"
        " times once."
    )
    waited = sorted(everything.waited_for.items(), key=lambda item: -item[1])
    for rank, us in waited[:5]:
        print(
            f"rank {rank} was the last to submit in {everything.last[rank]} of {everything.turns} turns;"
            f" the ranks waited {us / 1000:.3f} ms for it (mean)"
        )
    if across.nbytes:
        _summarise_hosts(across, ranks)
    if everything.failed:
        print(f"{everything.failed} turns ended in an error")


def _summarise_hosts(across: Across, ranks: str) -> None:
    print(
        f"between hosts: {across.nbytes / 2**20:.2f} MiB sent and received in {across.time / 1000:.3f} ms,"
        f" {100 * across.share:.1f}% of the time (means of {ranks})"
    )
    for host, us in sorted(across.waited_for.items(), key=lambda item: -item[1])[:5]:
        print(
            f"bytes of host {host} came last in {across.last[host]} of {across.last.total()} batches;"
            f" the exchange until they came took {us / 1000:.3f} ms (mean)"
        )


def _row(total: Total, parts: Sequence[str]) -> list[str]:
    slowest = total.slowest_rank()
    times = [total.time, *(total.parts[part] for part in parts)]
    return [
        total.name,
        str(total.turns),
        f"{total.nbytes / 2**20:.2f}",
        *(f"{us / 1000:.3f}" for us in times),
        "-" if slowest is None else f"rank {slowest}",
    ]

"""Fill the table of faults in docs/many_hosts.md from what `make test-hosts-ends` has measured.

The table stands between ``<!-- faults -->`` and ``<!-- end of faults -->``.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "many_hosts.md"
RESULTS = ROOT / "benchmarks" / "results" / "faults"
BLOCK = re.compile(r"(<!-- faults -->\n).*?(<!-- end of faults -->)", re.S)
PLACEHOLDERS = {"{pid}": "4711", "{rank}": "2"}


def rows(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Return the lines of the table, with a column of times for each MPI."""
    titles = " | ".join(f"{report['mpi'].rpartition(' ')[0]}, s" for report in reports)
    yield f"| Event | Last output | Within | {titles} |"
    yield "|---" * (3 + len(reports)) + "|"
    for name, fault in reports[0]["faults"].items():
        within = "" if fault["within"] is None else f"{fault['within']:g} s"
        times = [describe(fault, report["faults"].get(name, {}).get("seconds", [])) for report in reports]
        yield f"| {name} | {words_of(fault)} | {within} | {' | '.join(times)} |"


def words_of(fault: dict[str, Any]) -> str:
    """Return what the user reads."""
    if fault["within"] is None:
        return "(the job goes on)"
    text = "<br>".join(f"`{line}`" for line in fault["reads"]) or "(all processes end)"
    for name, value in PLACEHOLDERS.items():
        text = text.replace(name, value)
    return text


def describe(fault: dict[str, Any], seconds: list[float]) -> str:
    """Return the least time, the median and the longest, as far as a fault ends a job."""
    if not seconds or fault["within"] is None:
        return ""
    return " / ".join(f"{each:.2f}" for each in (min(seconds), statistics.median(seconds), max(seconds)))


def main() -> None:
    """Fill the page."""
    reports = [json.loads((RESULTS / f"{mpi}.json").read_text()) for mpi in ("mpich", "openmpi")]
    table = "\n".join(rows(reports))
    PAGE.write_text(BLOCK.sub(lambda match: f"{match[1]}{table}\n{match[2]}", PAGE.read_text()))


if __name__ == "__main__":
    main()

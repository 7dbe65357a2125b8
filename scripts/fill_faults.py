"""Fill the tables of faults in docs from what `make` has measured.

A table is between ``<!-- faults -->`` and ``<!-- end of faults -->``.

1. `test-hosts-ends` measures what ends jobs: docs/many_hosts.md.
2. `test-elastic-times` measures how soon elastic jobs go on: docs/elastic.md.
3. `test-elastic-faults` makes random faults: ``<!-- random faults -->`` in docs/elastic.md.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results" / "faults"
PLACEHOLDERS = {"{pid}": "4711", "{rank}": "2"}
# What the random faults are, in the order of the table.
RANDOM = {
    "kill": "a rank is killed at a random moment",
    "kill two": "two ranks are killed at once",
    "kill all": "all ranks are killed at once",
    "import": "a rank is killed before `init()`",
    "wire-up": "... while it connects with the others",
    "handshake": "... in the handshake of `init()`",
    "init": "... after `init()`",
    "sync": "... while it gets the state",
    "callback": "... in a reset callback",
    "func": "... in a step",
    "exchange": "... in an allreduce",
    "copying": "... in a commit, before it copies",
    "before_seal": "... in a commit, before the seal",
    "after_seal": "... in a commit, after the seal",
    "committed": "... between two commits",
    "stop": "a rank is stopped for 1 s",
    "zygote": "a zygote is killed",
    "agent": "an agent is killed",
    "crash": "a host crashes",
    "freeze": "a host is frozen",
    "freeze briefly": "a host is frozen for 1 to 4 s",
    "cut off": "a host is cut off",
    "cut off briefly": "a host is cut off for 1 to 4 s",
    "no power": "a host loses its power",
}


def rows(reports: list[dict[str, Any]], then: str) -> Iterator[str]:
    """Return the lines of a table of single faults, with a column of times for each MPI."""
    titles = " | ".join(f"{report['mpi'].rpartition(' ')[0]}, s" for report in reports)
    yield f"| Event | {then} | Within | {titles} |"
    yield "|---" * (3 + len(reports)) + "|"
    for name, fault in reports[0]["faults"].items():
        within = "" if fault["within"] is None else f"{fault['within']:g} s"
        times = [
            "" if fault["within"] is None else describe(report["faults"].get(name, {}).get("seconds", []))
            for report in reports
        ]
        yield f"| {name} | {words_of(fault)} | {within} | {' | '.join(times)} |"


def words_of(fault: dict[str, Any]) -> str:
    """Return what the user reads, or what happens."""
    if "happens" in fault:
        return str(fault["happens"])
    if fault["within"] is None:
        return "(the job goes on)"
    text = "<br>".join(f"`{line}`" for line in fault["reads"]) or "(all processes end)"
    for name, value in PLACEHOLDERS.items():
        text = text.replace(name, value)
    return text


def random_rows(report: dict[str, Any]) -> Iterator[str]:
    """Return what random faults did, and a table with their number and times in each place."""
    places = report["places"]
    faults = sum(sum(found["faults"].values()) for found in places.values())
    jobs = sum(found["jobs"] for found in places.values())
    wrong = ", ".join(f"{name} {count}" for name, count in report["wrong"].items())
    yield f"{faults:,} random faults in {jobs} jobs; {wrong}.\n"
    yield "| Fault |" + "".join(f" {place} | s |" for place in places)
    yield "|---" * (1 + 2 * len(places)) + "|"
    for kind, name in RANDOM.items():
        cells = [
            f" {found['faults'].get(kind, '')} | {describe(found['seconds'].get(kind, []))} |"
            for found in places.values()
        ]
        if any(kind in found["faults"] for found in places.values()):
            yield f"| {name} |{''.join(cells)}"


def describe(seconds: Sequence[float]) -> str:
    """Return the least time, the median and the longest, if there are any."""
    if not seconds:
        return ""
    return " / ".join(f"{each:.2f}" for each in (min(seconds), statistics.median(seconds), max(seconds)))


def fill(page: Path, mark: str, lines: Iterable[str]) -> None:
    """Replace what is between two marks of a page."""
    block = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end of {mark} -->)", re.DOTALL)
    table = "\n".join(lines)
    page.write_text(block.sub(lambda match: f"{match[1]}{table}\n{match[2]}", page.read_text()))


def read(name: str) -> dict[str, Any]:
    """Return a report."""
    report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return report


def main() -> None:
    """Fill the pages."""
    fill(DOCS / "many_hosts.md", "faults", rows([read("mpich"), read("openmpi")], "Last output"))
    fill(DOCS / "elastic.md", "faults", rows([read("elastic-mpich")], "Then"))
    fill(DOCS / "elastic.md", "random faults", random_rows(read("elastic-random")))


if __name__ == "__main__":
    main()

"""Fill docs/torch_distributed_judge.md from what ``make judge-torch`` has found.

The counts are between ``<!-- counts -->`` and ``<!-- end of counts -->``. The tests that one backend alone
passes are between ``<!-- differences -->`` and ``<!-- end of differences -->``.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from typing import Any

from fill_faults import DOCS, ROOT, fill

PAGE = DOCS / "torch_distributed_judge.md"
RESULTS = ROOT / "benchmarks" / "results" / "judge" / "torch.json"
KINDS = ("passed", "skipped", "failed")


def counts(report: dict[str, Any]) -> Iterator[str]:
    """Return the lines of the table of counts."""
    yield f"torch {report['torch'].partition('+')[0]}, {report['mpi']}.\n"
    runs = report["runs"]
    yield "| Ranks |" + "".join(f" {backend}: {kind} |" for backend in runs for kind in KINDS)
    yield "|---" * (1 + len(KINDS) * len(runs)) + "|"
    for size in sorted({size for run in runs.values() for size in run}, key=int):
        cells = [str(len(run[size][kind])) if size in run else "" for run in runs.values() for kind in KINDS]
        yield f"| {size} | {' | '.join(cells)} |"


def differences(report: dict[str, Any]) -> Iterator[str]:
    """Return the lines of the table of tests that one backend alone passes."""
    ours, theirs = report["runs"]["pyhvd"], report["runs"]["gloo"]
    for title, passes, fails in (("gloo", theirs, ours), ("pyhvd", ours, theirs)):
        found = collections.defaultdict(list)
        for size in sorted(passes.keys() & fails.keys(), key=int):
            for name in passes[size]["passed"]:
                if name not in fails[size]["passed"]:
                    found[name].append(size)
        yield f"{title} alone passes {len(found)} of the tests{':' if found else '.'}\n"
        if not found:
            continue
        yield "| Test | Ranks | The other backend's last line |\n|---|---|---|"
        for name, sizes in found.items():
            why = fails[sizes[0]]["failed"].get(name) or fails[sizes[0]]["skipped"].get(name, "")
            last = why.strip().splitlines()[-1:]
            yield f"| `{name}` | {', '.join(sizes)} | {' '.join(last).replace('|', '/')[:200]} |"
        yield ""


def main() -> None:
    """Fill the page."""
    report: dict[str, Any] = json.loads(RESULTS.read_text())
    fill(PAGE, "counts", counts(report))
    fill(PAGE, "differences", differences(report))


if __name__ == "__main__":
    main()

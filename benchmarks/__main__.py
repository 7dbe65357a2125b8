"""``python -m benchmarks [question ...]``: the questions in turn, and a table of what is met at the end."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.question import ROOT, add_flags, sizes
from benchmarks.report import Report, load_report, markdown, print_verdicts

QUESTIONS = (
    "large",
    "resnet",
    "small",
    "latency",
    "metrics",
    "busy",
    "idle",
    "startup",
    "memory",
    "halves",
    "oversubscribed",
)


def main() -> int:
    """Run them; return 1 if one failed. A missed target is no failure."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="example: python -m benchmarks resnet latency --python .venv/bin/python"
        " --python .venv-openmpi/bin/python",
    )
    parser.add_argument(
        "questions", nargs="*", choices=[*QUESTIONS, []], metavar="question", help=", ".join(QUESTIONS)
    )
    parser.add_argument("--sizes", type=sizes, help="of all questions asked (each has its own default)")
    add_flags(parser, "each question's own", "each question's own")
    parser.add_argument(
        "--python",
        action="append",
        type=Path,
        metavar="PATH",
        help="an interpreter to run under, with its MPI; may be given again (default: this one)",
    )
    given = parser.parse_args()
    folder = (given.results or ROOT / "benchmarks" / "results").absolute()
    names = given.questions or QUESTIONS
    flags = ["--seconds", str(given.seconds), "--results", str(folder), *(["--tiny"] if given.tiny else [])]
    for flag, value in (("--sizes", given.sizes), ("--ranks", given.ranks)):
        flags += [flag, ",".join(map(str, value))] if value else []
    flags += ["--repeats", str(given.repeats)] if given.repeats else []
    begun, failed = time.time(), []
    for python in given.python or [Path(sys.executable)]:
        for name in names:
            command = [str(python.absolute()), "-m", f"benchmarks.questions.{name}", *flags]
            if subprocess.run(command, cwd=ROOT, check=False).returncode:
                failed.append(f"{name} under {python}")
    _sum_up(_new_reports(folder, names, begun), folder)
    for each in failed:
        print(f"failed: {each}", file=sys.stderr)
    return int(bool(failed))


def _new_reports(folder: Path, names: list[str] | tuple[str, ...], begun: float) -> list[Report]:
    paths = [path for path in sorted(folder.glob("*.json")) if path.stat().st_mtime >= begun - 1]
    reports = [load_report(path) for path in paths]
    return sorted(reports, key=lambda report: (list(names).index(report.question), report.mpi))


def _sum_up(reports: list[Report], folder: Path) -> None:
    print()
    print_verdicts(reports)
    if reports:
        (folder / "summary.md").write_text(markdown(reports))
        print(f"figures, pictures and summary.md are in {folder}")


if __name__ == "__main__":
    sys.exit(main())

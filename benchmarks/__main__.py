"""``python -m benchmarks [question ...]``: answer the questions in turn, then print which targets are met."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import elastic, hosts, launch, simulation
from benchmarks.question import ROOT, add_flags, sizes
from benchmarks.report import Report, load_report, markdown, print_verdicts

QUESTIONS = (
    "large",
    "resnet",
    "small",
    "latency",
    "verbs",
    "calls",
    "metrics",
    "busy",
    "idle",
    "startup",
    "memory",
    "halves",
    "oversubscribed",
)
# Questions that run only by name: scale simulates, for minutes; spark and ray need pyspark and Ray, and start
# clusters; torch, torchdist and torch_memory need torch, and results takes it if it is there; frameworks
# measures JAX and TensorFlow where they are.
ON_DEMAND = ("scale", "spark", "ray", "torch", "torchdist", "torch_memory", "results", "frameworks")
# They have flags of their own, and start their jobs themselves.
ON_HOSTS = {
    "hosts": hosts.main,
    "launch": launch.main,
    "elastic": elastic.main,
    "simulation": simulation.main,
}


def main() -> int:
    """Answer the questions; return 1 if one fails. A missed target is no failure."""
    if sys.argv[1:] and sys.argv[1] in ON_HOSTS:
        return ON_HOSTS[sys.argv[1]](sys.argv[2:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="example: python -m benchmarks resnet latency --python .venv/bin/python"
        " --python .venv-openmpi/bin/python",
    )
    parser.add_argument(
        "questions",
        nargs="*",
        choices=[*QUESTIONS, *ON_DEMAND, []],
        metavar="question",
        help=f"{', '.join(QUESTIONS)} (default: these); {', '.join(ON_DEMAND)};"
        f" {', '.join(ON_HOSTS)}, which have other flags (--help)",
    )
    parser.add_argument("--sizes", type=sizes, help="for all questions (each has its own default)")
    add_flags(parser, *["each question's own"] * 3)
    parser.add_argument(
        "--python",
        action="append",
        type=Path,
        metavar="PATH",
        help="interpreter to run under, with its MPI; repeatable (default: this one)",
    )
    given = parser.parse_args()
    folder = (given.results or ROOT / "benchmarks" / "results").absolute()
    names = given.questions or QUESTIONS
    flags = ["--results", str(folder), *(["--tiny"] if given.tiny else [])]
    for flag, value in (("--sizes", given.sizes), ("--ranks", given.ranks)):
        flags += [flag, ",".join(map(str, value))] if value else []
    flags += ["--repeats", str(given.repeats)] if given.repeats else []
    flags += ["--seconds", str(given.seconds)] if given.seconds else []
    begun, failed = time.time(), []
    for python in given.python or [Path(sys.executable)]:
        for name in names:
            command = [str(python.absolute()), "-m", f"benchmarks.questions.{name}", *flags]
            if subprocess.run(command, cwd=ROOT, check=False).returncode:
                failed.append(f"{name} under {python}")
    _sum_up(folder, begun)
    for each in failed:
        print(f"failed: {each}", file=sys.stderr)
    return int(bool(failed))


def _sum_up(folder: Path, begun: float) -> None:
    """Print the verdicts of this run; write those of all reports in the folder to summary.md."""
    print()
    paths = sorted(folder.glob("*.json"))
    new = [path for path in paths if path.stat().st_mtime >= begun - 1]
    print_verdicts(_reports(new))
    if new:
        (folder / "summary.md").write_text(markdown(_reports(paths)))
        print(f"figures, pictures and summary.md are in {folder}")


def _reports(paths: list[Path]) -> list[Report]:
    order = (*QUESTIONS, *ON_DEMAND, *ON_HOSTS)
    reports = [load_report(path) for path in paths]
    return sorted(reports, key=lambda report: (order.index(report.question), report.mpi))


if __name__ == "__main__":
    sys.exit(main())

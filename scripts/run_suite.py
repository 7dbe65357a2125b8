"""Run parts of the test suite, each in its own venv, and close with one line that sums them up.

Without names the parts of `make test` run, thinned out; --full runs all combinations of them. --rest runs
what a thinned run has left out, but not that of a second MPI, and all other parts thinned out.

A failing part does not stop the others. The exit status is 1 if any part failed or ran no test at all. What
failed is shown again at the end: the message of each test, and the stacks of a worker that crashed.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
SHOWN_LINES = 60  # of each failure, at the end
LEFT_S = 5.0


@dataclass(frozen=True)
class Part:
    """What one pytest run covers; an optional part is skipped where its venv could not be made.

    ``other`` is the venv of another MPI, whose mpiexec must be told apart from the right one. ``arguments``
    are for pytest, ``workers`` is the number of tests at a time. ``stamp`` is a file in the venv that tells
    what was installed. A ``thinned`` part never runs all combinations, because another part or ``make
    test-stress`` does. Without ``tool``, a program, the part is skipped.
    """

    venv: str
    paths: tuple[str, ...]
    optional: str = ""
    other: str = ""
    arguments: tuple[str, ...] = ()
    workers: int = 1
    stamp: str = ""
    thinned: bool = False
    tool: str = ""


ABOUT_THE_TREE = ("tests/test_code_limits.py", "tests/test_docs_links.py", "tests/test_thinning.py")
SPARK_MAIN_PATH = (
    "tests/spark/test_run.py",
    "tests/spark/test_data.py",
    "tests/spark/test_estimator.py",
)
TORCH_UNDER_MPIEXEC = (
    "tests/torch/test_under_mpiexec.py",
    "tests/torch/test_as_horovod.py::test_a_program_for_horovod_runs_unchanged",
)
NO_TORCH = "no torch without CUDA for this machine"
# Tests of a file share mpiexec jobs.
BY_FILE = ("--dist", "loadfile")
# Tests wait for processes more than they compute: more workers than the two cores that CI has.
PARTS = {
    "unit": Part(".venv", ("tests/unit", "tests/devices", "tests/faults", *ABOUT_THE_TREE), workers=4),
    "ranks": Part(".venv", ("tests/ranks",), workers=3),
    "mpi-mpich": Part(
        ".venv", ("tests/mpi", "tests/gpu", "tests/test_walk.py"), other=".venv-openmpi", workers=3
    ),
    "mpi-openmpi": Part(
        ".venv-openmpi",
        ("tests/mpi", "tests/unit/run/launchers/test_many_hosts.py"),
        other=".venv",
        arguments=("--second-mpi",),
        workers=3,
    ),
    # Each worker has simulated hosts of its own.
    "hosts-mpich": Part(".venv", ("tests/hosts",), arguments=BY_FILE, workers=3, thinned=True),
    "hosts-openmpi": Part(
        ".venv-openmpi", ("tests/hosts",), arguments=(*BY_FILE, "-m", "not any_mpi"), workers=2, thinned=True
    ),
    "slurm-mpich": Part(".venv", ("tests/slurm",), tool="/usr/sbin/slurmctld"),
    "slurm-openmpi": Part(".venv-openmpi", ("tests/slurm",), tool="/usr/sbin/slurmctld"),
    "elastic": Part(".venv", ("tests/elastic",), workers=3),
    "gpu-build": Part(".venv-nvrtc", ("tests/devices/test_gpu_build.py",)),
    "spark": Part(".venv-spark", ("tests/spark",), arguments=BY_FILE, workers=2),
    "spark-torch": Part(
        ".venv-spark", ("tests/spark/test_estimator_torch.py", "tests/spark/test_torch_distributed.py")
    ),
    "torch": Part(".venv-spark", ("tests/torch",), NO_TORCH, arguments=BY_FILE, workers=3, stamp=".torch"),
    "torch-openmpi": Part(
        ".venv-spark-openmpi",
        TORCH_UNDER_MPIEXEC,
        NO_TORCH,
        arguments=(*BY_FILE, "-m", "not any_mpi"),
        workers=3,
        stamp=".torch",
    ),
    "torchdist": Part(
        ".venv-spark", ("tests/torch/distributed",), NO_TORCH, arguments=BY_FILE, workers=2, stamp=".torch"
    ),
    "frameworks": Part(".venv-frameworks", ("tests/frameworks", "tests/spark/test_estimator_keras.py")),
    "torch-oldest": Part(".venv-torch-oldest", ("tests/torch",), arguments=BY_FILE, workers=3),
    "ray": Part(".venv-ray", ("tests/ray",)),
    "spark35": Part(".venv-spark35", SPARK_MAIN_PATH, arguments=(*BY_FILE, "-m", "not any_spark"), workers=2),
    "spark-openmpi": Part(".venv-spark-openmpi", ("tests/spark/test_mpiexec.py",)),
    "py313": Part(".venv-py313", ("tests/unit",), "no Python 3.13 on this machine", workers=6, thinned=True),
    "py314t": Part(
        ".venv-py314t", ("tests/unit",), "no free-threaded Python 3.14 on this machine", workers=3
    ),
}

# What covers every behaviour once for each carrier that differs.
PLAIN = ("unit", "ranks", "mpi-mpich", "mpi-openmpi")
# spark has the test files of spark-torch, and torch those of torchdist.
# Their venvs take gigabytes, or 290 MB; the parts of Slurm need Debian's packages.
NOT_IN_ALL = (
    *("spark-torch", "torchdist", "frameworks", "torch-oldest", "ray"),
    *("slurm-mpich", "slurm-openmpi"),
)
ALL = tuple(name for name in PARTS if name not in NOT_IN_ALL)
# make test has run every value under Open MPI; the other combinations are for make test-all.
REST = tuple(name for name in ALL if name != "mpi-openmpi")


@dataclass
class Outcome:
    """The counts of one part, why it is bad where it is, and the texts of what failed.

    ``busy`` is the share of the machine's cores that had work: a part with a small one may get more workers.
    ``longest`` names the file whose tests took longest, together: where workers take whole files, the part
    takes as long at least.
    """

    name: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    busy: float = math.nan
    longest: str = ""
    note: str = ""
    bad: bool = False
    texts: list[str] = field(default_factory=list)


def cpu_times() -> tuple[float, float]:
    """Return for how long this machine's cores have been busy, and have run at all; in ticks, on Linux."""
    try:
        times = [float(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return math.nan, math.nan
    return sum(times) - times[3] - times[4], sum(times)  # less idle and waiting for a disk


def keep_crashes(stream: IO[str], outcome: Outcome) -> None:
    """Pass on pytest's stderr, and keep the stacks of workers that crash, which no report has."""
    lines: list[str] = []
    for line in stream:
        sys.stderr.write(line)
        if lines or line.startswith("Fatal Python error"):
            lines.append(line)
    if lines:
        outcome.texts.append("".join(lines[:SHOWN_LINES]))


def run_part(name: str, extra: list[str], limit: float) -> Outcome:
    """Run one part, its output streaming through, and read its counts from pytest's own report."""
    part, outcome = PARTS[name], Outcome(name)
    python = ROOT / part.venv / "bin" / "python"
    if not python.exists() or not (python.parent.parent / part.stamp).exists():
        outcome.note = f"not run: {part.optional or part.venv + ' is missing'}"
        outcome.bad = not part.optional
        return outcome
    if part.tool and not Path(part.tool).exists():
        outcome.note = f"not run: {part.tool} is not installed"
        return outcome
    print(f"\n=== {name}: {' '.join(part.paths)} in {part.venv}", flush=True)
    start, (busy, ran) = time.monotonic(), cpu_times()
    with tempfile.TemporaryDirectory(prefix="pyhvd-suite-") as folder:
        report = Path(folder) / "report.xml"
        # As if the venv were activated: tests start mpiexec, pyhvdrun and python by name too.
        env = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
        # The tests start some thousand processes: each would compile pyhvd anew.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        if part.other:
            env["PYHVD_OTHER_MPIEXEC"] = str(ROOT / part.other / "bin" / "mpiexec")
        command = [str(python), "-m", "pytest", "-q", f"--junitxml={report}"]
        command += ["-n", str(part.workers)] if part.workers > 1 else []
        command += [*part.arguments, *extra, *part.paths]
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        assert process.stderr is not None
        reader = threading.Thread(target=keep_crashes, args=(process.stderr, outcome), daemon=True)
        reader.start()
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            outcome.note = f"killed after {limit:g} s"
            process.send_signal(signal.SIGABRT)  # pytest's faulthandler prints all stacks
            process.wait()
        reader.join(LEFT_S)  # a process that a test has left may still have it open
        count(report, outcome)
    outcome.seconds = time.monotonic() - start
    now = cpu_times()
    outcome.busy = (now[0] - busy) / (now[1] - ran)
    if not outcome.passed + outcome.failed:
        outcome.note = outcome.note or "ran no test"
    outcome.bad = process.returncode != 0 or bool(outcome.note)
    return outcome


def count(report: Path, outcome: Outcome) -> None:
    """Add up the report's test suites; a missing report means that pytest itself died: one failure."""
    if not report.exists():
        outcome.failed += 1
        outcome.note = outcome.note or "pytest died without a report"
        return
    seconds: dict[str, float] = defaultdict(float)
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped = int(suite.get("skipped", 0))
        outcome.failed += failed
        outcome.skipped += skipped
        outcome.passed += int(suite.get("tests", 0)) - failed - skipped
        for test in suite.iter("testcase"):
            seconds[file_of(test)] += float(test.get("time", 0))
            for each in (*test.iter("failure"), *test.iter("error")):
                lines = (each.text or each.get("message") or "").splitlines()
                outcome.texts.append(
                    "\n".join([f"{test.get('classname')}::{test.get('name')}", *lines[-SHOWN_LINES:]])
                )
    if seconds:
        length, file = max((length, file) for file, length in seconds.items())
        outcome.longest = f"{file} {length:.0f} s"


def file_of(test: ElementTree.Element) -> str:
    """Return the name of a test's file: its class name has the packages in front, and a class may follow."""
    names = test.get("classname", "").split(".")
    return next((name for name in names if name.startswith("test_")), "")


def scope_of(name: str, *, full: bool, rest: bool) -> list[str]:
    """Return pytest's option for the combinations of parameters that a part runs."""
    if rest:
        return ["--rest"] if name in PLAIN else []
    return ["--full"] if full and not PARTS[name].thinned else []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], metavar="PART", help=f"default: {', '.join(PLAIN)}"
    )
    parser.add_argument("--all", action="store_true", help="run all parts")
    parser.add_argument("--full", action="store_true", help="run every combination and every slow test")
    parser.add_argument(
        "--rest",
        action="store_true",
        help=f"run what --full adds to {', '.join(name for name in PLAIN if name in REST)}, and the other"
        " parts thinned out",
    )
    parser.add_argument("--limit", type=float, default=1800, help="seconds that one part may take")
    parser.add_argument("--pytest-args", default="", help="further arguments for pytest, one string")
    options = parser.parse_args()
    chosen = options.parts or (REST if options.rest else ALL if options.all else PLAIN)
    extra = options.pytest_args.split()
    outcomes = []
    for name in chosen:
        scope = scope_of(name, full=options.full, rest=options.rest)
        outcomes.append(run_part(name, [*scope, *extra], options.limit))
    for one in outcomes:
        for text in one.texts:
            print(f"\n=== failed in {one.name}: {text.rstrip()}")
    print(f"\n{'part':<13} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8} {'busy':>5}  longest")
    for one in outcomes:
        line = f"{one.name:<13} {one.passed:>7} {one.failed:>7} {one.skipped:>8} {one.seconds:>8.1f}"
        busy = "" if math.isnan(one.busy) else f"{one.busy:.0%}"
        print(f"{line} {busy:>5}  {one.note or one.longest}".rstrip())
    sums = [sum(getattr(one, kind) for one in outcomes) for kind in ("passed", "failed", "skipped")]
    print("\n{} passed, {} failed, {} skipped".format(*sums))
    return int(any(one.bad for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())

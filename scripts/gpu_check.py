"""Run the stages of the check of the GPU path, each within its limit; ``scripts/gpu_check.sh`` starts this.

Runs under any python3 with pip, torch or CuPy, and makes an environment in which the stages run. A stage that
fails does not stop the next. ``gpu.json`` has one record per stage, and is written anew after each;
``log.txt`` has their output.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_OUTPUT = 2 * 1024 * 1024
"""Bytes of a stage's output that the log keeps, from its end."""


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes
    ----------
    seconds : int
        Its limit.
    tests : sequence of str
        What pytest runs on a GPU.
    on_fakes : sequence of str
        What it runs instead on the fakes.
    module : sequence of str
        A module and its arguments, which run on a GPU instead of tests; ``{out}`` is the folder of results.
    """

    name: str
    seconds: int
    tests: Sequence[str] = ()
    on_fakes: Sequence[str] = ()
    module: Sequence[str] = ()


STAGES = (
    Stage("facts", 10, module=("benchmarks.gpu", "--facts", "--output", "{out}/facts.json")),
    Stage("kernels", 40, ("tests/gpu/test_kernels.py",), ("tests/devices/test_packing.py",)),
    Stage("arrays", 100, ("tests/gpu/test_collectives.py",), ("tests/unit/devices",)),
    Stage("nccl", 80, (), ("tests/devices/test_nccl.py", "tests/ranks/test_devices_by_nccl.py")),
    Stage("failures", 50, (), ("tests/devices/test_nccl_failures.py", "tests/ranks/test_device_failures.py")),
    Stage("figures", 50, module=("benchmarks.gpu", "--output", "{out}/figures.json")),
)
BUILD_SECONDS = 120


@dataclass
class Record:
    """How a stage went.

    Attributes
    ----------
    outcome : str
        ``"passed"``, ``"failed"``, ``"timed out"`` or, if all its tests were skipped, ``"not run"``.
    tests : dict of str to int
        Numbers of passed, failed and skipped tests.
    """

    stage: str
    limit_s: int
    outcome: str
    wall_s: float
    tests: dict[str, int] = field(default_factory=dict)


class Check:
    """One check: its records, and the folder of its results."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.records = out, list[Record]()
        (out / "log.txt").write_bytes(b"")

    def run(
        self, name: str, seconds: int, commands: Sequence[Sequence[str]], report: Path | None = None
    ) -> bool:
        """Run a stage's commands, until one fails; return whether the stage has passed."""
        begun, outcome = time.monotonic(), "passed"
        for command in commands:
            left = begun + seconds - time.monotonic()
            code = self._log(name, command, left)
            if code != 0:
                outcome = "timed out" if code is None else "failed"
                break
        tests = counts(report) if report is not None and report.exists() else {}
        if outcome == "passed" and tests and not tests["passed"]:
            outcome = "not run"
        self.records.append(Record(name, seconds, outcome, round(time.monotonic() - begun, 1), tests))
        text = json.dumps([asdict(record) for record in self.records], indent=1)
        (self.out / "gpu.json").write_text(text + "\n")
        print(f"==> {name}: {outcome} {tests or ''}", flush=True)
        return outcome == "passed"

    def _log(self, name: str, command: Sequence[str], seconds: float) -> int | None:
        """Run a command, and log its output; return its status, or None if it was killed at its limit."""
        started = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            output, code = started.communicate(timeout=max(seconds, 0.1))[0], started.returncode
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            output, code = started.communicate()[0], None
        with (self.out / "log.txt").open("ab") as log:
            log.write(f"==> {name}: {' '.join(command)}\n".encode() + output[-MOST_OUTPUT:])
        return code


def counts(report: Path) -> dict[str, int]:
    """Return the numbers of passed, failed and skipped tests of a report of pytest."""
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
    failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    return {"passed": tests - failed - skipped, "failed": failed, "skipped": skipped}


def build_commands(folder: Path) -> list[list[str]]:
    """Return the commands that make an environment of this tree, wheels/ and python3's own packages."""
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    pip += ["--no-index", "--no-deps", "--no-build-isolation"]
    packages = "\n".join({sysconfig.get_path(kind) for kind in ("purelib", "platlib")})
    file = "sysconfig.get_path('purelib') + '/host.pth'"
    link = f"import sysconfig; open({file}, 'w').write({packages!r})"
    return [
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        [str(folder / "bin" / "python"), "-c", link],
        [*pip, *map(str, sorted((ROOT / "wheels").glob("*.whl")))],
        [*pip, "--editable", "."],
    ]


def main(argv: list[str] | None = None) -> int:
    """Run the stages; return 1 if one has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="example:\n  python3 scripts/gpu_check.py --fakes --out /tmp/check",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check", metavar="FOLDER")
    parser.add_argument("--fakes", action="store_true", help="run on the tests' fakes, in this environment")
    options = parser.parse_args(argv)
    out = options.out.resolve()
    check, python = Check(out), sys.executable
    if not options.fakes:
        folder = ROOT / "build" / "gpu-check-venv"
        shutil.rmtree(folder, ignore_errors=True)
        if not check.run("build", BUILD_SECONDS, build_commands(folder)):
            return 1
        python = str(folder / "bin" / "python")
    for stage in STAGES:
        tests = stage.on_fakes if options.fakes else stage.tests
        report = out / f"{stage.name}.xml"
        report.unlink(missing_ok=True)
        if tests:
            options_of_pytest = ["-p", "no:cacheprovider", f"--junitxml={report}"]
            command = [python, "-m", "pytest", "-q", *options_of_pytest, *tests]
            check.run(stage.name, stage.seconds, [command], report)
        elif stage.module and not options.fakes:
            module = [part.format(out=out) for part in stage.module]
            check.run(stage.name, stage.seconds, [[python, "-m", *module]])
    bad = {"failed", "timed out"} if options.fakes else {"failed", "timed out", "not run"}
    return int(any(record.outcome in bad for record in check.records))


if __name__ == "__main__":
    sys.exit(main())

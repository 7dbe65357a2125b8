"""Run torch's own suite of tests for backends of torch.distributed on pyhvd and on gloo.

``make judge-torch`` runs all tests on 2, 3 and 4 ranks, and fills docs/torch_distributed_judge.md. The
suite is ``torch.testing._internal.distributed.distributed_test``. Its tests run in order in one world: the
ranks of one job. After a test that fails, hangs or crashes, another world goes on with the next test. Tests
of timeouts leave their group in disorder, so they come last, each in a world of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mpi.launch import ROOT, MpiJob, job_directory, mpi_version, mpiexec_command

RESULTS = ROOT / "benchmarks" / "results" / "judge" / "torch.json"
BACKENDS = ("pyhvd", "gloo")
SIZES = (2, 3, 4)
_ALONE = re.compile("barrier_timeout|monitored_barrier")
# Reads the names where torch is: the suite wants these variables when it is imported.
_NAMES = """
import os, json
os.environ.update(BACKEND="gloo", WORLD_SIZE="2", TEMP_DIR="/nowhere")
import torch
from torch.testing._internal.distributed.distributed_test import DistributedTest
names = [name for name in dir(DistributedTest._DistTestBase) if name.startswith("test")]
print(json.dumps([torch.__version__, names]))
"""
_STACKS = 4000
_FAILED_SECONDS = 5.0
_START_SECONDS = 120.0


@dataclass
class Verdict:
    """The outcomes of one backend on one number of ranks, by the tests' names."""

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    ends: list[str] = field(
        default_factory=list
    )  # of worlds that did not end by themselves after passed tests

    def add(self, name: str, outcomes: Sequence[tuple[str, str]], text: str) -> None:
        """Add what the ranks of a test have said; ``text`` is the world's if one has said nothing."""
        kinds = {kind for kind, _ in outcomes}
        if "failed" in kinds:
            self.failed[name] = "\n".join(dict.fromkeys(text for kind, text in outcomes if kind == "failed"))
        elif text:
            self.failed[name] = text
        elif "passed" in kinds:
            self.passed.append(name)
        else:
            self.skipped[name] = outcomes[0][1]

    def summary(self) -> dict[str, Any]:
        """Return what the report has: of a failure the first line if it hung or crashed, else the last."""
        failed = {name: text.strip().splitlines() for name, text in self.failed.items()}
        return vars(self) | {
            "failed": {
                name: lines[0] if lines[0].startswith(("hung", "crashed")) else lines[-1]
                for name, lines in failed.items()
            },
            "ends": [text.splitlines()[0] for text in self.ends],
        }


class World:
    """The ranks of one job, which run some tests up to one that has an outcome of ``last``."""

    def __init__(
        self, folder: Path, backend: str, size: int, names: Sequence[str], last: Sequence[str]
    ) -> None:
        for name in ("barrier", "test_dir", "init_dir", "results"):
            (folder / name).mkdir()
        (folder / "names.json").write_text(json.dumps([last, names]))
        self._results, self._size, self._names, self._last = folder / "results", size, names, last
        command = mpiexec_command(
            size, sys.executable, "-m", "tests.torch.distributed.judge_ranks", str(folder), backend
        )
        self._job = MpiJob(
            command, folder, {"KINETO_LOG_LEVEL": "99", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}, ROOT
        )

    def run(self, limit: float, verdict: Verdict) -> int:
        """Wait for the tests, each for ``limit`` s; return how many have an outcome."""
        try:
            if why := self._wait("start", _START_SECONDS):
                raise RuntimeError(f"the ranks do not start: {why}")
            for index, name in enumerate(self._names):
                why = self._wait(str(index), limit)
                outcomes = self._outcomes(str(index))
                verdict.add(name, outcomes, why)
                if name in verdict.failed:
                    print(f"-- {name}\n{verdict.failed[name]}", flush=True)
                if why or any(kind in self._last for kind, _ in outcomes):
                    return index + 1
            if not self._job.wait(time.time() + limit):
                self._job.dump_stacks()
                verdict.ends.append("hung:\n" + self._tail())
            elif self._job.process.returncode:
                verdict.ends.append(f"ended with {self._job.process.returncode}:\n" + self._tail())
            return len(self._names)
        finally:
            self._job.kill()

    def _wait(self, what: str, limit: float) -> str:
        """Wait for all ranks' outcome of a test; return why there is none, or nothing."""
        began = failed = time.time()
        while len(found := self._outcomes(what)) < self._size:
            if self._job.process.poll() is not None and len(self._outcomes(what)) < self._size:
                return f"crashed: the job ended with {self._job.process.returncode}\n{self._tail()}"
            now = time.time()
            if not any(kind == "failed" for kind, _ in found):
                failed = now
            if now - began > limit or now - failed > _FAILED_SECONDS:
                self._job.dump_stacks()
                return f"hung: {len(found)} of {self._size} ranks have ended\n{self._tail()}"
            time.sleep(0.02)
        return ""

    def _outcomes(self, what: str) -> list[tuple[str, str]]:
        files = sorted(self._results.glob(f"{what}.*[0-9]"))
        return [tuple(json.loads(path.read_text())) for path in files]

    def _tail(self) -> str:
        out, err = self._job.output()
        return f"{out[-_STACKS // 4 :]}{err[-_STACKS:]}"


def judge(backend: str, size: int, names: Sequence[str], limit: float) -> Verdict:
    """Run tests with a backend on some ranks; ``limit`` is the longest time of one test in s."""
    verdict = Verdict()
    together = [name for name in names if not _ALONE.search(name)]
    alone = [name for name in names if _ALONE.search(name)]
    for left, last in ((together, ["failed"]), (alone, ["failed", "passed"])):
        while left:
            with job_directory() as folder:
                ended = World(folder, backend, size, left, last).run(limit, verdict)
            del left[:ended]
    return verdict


def read_names(pattern: str) -> tuple[str, list[str]]:
    """Return torch's version and the names of its tests that match."""
    run = subprocess.run([sys.executable, "-c", _NAMES], check=True, capture_output=True, text=True)
    version, names = json.loads(run.stdout.splitlines()[-1])
    return version, [name for name in names if re.search(pattern, name)]


def main() -> None:
    """Judge the backends, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", nargs="*", default=BACKENDS)
    parser.add_argument("--size", nargs="*", type=int, default=SIZES)
    parser.add_argument("--only", default="", metavar="REGEX", help="tests whose names match")
    parser.add_argument("--limit", type=float, default=60.0, metavar="S", help="longest time of a test")
    parser.add_argument("--json", type=Path, help=f"where the result goes; {RESULTS.name} if all tests run")
    options = parser.parse_args()
    version, names = read_names(options.only)
    path = options.json or (None if options.only else RESULTS)
    report: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {"runs": {}}
    report |= {"torch": version, "mpi": mpi_version()}
    for size in options.size:
        for backend in options.backend:
            began = time.time()
            verdict = judge(backend, size, names, options.limit)
            counts = (
                f"{len(verdict.passed)} passed, {len(verdict.skipped)} skipped, {len(verdict.failed)} failed"
            )
            print(f"{backend} on {size} ranks: {counts}, {time.time() - began:.0f} s", flush=True)
            for text in verdict.ends:
                print(f"-- a world {text}", flush=True)
            report["runs"].setdefault(backend, {})[str(size)] = verdict.summary()
            if path:
                path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

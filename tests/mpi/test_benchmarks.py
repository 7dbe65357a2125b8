"""Every benchmark runs at a tiny size, and all its results are correct. No figure is judged here."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.tensors import Tensors, WrongResultError, resnet50
from tests.mpi.launch import ROOT, mpiexec_path

pytestmark = pytest.mark.any_mpi

needs_mpi = pytest.mark.skipif(mpiexec_path() is None, reason="no mpiexec beside this interpreter or on PATH")

LIMIT = 100.0
# The contenders of every case that need only the suite's packages; the number of cases; the units.
QUESTIONS: dict[str, tuple[set[str], int, str]] = {
    "large": ({"pyhvd, in place", "MPI Allreduce", "MPI, pack + Allreduce + unpack", "memory floor"}, 2, "s"),
    "resnet": (
        {"pyhvd, in place", "pyhvd, one group", "MPI, 2 MiB chunks", "MPI, one flat Allreduce"},
        1,
        "s",
    ),
    "small": ({"MPI, an Allreduce per tensor", "MPI, pack + Allreduce + unpack"}, 2, "s"),
    "latency": ({"pyhvd, in place", "MPI Allreduce"}, 1, "s"),
    "metrics": ({"pyhvd, with times", "pyhvd, without"}, 1, "s"),
    "busy": ({"pyhvd, done() of all handles", "pyhvd, seen in the arrays", "MPI Iallreduce, seen"}, 1, "s"),
    "idle": ({"pyhvd", "raw mpi4py"}, 1, "%"),
    "startup": ({"pyhvd", "raw mpi4py"}, 4, "s"),
    "memory": ({"pyhvd", "raw mpi4py"}, 3, "MiB"),
    "halves": ({"pyhvd, float32", "pyhvd, float16", "pyhvd, bfloat16", "MPI Allreduce, float32"}, 1, "s"),
    "calls": (set(), 3, "s"),
    "results": ({"pyhvd, in place", "pyhvd, out of place", "pyhvd, out of place, one group"}, 2, "s"),
    "scale": (set(), 12, "s messages KiB MiB one-way delays characters"),
    "oversubscribed": ({"pyhvd, in place", "MPI, pack + Allreduce + unpack"}, 1, "s"),
}


def run(*arguments: object) -> str:
    """Run this Python as from a shell; return its output. At the time limit it and its jobs are ended."""
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=LIMIT)
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
    assert process.returncode == 0, printed
    return printed


def the_report(folder: Path, question: str) -> dict[str, Any]:
    """Return the JSON file of a benchmark."""
    (path,) = folder.glob(f"{question}-*.json")
    report: dict[str, Any] = json.loads(path.read_text())
    assert path.name == f"{question}-{report['mpi']}.json"
    if importlib.util.find_spec("matplotlib") is not None:
        assert path.with_suffix(".png").stat().st_size > 1000
    return report


@pytest.mark.slowest
@needs_mpi
@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.parametrize("question", QUESTIONS)
def test_question(question: str, tmp_path: Path) -> None:
    contenders, cases, units = QUESTIONS[question]
    printed = run("-m", f"benchmarks.questions.{question}", "--tiny", "--results", tmp_path)
    report = the_report(tmp_path, question)
    assert report["question"] == question
    assert report["title"] in printed
    (job,) = report["runs"]
    assert job["ranks"] == {"oversubscribed": 4, "scale": 1}.get(question, 2)
    assert job["machine"]["mpi"] in printed
    assert len(job["outcomes"]) == cases
    for outcome in job["outcomes"]:
        assert outcome["unit"] in units
        assert contenders <= {each["name"] for each in outcome["figures"]}
        for each in outcome["figures"]:
            assert len(each["samples"]) == 2
            assert 0 <= each["min"] <= each["median"] <= each["p99"] <= each["max"]


@needs_mpi
@pytest.mark.timeout(LIMIT + 20)
@pytest.mark.slow
def test_all_in_turn(tmp_path: Path) -> None:
    """Each benchmark and MPI has a file, and the table of the whole has the targets that apply."""
    printed = run("-m", "benchmarks", "latency", "small", "--tiny", "--seconds", 1, "--results", tmp_path)
    (verdict,) = the_report(tmp_path, "latency")["verdicts"]
    assert verdict["value"] > 0
    # The table of small has no targets here: they hold for 1000 tensors.
    assert the_report(tmp_path, "small")["verdicts"] == []
    summary = (tmp_path / "summary.md").read_text().splitlines()
    assert len(summary) == 3
    assert summary[2].startswith("| latency | ")
    assert str(tmp_path) in printed.replace("\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_help_has_the_same_flags_and_an_example(question: str) -> None:
    printed = run("-m", f"benchmarks.questions.{question}", "--help")
    for flag in ("--sizes", "--ranks", "--repeats", "--seconds", "--json", "--plot", "--results", "--tiny"):
        assert flag in printed
    assert "example: python -m benchmarks.questions." in printed


def test_gradients_of_resnet50() -> None:
    counts = resnet50()
    assert len(counts) == 161
    assert sum(counts) == 25_557_032
    assert counts[:2] == [1000, 2048 * 1000]
    assert counts[-3:] == [64, 64, 64 * 3 * 7 * 7]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_wrong_sums_are_found(dtype: str) -> None:
    tensors = Tensors([5, 200_000], rank=1, size=3, dtype=dtype)
    tensors.fill()
    with pytest.raises(WrongResultError, match="tensor 0 of 2"):
        tensors.check()
    for array in tensors.arrays:
        array *= 3  # rank 1 holds twice the pattern; the ranks' sum is six times it
    tensors.check()
    tensors.check(thorough=False)
    tensors.arrays[1][123_456] += 1
    tensors.check(thorough=False)
    with pytest.raises(WrongResultError, match="tensor 1 of 2"):
        tensors.check()


def test_pieces_are_views_that_cover_everything_once() -> None:
    tensors = Tensors([3, 10, 1, 8], rank=0, size=1)
    buckets = tensors.pieces(16)
    assert [sum(piece.size for piece in bucket) for bucket in buckets] == [4, 4, 4, 4, 4, 2]
    for bucket in buckets:
        for piece in bucket:
            piece += 1
    assert all(np.all(array == 2) for array in tensors.arrays)

"""Tests that run on N ranks under the mpiexec of the current interpreter.

    @on_ranks(1, 2, 4)
    def test_sum():
        hvd.init()
        assert hvd.allreduce(np.ones(3), op=hvd.Sum)[0] == hvd.size()

pytest runs the decorated function once per rank count; each run is a job of its own, in which every rank
calls the function. This module is the pytest side: it starts the job, collects what the ranks left and
reports it.
"""

from __future__ import annotations

import inspect
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tests.mpi.launch import ROOT, MpiJob, MpiRun, job_directory, mpiexec_command, mpiexec_path, run_mpi

__all__ = ["JobReport", "MpiRun", "mpiexec_command", "on_ranks", "run_function", "run_mpi"]

_LONGEST_OUTPUT = 6000


@dataclass
class JobReport:
    """What became of one job: its outcome, what each rank left, and the text pytest shows."""

    outcome: str = "passed"
    text: str = ""
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    output: str = ""
    returncode: int | None = None
    timed_out: bool = False
    seconds: float = 0.0


def hear_log() -> list[str]:
    """Return a list that gets what this rank's log says from now on."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pyhvd").addHandler(handler)
    return told


def on_ranks(
    *counts: int, timeout: float = 30.0, env: Mapping[str, str | None] | None = None, cleanup: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the decorated module-level test on each of `counts` ranks.

    Fixtures and ``pytest.mark.parametrize``, above or below, work as usual; their values are pickled for the
    ranks. A parameter named ``nranks`` receives the rank count. ``pytest.skip`` must be called by all ranks.

    Parameters
    ----------
    counts : int
        Numbers of ranks, one job each.
    timeout : float
        Seconds from the start of mpiexec. Shortly before, each rank writes the stacks of all its threads.
    env : mapping, optional
        Environment variables set for the job; None removes one.
    cleanup : bool
        After the test, shut pyhvd down and finalize MPI. False leaves both to the interpreter's exit.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.name != "nranks"]
        wanted = len(parameters) < len(signature.parameters)
        count = inspect.Parameter("nranks", inspect.Parameter.KEYWORD_ONLY)

        def test(**arguments: Any) -> None:
            n = arguments["nranks"] if wanted else arguments.pop("nranks")
            _report_to_pytest(run_function(n, function, arguments, timeout=timeout, env=env, cleanup=cleanup))

        test.__dict__.update(function.__dict__)  # the marks set below this decorator
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(function, name))
        attributes: Any = test
        attributes.__wrapped__ = function  # pytest then reports the test's own file and line
        attributes.rank_function = function  # what a rank calls
        attributes.__signature__ = signature.replace(parameters=[*parameters, count])
        # pytest-timeout would end the whole pytest run: it must only come after the job's own deadline.
        marked: Callable[..., None] = pytest.mark.timeout(timeout + 30)(test)
        by_count = pytest.mark.parametrize("nranks", counts, ids=[f"n{n}" for n in counts])
        parametrised: Callable[..., None] = by_count(marked)
        return parametrised

    return decorate


def run_function(
    n: int,
    function: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    *,
    timeout: float = 30.0,
    env: Mapping[str, str | None] | None = None,
    cleanup: bool = True,
) -> JobReport:
    """Call a module-level function on `n` ranks and report how that went; a failed rank raises nothing."""
    if mpiexec_path() is None:
        return JobReport("skipped", "no mpiexec beside this interpreter or on PATH")
    start = time.time()
    with job_directory() as directory:
        task = {"module": function.__module__, "function": function.__qualname__, "cleanup": cleanup}
        # The ranks dump early enough for the dumps to be complete when the job is killed.
        task |= {"dump_at": start + timeout - min(1.0, 0.1 * timeout), "kill_at": start + timeout}
        (directory / "job.json").write_text(json.dumps(task))
        (directory / "arguments.pkl").write_bytes(cloudpickle.dumps(dict(arguments or {})))
        job = MpiJob(n, [sys.executable, "-m", "tests.mpi.rank", str(directory)], directory, env, ROOT)
        try:
            ended = job.wait(start + timeout, until=lambda: _any_failed(directory))
            if not ended and (failed := _any_failed(directory)):
                # The failed rank is aborting the job; an MPI that was never initialised cannot.
                job.wait(min(start + timeout, time.time() + 2.0))
                ended = failed
        finally:
            job.kill()
        report = _collect(n, directory, job, timed_out=not ended)
    report.seconds = time.time() - start
    _judge(report, n, timeout)
    return report


def _any_failed(directory: Path) -> bool:
    return any(json.loads(path.read_text())["outcome"] == "failed" for path in directory.glob("result*.json"))


def _collect(n: int, directory: Path, job: MpiJob, *, timed_out: bool) -> JobReport:
    report = JobReport(returncode=job.process.returncode, timed_out=timed_out)
    for rank in range(n):
        result, stacks = directory / f"result{rank}.json", directory / f"stacks{rank}"
        if result.exists():
            report.results[rank] = json.loads(result.read_text())
        if stacks.exists() and (text := stacks.read_text(errors="replace")):
            report.stacks[rank] = text
    report.output = "".join(job.output())
    return report


def _judge(report: JobReport, n: int, timeout: float) -> None:
    """Fill in `outcome` and `text` from what the ranks left behind."""
    by_outcome: dict[str, list[int]] = {}
    for rank, result in sorted(report.results.items(), key=lambda item: item[1]["time"]):
        by_outcome.setdefault(result["outcome"], []).append(rank)
    skipped = by_outcome.get("skipped", [])
    lines: list[str] = []
    if "failed" in by_outcome:
        lines += _tell_failed(report, n, by_outcome["failed"])
    elif report.timed_out:
        lines += [f"{n} ranks had not ended after {timeout:g} s", *_tell_stacks(report, n)]
    elif report.returncode != 0 or len(report.results) < n:
        lines += [f"mpiexec exited with {report.returncode}"]
        lines += [
            f"rank {rank} of {n} died without a result" for rank in range(n) if rank not in report.results
        ]
    elif skipped and len(skipped) < n:
        lines += [f"only ranks {skipped} of {n} skipped: " + report.results[skipped[0]]["message"]]
    elif skipped:
        report.outcome, report.text = "skipped", report.results[skipped[0]]["message"]
    if lines:
        output = report.output[-_LONGEST_OUTPUT:].rstrip()
        report.outcome = "failed"
        report.text = "\n".join([*lines, "--- output of the job ---", output] if output else lines)


def _tell_failed(report: JobReport, n: int, failed: list[int]) -> list[str]:
    """The failed ranks' tracebacks, the first failure first; ranks that failed alike share one."""
    alike: dict[str, list[int]] = {}
    for rank in failed:
        alike.setdefault(report.results[rank]["message"], []).append(rank)
    lines: list[str] = []
    for message, ranks in alike.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, sorted(ranks)))
        lines += [f"{who} of {n} failed:", message]
    return [*lines, *(f"rank {r} of {n} was stopped" for r in range(n) if r not in report.results)]


def _tell_stacks(report: JobReport, n: int) -> list[str]:
    lines: list[str] = []
    for rank in range(n):
        if rank in report.results:
            lines.append(f"rank {rank} of {n} had returned from the test:")
        else:
            lines.append(f"rank {rank} of {n} was still in the test:")
        lines.append(report.stacks.get(rank, "  (it left no stacks)"))
    return lines


def _report_to_pytest(report: JobReport) -> None:
    if report.outcome == "skipped":
        pytest.skip(report.text)
    if report.outcome == "failed":
        pytest.fail(report.text, pytrace=False)
    print(report.output, end="")

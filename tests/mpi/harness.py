"""Tests that run on N ranks under the mpiexec of the current interpreter.

    @on_ranks(1, 2, 4)
    def test_sum():
        hvd.init()
        assert hvd.allreduce(np.ones(3), op=hvd.Sum)[0] == hvd.size()

pytest runs the decorated function once per rank count. The start of mpiexec takes longer than most tests, so
tests with the same rank count share a job, whose ranks run one case after the other. A case that fails or
hangs ends its job, and the next case gets a fresh one. This module is the pytest side: it starts the jobs,
hands the cases over, collects the results and reports them.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tests.mpi.launch import ROOT, MpiJob, MpiRun, job_directory, mpiexec_command, mpiexec_path, run_mpi

__all__ = ["JobReport", "MpiRun", "SharedJobs", "mpiexec_command", "on_ranks", "run_function", "run_mpi"]

_LONGEST_OUTPUT = 6000
# On a busy machine stacks may be written late.
_STACKS_S = 10.0
# pyhvd reads these when it starts; MPI and others read theirs when the process starts.
_READ_BY_INIT = ("PYHVD_", "HOROVOD_")
_READ_BY_MPI = ("PYHVD_MPI_THREADS_DISABLE",)

Environment = Mapping[str, str | None]


@dataclass
class JobReport:
    """The result of one case: its outcome, each rank's result and stacks, and the text that pytest shows."""

    outcome: str = "passed"
    text: str = ""
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    stacks: dict[int, str] = field(default_factory=dict)
    output: str = ""
    returncode: int | None = None
    timed_out: bool = False
    seconds: float = 0.0


def hear_log() -> list[str]:
    """Return a list that collects this rank's log messages from now on."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pyhvd").addHandler(handler)
    return told


def on_ranks(
    *counts: int,
    timeout: float = 60.0,
    env: Environment | None = None,
    alone: bool = False,
    cleanup: bool = True,
    warm: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the decorated module-level test on each of `counts` ranks.

    Fixtures and ``pytest.mark.parametrize``, above or below, work as usual; their values are pickled for the
    ranks. A parameter named ``nranks`` receives the rank count. ``pytest.skip`` must be called by all ranks.

    Parameters
    ----------
    counts : int
        Numbers of ranks. Without any, the test is parametrised over ``nranks`` by other means.
    timeout : float
        Seconds for the case, including the start of its job if it is the first one. Then each rank writes the
        stacks of all its threads, and the job is killed.
    env : mapping, optional
        Environment variables of the ranks during the case; None removes one.
    alone : bool
        Start a job for this case alone: it changes its process, or ends it.
    cleanup : bool
        After the test, shut pyhvd down and finalize MPI. False leaves both to the interpreter's exit, in a
        job for this case alone.
    warm : bool
        Leave pyhvd running for the next case, if that is warm too and has the same `env`: the start takes
        longer than most cases.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.name != "nranks"]
        wanted = len(parameters) < len(signature.parameters)

        def test(**arguments: Any) -> None:
            n, jobs = arguments["nranks"], arguments.pop("shared_jobs")
            if not wanted:
                del arguments["nranks"]
            if alone or not cleanup:
                report = run_function(n, function, arguments, timeout=timeout, env=env, cleanup=cleanup)
            else:
                report = jobs.run(n, function, arguments, timeout=timeout, env=env, warm=warm)
            _report_to_pytest(report)

        _dress(test, function, signature.replace(parameters=parameters))
        # pytest-timeout would end the whole pytest run: it must only come after the job's own deadline.
        marked: Callable[..., None] = pytest.mark.timeout(timeout + 60)(test)
        if not counts:
            return marked
        by_count = pytest.mark.parametrize("nranks", counts, ids=[f"n{n}" for n in counts])
        parametrised: Callable[..., None] = by_count(marked)
        return parametrised

    return decorate


def _dress(test: Any, function: Callable[..., Any], signature: inspect.Signature) -> None:
    """Give a test the name and marks of the function that the ranks call, and two more parameters."""
    test.__dict__.update(function.__dict__)  # the marks set below the decorator
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(test, name, getattr(function, name))
    test.__wrapped__ = function  # pytest then reports the test's own file and line
    test.rank_function = function  # what a rank calls
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("nranks", "shared_jobs")]
    test.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])


def run_function(
    n: int,
    function: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    *,
    timeout: float = 60.0,
    env: Environment | None = None,
    cleanup: bool = True,
) -> JobReport:
    """Call a module-level function on `n` ranks of a separate job, and report the result.

    A failed rank raises nothing here. The job has ended on return, and its exit code is in the report.
    """
    if mpiexec_path() is None:
        return JobReport("skipped", "no mpiexec beside this interpreter or on PATH")
    start = time.time()
    with contextlib.closing(CaseJob(n, env)) as job:
        return job.run(function, arguments or {}, start, timeout, cleanup=cleanup, last=True)


class CaseJob:
    """One mpiexec, whose ranks run cases one after the other.

    Parameters
    ----------
    n : int
        Number of ranks.
    env : mapping or None
        Environment variables of the job.
    command : callable
        ``command(n, *argv)`` returns the command line that starts the ranks.
    """

    def __init__(
        self, n: int, env: Environment | None, command: Callable[..., list[str]] = mpiexec_command
    ) -> None:
        self._n = n
        self._cases = 0
        self._stack = contextlib.ExitStack()
        self._directory = self._stack.enter_context(job_directory())
        self._pipes: list[int] = []
        for rank in range(n):
            path = self._directory / f"commands{rank}"
            os.mkfifo(path)
            # For reading too: opening it for writing alone would wait for the rank.
            self._pipes.append(os.open(path, os.O_RDWR))
        argv = [sys.executable, "-m", "tests.mpi.rank", str(self._directory)]
        self._job = MpiJob(command(n, *argv), self._directory, env, ROOT)

    def run(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        start: float,
        timeout: float,
        *,
        env: Environment | None = None,
        cleanup: bool = True,
        last: bool = False,
        warm: bool = False,
    ) -> JobReport:
        """Run a case whose time began at `start`. If it is the last one, wait for the end of the job."""
        self._cases += 1
        folder = self._directory / str(self._cases)
        folder.mkdir()
        task: dict[str, Any] = {"module": function.__module__, "function": function.__qualname__}
        task |= {"env": dict(env or {}), "cleanup": cleanup, "last": last, "warm": warm}
        task |= {"dump_at": start + timeout, "kill_at": start + timeout + 3 * _STACKS_S}
        (folder / "task.json").write_text(json.dumps(task))
        (folder / "arguments.pkl").write_bytes(cloudpickle.dumps(dict(arguments)))
        self._tell(folder.name)

        def is_over() -> bool:
            return _any_failed(folder) or (not last and len(list(folder.glob("result*.json"))) == self._n)

        ended = self._job.wait(start + timeout, until=is_over)
        timed_out = not ended and not is_over()
        if timed_out:
            self._await_stacks(folder)
        elif not ended and _any_failed(folder):
            # The failed rank is aborting the job; an MPI that was never initialised cannot.
            self._job.wait(min(start + timeout, time.time() + 2.0))
        if last or ended or timed_out or _any_failed(folder):
            self._job.kill()
        report = self._collect(folder, timed_out=timed_out)
        report.seconds = time.time() - start
        _judge(report, self._n, timeout)
        if report.outcome == "failed":
            self._job.kill()
        else:
            self._tell("")
        shutil.rmtree(folder, ignore_errors=True)
        return report

    def is_running(self) -> bool:
        """Return whether the job can run another case."""
        return self._job.process.poll() is None

    def finish(self, within: float) -> str:
        """Let the ranks finalize MPI and end; return the text of a failure, or an empty text."""
        ended_early = not self.is_running()
        self._close_pipes()
        ended = self._job.wait(time.time() + within)
        code = self._job.process.returncode
        if ended and code == 0 and not ended_early:
            return ""
        if not ended:
            self._job.dump_stacks()
        how = f"mpiexec exited with {code}" if ended else f"{self._n} ranks had not ended after {within:g} s"
        return "\n".join([f"{how}, after {self._cases} cases", *self._job.output()])

    def close(self) -> None:
        """End all of the job's processes."""
        self._close_pipes()
        self._job.kill()
        self._stack.close()

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            os.close(pipe)
        self._pipes.clear()

    def _tell(self, command: str) -> None:
        for pipe in self._pipes:
            os.write(pipe, f"{command}\n".encode())

    def _await_stacks(self, folder: Path) -> None:
        """Wait until the ranks that are still in the case have finished writing their stacks."""
        give_up, before, since = time.time() + _STACKS_S, -1, time.time()
        late = [rank for rank in range(self._n) if not (folder / f"result{rank}.json").exists()]
        while time.time() < give_up:
            sizes = [path.stat().st_size for rank in late if (path := folder / f"stacks{rank}").exists()]
            if sum(sizes) != before:
                before, since = sum(sizes), time.time()
            elif len(sizes) == len(late) and all(sizes) and time.time() - since > 0.3:
                return
            time.sleep(0.05)

    def _collect(self, folder: Path, *, timed_out: bool) -> JobReport:
        report = JobReport(returncode=self._job.process.poll(), timed_out=timed_out)
        for rank in range(self._n):
            result, stacks = folder / f"result{rank}.json", folder / f"stacks{rank}"
            if result.exists():
                report.results[rank] = json.loads(result.read_text())
            if stacks.exists() and (text := stacks.read_text(errors="replace")):
                report.stacks[rank] = text
        printed = folder / "output"
        report.output = printed.read_text(errors="replace") if printed.exists() else ""
        report.output += "".join(self._job.output())  # usually mpiexec's own output
        return report


class SharedJobs:
    """The jobs of a pytest session that run many cases each, at most one per rank count and environment."""

    _MOST = 4

    def __init__(self) -> None:
        self._jobs: dict[tuple[object, ...], CaseJob] = {}
        self._trouble: list[str] = []

    def run(
        self,
        n: int,
        function: Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        *,
        timeout: float = 60.0,
        env: Environment | None = None,
        warm: bool = False,
    ) -> JobReport:
        """Call a module-level function on `n` ranks, in a job that earlier cases may have used."""
        if mpiexec_path() is None:
            return JobReport("skipped", "no mpiexec beside this interpreter or on PATH")
        start = time.time()
        of_case, of_job = _split(env or {})
        key = (n, *sorted(of_job.items()))
        job = self._jobs.pop(key, None)
        if job is not None and not job.is_running():
            self._end(job)
            job = None
        while len(self._jobs) >= self._MOST:
            self._end(self._jobs.pop(next(iter(self._jobs))))
        job = job or CaseJob(n, of_job)
        try:
            report = job.run(function, arguments or {}, start, timeout, env=of_case, warm=warm)
        except BaseException:
            job.close()
            raise
        if report.outcome == "failed":
            job.close()
        else:
            self._jobs[key] = job  # the last one used is the last one to be ended
        return report

    def close(self) -> None:
        """End all jobs.

        Raises
        ------
        AssertionError
            A job failed at its end.
        """
        while self._jobs:
            self._end(self._jobs.popitem()[1])
        assert not self._trouble, "\n".join(self._trouble)

    def _end(self, job: CaseJob) -> None:
        with contextlib.closing(job):
            if trouble := job.finish(30.0):
                self._trouble.append(trouble)


def _split(env: Environment) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Return the variables that a case can set in a running job, and those that need a new job."""
    of_case = {k: v for k, v in env.items() if k.startswith(_READ_BY_INIT) and k not in _READ_BY_MPI}
    return of_case, {k: v for k, v in env.items() if k not in of_case}


def _any_failed(folder: Path) -> bool:
    return any(json.loads(path.read_text())["outcome"] == "failed" for path in folder.glob("result*.json"))


def _judge(report: JobReport, n: int, timeout: float) -> None:
    """Fill in `outcome` and `text` from the ranks' results."""
    by_outcome: dict[str, list[int]] = {}
    for rank, result in sorted(report.results.items(), key=lambda item: item[1]["time"]):
        by_outcome.setdefault(result["outcome"], []).append(rank)
    skipped = by_outcome.get("skipped", [])
    lines: list[str] = []
    if "failed" in by_outcome:
        lines += _tell_failed(report, n, by_outcome["failed"])
    elif report.timed_out:
        lines += [f"{n} ranks had not ended after {timeout:g} s", *_tell_stacks(report, n)]
    elif report.returncode or len(report.results) < n:
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
    """Return the failed ranks' tracebacks, the first failure first; ranks with equal failures share one."""
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

"""Run cases on jobs whose ranks are on the hosts of a bed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.hosts.launch import Site
from tests.mpi.harness import CaseJob, Environment, JobReport

Shape = tuple[int, ...]
"""The number of ranks on each host."""

SHAPES: tuple[Shape, ...] = ((4,), (1, 1), (2, 2), (1, 1, 1, 1), (3, 1), (1,) * 8, (1, 2, 4))


DAEMON_CRASHED = "Daemon exit status: 139"
"""Open MPI 5.0.11: a daemon of mpiexec crashed, before it started a rank. That happens now and then."""


def name_of(shape: Shape) -> str:
    """Return a shape's name: hosts x ranks, or the ranks of each host if they differ."""
    return f"{len(shape)}x{shape[0]}" if len(set(shape)) == 1 else "+".join(map(str, shape))


class HostsJob:
    """A job of one shape, which runs cases in turn; after a failure, the next case has a new job."""

    def __init__(self, site: Site, shape: Shape, env: Environment | None = None) -> None:
        self.shape = shape
        self.size = sum(shape)
        self._site = site
        self._env = env
        self._job: CaseJob | None = None

    def run(
        self,
        function: Callable[..., Any],
        timeout: float = 60.0,
        env: Environment | None = None,
        **arguments: Any,
    ) -> None:
        """Call a module-level function on all ranks; its failure fails the test that pytest runs.

        ``env`` has variables that ``init()`` reads.
        """
        fresh = self._job is None
        report = self._run(function, arguments, timeout, env)
        if fresh and DAEMON_CRASHED in report.text:
            self._end()
            report = self._run(function, arguments, timeout, env)
        if report.outcome == "failed":
            self._end()
            pytest.fail(f"on {name_of(self.shape)} ranks: {report.text}", pytrace=False)
        if report.outcome == "skipped":
            pytest.skip(report.text)

    def finish(self) -> None:
        """Let the ranks end; a failure then is an error of the last test."""
        if self._job is not None:
            trouble = self._job.finish(30.0)
            self._end()
            assert not trouble, trouble

    def _run(
        self, function: Callable[..., Any], arguments: dict[str, Any], timeout: float, env: Environment | None
    ) -> JobReport:
        start = time.time()
        if self._job is None:
            self._job = CaseJob(self.size, self._env, self._command)
        return self._job.run(function, arguments, start, timeout, env=env)

    def _end(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None

    def _command(self, n: int, *argv: str) -> list[str]:
        assert n == self.size
        return self._site.command(self.shape, *argv)

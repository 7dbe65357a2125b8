"""``run_elastic``: run a function inside Spark on ranks that are started again when some are lost."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from pyhvd.job.agent_command import AgentProcess
from pyhvd.job.call import (
    check_call,
    check_size,
    check_text_files,
    expect,
    interface_names,
    is_duration,
    rank_variables,
)
from pyhvd.job.driver import JobSpec
from pyhvd.job.function_process import dump_call
from pyhvd.job.generation_driver import ElasticSpec, GenerationDriver
from pyhvd.job.generation_env import JOB
from pyhvd.job.hosts_driver import Checked, Seat
from pyhvd.job.interfaces import interface_addresses
from pyhvd.job.membership import Limits, Membership, StartGeneration
from pyhvd.job.messages import Facts
from pyhvd.job.mpi.rank_env import MPICH
from pyhvd.job.network_choice import Wanted
from pyhvd.job.output import Output
from pyhvd.job.rendezvous import PmiRendezvous
from pyhvd.run.elastic import clear_store, make_store
from pyhvd.run.elastic_job import ElasticJob, GaveUp
from pyhvd.run.environment import of_stores
from pyhvd.spark.api import (
    JOB_END_S,
    active_context,
    as_spark_errors,
    driver_hosts,
    is_dynamic,
    read_start_timeout,
)
from pyhvd.spark.arrivals import Arrivals, TaskAgent
from pyhvd.spark.decommission import DecommissionWatch, may_decommission
from pyhvd.spark.elastic_task import DECOMMISSIONED, ElasticTask
from pyhvd.spark.errors import SparkError, StartTimeoutError
from pyhvd.spark.job import CollectJob
from pyhvd.spark.slots import count_slots, wait_for_slots
from pyhvd.transport.tcp.connection import Secret

_log = logging.getLogger("pyhvd")

_ELASTIC_TIMEOUT_S = 600.0
# Between two looks at tasks that come when the job is over.
_LOOK_S = 0.05
# Of a task, by Spark's default.
_MOST_FAILURES = "4"
# The ranks run where Spark runs their tasks.
_HERE = "."


def run_elastic(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    store: str | None = None,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on ranks that are started again when ranks or executors are lost.

    `fn` calls a function that :func:`pyhvd.elastic.run` decorates; it goes on from the last commit. Each rank
    has a Spark task. The failure of a rank is no failure of its task. The other arguments, the result and the
    errors are those of :func:`pyhvd.spark.run`; a rank's error is raised if it comes again and again.

    Parameters
    ----------
    num_proc : int, optional
        The number of ranks to start with; by default as many as the executors can run tasks at once.
    min_num_proc, max_num_proc : int, optional
        The fewest and the most ranks; by default `num_proc`.
    elastic_timeout : float, optional
        Seconds for which the job waits for `min_num_proc` tasks after a loss; 600.
    reset_limit : int, optional
        How often the ranks may be started again; by default as long as there are commits in between.
    store : str, optional
        A folder's URL for fsspec, where commits are stored in case all executors are lost.
    """
    check_call((fn, args, kwargs), env, executable)
    expect(isinstance(verbose, int), "verbose", verbose, "0, 1 or 2")
    expect(store is None or isinstance(store, str), "store", store, "a URL, as str")
    chosen = interface_names(nics)
    own = [(name.encode(), value.encode()) for name, value in rank_variables(env, chosen).items()]
    shown = Output(*check_text_files(stdout, stderr), prefix_output_with_timestamp, quiet=not verbose)
    timeout = read_start_timeout(start_timeout, os.environ)
    context = active_context()
    size = _count_slots(context, timeout) if num_proc is None else num_proc
    limits = _limits(size, min_num_proc, max_num_proc, reset_limit, elastic_timeout)
    code = dump_call((fn, tuple(args), dict(kwargs)), _HERE, own, [])
    with as_spark_errors():
        spec = ElasticSpec(limits.max_np or size, "", make_store(store or "", 1, of_stores(own)), True)
        return _serve(context, _Run(code, limits, timeout, spec), chosen, executable, shown)


def _count_slots(context: Any, timeout: float) -> int:
    return wait_for_slots(lambda: count_slots(context), timeout, is_dynamic(context.getConf()))


def _serve(
    context: Any, wanted: _Run, nics: Sequence[str] | None, executable: str | None, shown: Output
) -> list[Any]:
    """Start the tasks, and serve the job to its end; return the results."""
    conf = context.getConf()
    bound, announced = driver_hosts(conf) if nics is None else (interface_addresses(nics),) * 2
    secret = Secret()
    with shown as output, contextlib.closing(Arrivals(secret, bound)) as arrivals:
        addresses = list(zip(announced, arrivals.ports, strict=True))
        most_failures = int(conf.get("spark.task.maxFailures", _MOST_FAILURES))
        task = ElasticTask(addresses, secret, executable, most_failures)
        spark = CollectJob(context, wanted.elastic.max_size, task, barrier=False)
        try:
            watch = None
            if may_decommission(conf):
                watch = DecommissionWatch(lambda: context._jsc.sc().taskScheduler())
            with contextlib.closing(_SparkJob(wanted, arrivals, spark, output, watch)) as job:
                return job.serve_function()
        finally:
            _end(spark, arrivals)
            if wanted.elastic.store is not None:
                clear_store(wanted.elastic.store)


def _limits(
    size: int, least: int | None, most: int | None, reset_limit: int | None, timeout: float | None
) -> Limits:
    """Return the limits of the job; raise ValueError for numbers that do not fit."""
    check_size(size)
    least = size if least is None else check_size(least, "min_num_proc")
    most = size if most is None else check_size(most, "max_num_proc")
    if not least <= size <= most:
        raise ValueError(
            f"min_num_proc={least}, num_proc={size}, max_num_proc={most}: expected"
            " min_num_proc <= num_proc <= max_num_proc"
        )
    waits = timeout is None or is_duration(timeout)
    expect(waits, "elastic_timeout", timeout, "a number of seconds above 0")
    if reset_limit is not None:
        right = isinstance(reset_limit, int) and not isinstance(reset_limit, bool) and reset_limit >= 0
        expect(right, "reset_limit", reset_limit, "a number of restarts, 0 at least")
    seconds = _ELASTIC_TIMEOUT_S if timeout is None else timeout
    # A task whose agent is ended does not come back.
    return Limits(least, most, size, reset_limit, seconds, leaves_out=False)


def _end(spark: CollectJob, arrivals: Arrivals) -> None:
    """End the tasks: they end by themselves, as their agents' channels are closed, or are killed.

    Tasks that have waited for slots begin when others end; they must find the driver, or Spark shows errors.
    """
    until = time.monotonic() + JOB_END_S / 3
    arrivals.dismiss()
    while not spark.join(_LOOK_S) and time.monotonic() < until:
        arrivals.dismiss()
    arrivals.close()
    if not spark.done:
        spark.cancel()
        if not spark.join(JOB_END_S):
            _log.warning("Spark has not ended job group %s within %g s", spark.group, JOB_END_S)
    spark.close()


@dataclass(frozen=True)
class _Run:
    """What one call of :func:`run_elastic` asks for: the pickled call, and its limits."""

    code: bytes
    limits: Limits
    start_timeout: float
    elastic: ElasticSpec


class _SparkJob(ElasticJob):
    """An elastic job whose agents are processes beside Spark's tasks."""

    def __init__(
        self,
        wanted: _Run,
        arrivals: Arrivals,
        spark: CollectJob,
        output: Output,
        watch: DecommissionWatch | None,
    ) -> None:
        membership = Membership(wanted.limits, time.monotonic())
        super().__init__(membership, arrivals, None, wanted.start_timeout)
        self._wanted = wanted
        self._arrivals = arrivals
        self._spark = spark
        self._output = output
        self._letters = secrets.token_hex(3)
        self._start_by = time.monotonic() + wanted.start_timeout
        self._watch = watch

    def close(self) -> None:
        """See :meth:`ElasticJob.close`."""
        if self._watch is not None:
            self._watch.close()
        super().close()

    def look_at_notices(self, now: float) -> None:
        """Drain the agents whose executors are being decommissioned, too."""
        super().look_at_notices(now)
        if self._watch is None:
            return
        self._watch.tasks = tasks = self._arrivals.tasks
        for host in sorted(self._watch.leaving & tasks.keys()):
            self._membership.drain(host, now, DECOMMISSIONED)

    def end_command(self, host: str, command: AgentProcess) -> None:
        """Let Spark start the task again on another executor, if this one is being decommissioned."""
        if self._watch is not None and host in self._watch.leaving and isinstance(command, TaskAgent):
            command.stop(DECOMMISSIONED)
        super().end_command(host, command)

    def step(self, now: float) -> None:
        """See :meth:`ElasticJob.step`."""
        if self._spark.done:
            raise GaveUp(self._why_spark_ended())
        if self.number < 0 and now > self._start_by:
            least, seconds = self._wanted.limits.min_np, self._wanted.start_timeout
            raise GaveUp(
                StartTimeoutError(
                    f"less than {least} tasks have started within {seconds:g} s: does the cluster have as"
                    " many free slots? See start_timeout and min_num_proc"
                )
            )
        super().step(now)

    def _why_spark_ended(self) -> Exception:
        try:
            self._spark.results()
        except SparkError as exc:
            return exc
        return SparkError("all tasks have ended, as they have not heard of the driver")

    def command(self, host: str) -> Sequence[str]:
        """See :meth:`ElasticJob.command`."""
        return [host]

    def start_command(self, command: Sequence[str]) -> TaskAgent:
        """See :meth:`ElasticJob.start_command`."""
        return self._arrivals.agent(command[0])

    def explain(self, host: str, code: int, said: str) -> tuple[str, bool]:  # noqa: ARG002
        """See :meth:`ElasticJob.explain`."""
        return "its task has ended", False

    def signals(self, driver: GenerationDriver) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        """Leave signals to the program that called, of which this job may be any thread."""
        return contextlib.nullcontext()

    def say(self, text: str) -> None:
        """Show a line, unless the user wants none."""
        _log.warning("%s", text.removeprefix("pyhvd: "))

    def make_driver(self, begins: StartGeneration) -> GenerationDriver:
        """See :meth:`ElasticJob.make_driver`."""
        wanted, size = self._wanted, sum(place.slots for place in begins.places)
        return GenerationDriver(
            begins.number,
            wanted.elastic,
            self.commit,
            self.holders,
            self.step,
            self.kept,
            JobSpec(size, wanted.code, {JOB: self._letters}, start_timeout=wanted.start_timeout),
            [Seat(place.host, place.slots, self.command(place.host)) for place in begins.places],
            lambda: Checked(_HERE, "", Facts(MPICH, "MPICH", True, ""), PmiRendezvous()),
            self.explain,
            self._output,
            self.say,
            None,
            Wanted(probe=False),
            None,
        )

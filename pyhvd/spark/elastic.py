"""``run_elastic``: run a function inside Spark on ranks that are started again when some are lost."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from pyhvd.job.agent.function_process import dump_call
from pyhvd.job.driver.agent_source import AgentProcess, Checked, HostSlots
from pyhvd.job.driver.arrivals import Arrivals, ArrivedAgent
from pyhvd.job.driver.console import log_warning
from pyhvd.job.driver.elastic_job import AgentStarter, ElasticJob
from pyhvd.job.driver.output import Output
from pyhvd.job.machines.member_host import FoundHost
from pyhvd.job.machines.membership import Membership
from pyhvd.job.machines.roster import ElasticLimits, Place
from pyhvd.job.messages import Facts
from pyhvd.job.mpi.rank_env import MPICH, of_stores
from pyhvd.job.mpi.rendezvous import PmiRendezvous
from pyhvd.job.network.network_choice import Wanted
from pyhvd.job.rank.call import check_size, check_text_files, expect, read_duration
from pyhvd.job.spec import ELASTIC_TIMEOUT, ElasticSpec, JobSpec, argument_of
from pyhvd.run.launchers.elastic import clear_store, make_store
from pyhvd.spark.api import SparkCall, as_spark_errors
from pyhvd.spark.decommission import DecommissionWatch
from pyhvd.spark.elastic_task import DECOMMISSIONED, ElasticTask
from pyhvd.spark.errors import SparkError, StartTimeoutError
from pyhvd.spark.job import END_S, CollectJob
from pyhvd.spark.task_body import is_on, pack
from pyhvd.transport.tcp.connection import Secret

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
    prefix_output_with_timestamp: bool = False,  # noqa: FBT001, FBT002 - Horovod's
    min_np: int | None = None,
    max_np: int | None = None,
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
    min_num_proc, max_num_proc, min_np, max_np : int, optional
        The fewest and the most ranks, by new or old name; by default `num_proc`.
    elastic_timeout : float, optional
        Seconds for which the job waits for `min_num_proc` tasks after a loss; PYHVD_ELASTIC_TIMEOUT or 600.
    reset_limit : int, optional
        How often the ranks may be started again; by default as long as there are commits in between.
    store : str, optional
        A folder's URL for fsspec, where commits are stored in case all executors are lost.
    """
    expect(store is None or isinstance(store, str), "store", store, "a URL, as str")
    least, most = _renamed("min", min_num_proc, min_np), _renamed("max", max_num_proc, max_np)
    out = Output(*check_text_files(stdout, stderr), timestamp=prefix_output_with_timestamp, quiet=not verbose)
    call = SparkCall((fn, args, kwargs), num_proc, start_timeout, env, nics, executable, verbose)
    size = call.find_size()
    limits = _limits(size, least, most, reset_limit, elastic_timeout, call.time_limit)
    own = [(name.encode(), value.encode()) for name, value in call.variables.items()]
    code, broadcasts = pack(call.context, call.function, lambda known: dump_call(known, _HERE, own, []))
    with as_spark_errors():
        elastic = ElasticSpec(limits.max_np or size, store=make_store(store or "", 1, of_stores(own)))
        times = call.time_limit, call.start_timeout is not None
        spec = JobSpec(*(code, True, {}, None, *times), elastic=elastic, name_of=argument_of)
        return _serve(call, spec, limits, broadcasts, out)


def _serve(
    call: SparkCall, spec: JobSpec, limits: ElasticLimits, broadcasts: Mapping[int, Any], shown: Output
) -> list[Any]:
    """Start the tasks, and serve the job to its end; return the results."""
    assert spec.elastic is not None
    context, conf = call.context, call.conf
    bound, announced = call.driver_hosts()
    secret = Secret()
    with shown as output, contextlib.closing(Arrivals(secret, bound, _task_names())) as arrivals:
        addresses = list(zip(announced, arrivals.ports, strict=True))
        most_failures = int(conf.get("spark.task.maxFailures", _MOST_FAILURES))
        task = ElasticTask(addresses, secret, call.executable, most_failures, broadcasts)
        spark = CollectJob(context, spec.elastic.max_size, task, barrier=False)
        try:
            watch = None
            if is_on(conf, "spark.decommission.enabled"):
                watch = DecommissionWatch(lambda: context._jsc.sc().taskScheduler())
            starter = _TaskStarter(spec, limits.min_np, arrivals, spark, watch)
            membership = Membership(limits, time.monotonic())
            with contextlib.closing(
                ElasticJob(spec, membership, starter, arrivals, output, log_warning)
            ) as job:
                return job.serve_function()
        finally:
            _end(spark, arrivals)
            if spec.elastic.store is not None:
                clear_store(spec.elastic.store)


def _task_names() -> Callable[[int, str], FoundHost]:
    """Return what makes a host of one slot of each task, with a name that no other task had."""
    count = itertools.count()
    return lambda _, address: FoundHost(f"task {next(count)} on {address}", 1)


def _renamed(which: str, value: int | None, old: int | None) -> int | None:
    """Return the value of an argument that may also have its old name, which warns as Horovod does."""
    if old is None:
        return value
    warnings.warn(f"{which}_np is deprecated: use {which}_num_proc", DeprecationWarning, stacklevel=3)
    return old if value is None else value


def _limits(
    size: int,
    least: int | None,
    most: int | None,
    reset_limit: int | None,
    timeout: float | None,
    start_timeout: float,
) -> ElasticLimits:
    """Return the limits of the job; raise ValueError for numbers that do not fit."""
    least = size if least is None else check_size(least, "min_num_proc")
    most = size if most is None else check_size(most, "max_num_proc")
    if not least <= size <= most:
        raise ValueError(
            f"min_num_proc={least}, num_proc={size}, max_num_proc={most}: expected"
            " min_num_proc <= num_proc <= max_num_proc"
        )
    right = reset_limit is None or (type(reset_limit) is int and reset_limit >= 0)
    expect(right, "reset_limit", reset_limit, "a number of restarts, 0 at least")
    # A task whose agent is ended does not come back.
    return ElasticLimits(
        *(least, most, size, reset_limit),
        elastic_timeout=read_duration(ELASTIC_TIMEOUT, timeout),
        leaves_out=False,
        start_timeout=start_timeout,
        name_of=argument_of,
    )


def _end(spark: CollectJob, arrivals: Arrivals) -> None:
    """End the tasks: they end by themselves, as their agents' channels are closed, or are killed.

    Tasks that have waited for slots begin when others end; they must find the driver, or Spark shows errors.
    """
    until = time.monotonic() + END_S / 3
    arrivals.dismiss()
    while not spark.join(_LOOK_S) and time.monotonic() < until:
        arrivals.dismiss()
    arrivals.close()
    spark.end()
    spark.close()


@dataclass(eq=False)
class _TaskStarter(AgentStarter):
    """Takes tasks of Spark for agents: each is a host with one slot.

    Attributes
    ----------
    spec : JobSpec
        What the ranks run.
    least : int
        The fewest ranks.
    arrivals : Arrivals
        The tasks that have connected.
    spark : CollectJob
        The job in Spark.
    watch : DecommissionWatch or None
        Knows which executors are being decommissioned.
    """

    spec: JobSpec
    least: int
    arrivals: Arrivals
    spark: CollectJob
    watch: DecommissionWatch | None

    def __post_init__(self) -> None:
        """Begin to count the time."""
        self._start_by = time.monotonic() + self.spec.start_timeout

    def command(self, host: str) -> Sequence[str]:
        """See :meth:`AgentStarter.command`."""
        return [host]

    def start(self, command: Sequence[str]) -> ArrivedAgent:
        """See :meth:`AgentStarter.start`."""
        return self.arrivals.agent(command[0])

    def end(self, host: str, agent: AgentProcess) -> None:
        """Let Spark start the task again on another executor, if this one is being decommissioned."""
        if self.watch is not None and host in self.watch.leaving and isinstance(agent, ArrivedAgent):
            agent.stop(DECOMMISSIONED)
        super().end(host, agent)

    def explain(self, host: str, code: int, said: str) -> tuple[str, bool]:  # noqa: ARG002
        """See :meth:`AgentStarter.explain`."""
        return "its task has ended", False

    def prepare(self, places: Sequence[Place]) -> tuple[list[HostSlots], Checked, Wanted]:
        """See :meth:`AgentStarter.prepare`."""
        hosts = [HostSlots(place.host, place.slots, self.command(place.host)) for place in places]
        facts = Facts(MPICH, "MPICH", True, "")
        return hosts, Checked(_HERE, "", facts, PmiRendezvous()), Wanted(probe=False)

    def leaving(self) -> Mapping[str, str]:
        """Return the tasks whose executors are being decommissioned."""
        if self.watch is None:
            return {}
        self.watch.tasks = tasks = self.arrivals.numbers
        return dict.fromkeys(sorted(self.watch.leaving & tasks.keys()), DECOMMISSIONED)

    def why_over(self, number: int, now: float) -> Exception | None:
        """See :meth:`AgentStarter.why_over`."""
        if self.spark.done:
            try:
                self.spark.results()
            except SparkError as exc:
                return exc
            return SparkError("all tasks have ended, as they have not heard of the driver")
        if number < 0 and now >= self._start_by:  # the membership gives up then, too
            return StartTimeoutError(
                f"less than {self.least} tasks have started within {self.spec.start_timeout:g} s: does the"
                " cluster have as many free slots? See start_timeout and min_num_proc"
            )
        return None

    def close(self) -> None:
        """See :meth:`AgentStarter.close`."""
        if self.watch is not None:
            self.watch.close()

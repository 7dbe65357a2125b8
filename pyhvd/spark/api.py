"""``run``: run a function on ranks inside Spark's executors."""

from __future__ import annotations

import functools
import logging
import math
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from pyhvd.common.text import describe_import_error
from pyhvd.job import errors as job_errors
from pyhvd.job.driver.console import Console, log_warning
from pyhvd.job.driver.generation_driver import GenerationDriver
from pyhvd.job.driver.output import Output
from pyhvd.job.errors import LaunchError, UnsupportedLauncherError
from pyhvd.job.mpi.openmpi.rendezvous import MpiexecRendezvous, find
from pyhvd.job.mpi.rendezvous import PmiRendezvous
from pyhvd.job.rank.call import (
    check_call,
    check_size,
    check_text_files,
    expect,
    interface_addresses,
    interface_names,
    load_result,
    rank_variables,
    read_duration,
)
from pyhvd.job.rank.pickles import dump_functions
from pyhvd.job.spec import SPARK_START_TIMEOUT, JobSpec
from pyhvd.spark.data.partition import deal
from pyhvd.spark.data.schema import check_frame
from pyhvd.spark.errors import SparkError, StartTimeoutError
from pyhvd.spark.job import CollectJob, TaskSource, serve_tasks
from pyhvd.spark.slots import count_slots, require_slots, wait_for_slots
from pyhvd.spark.task_body import TaskBody, is_on, pack
from pyhvd.transport.tcp.connection import Secret

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("pyhvd")

# Tasks have this long to kill their ranks and end; then Spark kills the Python workers.
_STOP_S = 3.0


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,  # noqa: FBT001 - Horovod's
    use_gloo: bool | None = None,  # noqa: FBT001 - Horovod's
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,  # noqa: FBT001, FBT002 - Horovod's
    executable: str | None = None,
    launcher: str = "pmi",
    df: DataFrame | None = None,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on every rank; each is a process of its own beside a Spark task.

    Parameters
    ----------
    fn : callable
        Calls :func:`pyhvd.init` itself. cloudpickle carries it, its arguments and its result.
    num_proc : int, optional
        How many ranks; by default as many as the cluster's executors can run tasks at once.
    start_timeout : float, optional
        Seconds until all tasks must have started; PYHVD_SPARK_START_TIMEOUT or 600.
    use_mpi, use_gloo, extra_mpi_args : optional
        Horovod's. The last has mpiexec's arguments, as in a shell; the others have no effect.
    env : mapping of str to str, optional
        Variables of the ranks, in addition to those of the executors.
    stdout, stderr : text file, optional
        The driver's files for the ranks' output.
    verbose : int
        0: do not show stdout; 2: also log where the ranks ran.
    nics : iterable of str, optional
        The driver's network interfaces for the tasks. MPI uses the first on every host.
    executable : str, optional
        The ranks' Python; by default that of the executors.
    launcher : ``"pmi"`` or ``"mpiexec"``
        ``"pmi"`` for MPICH and Intel MPI: the driver serves PMI-1. ``"mpiexec"`` for Open MPI.
    df : pyspark.sql.DataFrame, optional
        Each rank gets an equal part of its rows: :func:`pyhvd.spark.partition`.

    Returns
    -------
    list
        The results of ``fn``, in rank order.

    Raises
    ------
    RankFailedError, StartTimeoutError, SparkError, DataError, ValueError
        A rank failed (the ``__cause__``); tasks did not start; Spark ended the job; no rows; bad argument.
    """
    extra = _mpiexec_arguments(extra_mpi_args, launcher, use_gloo=use_gloo, use_mpi=use_mpi)
    call = SparkCall((fn, args, kwargs), num_proc, start_timeout, env, nics, executable, verbose)
    return _run(call, df, extra, check_text_files(stdout, stderr), timestamp=prefix_output_with_timestamp)


@dataclass
class SparkCall:
    """The arguments that `run` and `run_elastic` share, checked.

    Attributes
    ----------
    function : tuple
        The function, its args and its kwargs.
    variables : dict of str to str
        Those of the ranks.
    time_limit : float
        How long tasks may take to start, in seconds, by the user or by default.
    """

    function: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
    num_proc: int | None
    start_timeout: float | None
    env: Mapping[str, str] | None
    nics: Iterable[str] | None
    executable: str | None
    verbose: int

    def __post_init__(self) -> None:
        """Check the arguments; raise ValueError for a wrong one."""
        check_call(self.function, self.env, self.executable)
        expect(isinstance(self.verbose, int), "verbose", self.verbose, "0, 1 or 2")
        self._interfaces = interface_names(self.nics)
        self.variables = rank_variables(self.env, self._interfaces)
        self.time_limit = read_duration(SPARK_START_TIMEOUT, self.start_timeout)
        if self.num_proc is not None:
            check_size(self.num_proc)

    @functools.cached_property
    def context(self) -> Any:
        """Spark's context."""
        return active_context()

    @property
    def conf(self) -> Any:
        """Spark's settings."""
        return self.context.getConf()

    def find_size(self) -> int:
        """Return the given number of ranks, or wait for executors, and return that of their slots."""
        if self.num_proc is not None:
            return self.num_proc
        return wait_for_slots(
            lambda: count_slots(self.context), self.time_limit, dynamic=is_dynamic(self.conf)
        )

    def driver_hosts(self) -> tuple[list[str], list[str]]:
        """Return where the driver listens, and the names by which the tasks know it."""
        if self._interfaces is not None:
            return (interface_addresses(self._interfaces),) * 2
        return driver_hosts(self.conf)


def _run(
    call: SparkCall, df: DataFrame | None, extra: list[str] | None, files: tuple[Any, Any], *, timestamp: bool
) -> list[Any]:
    if df is not None:
        check_frame(df)
    size = call.find_size()
    if call.context.master.partition("[")[0] == "local":  # elsewhere more executors may come
        require_slots(call.context, size, math.inf)
    rows = None if df is None else deal(df, size)
    code, broadcasts = pack(call.context, call.function, dump_functions)
    spec = JobSpec(
        code,
        env=call.variables,
        executable=call.executable,
        start_timeout=call.time_limit,
        ends_late=call.start_timeout is not None,
    )
    bound, announced = call.driver_hosts()
    secret = Secret()
    rendezvous = PmiRendezvous() if extra is None else _mpiexec(extra, call.executable)
    with as_spark_errors(), Output(*files, timestamp=timestamp, quiet=not call.verbose) as output:
        source = TaskSource(size, secret, bound, rendezvous, call.time_limit)
        console = Console(log_warning, log_warning)
        driver = GenerationDriver(spec, source, output, console)
        addresses = list(zip(announced, driver.connections.ports, strict=True))
        try:
            body = TaskBody(addresses, secret, broadcasts)
            results = _drive(
                driver, CollectJob(call.context, size, body, rows, barrier=_use_barrier(call.conf))
            )
        finally:
            driver.close()
            for each in driver.placements if call.verbose >= 2 else ():
                _log.warning("rank %d was Spark task %d on %s", each.rank, each.index, each.host)
        return [load_result(rank, bytearray(result)) for rank, result in enumerate(results)]


def _drive(driver: GenerationDriver, job: CollectJob) -> list[bytes]:
    try:
        return serve_tasks(driver, job)
    except BaseException as exc:  # Ctrl-C too
        # In this order: Spark logs long complaints about Python workers that it has to kill.
        try:
            driver.stop(type(exc).__name__, _STOP_S)
        finally:
            job.end()
        raise
    finally:
        job.close()


def _say_without_effect(what: str, why: str) -> None:
    warnings.warn(f"pyhvd.spark.run: {what} has no effect: {why}", stacklevel=4)  # at the caller of run


def _mpiexec_arguments(
    extra_mpi_args: str | None, launcher: str, *, use_gloo: bool | None = None, use_mpi: bool | None = None
) -> list[str] | None:
    """Return the user's arguments for mpiexec; None if the launcher is not mpiexec."""
    if use_gloo:
        _say_without_effect("use_gloo=True", "pyhvd has no gloo, it reduces by MPI and shared memory")
    if use_mpi is False:
        _say_without_effect("use_mpi=False", "pyhvd's ranks find each other by MPI alone")
    if launcher not in ("pmi", "mpiexec"):
        raise UnsupportedLauncherError(f"launcher={launcher!r}: use 'pmi' or 'mpiexec'")
    text = extra_mpi_args is None or isinstance(extra_mpi_args, str)
    expect(text, "extra_mpi_args", extra_mpi_args, "one string, as in a shell")
    if launcher == "pmi" and extra_mpi_args:
        _say_without_effect(
            f"extra_mpi_args={extra_mpi_args!r}",
            "they are for mpiexec, which launcher='pmi' does not run. Set MPI's variables with env, or use"
            " launcher='mpiexec' with Open MPI",
        )
    if launcher == "pmi":
        return None
    try:
        return shlex.split(extra_mpi_args or "")
    except ValueError as exc:
        raise ValueError(f"extra_mpi_args={extra_mpi_args!r}: {exc}") from None


def _mpiexec(arguments: list[str], executable: str | None) -> MpiexecRendezvous:
    try:
        return MpiexecRendezvous(find(), arguments, executable)
    except LaunchError as exc:
        raise SparkError(f"launcher='mpiexec' needs an mpiexec on the driver: {exc}") from None


def active_context() -> Any:
    try:
        from pyspark import SparkContext
    except ImportError as exc:
        raise SparkError(f"pyhvd.spark needs {describe_import_error(exc, 'pyspark', 'spark')}") from None
    context = SparkContext._active_spark_context
    if context is None:
        from pyspark.sql.utils import is_remote

        if is_remote():
            raise SparkError(
                "pyhvd.spark.run starts tasks in barrier mode, which Spark Connect cannot: run the driver at"
                " the cluster, with a session of its own (spark-submit, or master() instead of remote())"
            )
        raise SparkError(
            "pyhvd.spark.run needs a Spark session: call SparkSession.builder.getOrCreate() first"
        )
    return context


def driver_hosts(conf: Any) -> tuple[list[str], list[str]]:
    """Return the host that Spark's driver listens on, and the name by which its executors know it."""
    host = conf.get("spark.driver.host") or "127.0.0.1"
    bind = conf.get("spark.driver.bindAddress") or host
    return [bind.strip("[]")], [host.strip("[]")]  # Spark writes IPv6 addresses in brackets


def _use_barrier(conf: Any) -> bool:
    """Return whether to use barrier mode, which starts all tasks or none; not with dynamic allocation."""
    if not is_dynamic(conf):
        return True
    if is_on(conf, "spark.speculation"):
        raise SparkError(
            "with dynamic allocation and spark.speculation, Spark would start some ranks twice: set"
            " spark.speculation to false"
        )
    return False


def is_dynamic(conf: Any) -> bool:
    """Return whether Spark starts and ends executors as its jobs need them."""
    return is_on(conf, "spark.dynamicAllocation.enabled")


@contextmanager
def as_spark_errors() -> Iterator[None]:
    """Raise errors of pyhvd.job as errors of pyhvd.spark, which users catch."""
    try:
        yield
    except SparkError:
        raise
    except job_errors.StartTimeoutError as exc:
        raise StartTimeoutError(str(exc), exc.missing) from exc.__cause__
    except LaunchError as exc:
        raise SparkError(str(exc)) from exc.__cause__

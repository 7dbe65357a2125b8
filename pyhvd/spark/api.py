"""``run``: run a function on ranks inside Spark's executors."""

from __future__ import annotations

import io
import logging
import math
import numbers
import os
import reprlib
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO, cast

from pyhvd.common.text import describe_exception, sendable
from pyhvd.errors import ConfigError
from pyhvd.job.addresses import interface_addresses
from pyhvd.job.driver import DriverService, JobSpec
from pyhvd.job.errors import LaunchError, UnsupportedLauncherError
from pyhvd.job.job_key import Secret
from pyhvd.job.mpi.openmpi.rendezvous import MpiexecRendezvous, find
from pyhvd.job.output import Output
from pyhvd.spark.data.partition import deal
from pyhvd.spark.data.schema import Selection, check_frame
from pyhvd.spark.errors import SparkError, as_spark_errors
from pyhvd.spark.job import CollectJob
from pyhvd.spark.slots import count_slots, wait_for_slots
from pyhvd.spark.task_body import TaskBody
from pyhvd.transport.tcp.connection import Address
from pyhvd.transport.tcp.session import MAX_RECORD

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("pyhvd")

_START_TIMEOUT_S = 600.0
# Tasks have this long to kill their ranks and end; then Spark kills the Python workers.
_STOP_S = 3.0
_JOB_END_S = 15.0
# Most bytes of the ranks' variables: they travel in one message.
_MOST_ENV = MAX_RECORD // 2


def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] = {},
    num_proc: int | None = None,
    start_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
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
    extra_mpi_args : str, optional
        Arguments for mpiexec, as in a shell: ``"--mca btl_tcp_if_include eth1"``.
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
    extra = _mpiexec_arguments(extra_mpi_args, launcher, use_gloo, use_mpi)
    shown = Output(*_text_files(stdout, stderr), prefix_output_with_timestamp, quiet=not verbose)
    return _run((fn, args, kwargs), num_proc, start_timeout, env, nics, executable, shown, verbose, df, extra)


def _run(
    call: tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]],
    num_proc: int | None,
    start_timeout: float | None,
    env: Mapping[str, str] | None,
    nics: Iterable[str] | None,
    executable: str | None,
    output: Output,
    verbose: int,
    df: DataFrame | None,
    mpiexec_arguments: list[str] | None,
) -> list[Any]:
    _check(call, env, verbose, executable, df)
    chosen = _interfaces(nics)
    timeout = _start_timeout(start_timeout, os.environ)
    size = None if num_proc is None else _positive(num_proc)
    context = _active_context()
    conf = context.getConf()
    if size is None:
        size = wait_for_slots(lambda: count_slots(context), timeout, _is_dynamic(conf))
    dealt = None if df is None else deal(df, size)
    import cloudpickle

    fn, args, kwargs = call
    code = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
    spec = JobSpec(size, code, _rank_env(env, chosen), executable, timeout)
    bound, announced = _driver_hosts(conf) if chosen is None else (interface_addresses(chosen),) * 2
    secret = Secret()
    rendezvous = None if mpiexec_arguments is None else _mpiexec(mpiexec_arguments, secret, executable)
    with as_spark_errors(), output:
        service = DriverService(spec, secret, bound, output, rendezvous)
        if rendezvous is not None:
            rendezvous.listen_at(zip(bound, service.ports, strict=True))
        addresses = list(zip(announced, service.ports, strict=True))
        try:
            results = _drive(context, service, size, addresses, secret, dealt)
        finally:
            service.close()
            for each in service.placements if verbose >= 2 else ():
                _log.warning("rank %d was Spark task %d on %s", each.rank, each.index, each.host)
    return [_unpickle(rank, result) for rank, result in enumerate(results)]


def _unpickle(rank: int, result: bytes) -> Any:
    import cloudpickle

    try:
        return cloudpickle.loads(result)
    except Exception as exc:
        why = describe_exception(exc)
        raise SparkError(f"what rank {rank} returned cannot be unpickled on the driver: {why}") from exc


def _drive(
    context: Any,
    service: DriverService,
    size: int,
    addresses: list[Address],
    secret: Secret,
    rows: Selection | None,
) -> list[bytes]:
    job = CollectJob(context, size, TaskBody(addresses, secret), _use_barrier(context.getConf()), rows)
    try:
        return service.run(job)
    except BaseException as exc:  # Ctrl-C too
        # In this order: Spark logs long complaints about Python workers that it has to kill.
        try:
            service.stop(type(exc).__name__, _STOP_S)
        finally:
            job.cancel()
        if not job.join(_JOB_END_S):
            _log.warning("Spark has not ended job group %s within %g s", job.group, _JOB_END_S)
        raise
    finally:
        job.close()


def _check(call: Any, env: Any, verbose: Any, executable: Any, df: Any) -> None:
    fn, args, kwargs = call
    _expect(callable(fn), "fn", fn, "a function")
    many = isinstance(args, Iterable) and not isinstance(args, (str, bytes, Mapping))
    _expect(many, "args", args, "a sequence of arguments")
    named = isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)
    _expect(named, "kwargs", kwargs, "a mapping of names to arguments")
    _expect(env is None or isinstance(env, Mapping), "env", env, "a mapping of names to values")
    _expect(isinstance(verbose, int), "verbose", verbose, "0, 1 or 2")
    path = isinstance(executable, str) and executable
    _expect(executable is None or path, "executable", executable, "the path of a Python, as str")
    if df is not None:
        check_frame(df)


def _text_files(stdout: TextIO | None, stderr: TextIO | None) -> tuple[TextIO | None, TextIO | None]:
    given: dict[str, Any] = {"stdout": stdout, "stderr": stderr}
    for name, file in given.items():
        text = hasattr(file, "write") and not isinstance(file, (io.RawIOBase, io.BufferedIOBase))
        _expect(file is None or text, name, file, "a file that is open for text")
    return stdout, stderr


def _expect(right: object, name: str, value: object, expected: str) -> None:
    if not right:
        raise ValueError(f"{name}={reprlib.repr(value)}: expected {expected}")


def _refuse(use_gloo: bool | None, use_mpi: bool | None) -> None:
    if use_gloo:
        raise ValueError(
            "use_gloo=True: pyhvd has no gloo, it reduces by MPI and shared memory; leave use_gloo out"
        )
    if use_mpi is False:
        raise ValueError("use_mpi=False: pyhvd's ranks find each other by MPI alone; leave use_mpi out")


def _mpiexec_arguments(
    extra_mpi_args: str | None, launcher: str, use_gloo: bool | None = None, use_mpi: bool | None = None
) -> list[str] | None:
    """Return the user's arguments for mpiexec; None if the launcher is not mpiexec."""
    _refuse(use_gloo, use_mpi)
    if launcher not in ("pmi", "mpiexec"):
        raise UnsupportedLauncherError(f"launcher={launcher!r}: use 'pmi' or 'mpiexec'")
    text = extra_mpi_args is None or isinstance(extra_mpi_args, str)
    _expect(text, "extra_mpi_args", extra_mpi_args, "one string, as in a shell")
    if launcher == "pmi" and extra_mpi_args:
        raise ValueError(
            "extra_mpi_args are for mpiexec, which launcher='pmi' does not run: set MPI's variables with env,"
            " or use launcher='mpiexec' with Open MPI"
        )
    if launcher == "pmi":
        return None
    try:
        return shlex.split(extra_mpi_args or "")
    except ValueError as exc:
        raise ValueError(f"extra_mpi_args={extra_mpi_args!r}: {exc}") from None


def _mpiexec(arguments: list[str], secret: Secret, executable: str | None) -> MpiexecRendezvous:
    try:
        return MpiexecRendezvous(find(), arguments, secret, executable)
    except LaunchError as exc:
        raise SparkError(f"launcher='mpiexec' needs an mpiexec on the driver: {exc}") from None


def _active_context() -> Any:
    try:
        from pyspark import SparkContext
    except ImportError:
        raise SparkError('pyspark is not installed: pip install "pyhvd[spark]"') from None
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


def _driver_hosts(conf: Any) -> tuple[list[str], list[str]]:
    """Return the host that Spark's driver listens on, and the name by which its executors know it."""
    host = conf.get("spark.driver.host") or "127.0.0.1"
    bind = conf.get("spark.driver.bindAddress") or host
    return [bind.strip("[]")], [host.strip("[]")]  # Spark writes IPv6 addresses in brackets


def _positive(num_proc: int) -> int:
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise ValueError(f"num_proc={num_proc!r}: expected a number of ranks, 1 at least")
    return num_proc


def _start_timeout(given: float | None, environ: Mapping[str, str]) -> float:
    """Return the argument, else the environment's value, else the default."""
    source, value = "start_timeout", cast(Any, given)
    for name in ("PYHVD_SPARK_START_TIMEOUT", "HOROVOD_SPARK_START_TIMEOUT"):
        if value is None and name in environ:
            source = name
            try:
                value = float(environ[name])
            except ValueError:
                value = math.nan
    if value is None:
        return _START_TIMEOUT_S
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    seconds = float(value) if is_number else math.nan
    if not 0 < seconds < math.inf:
        kind = ValueError if source == "start_timeout" else ConfigError
        text = value if source == "start_timeout" else environ[source]
        raise kind(f"{source}={text!r}: expected a number of seconds above 0")
    return seconds


def _interfaces(nics: Iterable[str] | None) -> list[str] | None:
    """Return each interface once, in the given order; sorted if they are a set."""
    if nics is None:
        return None
    if isinstance(nics, str):
        return [nics]
    _expect(isinstance(nics, Iterable), "nics", nics, "names of network interfaces")
    names = list(dict.fromkeys(nics))
    _expect(all(isinstance(name, str) for name in names), "nics", names, "names of network interfaces")
    return sorted(names) if isinstance(nics, (set, frozenset)) else names


def _rank_env(env: Mapping[str, str] | None, nics: list[str] | None) -> dict[str, str]:
    chosen = dict(env or {})
    for name, value in chosen.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ValueError(f"env: {name!r}={value!r}: names and values are strings")
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(
                f"env: {name!r}: invalid name or value: a name is not empty and has no '='; neither has NUL"
            )
        if sendable(name + value) != name + value:
            raise ValueError(f"env: {name!r}: it is not UTF-8, and cannot be sent to the executors")
    size = sum(len(f"{name}={value}".encode()) for name, value in chosen.items())
    if size > _MOST_ENV:
        raise ValueError(f"env: {size} bytes in all; {_MOST_ENV} are the most: give the ranks more by args")
    for nic in (nics or [])[:1]:
        # MPICH uses one of these between hosts, depending on how it was built.
        chosen.setdefault("UCX_NET_DEVICES", nic)
        chosen.setdefault("FI_TCP_IFACE", nic)
        # Open MPI uses this.
        chosen.setdefault("OMPI_MCA_btl_tcp_if_include", nic)
    return chosen


def _use_barrier(conf: Any) -> bool:
    """Return whether to use barrier mode, which starts all tasks or none; not with dynamic allocation."""
    if not _is_dynamic(conf):
        return True
    if conf.get("spark.speculation", "false").lower() == "true":
        raise SparkError(
            "with dynamic allocation and spark.speculation, Spark would start some ranks twice: set"
            " spark.speculation to false"
        )
    return False


def _is_dynamic(conf: Any) -> bool:
    """Return whether Spark starts and ends executors as its jobs need them."""
    given: str = conf.get("spark.dynamicAllocation.enabled", "false")
    return given.lower() == "true"

"""``init()`` and ``shutdown()``: starting and stopping pyhvd on this rank."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyhvd._version import __version__
from pyhvd.api import logs, process_sets
from pyhvd.api.process_sets import ProcessSet
from pyhvd.common import launcher_hooks
from pyhvd.common.text import list_members
from pyhvd.config import Config
from pyhvd.engine import context
from pyhvd.engine.autotuner import SampleLog, open_log
from pyhvd.engine.context import Context, ContextHolder, StaticSet
from pyhvd.errors import ConfigError, NotInitializedError, TransportError
from pyhvd.job.mpi.alone import explain_alone
from pyhvd.job.mpi.flavour import explain_no_mpi, judge_library
from pyhvd.job.mpi.rank_env import claim_rank, explain_child, read_torchrun
from pyhvd.observe.prometheus import Endpoint
from pyhvd.transport.mpi import ending
from pyhvd.transport.world import World

_log = logging.getLogger("pyhvd")

_HOW = "called shutdown()"
_before_leaving: list[Callable[[], Any]] = []


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Start pyhvd on this rank. Collective; a second call before ``shutdown()`` does nothing.

    Parameters
    ----------
    comm : list of int, or mpi4py.MPI.Intracomm, optional
        The ranks that take part: some ranks of the world, which then count from 0, or a communicator, which
        is duplicated. None for all ranks.
    process_sets : list of ProcessSet, or ``"dynamic"``, optional
        Static process sets, the same on every rank; ``"dynamic"`` permits
        :func:`add_process_set` and :func:`remove_process_set`, as PYHVD_DYNAMIC_PROCESS_SETS=1 does.

    Raises
    ------
    ValueError
        Bad arguments on this rank or on another one, ranks that disagree, or a rank outside ``comm``.
    ConfigError
        An environment variable cannot be parsed.
    TransportError
        MPI's thread level does not allow a background thread; or MPI has found this rank alone, though its
        launcher has started more.
    NotInitializedError
        This process is a child of a rank; see :func:`pyhvd.child_environment`.
    ImportError
        mpi4py finds no MPI library.
    RuntimeError
        Called in a callback of a handle.

    Examples
    --------
    >>> import pyhvd as hvd
    >>> hvd.init()
    >>> hvd.size() >= 1
    True
    """
    holder = context.current_holder()
    if holder.context is not None and holder.context.runtime.is_here():
        raise RuntimeError("a callback of a handle must not call init(): that waits")
    with holder.lock:
        if holder.context is not None:
            holder.context.check_usable()
            if holder.context.runtime.ended is None:
                return
            leave(holder, None)
        _start(holder, comm, process_sets)
    if holder.make_world is None:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        launcher_hooks.tell_up()


def _start(holder: ContextHolder, comm: Any, sets: Iterable[ProcessSet] | str | None) -> None:
    config, notices, error = _read_config(holder, sets)
    world = holder.make_world() if holder.make_world is not None else _mpi_world(comm, config)
    by_comm = hasattr(comm, "Get_group")
    logs.set_up(config)
    holder.rank = world.topology.rank
    given: list[Any] = []
    prepared: list[StaticSet] = []
    log: SampleLog | None = None
    endpoint: Endpoint | None = None
    try:
        if config.metrics_port is not None:
            endpoint = Endpoint(
                config.metrics_port, config.metrics_address, world.topology.local_rank, config.metrics_targets
            )
        given = [] if sets is None or isinstance(sets, str) else list(sets)
        prepared = process_sets.prepare(given, world, by_comm_allowed=by_comm)
        log = open_log(config, world.topology.rank)
    except ConfigError as exc:
        error = error or ConfigError(config.users_words(str(exc)))
    except (ValueError, TypeError, NotImplementedError, ImportError) as exc:
        error = error or exc
    try:
        refusal = "" if error is None else f"{type(error).__name__}: {error}"
        active = Context(world, config, prepared, refusal, log)
    except BaseException as exc:
        holder.rank = None
        if log is not None:
            log.close()
        if endpoint is not None:
            endpoint.close()
        if not isinstance(exc, ValueError):  # the state of the other ranks is not known
            raise
        world.fabric.close()
        raise (error or exc) from None
    for each, static in zip(given, prepared, strict=True):
        process_sets.register(active, each, active.static_ids[static.ranks])
    holder.use(active)
    if holder.make_world is None:
        process_sets.global_process_set.mpi_comm = comm if by_comm else None
    if endpoint is not None:
        active.endpoint = endpoint
        endpoint.serve(active.runtime.meter.snapshot, active.job)
    for notice in (*(notices if active.topology.rank == 0 else ()), *active.notices):
        _log.warning("%s", notice)
    _say_hello(active)


def _say_hello(active: Context) -> None:
    place = active.topology
    _log.info(
        "pyhvd %s is up: %d ranks, %d of them on this node; the fast lane is %s",
        __version__,
        place.size,
        place.local_size,
        "on" if active.fast_path is not None and active.fast_path.delegates else "off",
    )
    _log.debug("rank %d is process %d on host %s", place.rank, os.getpid(), socket.gethostname())


def _read_config(
    holder: ContextHolder, sets: Iterable[ProcessSet] | str | None
) -> tuple[Config, list[str], Exception | None]:
    """Return the configuration and notices, or defaults and an error to announce to all ranks."""
    dynamic = sets == "dynamic"
    overrides = {**holder.overrides, **({"dynamic_process_sets": True} if dynamic else {})}
    try:
        if isinstance(sets, str) and not dynamic:
            raise ValueError(f"process_sets takes a list of ProcessSet, or 'dynamic', not {sets!r}")
        return *Config.from_env(None, **overrides), None
    except ValueError as exc:
        return Config(), [], exc


def _mpi_world(comm: Any, config: Config) -> World:
    if process := claim_rank():
        raise NotInitializedError(explain_child(process))
    import mpi4py

    if config.mpi_threads_disable:  # without effect if MPI has been initialised
        mpi4py.rc.thread_level = "serialized"
    ending.take_over()
    if read_torchrun() is not None and not config.allow_alone:
        from pyhvd.job.mpi.store_world import join_torchrun

        join_torchrun(config.link_interfaces)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as exc:
        raise ImportError(explain_no_mpi(exc)) from exc
    ending.watch_abort()
    from pyhvd.transport.mpi.fabric import sub_communicator
    from pyhvd.transport.mpi.world import mpi_world, start_mpi

    start_mpi()
    if comm is None:
        if MPI.COMM_WORLD.Get_size() == 1 and not config.allow_alone:
            library = judge_library(MPI.Get_library_version())
            if alone := explain_alone(os.environ, library.name):
                raise TransportError(alone)
        return mpi_world(MPI.COMM_WORLD)
    if isinstance(comm, MPI.Comm):
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ValueError(f"init(comm=...) takes an intracommunicator, and this is {comm!r}")
        return mpi_world(comm)
    if isinstance(comm, Sequence) and not isinstance(comm, str):
        ranks = process_sets.sorted_ranks(comm, "init(comm=...)")
        here, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
        process_sets.checked_ranks(ranks, size, "init(comm=...)")
        if here not in ranks:
            raise ValueError(
                f"rank {here} calls init(comm={list_members(ranks)}), but is not one of those ranks"
            )
        return mpi_world(sub_communicator(MPI.COMM_WORLD, ranks), owned=True)
    raise ValueError(f"init(comm=...) takes a list of ranks or an mpi4py communicator, not {comm!r}")


def shutdown() -> None:
    """Stop pyhvd on every rank. Does nothing before ``init()``; ``init()`` may be called again.

    Pending collectives of all ranks fail with :class:`~pyhvd.errors.ShutDownError`, which names the rank that
    asked for the shutdown. The other ranks still answer ``rank()`` until they call ``shutdown()`` themselves.

    In a callback of a handle it asks for the shutdown but does not wait, because the callback runs on the
    thread that must end; the next call waits. In a forked child it does nothing.
    """
    holder = context.current_holder()
    active = holder.context
    if active is not None and active.runtime.is_here():
        active.shutdown(None, _HOW)
        return
    with holder.lock:
        leave(holder, None)


def leave(holder: ContextHolder, cause: BaseException | None, how: str = _HOW) -> None:
    """End a holder's context; ``cause`` is this rank's failure, if any; ``how`` describes any other end."""
    active = holder.context
    if active is None or active.runtime.is_forked():  # in a forked child the context belongs to the parent
        return
    if holder.make_world is None:
        for function in _before_leaving if cause is None else ():
            function()
        launcher_hooks.tell_down()
    active.shutdown(cause, how)  # after an interrupt, the caller can call it again
    if active.endpoint is not None:
        active.endpoint.close()
    process_sets.forget(active)
    holder.use(None)
    holder.rank = None


def call_before_leaving(function: Callable[[], Any]) -> None:
    """Call a function whenever this process is about to leave pyhvd without a failure of its own."""
    _before_leaving.append(function)


def call_after_leaving(function: Callable[[], Any]) -> None:
    """Call a function at the interpreter's exit, after pyhvd has been left."""
    atexit.unregister(_at_exit)
    atexit.register(function)
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Announce the failure of an ending rank, so that no rank waits for it."""
    holder = context.current_holder()
    cause = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    leave(holder, cause, "has ended")

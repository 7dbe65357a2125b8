"""Context: one rank's runtime, built by ``init()``, torn down by ``shutdown()``.

Owns the handshake of the ranks, the engine, the names of unnamed tensors, and the choice of the context that
the module-level functions use: the process's, or that of a thread that plays a rank (in tests). Knows no
verbs; of process sets it knows only ids and ranks.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pyhvd._version import __version__
from pyhvd.backends.base import Pieces
from pyhvd.backends.host import HostBackend
from pyhvd.backends.shm import ShmBackend, make_backend
from pyhvd.common import launcher_hooks
from pyhvd.common.processes import ProcessPlace, here
from pyhvd.common.text import (
    describe_exception,
    describe_ranks,
    describe_traceback,
    describe_values,
    list_members,
)
from pyhvd.config import SHARED, Config, port_range
from pyhvd.devices.base import Device
from pyhvd.engine.autotune_search import LARGEST_CHUNK
from pyhvd.engine.autotuner import SampleLog, make_tuner
from pyhvd.engine.fast_path import connect, open_fast_path
from pyhvd.engine.runtime import Runtime, RuntimeParts
from pyhvd.engine.set_backends import SetBackends
from pyhvd.errors import HorovodInternalError, NotInitializedError
from pyhvd.job.mpi.rank_env import read_generation
from pyhvd.native.shared_memory import (
    CallOrder,
    FastPathHolder,
    count_rank_threads,
    current_context,
    pool_counts,
)
from pyhvd.negotiation.message_table import StragglerStats
from pyhvd.negotiation.messages import FOUNDING, GLOBAL_SET, UNNAMED, ErrorInfo, ErrorKind, TimelineOrder
from pyhvd.observe.hang_reporter import RankLocations
from pyhvd.observe.hooks import Instruments
from pyhvd.observe.host_meter import HostMeter
from pyhvd.observe.metrics import Meter
from pyhvd.observe.prometheus import Endpoint
from pyhvd.observe.timeline import DYNAMIC, Recorder, new_job
from pyhvd.transport.arena import Arena
from pyhvd.transport.fabric import Fabric, Unavailable, allgather_decoded
from pyhvd.transport.hosts import HostsFabric
from pyhvd.transport.links import LinkOptions
from pyhvd.transport.world import World

Ranks = tuple[int, ...]


class Counts(dict[str, int]):
    """The last number of one process set's names, by prefix, until the counts restart: then it gets others.

    Attributes
    ----------
    restarted : bool
        Whether they have restarted. Set once, before the call that restarts them ends; read without a lock.
    """

    restarted = False


class StaticSet(NamedTuple):
    """A process set given to ``init()``; each rank knows only its own communicator's ranks."""

    ranks: Ranks
    by_comm: bool = False


class RankHello(msgspec.Struct, frozen=True, array_like=True):
    """The first message between ranks."""

    version: str
    shared: tuple[Any, ...]
    sets: list[StaticSet]
    error: str = ""
    job: str = ""
    place: ProcessPlace = ProcessPlace("", 0)


# Made here: with ranks as threads, several first uses at once may crash msgspec.
_hello_decoder = msgspec.msgpack.Decoder(RankHello)


class KeptName:
    """A name from a process set's counts, which an object keeps for its calls until the counts restart.

    They restart at a join, with a new context and with a new set. The next call then takes a new name. So a
    name follows from the order in which the rank has first used such objects since then, and this order must
    be the same on all members of the set. A copy of the object takes a name of its own.

    Parameters
    ----------
    prefix : str
        How the name begins.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._kept: tuple[str, Counts] | None = None

    def in_set(self, process_set: Any) -> str:
        """Return the name for a call in a process set; see :meth:`Context.members_of` for the errors."""
        active = current()
        set_id, _ = active.members_of(process_set)
        self._kept = active.keep_name(set_id, self._prefix, self._kept)
        return self._kept[0]

    def __reduce__(self) -> tuple[type[KeptName], tuple[str]]:
        return KeptName, (self._prefix,)


class Context:
    """One rank's runtime. Collective: every rank of the world builds one at the same time.

    Parameters
    ----------
    world : World
        The transports to build on.
    config : Config
        This rank's configuration.
    static_sets : sequence of StaticSet
        Process sets that exist from the start.
    error : str
        Why this rank cannot start, or empty; with an error every rank's ``init`` fails.
    autotune_log : SampleLog, optional
        Rank 0's log of the autotuner; the context closes it.

    Raises
    ------
    ValueError
        The ranks differ in version or in process sets, or one of them reported an error.
    TimelineError
        A rank cannot write its timeline.
    """

    def __init__(
        self,
        world: World,
        config: Config,
        static_sets: Sequence[StaticSet] = (),
        error: str = "",
        autotune_log: SampleLog | None = None,
    ) -> None:
        self.topology = world.topology
        self.threads_supported = world.threads
        self.notices: list[str] = []
        self._generation = read_generation(os.environ)
        hello = RankHello(
            __version__,
            tuple(getattr(config, knob) for knob in SHARED),
            list(static_sets),
            error,
            _make_job_name("" if self._generation is None else self._generation.job),
            here(),
        )
        heard = allgather_decoded(world.fabric, hello, _hello_decoder, "its greeting")
        sets = _agree(heard)
        self.config = self._adopt(config, heard)
        self.job = heard[0].job
        self.endpoint: Endpoint | None = None
        self.static_ids: dict[Ranks, int] = {ranks: i for i, ranks in enumerate(sets, 1)}
        self.process_sets: dict[int, Ranks] = dict(enumerate([tuple(range(self.topology.size)), *sets]))
        self._world = world
        self._counts: dict[int, Counts] = {}
        self.orders: dict[tuple[int, str], CallOrder] = {}
        self._lock = threading.Lock()
        self.hooks = Instruments()
        self.warned_of_memory = False
        self._device: Device | None = None
        places = [hello.place for hello in heard]
        self.runtime = self._make_runtime(sets, places, autotune_log)
        self.runtime.start()

    def _make_runtime(
        self, sets: Sequence[Ranks], places: Sequence[ProcessPlace], log: SampleLog | None
    ) -> Runtime:
        world, config, rank = self._world, self.config, self.topology.rank
        open_window = world.open_window if config.fast_lane else None
        recorder = self._make_recorder(world)
        between = HostMeter(rank, self.topology.hosts, [place.host for place in places])
        make = self._backend_maker(recorder, between)
        everyone = make(world.fabric, self.process_sets[GLOBAL_SET])
        self.fast_path = open_fast_path(world.fabric, open_window, everyone, config)
        checked = config.check != "off"
        without = f"PYHVD_CHECK={config.check} is on" if checked else "there is no fast lane"
        several = isinstance(everyone.fabric, HostsFabric)
        self.carrier = str(everyone.fabric.choice) if isinstance(everyone.fabric, HostsFabric) else ""
        if several:
            without = "the ranks are on several hosts"
        no_arena = self.fast_path is None or several
        self.arena = Unavailable(without) if no_arena else world.open_arena(world.fabric)
        if self.fast_path is not None:
            self.fast_path.record_in(recorder.trace)
        recorder.fast_path, recorder.members = self.fast_path, self.process_sets
        recorder.hosts = between.names
        recorder.begin(everyone.fabric)
        tuner = None
        if config.autotune and rank == 0:
            windowed = isinstance(everyone, ShmBackend)
            tuner = make_tuner(config, self.topology.size, log, windowed=windowed)
        holder = current_holder()  # callbacks of handles use this rank's context too
        threads = None if holder is process_holder else (threading.get_ident(),)
        long_waits = bool if self.fast_path is None else self.fast_path.has_long_waits
        return Runtime(
            connect(world, self.fast_path, everyone.fabric),
            SetBackends(everyone, make),
            sets,
            config,
            RuntimeParts(
                where=RankLocations(rank, places, threads, long_waits, self.job),
                hooks=self.hooks,
                recorder=recorder,
                make_meter=partial(self._make_meter, between),
                fast_path=self.fast_path,
                arena=self.arena if isinstance(self.arena, Arena) else None,
                surroundings=lambda: playing_rank(holder),
                tuner=tuner,
            ),
        )

    def _make_meter(self, between: HostMeter, lateness: StragglerStats | None) -> Meter:
        topology, timed = self.topology, self.config.metrics_port is not None
        number = None if self._generation is None else self._generation.number
        results = self.arena.counts if isinstance(self.arena, Arena) else pool_counts
        return Meter(
            topology.rank, topology.size, self.fast_path, lateness, between, number, results, timed=timed
        )

    def _backend_maker(
        self, recorder: Recorder, between: HostMeter
    ) -> Callable[[Fabric, Ranks], HostBackend]:
        """Return the function that makes the backend of a process set, from its fabric and ranks."""
        config, topology = self.config, self.topology
        open_window = self._world.open_window if config.fast_lane else None
        interfaces = tuple(each.strip() for each in config.link_interfaces.split(",") if each.strip())
        options = LinkOptions(
            interfaces,
            carrier=config.link_carrier,
            open_mpi=self._world.open_mpi,
            ports=port_range(config.link_ports),
        )
        links = options if config.links else None
        pieces = Pieces(config.chunk_size, config.staging_size)
        largest = max(config.chunk_size, LARGEST_CHUNK) if config.autotune else config.chunk_size

        def make(fabric: Fabric, ranks: Ranks) -> HostBackend:
            hosts = [topology.hosts[each] for each in ranks]
            agreement = len(ranks) == topology.size
            backend = make_backend(
                fabric, ranks, hosts, open_window, links, pieces, largest, agreement=agreement
            )
            recorder.watch(backend)
            between.watch(backend.fabric)
            return backend

        return make

    def _make_recorder(self, world: World) -> Recorder:
        """Open this rank's timeline, if recording starts with init()."""
        number = 0 if self._generation is None else self._generation.number
        recorder = Recorder(self.topology.rank, self.topology.size, self.hooks, number)
        if self.config.timeline not in ("", DYNAMIC):
            order = TimelineOrder(self.config.timeline, self.config.timeline_mark_cycles, new_job())
            recorder.open(order, world.fabric)
        return recorder

    def _adopt(self, config: Config, heard: Sequence[RankHello]) -> Config:
        """Take the shared knobs from rank 0; log each difference."""
        for index, knob in enumerate(SHARED):
            if heard[self.topology.rank].shared[index] != heard[0].shared[index]:
                self.notices.append(
                    f"{knob} is {heard[self.topology.rank].shared[index]!r} on rank {self.topology.rank},"
                    f" but {heard[0].shared[index]!r} on rank 0, which binds every rank"
                )
        return replace(config, **dict(zip(SHARED, heard[0].shared, strict=True)))

    def next_name(self, process_set: int, prefix: str = UNNAMED) -> str:
        """Return the name of an unnamed tensor; ranks that call in the same order get the same names.

        A call that is rejected because of its process set gets no number, and that rank's order is lost: give
        tensors names.
        """
        if prefix == UNNAMED and self.fast_path is not None:
            number = self.fast_path.next_number(process_set)
            if number >= 0:
                return f"{prefix}.{number}"
        return self.keep_name(process_set, prefix, None)[0]

    def keep_name(self, process_set: int, prefix: str, kept: tuple[str, Counts] | None) -> tuple[str, Counts]:
        """Return the kept name if it is of this set and its counts have not restarted, else the next name."""
        with self._lock:
            counts = self._counts.setdefault(process_set, Counts())
            if kept is not None and kept[1] is counts:
                return kept
            number = counts[prefix] = counts.get(prefix, -1) + 1
            return f"{prefix}.{number}", counts

    def make_order(self, process_set: Any, name: str) -> CallOrder:
        """Return the order of a process set's calls of one name; :func:`find_order` finds it from then on.

        Raises ValueError as :meth:`members_of` does, and RuntimeError in a callback of a handle, which must
        not wait.
        """
        self.runtime.check_may_wait()
        set_id, _ = self.members_of(process_set)
        return self.orders.setdefault((set_id, name), CallOrder(self.runtime.thread_id))

    def members_of(self, process_set: Any) -> tuple[int, Ranks]:
        """Return the id and the members of a process set that this rank may use.

        Raises
        ------
        ValueError
            The object is not a ProcessSet, the set is not registered, or this rank is not a member.
        """
        if not hasattr(process_set, "process_set_id"):
            raise ValueError(f"process_set takes a ProcessSet, not {process_set!r}")
        set_id: int | None = process_set.process_set_id
        ranks = None if set_id is None else self.process_sets.get(set_id)
        if set_id == FOUNDING:
            ranks = tuple(process_set.ranks)
        if set_id is None or ranks is None:
            raise ValueError(
                f"{process_set} has not been registered, or was removed: pass it to init(process_sets=[...])"
                " or to add_process_set()"
            )
        if self.topology.rank not in ranks:
            raise ValueError(f"rank {self.topology.rank} is not a member of {process_set}")
        return set_id, ranks

    def settle_on(self, device: Device) -> None:
        """Note the device of this rank's arrays: that of the first array, until shutdown.

        Raises
        ------
        ValueError
            An earlier array was on another device.
        """
        if self._device is device:
            return
        with self._lock:
            settled = self._device = self._device or device
        if settled is not device:
            raise ValueError(
                f"this array is on {device.name}, but this rank's arrays have been on {settled.name}:"
                " a rank uses one device, so move the array there, or start a rank for each device"
            )

    def admit(self, set_id: int, ranks: Ranks) -> None:
        """Register a process set, and restart its counts: the id may be reused."""
        self._restart(set_id)  # no thread counts in the set before it is registered
        self.process_sets[set_id] = ranks

    def recount(self) -> None:
        """Restart the counts of all process sets, at the same place in the order on every rank.

        A join needs this: some ranks have called more often than others, and none of those calls is left.
        """
        for set_id in {*self._counts, *self.process_sets}:
            self._restart(set_id)

    def _restart(self, set_id: int) -> None:
        with self._lock:
            if (counts := self._counts.pop(set_id, None)) is not None:
                counts.restarted = True
        if self.fast_path is not None:
            self.fast_path.restart_numbers(set_id)

    def check_usable(self) -> None:
        """Raise NotInitializedError in a forked child."""
        if self.runtime.is_forked():
            raise NotInitializedError(
                "pyhvd was initialised in the parent of this forked process: only the parent can call init()"
                " and collectives; rank() and size() answer here too"
            )

    def shutdown(self, cause: BaseException | None, how: str) -> None:
        """Stop the runtime of every rank; pending collectives fail with the cause."""
        rank = self.topology.rank
        failed = cause is not None
        if isinstance(cause, HorovodInternalError) and self.runtime.ended is not None:
            cause = None
        if cause is None:
            reason = ErrorInfo(ErrorKind.SHUT_DOWN, f"pyhvd has been shut down: rank {rank} {how}", rank)
        else:
            text = f"rank {rank} failed: {describe_exception(cause)}"
            reason = ErrorInfo(ErrorKind.RANK_FAILED, text, rank, traceback=describe_traceback(cause))
        self.runtime.stop(reason)
        self.recount()
        # A supervisor prints a reported failure before it ends the job; MPI would end the job first.
        if self.runtime.broken and not (failed and launcher_hooks.supervised):
            self._world.abort()


def _make_job_name(letters: str) -> str:
    """Return a readable, unique name of the job; rank 0's name counts.

    `letters` tell elastic jobs apart, so that all generations of one have the same name; else they are empty.
    """
    script = re.sub(r"[^A-Za-z0-9_]+", "-", Path(sys.argv[0]).stem)[:40].strip("-") if sys.argv else ""
    return f"{script or 'python'}-{letters or secrets.token_hex(3)}"


def _agree(heard: Sequence[RankHello]) -> list[Ranks]:
    """Return the static process sets that all ranks agree on, in the order of their ids."""
    errors = {rank: hello.error for rank, hello in enumerate(heard) if hello.error}
    if errors:
        raise ValueError(f"pyhvd initialization failed: {describe_values(errors)}")
    versions = {rank: hello.version for rank, hello in enumerate(heard)}
    if len(set(versions.values())) > 1:
        raise ValueError(f"the ranks run different versions of pyhvd: {describe_values(versions)}")
    numbers = {rank: f"{len(hello.sets)} process sets" for rank, hello in enumerate(heard)}
    if len(set(numbers.values())) > 1:
        raise ValueError(f"init() got different process sets: {describe_values(numbers)}")
    world = tuple(range(len(heard)))
    agreed: list[Ranks] = []
    for index in range(len(heard[0].sets)):
        given = [hello.sets[index] for hello in heard]
        distinct = sorted({ranks for ranks, _ in given})
        if len(distinct) > 1 and not all(by_comm for _, by_comm in given):
            texts = {rank: list_members(ranks) for rank, (ranks, _) in enumerate(given)}
            raise ValueError(f"init() got different process sets in place {index}: {describe_values(texts)}")
        for ranks in distinct:
            if ranks == world or ranks in agreed:
                twin = "the global process set" if ranks == world else "another one"
                raise ValueError(f"process set of {describe_ranks(ranks)} is a duplicate of {twin}")
            agreed.append(ranks)
    return agreed


# -- the context of the module-level functions ------------------------------------------------------


class _ThreadHolder(threading.local):
    """Set in a thread that plays a rank."""

    rank: ContextHolder | None = None


class ContextHolder(FastPathHolder):
    """Holds the context of the process, or of a thread that plays a rank.

    ``rank`` is set as soon as ``init()`` knows it, for log records. ``fast_path`` is the context's; a
    submission reads it without the context.
    """

    context: Context | None  # read-only: `use` sets it

    def __init__(self) -> None:
        self.rank: int | None = None
        self.lock = threading.RLock()  # a signal handler may call shutdown() meanwhile
        self.make_world: Callable[[], World] | None = None
        self.overrides: dict[str, Any] = {}

    def use(self, context: Context | None) -> None:
        """Set the context of the module-level functions, or clear it."""
        if context is None:
            self.keep(None, None, None)
        else:
            self.keep(context, context.fast_path, context.orders)


process_holder = ContextHolder()
_thread = _ThreadHolder()
_players = threading.Lock()


def current_holder() -> ContextHolder:
    """Return this thread's holder if it plays a rank, else the process's."""
    holder = _thread.rank
    return holder if holder is not None else process_holder


@contextlib.contextmanager
def playing_rank(holder: ContextHolder) -> Iterator[None]:
    """Set this thread's holder: one of its own, or the process's, as the background thread does."""
    before, _thread.rank = _thread.rank, holder
    # While no thread has a holder of its own, submissions skip the lookup.
    own = int(holder is not process_holder)
    with _players:
        count_rank_threads(own)
    try:
        yield
    finally:
        with _players:
            count_rank_threads(-own)
        _thread.rank = before


def current() -> Context:
    """Return the context in use.

    Raises
    ------
    NotInitializedError
        No context exists, or this is a forked child.
    """
    context: Context | None = current_context()
    if context is None:
        context = inherited()
        context.check_usable()
    return context


def inherited() -> Context:
    """Return the context in use, in a forked child that of its rank: only its constants can be used there.

    Raises
    ------
    NotInitializedError
        No context exists.
    """
    context: Context | None = current_holder().context
    if context is None:
        raise NotInitializedError("pyhvd has not been initialized: call pyhvd.init() first")
    return context

"""The executor: takes the entries of agreed responses, calls the backend, and completes the handles.

Owns the backends, by process set. Only the runtime's thread calls it, except for ``abort``. Knows nothing of
negotiation. A joined rank has no entries: it contributes identity elements, or zero rows.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pyhvd.arrays import Bytes, TensorView
from pyhvd.backends.base import Pieces, Views
from pyhvd.backends.host import HostBackend, rows_of
from pyhvd.backends.shm import ShmBackend
from pyhvd.config import Config
from pyhvd.devices.array_libraries import View
from pyhvd.dtypes import BY_CODE
from pyhvd.engine.device_executor import DeviceExecutor
from pyhvd.engine.error_mapping import error_of_response, exception_of, note_of
from pyhvd.engine.plans import Entries, allocate, as_splits, gathered
from pyhvd.engine.result_checks import Checker
from pyhvd.engine.set_backends import SetBackends
from pyhvd.errors import CorruptionError, InternalError, ShutDownError
from pyhvd.negotiation.messages import GLOBAL_SET, HOST, ErrorInfo, ErrorKind, RequestType, Response, verb
from pyhvd.observe.hooks import Instruments
from pyhvd.observe.metrics import MPI, WINDOW, Meter
from pyhvd.queue import TensorEntry, TensorQueue

if TYPE_CHECKING:
    from pyhvd.engine.fast_path import FastPathAdapter
    from pyhvd.observe.hang_reporter import RankLocations
    from pyhvd.transport.fabric import Fabric


_SET_CHANGES = (RequestType.ADD_PROCESS_SET, RequestType.REMOVE_PROCESS_SET)


@dataclass(eq=False)
class Executor:
    """Runs responses on one rank.

    Parameters
    ----------
    where : RankLocations
        Where this rank and the others are.
    queue : TensorQueue
        Submitted tensors that wait for agreement.
    backends : SetBackends
        The backends of this rank's process sets; the executor makes and closes them.
    sets : dict of int to tuple of int
        Members of every process set; the worker updates it, the executor only reads it.
    meter : Meter
        Counts the responses.
    fast_path : FastPathAdapter or None
        Learns of added and removed sets.
    hooks : Instruments
        Notified of batches.
    config : Config
        Says whether results are checked.
    """

    where: RankLocations
    queue: TensorQueue
    backends: SetBackends
    sets: dict[int, tuple[int, ...]]
    meter: Meter
    fast_path: FastPathAdapter | None
    hooks: Instruments
    config: Config

    def __post_init__(self) -> None:
        self._checker = Checker(self.config.check)
        # For the watchdog: the entries of the running batch, and the number of ended batches.
        self.running: Entries = []
        self.ended = 0
        config = self.config
        limits = config.stall_shutdown_time_seconds, config.stall_check_time_seconds
        patience = next((each for each in limits if each and not config.stall_check_disable), math.inf)
        self.devices = DeviceExecutor(
            self.where, self.backends, self.sets, self.hooks, self._run_on_host,
            checked=config.check != "off", patience=patience,
        )  # fmt: skip
        for set_id, ranks in self.sets.items():
            if self.where.rank in ranks:
                self._add_set(set_id, ranks)
        if self.fast_path is not None:
            self.fast_path.open_set(GLOBAL_SET, self.backends[GLOBAL_SET])
        self._run: dict[int, Callable[[list[Response], Entries], None]] = {
            RequestType.ALLREDUCE: self._allreduce,
            RequestType.ADASUM: self._adasum,
            RequestType.REDUCESCATTER: self._reducescatter,
            RequestType.ALLGATHER: self._allgather,
            RequestType.BROADCAST: self._broadcast,
            RequestType.ALLTOALL: self._alltoall,
            RequestType.BARRIER: self._tell_value,
            RequestType.JOIN: self._tell_value,
            RequestType.ADD_PROCESS_SET: self._add_process_set,
            RequestType.REMOVE_PROCESS_SET: self._remove_process_set,
        }

    @property
    def fabric(self) -> Fabric:
        """The fabric of all ranks."""
        return self.backends[GLOBAL_SET].fabric

    def run(self, batch: list[Response]) -> None:
        """Run one batch of fused responses, and complete their entries."""
        if self.hooks.active and batch[0].error is None:
            self.hooks.batch_started(batch)
            self._carry_out(batch)
            self.hooks.batch_ended(batch)
        else:
            self._carry_out(batch)

    def _carry_out(self, batch: list[Response]) -> None:
        first = batch[0]
        entries = [self.queue.pop(r.process_set, r.request.name) for r in batch]
        ready = self.meter.clock() if any(entry is not None for entry in entries) else 0
        if first.error is not None:
            if entries[0] is None:
                raise InternalError(
                    f"an error arrived for {first.request.name!r}, which is not in flight here"
                )
            entries[0].done(None, exception_of(first.error, first.request.name, self.where.places))
            return
        self.running = entries
        try:
            if first.process_set not in self.backends and first.request.type not in _SET_CHANGES:
                self._open_set(first.process_set)
            self._count(first, [entry for entry in entries if entry is not None], ready)
            if first.request.device == HOST:
                self._run_on_host(batch, entries)
            else:
                self.devices.run(batch, entries)
            self.meter.carried_out(ready)
        except BaseException as exc:
            # The entries have left the queue, so only this method can still complete them.
            for entry in entries:
                if entry is not None:
                    entry.done(None, error_of_response(exc, first))
            raise
        finally:
            self.running = []
            self.ended += 1

    def _run_on_host(self, batch: list[Response], entries: Entries) -> None:
        self._run[batch[0].request.type](batch, entries)

    def look(self, now: float) -> float | None:
        """Do due work of the hooks and devices; return when (monotonic s) to call again, None for never."""
        times = [
            self.hooks.look(now) if self.hooks.active else None,
            self.devices.look(now) if self.devices.busy else None,
        ]
        return min((time for time in times if time is not None), default=None)

    def resize(self, pieces: Pieces) -> None:
        """Use other piece sizes from now on, in every set."""
        self.backends.resize(pieces)

    def _count(self, first: Response, entries: Sequence[TensorEntry], ready: int) -> None:
        if not entries:
            return  # this rank has joined, and has no tensor of its own to count
        lane = WINDOW if isinstance(self.backends.get(first.process_set), ShmBackend) else MPI
        sizes = [0 if entry.source is None else entry.source.nbytes for entry in entries]
        told = [entry.announced_ns for entry in entries]
        self.meter.agreed(verb(first.request.type), lane, sizes, told, ready)

    def abort(self, info: ErrorInfo) -> None:
        """Abort the collectives of every set, so that no rank and no device waits for this rank.

        Not collective; from any thread. If the abort of one set fails, the other sets are still aborted.
        """
        note = note_of(info)
        with contextlib.ExitStack() as aborts:
            aborts.callback(self.devices.abort, info.message)
            aborts.callback(self.backends.abort, note)

    def close(self, stop: ErrorInfo) -> None:
        """Close the backends, in the order of their sets; collective.

        Nothing is aborted: other ranks may still run collectives to which this rank has contributed.
        """
        if stop.kind != ErrorKind.SHUT_DOWN:
            self.devices.abort(stop.message)
        self.devices.close()
        self.backends.close()

    # -- reductions ----------------------------------------------------------------------------------

    def _allreduce(self, batch: list[Response], entries: Entries) -> None:
        backend, sources = self.backends[batch[0].process_set], _sources(entries)
        self._look_at_inputs(batch, sources)
        self._reduce(backend, batch, sources, _targets(entries))
        self._deliver_targets(batch, entries)

    @staticmethod
    def _reduce(backend: HostBackend, batch: list[Response], sources: Views, targets: Views) -> None:
        counts = [math.prod(r.request.shape) for r in batch]
        backend.allreduce(sources, targets, counts, batch[0].request.reduce_spec(backend.size))

    def _adasum(self, batch: list[Response], entries: Entries) -> None:
        backend, sources = self.backends[batch[0].process_set], _sources(entries)
        counts = [math.prod(r.request.shape) for r in batch]
        spec = batch[0].request.reduce_spec(backend.size)
        self._look_at_inputs(batch, sources)
        with self.hooks.phase(f"{backend.name}_ADASUM"):
            backend.adasum(sources, _targets(entries), counts, spec)
        self._deliver_targets(batch, entries)

    def _reducescatter(self, batch: list[Response], entries: Entries) -> None:
        backend, sources = self.backends[batch[0].process_set], _sources(entries)
        shapes = [r.request.shape for r in batch]
        spec = batch[0].request.reduce_spec(backend.size)
        self._look_at_inputs(batch, sources)
        with self.hooks.phase(f"{backend.name}_REDUCESCATTER"):
            backend.reducescatter(sources, _targets(entries), shapes, spec)
        whole: list[Bytes | None] | None = None
        if self._checker.results:
            firsts = [sum(rows_of(r.request.shape[0], backend.size)[: backend.rank]) for r in batch]
            reduce = partial(self._reduce, backend, batch, sources)
            whole = self._checker.whole(batch, _targets(entries), firsts, reduce)
        self._deliver_targets(batch, entries, whole)

    # -- outputs whose size comes with the response ----------------------------------------------------

    def _allgather(self, batch: list[Response], entries: Entries) -> None:
        backend = self.backends[batch[0].process_set]
        shapes, counts = gathered(batch)
        outputs = self._allocate(backend, batch, entries, shapes)
        if outputs is None:
            return
        with self.hooks.phase(f"{backend.name}_ALLGATHER"):
            backend.allgather(_sources(entries), [out.bytes for out in outputs], counts)
        errors = self._compare(batch, [out.bytes for out in outputs])
        for response, entry, output, error in zip(batch, entries, outputs, errors, strict=True):
            if entry is not None:
                entry.done(None if error else (output.result, response.dims), error)

    def _alltoall(self, batch: list[Response], entries: Entries) -> None:
        (response,), (entry,) = batch, entries
        backend = self.backends[response.process_set]
        source = _sources(entries)[0]
        if entry is None or source is None:
            raise InternalError(f"alltoall {response.request.name!r} was agreed, but is not in flight here")
        with self.hooks.phase(f"{backend.name}_ALLTOALL_COUNTS"):
            received = self._exchange_splits(backend, response, entry.splits)
        outputs = self._allocate(backend, batch, entries, [(sum(received), *source.shape[1:])])
        if outputs is None:
            return
        row = math.prod(source.shape[1:]) * source.info.itemsize
        counts = [n * row for n in entry.splits], [n * row for n in received]
        with self.hooks.phase(f"{backend.name}_ALLTOALL"):
            backend.alltoall(source.bytes, counts[0], outputs[0].bytes, counts[1])
        if self._checker.results:
            sent, arrived = _blocks(source.bytes, counts[0]), _blocks(outputs[0].bytes, counts[1])
            members = self.sets[response.process_set]
            if error := self._checker.compare_blocks(response, sent, arrived, backend, members):
                entry.done(None, error)
                return
        entry.done((outputs[0].result, as_splits(received)), None)

    def _exchange_splits(
        self, backend: HostBackend, response: Response, splits: Sequence[int]
    ) -> Sequence[int]:
        """Return the rows from each rank."""
        if self.fast_path is None or not self.fast_path.wants_splits(response):
            return backend.exchange_counts(splits)
        table = backend.gather_counts(splits)
        self.fast_path.learn_splits(response, table)
        received: list[int] = table[:, backend.rank].tolist()
        return received

    def _allocate(
        self, backend: HostBackend, batch: list[Response], entries: Entries, shapes: Sequence[tuple[int, ...]]
    ) -> list[TensorView] | None:
        def make(response: Response, entry: TensorEntry | None, shape: tuple[int, ...]) -> TensorView:
            if entry is not None and (source := _on_host(entry.source)) is not None:
                return source.empty_like(shape)
            info = BY_CODE[response.request.dtype]  # this rank has joined, and drops the output
            return TensorView(np.empty(shape, np.dtype((np.void, info.itemsize))), info)

        with self.hooks.phase("ALLOCATE_OUTPUT"):
            return allocate(backend, batch, entries, shapes, make, self.sets[batch[0].process_set])

    # -- broadcast -------------------------------------------------------------------------------------

    def _broadcast(self, batch: list[Response], entries: Entries) -> None:
        (response,) = batch
        request = response.request
        root = self.sets[response.process_set].index(request.root)
        backend = self.backends[response.process_set]
        source, target = _sources(entries)[0], _targets(entries)[0]
        if source is None or target is None:
            nbytes = math.prod(request.shape) * BY_CODE[request.dtype].itemsize
            backend.broadcast(np.empty(nbytes, np.uint8), root)
            self._compare(batch, [None])
            return
        if backend.rank == root and source is not target:
            target.bytes[:] = source.bytes
        with self.hooks.phase(f"{backend.name}_BCAST"):
            backend.broadcast(target.bytes, root)
        self._deliver_targets(batch, entries)

    # -- checks, and handing results back ----------------------------------------------------------------

    def _look_at_inputs(self, batch: list[Response], sources: Views) -> None:
        if self._checker.finite:
            set_id = batch[0].process_set
            self._checker.look_at_inputs(batch, sources, self.backends[set_id].fabric, self.sets[set_id])

    def _compare(
        self, batch: list[Response], results: Sequence[Bytes | None]
    ) -> Sequence[CorruptionError | None]:
        if not self._checker.results:
            return [None] * len(batch)
        set_id = batch[0].process_set
        return self._checker.compare(batch, results, self.backends[set_id].fabric, self.sets[set_id])

    def _deliver_targets(
        self, batch: list[Response], entries: Entries, results: Sequence[Bytes | None] | None = None
    ) -> None:
        """Check the results, then complete the entries with their targets.

        The ranks compare ``results``, or their targets if it is None.
        """
        targets = _targets(entries)
        if self._checker.finite:
            self._checker.look_at_results(batch, targets, self.backends[batch[0].process_set].fabric)
        if results is None and self._checker.results:
            results = [target.bytes if target is not None else None for target in targets]
        errors = self._compare(batch, results or ())
        for entry, target, error in zip(entries, targets, errors, strict=True):
            if entry is None or target is None:
                continue
            try:
                target.copy_home()
            except ValueError as exc:  # the caller's array became read-only after the submission
                entry.done(None, exc)
                continue
            entry.done(None if error else target.result, error)

    # -- no tensors ------------------------------------------------------------------------------------

    def _tell_value(self, batch: list[Response], entries: Entries) -> None:
        if entries[0] is not None:
            entries[0].done(batch[0].value, None)

    def _add_process_set(self, batch: list[Response], entries: Entries) -> None:
        ranks, set_id = batch[0].request.ranks, batch[0].value
        if self.where.rank in ranks:
            self._add_set(set_id, ranks)
        self._tell_value(batch, entries)

    def _add_set(self, set_id: int, ranks: tuple[int, ...]) -> None:
        """Note a new set of which this rank is a member."""
        self.backends.add(set_id, ranks)
        if self.fast_path is not None:
            self.fast_path.add_set(set_id)

    def _open_set(self, set_id: int) -> None:
        """Prepare a set for its first batch. Collective over the set."""
        backend = self.backends.open(set_id)
        if self.fast_path is not None:
            self.fast_path.open_set(set_id, backend)

    def _remove_process_set(self, batch: list[Response], entries: Entries) -> None:
        removed = batch[0].request.ranks[0]
        left = self.queue.pop_set(removed)
        if self.fast_path is not None:
            left += self.fast_path.close_set(removed)
        for entry in left:
            text = (
                f"{verb(entry.request.type)} {entry.request.name!r}: process set {removed} has been removed"
            )
            entry.done(None, ShutDownError(text))
        self.devices.close_set(removed)
        self.backends.remove(removed)
        self._tell_value(batch, entries)


def _sources(entries: Entries) -> list[TensorView | None]:
    return [_on_host(entry.source) if entry is not None else None for entry in entries]


def _targets(entries: Entries) -> list[TensorView | None]:
    return [_on_host(entry.target) if entry is not None else None for entry in entries]


def _on_host(view: View | None) -> TensorView | None:
    """Return the view itself; the ranks have agreed that its tensor is in host memory."""
    assert view is None or isinstance(view, TensorView)
    return view


def _blocks(buffer: Bytes, counts: Sequence[int]) -> list[Bytes]:
    """Split a buffer into the parts of the ranks."""
    ends = list(itertools.accumulate(counts))
    return [buffer[end - count : end] for end, count in zip(ends, counts, strict=True)]

"""The group of torch.distributed whose collectives are pyhvd's, in a process set of its own.

torch calls the methods here by name, from Python and from C++. Calls have no name: their order in the group
pairs them, and ranks that call something else get pyhvd's MismatchError with all call sites.

1. :class:`ProcessGroup` is the whole group. torch's Python code calls it directly.
2. :class:`CpuBackend` is the part of a group of torch's own whose other devices have other backends. torch's
   C++ code calls it, which takes longer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as TorchBackend

from pyhvd.api.process_sets import ProcessSet, start_removal
from pyhvd.errors import HorovodInternalError
from pyhvd.native.shared_memory import (
    ALLGATHER,
    ALLTOALL,
    BARRIER,
    BROADCAST,
    GROUPED,
    IN_PLACE,
    PLACED,
    SCATTERS,
    WAITS,
    start,
    start_move,
)
from pyhvd.torch.distributed.errors import CollectiveError
from pyhvd.torch.distributed.monitored_barrier import MonitoredBarrier
from pyhvd.torch.distributed.ops import op_of
from pyhvd.torch.distributed.point_to_point import PointToPoint, ReceiveWork
from pyhvd.torch.distributed.tensors import (
    Store,
    as_bytes,
    flat,
    flat_parts,
    in_place,
    in_place_each,
    in_rows,
    listed,
    placed,
    placed_parts,
    store_each,
    store_elements,
    store_flat,
    store_part,
    store_parts,
    store_rows,
    store_sparse,
)
from pyhvd.torch.distributed.untraced import untraced
from pyhvd.torch.distributed.work import Work, end_now, join_works, make_work
from pyhvd.torch.sparse import sparse_allreduce_async

_NO_TIME = timedelta(0)
_SMALL_SCATTER = 4 << 20
"""A scatter is a broadcast of which each rank takes its part, if it gets at most so many bytes of others."""


@untraced
class Collectives:
    """What both kinds of groups have in common.

    Parameters
    ----------
    rank, size : int
        This rank's number in the group, and the number of ranks.
    process_set : ProcessSet
        The set of the group's ranks, made for it alone.
    timeout : timedelta
        How long a collective may take.
    point_to_point : PointToPoint
        Sends and receives.
    name : str
        torch's name of the group.
    is_default : bool
        Whether it is the group of all ranks that ``init_process_group`` makes.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        process_set: ProcessSet,
        timeout: timedelta,
        point_to_point: PointToPoint,
        name: str,
        *,
        is_default: bool,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # of torch's class, which comes after this one
        self._is_default = is_default
        self._rank, self._size = rank, size
        self._process_set, self._point_to_point = process_set, point_to_point
        self._ranks: list[int] = process_set.ranks or []
        self._group_name, self._description = name, "undefined"
        self._coalesced: list[Work] | None = None
        self._monitored: MonitoredBarrier | None = None
        self._sparse_calls = itertools.count()
        self._set_default_timeout(timeout)

    # -- what torch asks of a group --------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name."""
        return "pyhvd"

    name = getBackendName

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: pyhvd numbers the calls itself."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout.total_seconds() if timeout > _NO_TIME else None

    set_timeout = _set_default_timeout

    def shutdown(self) -> None:
        """Begin to remove the group; its calls that have not ended fail when all ranks have done so.

        The default group waits for that, at most for its timeout: ranks that end the program or pyhvd earlier
        would fail the calls of others, also in groups of which they are no members.
        """
        # Another rank may have removed it, and have ended the job.
        with contextlib.suppress(HorovodInternalError):
            removal = start_removal(self._process_set, unattended=not self._is_default)
            if removal is not None and self._is_default:
                removal.wait(self._limit)

    def abort(self) -> None:
        """Begin to remove the group, and wait for nobody."""
        with contextlib.suppress(HorovodInternalError):
            start_removal(self._process_set)

    # -- reductions ------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None) -> Work:
        """Reduce a tensor in place."""
        if type(tensors) is not list:
            tensors = listed(tensors)
        if len(tensors) > 1:
            return self.allreduce_coalesced(tensors, opts)
        tensor = tensors[0]
        chosen = op_of(opts, tensor.dtype, op)
        if tensor.layout is not torch.strided:
            name = f"sparse.{next(self._sparse_calls)}"
            handle = sparse_allreduce_async(tensor, name, chosen, self._process_set)
            return self._collect(make_work(handle, tensors, self._limit, partial(store_sparse, tensor)))
        sent, store = in_place(tensor)
        return self._reduce(IN_PLACE, sent, chosen, opts, tensors, store)

    def allreduce_coalesced(self, tensors: list[Any], opts: Any = None) -> Work:
        """Reduce several tensors in place, as one unit."""
        sent, store = in_place_each(tensors)
        return self._reduce(GROUPED | IN_PLACE, sent, op_of(opts, tensors[0].dtype), opts, tensors, store)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> Work:
        """Reduce a tensor into that of the root; the others' tensors stay as they are."""
        tensors = listed(tensors)
        sent, store = in_place(tensors[0])
        form = IN_PLACE if _root_of(opts) == self._rank else 0
        chosen = op_of(None if isinstance(opts, int) else opts, sent.dtype, op)
        return self._reduce(form, sent, chosen, opts, tensors, store if form else None)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, op: Any = None) -> Work:
        """Reduce a list of tensors, one for each rank, and give each rank its own."""
        outputs = listed(outputs)
        inputs = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
        sent, sizes = flat_parts(inputs)
        chosen = op_of(opts, inputs[0].dtype, op)
        if sizes == [outputs[0].numel()] * self._size:
            target, store = placed(outputs[0])
            return self._reduce(SCATTERS | PLACED, (sent, target), chosen, opts, outputs, store)
        own = slice(sum(sizes[: self._rank]), sum(sizes[: self._rank + 1]))
        return self._reduce(0, sent, chosen, opts, outputs, lambda all_: store_flat(outputs[0], all_[own]))

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        """Reduce a tensor, and give each rank its part."""
        if tensor.numel() != output.numel() * self._size:
            raise ValueError(
                f"the input has {tensor.numel()} elements, and the output {output.numel()}: it must have"
                f" {self._size} times as many, one part for each rank"
            )
        target, store = placed(output)
        sent = flat(tensor), target
        return self._reduce(SCATTERS | PLACED, sent, op_of(opts, tensor.dtype), opts, [output], store)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], inputs: list[Any], opts: Any = None
    ) -> Work:
        """Do several of :meth:`reduce_scatter_single` as one unit."""
        store = partial(store_each, [partial(store_flat, output) for output in outputs])
        sent = [flat(tensor) for tensor in inputs]
        return self._reduce(GROUPED | SCATTERS, sent, op_of(opts, sent[0].dtype), opts, outputs, store)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- moves -----------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = 0) -> Work:
        """Overwrite a tensor with the root's."""
        tensors = listed(tensors)
        if len(tensors) > 1:
            return join_works([self.broadcast([tensor], opts) for tensor in tensors], tensors, self._limit)
        sent, store = in_place(tensors[0])
        root = self._ranks[_root_of(opts)]
        return self._move(BROADCAST, IN_PLACE, as_bytes(sent), root, opts, tensors, store)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Gather each rank's tensor in a list; they may have several sizes."""
        inputs = listed(inputs)
        outputs = outputs if isinstance(outputs[0], (list, tuple)) else [outputs]
        if len(inputs) > 1:
            return self._gather_group(outputs, inputs, opts, store_parts)
        form, tensors, store = placed_parts(flat(inputs[0]), outputs[0])
        return self._move(ALLGATHER, form, tensors, None, opts, outputs, store)

    def allgather_coalesced(self, outputs: list[list[Any]], inputs: list[Any], opts: Any = None) -> Work:
        """Gather several tensors of each rank; each list of outputs is for one rank's."""
        of_inputs = [list(each) for each in zip(*outputs, strict=True)]
        return self._gather_group(of_inputs, inputs, opts, store_parts)

    def all_gather_single(self, output: Any, tensor: Any, opts: Any = None) -> Work:
        """Gather each rank's tensor in one tensor."""
        target, store = placed(output)
        return self._move(ALLGATHER, PLACED, (flat(tensor), target), None, opts, [output], store)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Work:
        """Do several of :meth:`all_gather_single` as one unit."""
        return self._gather_group(outputs, inputs, opts, store_flat)

    def _gather_group(
        self, outputs: list[Any], inputs: list[Any], opts: Any, store: Callable[[Any, Any], None]
    ) -> Work:
        each = partial(store_each, [partial(store, output) for output in outputs])
        return self._move(ALLGATHER, GROUPED, [flat(one) for one in inputs], None, opts, outputs, each)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = 0) -> Work:
        """Gather each rank's tensor in a list of the root."""
        sent, root = flat(listed(inputs)[0]), _root_of(opts)
        splits = [sent.numel() if rank == root else 0 for rank in range(self._size)]
        received: list[Any] = []
        if root == self._rank:
            received = list(outputs[0] if isinstance(outputs[0], (list, tuple)) else outputs)
        return self._exchange(sent, splits, received, opts, outputs or [])

    def scatter(self, outputs: Any, inputs: Any, opts: Any = 0) -> Work:
        """Give each rank one of the root's tensors."""
        outputs, root = listed(outputs), _root_of(opts)
        own, is_root = flat(outputs[0]), root == self._rank
        n = own.numel()
        sent, splits = own[:0], [0] * self._size
        if is_root:
            sent, splits = flat_parts(inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs)
        # Ranks whose splits differ agree by messages, which takes longer than to move some more bytes.
        if (self._size - 1) * own.nbytes > _SMALL_SCATTER or (is_root and splits != [n] * self._size):
            return self._exchange(sent, splits, outputs, opts, outputs)
        whole = sent if is_root else own.new_empty(n * self._size)
        part = whole[self._rank * n : (self._rank + 1) * n]
        store = partial(store_part, outputs[0], part)
        return self._move(BROADCAST, IN_PLACE, whole, self._ranks[root], opts, outputs, store)

    def alltoall(self, outputs: list[Any], inputs: list[Any], opts: Any = None) -> Work:
        """Send one tensor to each rank, and receive one from each."""
        sent, splits = flat_parts(inputs)
        return self._exchange(sent, splits, outputs, opts, outputs)

    def _exchange(
        self, sent: Any, splits: list[int], received: Sequence[Any], opts: Any, outputs: list[Any]
    ) -> Work:
        """Send some elements to each rank; store those that come in ``received``, one after the other."""
        form, tensors, store = placed_parts(sent, received)
        return self._move(ALLTOALL, form, tensors, splits, opts, outputs, partial(store_elements, store))

    def all_to_all_single(
        self, output: Any, tensor: Any, output_splits: Any, splits: Any, opts: Any = None
    ) -> Work:
        """Send some rows of a tensor to each rank; the rows that come are stored in rank order."""
        sent, parts = in_rows(tensor, splits, self._size)
        target, expected = in_rows(output, output_splits, self._size)
        store = partial(store_rows, output, target, expected)
        return self._move(ALLTOALL, PLACED, (sent, target), parts, opts, [output], store)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        """Wait until all ranks have called it."""
        return self._move(BARRIER, 0, None, None, opts, [], None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:  # noqa: FBT001, FBT002
        """Wait until all ranks have called it; the error of a timeout names those that have not."""
        if self._monitored is None:
            self._monitored = MonitoredBarrier(self._point_to_point, self._ranks, self._set_id(), self._rank)
        seconds = self._limit if timeout is None else timeout.total_seconds()
        self._monitored.wait(seconds, names_all=wait_all_ranks)

    # -- from one rank to another ----------------------------------------------------------------------

    def send(self, tensors: list[Any], rank: int, tag: int) -> Work:
        """Start to send a tensor to a rank of the group."""
        sent = flat(tensors[0]).contiguous()  # a row of every second element is flat too
        request = self._point_to_point.send(sent, self._ranks[rank], self._set_id(), tag)
        return self._collect(make_work(request, tensors, self._limit))

    def recv(self, tensors: list[Any], rank: int, tag: int) -> Work:
        """Start to receive a tensor from a rank of the group."""
        return self._receive(tensors, self._ranks[rank], tag)

    def recv_anysource(self, tensors: list[Any], tag: int) -> Work:
        """Start to receive a tensor from any rank of the group; the work's source_rank() tells from which."""
        return self._receive(tensors, None, tag)

    recvAnysource = recv_anysource  # noqa: N815 - the name of the C++ method

    def _receive(self, tensors: list[Any], rank: int | None, tag: int) -> Work:
        target, store = in_place(tensors[0])
        request = self._point_to_point.receive(as_bytes(target), rank, self._ranks, self._set_id(), tag)
        stored = None if store is None else lambda _: store(target)
        work = make_work(request, tensors, self._limit, stored, ReceiveWork)
        work.request, work.ranks = request, self._ranks
        return self._collect(work)

    # -- several calls as one --------------------------------------------------------------------------

    def start_coalescing(self, _: Any = None) -> None:
        """Begin to collect the works of calls; they start at once."""
        self._coalesced = []

    def end_coalescing(self, _: Any = None) -> Work:
        """Return one work for all calls since :meth:`start_coalescing`."""
        works, self._coalesced = self._coalesced or [], None
        return join_works(works, [], self._limit)

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    # -- what all of these use -------------------------------------------------------------------------

    def _reduce(
        self, form: int, tensors: Any, op: Any, opts: Any, outputs: list[Any], store: Store | None
    ) -> Work:
        waits = not getattr(opts, "asyncOp", True)
        if waits:
            form |= WAITS
        try:
            handle = start(form, tensors, None, None, op, 1.0, 1.0, self._process_set)
        except HorovodInternalError as exc:
            raise CollectiveError.at_submission(exc) from None
        if waits:
            return end_now(handle, self._limit, store)
        return self._collect(make_work(handle, outputs, self._limit, store))

    def _move(
        self,
        verb: int,
        form: int,
        tensors: Any,
        term: Any,
        opts: Any,
        outputs: list[Any],
        store: Store | None,
    ) -> Work:
        waits = not getattr(opts, "asyncOp", True)
        if waits:
            form |= WAITS
        try:
            handle = start_move(verb, form, tensors, term, None, self._process_set)
        except HorovodInternalError as exc:
            raise CollectiveError.at_submission(exc) from None
        if waits:
            return end_now(handle, self._limit, store)
        return self._collect(make_work(handle, outputs, self._limit, store))

    def _collect(self, work: Work) -> Work:
        """Keep a work for :meth:`end_coalescing`, if calls are collected."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _set_id(self) -> int:
        set_id = self._process_set.process_set_id
        if set_id is None:
            raise RuntimeError(f"the group {self._group_name!r} has been destroyed")
        return set_id


class _BackendFacts:
    """What torch asks the backend of a device; a subclass of torch's class must answer it itself."""

    supports_coalescing = False
    supports_splitting = False
    supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False


@untraced
class ProcessGroup(Collectives, dist.ProcessGroup):
    """A group of ranks; torch makes it by :func:`pyhvd.torch.distributed.backend.create`."""

    def getGroupName(self) -> str:  # noqa: N802
        """Return torch's name of the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Change the name that :meth:`getGroupName` returns."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the user's description."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Change the user's description."""
        self._description = description

    # Up to torch 2.6 these names are asked of the Python object alone.
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, _: torch.device) -> _BackendFacts:
        return _BackendFacts()


@untraced
class CpuBackend(Collectives, _BackendFacts, TorchBackend):
    """The backend for CPU tensors of a group that has other backends for other devices.

    torch can make an instance from version 2.14 on.
    """

    allreduce_sparse = Collectives.allreduce  # C++ code has a method of its own for sparse tensors

    @property
    def options(self) -> Any:
        """Return the options that torch's own groups have."""
        limit = self._limit
        return TorchBackend.Options("pyhvd", _NO_TIME if limit is None else timedelta(seconds=limit))

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:  # noqa: FBT001, FBT002
        """Do the barrier; torch's C++ code passes options, whose time may be unset."""
        limit = getattr(opts, "timeout", opts)
        super().monitored_barrier(limit if limit and limit >= _NO_TIME else None, wait_all_ranks)


def _root_of(opts: Any) -> int:
    return opts if isinstance(opts, int) else opts.rootRank

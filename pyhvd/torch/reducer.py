"""Reduces the gradients of an optimizer's parameters while the backward pass still computes others.

A hook on each parameter counts its backward passes. When a bucket's gradients are complete, one grouped
allreduce starts, in the gradients' own memory. :meth:`Reducer.synchronize` starts the rest, with zeros for
parameters that have no gradient, and waits. The last bucket is among the rest: no computation is left beside
which to reduce it, and a thread that waits reduces sooner than one that must be woken.

The ranks agree on the buckets in the first call of :meth:`Reducer.synchronize`, which compares their
parameters. Each further call carries a flag by which a rank says that its parameters have changed since:
some were frozen, unfrozen or added, or a gradient was sparse. Then that call compares again.

Only one thread at a time may run a backward pass, or call a method.
"""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from pyhvd.api import collectives
from pyhvd.api.compression import Compressor
from pyhvd.api.handles import Handle
from pyhvd.api.process_sets import ProcessSet
from pyhvd.dtypes import ReduceOp
from pyhvd.engine import context
from pyhvd.native.shared_memory import GROUPED, IN_PLACE, WAITS, start
from pyhvd.torch.compression import Compression
from pyhvd.torch.functions import compare
from pyhvd.torch.plan import Description, ParameterInfo, make_buckets
from pyhvd.torch.sparse import sparse_allreduce_async

_BUCKET_BYTES = 25 << 20
_numbers: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()


_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()


def _pause_all() -> None:
    """Let backward passes in a forked child, which has no part in the job, reduce nothing."""
    for reducer in _reducers:
        reducer.pause(True)


os.register_at_fork(after_in_child=_pause_all)


def next_prefix() -> str:
    """Return how the names of an optimizer's collectives begin; ranks make optimizers in the same order."""
    counter = _numbers.setdefault(context.current(), itertools.count())
    return f"gradients {next(counter)}"


class Terms(msgspec.Struct, frozen=True):
    """How gradients are reduced; see :func:`pyhvd.torch.DistributedOptimizer`."""

    compression: type[Compressor]
    passes: int
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet
    zeros_if_unused: bool
    at_end_of_backward: bool


@dataclass(eq=False)
class _Bucket:
    """Gradients that are reduced by one call."""

    name: str
    members: list[int]
    missing: int  # members whose gradients are not complete
    tensors: list[Any] = field(default_factory=list)  # the members' gradients, while they are reduced
    sent: list[Any] = field(default_factory=list)  # what is reduced in their place
    contexts: list[Any] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    changed: str = ""  # a gradient that was changed before the reduction started
    handle: Handle | None = None


class Reducer:
    """The gradients of one optimizer; see the module's docstring.

    Parameters
    ----------
    names : mapping of torch.Tensor to str
        The parameters, in the same order on every rank.
    groups : sequence of sequence of torch.Tensor
        Parameters whose gradients are reduced as one unit.
    terms : Terms
        How.
    """

    def __init__(self, names: Mapping[Any, str], groups: Sequence[Sequence[Any]], terms: Terms) -> None:
        self.terms = terms
        self.names: list[str] = []
        self.synchronized = False
        """Whether all gradients are reduced, and no pass has ended since."""
        self._parameters: list[Any] = []
        self._left: list[int] = []
        self._order: list[int] = []
        self._bucket_of: list[_Bucket | None] = []
        self._buckets: list[_Bucket] = []
        self._incomplete = 0  # buckets with missing gradients; synchronize() starts the last one
        self._sparse: set[int] = set()
        self._touched: dict[int, Handle] = {}
        self._planned: tuple[list[bool], set[int]] | None = None
        self._paused = False
        self._queued = False
        self._hooks: list[Any] = []
        self._has_warned = False
        self.prefix = next_prefix()
        _reducers.add(self)
        self.add(names)
        index = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._groups = tuple(
            tuple(index[id(each)] for each in group if id(each) in index) for group in groups
        )

    def add(self, names: Mapping[Any, str]) -> None:
        """Reduce the gradients of more parameters."""
        for parameter, name in names.items():
            index = len(self._parameters)
            self._parameters.append(parameter)
            self.names.append(name.replace("allreduce.noname.", "parameter "))  # which pyhvd reserves
            self._left.append(self.terms.passes)
            self._bucket_of.append(None)
            self._hook(index)

    def _hook(self, index: int) -> None:
        """Let a parameter tell when its gradient has been computed."""
        parameter, reference = self._parameters[index], weakref.ref(self)

        def tell(_: Any) -> None:
            reducer = reference()
            if reducer is not None:
                reducer._pass_ended(index)

        if not (parameter.is_floating_point() or parameter.is_complex()):
            return  # it cannot have a gradient
        trainable = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen one has its hook when it is unfrozen
        self._hooks.append(parameter.register_post_accumulate_grad_hook(tell))
        parameter.requires_grad_(trainable)

    def remove(self) -> None:
        """Remove the hooks."""
        self.abandon()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- during the backward pass ----------------------------------------------------------------------

    def _pass_ended(self, index: int) -> None:
        """Count a backward pass of one parameter; start its bucket if that was the bucket's last."""
        if self._paused:
            return
        self.synchronized = False
        left = self._left[index] - 1
        if left < 0:
            raise AssertionError(
                f"the gradient of {self.names[index]!r} was computed more than {self.terms.passes} times"
                " (backward_passes_per_step) before step(): call step() or zero_grad() of the optimizer"
                " between, accumulate inside no_sync(), or increase backward_passes_per_step"
            )
        self._left[index] = left
        if self.terms.at_end_of_backward and not self._queued:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)
        if left:
            return
        bucket = self._bucket_of[index]
        if bucket is None:
            self._order.append(index)
            return
        bucket.missing -= 1
        if not bucket.missing:
            self._incomplete -= 1
            self._collect(bucket)
            if self._incomplete:
                self._start(bucket)

    def _backward_ended(self) -> None:
        self._queued = False
        if not min(self._left):
            self.synchronize()

    def pause(self, paused: bool) -> bool:
        """Let backward passes count, or not, from now on; return whether they did not before."""
        before, self._paused = self._paused, paused
        return before

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes before a reduction."""
        self.abandon()
        self.terms = msgspec.structs.replace(self.terms, passes=passes)
        self._reset()

    # -- buckets ---------------------------------------------------------------------------------------

    def _collect(self, bucket: _Bucket) -> None:
        """Take a bucket's gradients; parameters without a gradient get, or lend, zeros."""
        bucket.tensors = [self._gradient(index) for index in bucket.members]
        bucket.versions = [tensor._version for tensor in bucket.tensors]

    def _start(self, bucket: _Bucket, waits: int = 0) -> None:
        """Start the reduction of a bucket.

        With ``waits=WAITS`` this thread is about to wait, and so no thread is woken to reduce.
        """
        terms = self.terms
        if bucket.tensors:
            bucket.changed = self._find_changed(bucket)  # the other ranks wait for it all the same
        else:
            self._collect(bucket)
        bucket.sent = [each.detach() if each.requires_grad else each for each in bucket.tensors]
        if terms.compression is not Compression.none:
            pairs = [terms.compression.compress(tensor) for tensor in bucket.sent]
            bucket.sent = [sent for sent, _ in pairs]
            bucket.contexts = [ctx for _, ctx in pairs]
        bucket.handle = start(
            GROUPED | IN_PLACE | waits,
            bucket.sent,
            None,
            bucket.name,
            terms.op,
            1.0 / terms.predivide,
            terms.predivide,
            terms.process_set,
        )
        bucket.versions = [tensor._version for tensor in bucket.tensors]

    def _gradient(self, index: int) -> Any:
        """Return a parameter's gradient as a dense tensor."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is None or not parameter.requires_grad:
            gradient = torch.zeros_like(parameter, requires_grad=False)
            if parameter.requires_grad:
                parameter.grad = gradient
        elif gradient.is_sparse:
            if self.terms.sparse_as_dense:
                self._touched[index] = self._start_touched(index, gradient)
            else:  # the plan says dense: the next one will not
                self._sparse.add(index)
            gradient = parameter.grad = gradient.to_dense()
        return gradient

    def _start_touched(self, index: int, gradient: Any) -> Handle:
        """Start to find which rows of a sparse gradient any rank has."""
        rows = torch.zeros(gradient.shape[: gradient.sparse_dim()], dtype=torch.uint8, device=gradient.device)
        rows[tuple(gradient._indices())] = 1
        name = f"{self.prefix}: rows of {self.names[index]}"
        return collectives.allreduce_async_(
            rows, name=name, op=collectives.Max, process_set=self.terms.process_set
        )

    def _find_changed(self, bucket: _Bucket) -> str:
        """Return the name of a gradient that was changed or replaced since it was taken, or an empty text."""
        for index, tensor, version in zip(bucket.members, bucket.tensors, bucket.versions, strict=True):
            parameter = self._parameters[index]
            if tensor._version != version or (parameter.grad is not tensor and parameter.requires_grad):
                return self.names[index]
        return ""

    def _finish(self, bucket: _Bucket) -> None:
        """Wait for a bucket, and write what was sent in place of its gradients."""
        assert bucket.handle is not None
        bucket.handle.result()
        if changed := bucket.changed or self._find_changed(bucket):
            raise RuntimeError(
                f"the gradient of {changed!r} was changed or replaced before it was reduced:"
                " call optimizer.synchronize() before you clip or scale gradients, then step() inside"
                " skip_synchronize()"
            )
        if self.terms.compression is Compression.none:
            return
        for tensor, sent, ctx in zip(bucket.tensors, bucket.sent, bucket.contexts, strict=True):
            result = self.terms.compression.decompress(sent, ctx)
            if result is not tensor:
                tensor.detach().copy_(result)

    # -- the end of a step -----------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Reduce all gradients that are not reduced yet, and wait."""
        try:
            self._reduce_all()
        except BaseException:
            self.abandon()
            raise
        self._reset()
        self.synchronized = True

    def _reduce_all(self) -> None:
        if self._planned is None:
            self._agree()
        if all(parameter.grad is None for parameter in self._parameters):
            self._warn_of_no_gradient()
        unused = self._unused()
        for bucket in self._buckets:
            if bucket.handle is None:
                self._start(bucket, WAITS)
        sparse = self._start_sparse()
        flags = self._exchange_flags(unused)
        for bucket in self._buckets:
            self._finish(bucket)
        for index, handle in sparse:
            self._parameters[index].grad = handle.result()
        for index, handle in self._touched.items():
            self._parameters[index].grad = _rows_of(self._parameters[index].grad, handle.result())
        if flags[0]:
            self._reduce_changed()
        for index in unused:
            if not flags[1 + index]:
                self._parameters[index].grad = None

    def _warn_of_no_gradient(self) -> None:
        """Warn once that this rank has no gradient at all, unless all parameters are frozen."""
        if not self._has_warned and any(parameter.requires_grad for parameter in self._parameters):
            self._has_warned = True
            warnings.warn(
                "no parameter of this optimizer has a gradient: there was no backward pass, or the model has"
                " other parameters, as after load_state_dict(assign=True): then make the optimizer anew",
                stacklevel=4,
            )

    def _unused(self) -> list[int]:
        """Return the parameters whose gradient becomes None again, unless another rank has one."""
        if self.terms.zeros_if_unused:
            return []
        return [index for index, parameter in enumerate(self._parameters) if parameter.grad is None]

    def _exchange_flags(self, unused: Iterable[int]) -> Any:
        """Return how many ranks' parameters have changed, and how many ranks have each gradient."""
        flags = np.zeros(1 + (0 if self.terms.zeros_if_unused else len(self._parameters)), np.int64)
        flags[0] = self._state() != self._planned
        if not self.terms.zeros_if_unused:
            flags[1:] = 1
            flags[[1 + index for index in unused]] = 0
        name = f"{self.prefix}: flags"
        return collectives.allreduce(flags, name=name, op=collectives.Sum, process_set=self.terms.process_set)

    def _state(self) -> tuple[list[bool], set[int]]:
        """Return which parameters are trainable, and whose gradients were sparse."""
        return [parameter.requires_grad for parameter in self._parameters], self._sparse

    def _reduce_changed(self) -> None:
        """Agree anew, and reduce gradients that were not in the plan before."""
        assert self._planned is not None
        done = {index for bucket in self._buckets for index in bucket.members}
        done |= self._planned[1]
        self._agree()
        for bucket in self._buckets:
            if not done.issuperset(bucket.members):
                extra = [index for index in bucket.members if index not in done]
                added = _Bucket(f"{bucket.name}, added", extra, 0)
                self._start(added, WAITS)
                self._finish(added)

    def _start_sparse(self) -> list[tuple[int, Handle]]:
        """Start the reduction of the gradients that the ranks have agreed to be sparse."""
        started: list[tuple[int, Handle]] = []
        assert self._planned is not None
        trainable, sparse = self._planned
        for index in sorted(sparse):
            if not trainable[index]:
                continue
            parameter = self._parameters[index]
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter).to_sparse(1)
            elif not gradient.is_sparse:
                gradient = gradient.to_sparse(1)
            handle = sparse_allreduce_async(
                gradient, f"{self.prefix}: {self.names[index]}", self.terms.op, self.terms.process_set
            )
            started.append((index, handle))
        return started

    def abandon(self) -> None:
        """Wait for the reductions that are under way, and forget them."""
        for bucket in self._buckets:
            if bucket.handle is not None:
                bucket.handle.exception()
        self._reset()

    @property
    def is_open(self) -> bool:
        """Whether there are gradients that are to be reduced, or are being reduced."""
        return any(bucket.tensors for bucket in self._buckets)

    def _reset(self) -> None:
        self._left = [self.terms.passes] * len(self._parameters)
        self._order.clear()
        self._touched.clear()
        self._incomplete = len(self._buckets)
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)
            bucket.handle, bucket.changed = None, ""
            bucket.tensors, bucket.sent = [], []
            bucket.versions, bucket.contexts = [], []

    # -- agreement -------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """Compare the ranks' parameters, and make the buckets that all ranks have."""
        for index, parameter in enumerate(self._parameters):
            if not self.terms.sparse_as_dense and parameter.grad is not None and parameter.grad.is_sparse:
                self._sparse.add(index)
        terms = self.terms
        mine = Description(
            tuple(
                ParameterInfo.of(self.names[index], parameter, parameter.requires_grad, index in self._sparse)
                for index, parameter in enumerate(self._parameters)
            ),
            self._groups,
            {
                "backward_passes_per_step": str(terms.passes),
                "op": terms.op.name.title(),
                "gradient_predivide_factor": str(terms.predivide),
                "compression": terms.compression.__qualname__,
            },
            tuple(self._order),
        )
        everyone = compare(mine, self.prefix, terms.process_set)
        for each in everyone:
            self._sparse.update(index for index, p in enumerate(each.parameters) if p.sparse)
        first = everyone[0]
        agreed = [
            msgspec.structs.replace(each, sparse=index in self._sparse)
            for index, each in enumerate(first.parameters)
        ]
        trainable, sparse = self._state()
        self._planned = trainable, sparse.copy()
        self._bucket_of = [None] * len(self._parameters)
        self._buckets = []
        for members in make_buckets(agreed, first.order, self._groups, _BUCKET_BYTES):
            names = [self.names[index] for index in members]
            what = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
            bucket = _Bucket(f"{self.prefix}: {what}", members, len(members))
            self._buckets.append(bucket)
            for index in members:
                self._bucket_of[index] = bucket


def _rows_of(dense: Any, touched: Any) -> Any:
    """Return the touched rows of a tensor as a sparse tensor."""
    indices = touched.nonzero().t()
    rows = dense[tuple(indices)]
    return torch.sparse_coo_tensor(indices, rows, dense.shape, check_invariants=False, is_coalesced=True)

"""Reduces the gradients of an optimizer's parameters while the backward pass still computes others.

A hook on each parameter counts its backward passes. When a bucket's gradients are complete, one grouped
allreduce starts, in the gradients' own memory. The backward pass ends with a *round*, which reduces what is
left and waits: so whatever a program does to gradients afterwards, such as clipping, is done to reduced ones.
A rank whose step has no such backward pass has its round in ``synchronize()`` or ``step()``.

Invariants
----------
1. Each rank carries out the same rounds in the same order, and each round submits every bucket once or never.
   A round that rank 0 gives back (:mod:`pyhvd.engine.rounds`) has reduced nothing and counts as none: its
   ranks have it in ``synchronize()`` or ``step()`` instead, as the rank that made no backward pass.
2. A round first exchanges flags: each rank's place in its loop, and which gradients it has. A bucket is
   reduced if any rank has one of its gradients; the others lend zeros.
3. The ranks agree on the buckets (the *plan*) before any bucket starts: in their first round, and in the
   first one after each ``init()`` and ``join()``. If a flag says that parameters of a rank have changed, all
   ranks agree anew at the end of that round, and reduce what was not in the plan.
4. Outside of backward passes and rounds nothing is being reduced, unless a backward pass has failed. Then
   this rank's next call ends the round for the others, with an error on every rank.

Only one thread at a time may run a backward pass, or call a method.
"""

from __future__ import annotations

import math
import os
import sys
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
from pyhvd.engine.rounds import BEGIN, FLAGS
from pyhvd.errors import MismatchError, WithdrawnError
from pyhvd.native.shared_memory import GROUPED, IN_PLACE, WAITS, start
from pyhvd.torch.compression import Compression
from pyhvd.torch.functions import compare
from pyhvd.torch.plan import Description, ParameterInfo, make_buckets
from pyhvd.torch.position import FIGURES, Position
from pyhvd.torch.sparse import sparse_allreduce_async

_BUCKET_BYTES = 25 << 20
_PATIENCE_S, _MOST_PATIENCE_S = 0.2, 5.0  # until a rank that waits in a backward pass tells rank 0; again
_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__

# Before the flags of the single parameters: whether this rank's parameters have changed since the plan;
# whether it has changed a gradient before its reduction; whether it has added to reduced ones; its place.
_CHANGED, _SPOILED, _ADDED, _PLACE = 0, 1, 2, slice(3, 3 + FIGURES)
_RANKS = _PLACE.start
_HEAD = _PLACE.stop

_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()


def _pause_all() -> None:
    """Let backward passes in a forked child, which has no part in the job, reduce nothing."""
    for reducer in _reducers:
        reducer.pause(paused=True)


os.register_at_fork(after_in_child=_pause_all)


class Terms(msgspec.Struct, frozen=True):
    """How gradients are reduced; see :func:`pyhvd.torch.DistributedOptimizer`."""

    compression: type[Compressor]
    passes: int
    op: ReduceOp
    predivide: float
    sparse_as_dense: bool
    process_set: ProcessSet
    zeros_if_unused: bool
    in_step: bool
    only_sparse: bool
    """Whether the optimizer takes no dense gradients."""


@dataclass(eq=False)
class _Bucket:
    """Gradients that are reduced by one call."""

    name: str
    members: list[int]
    missing: int  # members whose gradients are not complete
    tensors: list[Any] = field(default_factory=list)  # the members' gradients, while they are reduced
    lent: dict[int, Any] = field(default_factory=dict)  # by parameter, those that are no ``.grad``
    sent: list[Any] = field(default_factory=list)  # what is reduced in their place
    contexts: list[Any] = field(default_factory=list)
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
        self.position = Position(terms.process_set)
        self._parameters: list[Any] = []
        self._left: list[int] = []  # backward passes until a gradient is complete
        self._complete = 0  # gradients that are
        self._settled: list[bool] = []  # whether a gradient is reduced, and no pass has added to it since
        self._added = False  # whether a pass has added to a reduced gradient since the last step
        self._synchronized = False  # whether a round has ended, and no pass since
        self._order: list[int] = []
        self._bucket_of: list[_Bucket | None] = []
        self._buckets: list[_Bucket] = []
        self._ready: list[_Bucket] = []  # complete, not started
        self._planned: tuple[list[bool], set[int]] | None = None
        self._sparse: set[int] = set()
        self._task = -1  # the backward pass that has been seen last
        self._paused = False
        self._marks: dict[int, int] = {}  # gradients as a backward pass has left them without a round
        self._in_backward = False  # whether this rank is in the round of a backward pass
        self._hooks: list[Any] = []
        self._has_warned = self._has_warned_of_late_round = False
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
            self._settled.append(False)
            self._bucket_of.append(None)
            if self.terms.only_sparse:
                self._sparse.add(index)
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
        """Count a backward pass of one parameter; start buckets that were complete before it."""
        self._synchronized = False
        if self._marks:
            self._marks.pop(index, None)
        if self._settled[index]:
            self._settled[index], self._added = False, True
            if self.terms.op is not collectives.Average:
                raise AssertionError(
                    f"the gradient of {self.names[index]!r} is reduced already, and op={self.terms.op.name}"
                    " cannot reduce it again: call the optimizer's step() or zero_grad() between two backward"
                    " passes, accumulate inside no_sync(), or increase backward_passes_per_step"
                )
        if self._paused:
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._backward_begins(task)
        if self.terms.in_step:
            self._order.append(index)
            return
        if self._ready:
            self._start_ready()
        left = self._left[index] - 1
        if left < 0:
            raise AssertionError(
                f"the gradient of {self.names[index]!r} was computed more than {self.terms.passes} times"
                " (backward_passes_per_step) before it was reduced: increase backward_passes_per_step, or"
                " accumulate inside no_sync()"
            )
        self._left[index] = left
        if left:
            return
        self._complete += 1
        bucket = self._bucket_of[index]
        if bucket is None:
            self._order.append(index)
            return
        bucket.missing -= 1
        if not bucket.missing:
            # Other hooks of this parameter may yet change its gradient: the next call of this one starts it.
            self._ready.append(bucket)

    def _backward_begins(self, task: int) -> None:
        """Let autograd call this reducer at the end of a backward pass."""
        self._task = task
        if self.is_open and not _is_nested():
            self.abandon()
        self._renew()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Carry out a round, unless passes are left, or this one is part of another that goes on."""
        if self.terms.in_step:
            self._mark(set(self._order))
        elif self._complete and not (_is_nested() and self._complete < sum(self._trainable())):
            self._in_backward = True
            try:
                self.synchronize()
            except WithdrawnError as exc:
                self._mark(index for index, each in enumerate(self._parameters) if each.grad is not None)
                self._warn_of_late_round(exc)
            finally:
                self._in_backward = False

    def _mark(self, indices: Iterable[int]) -> None:
        """Remember gradients that are reduced later, and must not be changed before."""
        self._marks = {index: _fingerprint(self._parameters[index].grad) for index in indices}

    def pause(self, *, paused: bool) -> bool:
        """Let backward passes count, or not, from now on; return whether they did not before."""
        before, self._paused = self._paused, paused
        return before

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes before a reduction."""
        self.abandon()
        self.terms = msgspec.structs.replace(self.terms, passes=passes)
        self._reset()

    # -- between steps ---------------------------------------------------------------------------------

    def stepped(self) -> None:
        """Count a step: what is computed from now on belongs to the next one."""
        self._renew()
        self.position.steps += 1
        self._forget()

    def zeroing(self) -> None:
        """Count a call of ``zero_grad()``, after what a failed backward pass has left."""
        self.abandon()
        self._renew()
        self.position.zeroings += 1
        self._forget()

    @property
    def is_synchronized(self) -> bool:
        """Whether all gradients are reduced, also those that the program has assigned since."""
        if not self._synchronized or all(self._settled):
            return self._synchronized
        return not any(
            each.grad is not None and each.requires_grad
            for each, settled in zip(self._parameters, self._settled, strict=True)
            if not settled
        )

    @property
    def is_open(self) -> bool:
        """Whether gradients are being reduced."""
        return any(bucket.handle is not None for bucket in self._buckets)

    def abandon(self) -> None:
        """Forget what a failed backward pass has left, and end its round: the other ranks wait there.

        Raises
        ------
        MismatchError
            Some other rank's backward pass has not failed.
        """
        handles = [bucket.handle for bucket in self._buckets if bucket.handle is not None]
        if handles and not any(handle.done() and handle.exception() is not None for handle in handles):
            self._run_round(has_left=True)
        self._reset()

    def _forget(self) -> None:
        self._synchronized = False
        self._settled, self._added = [False] * len(self._parameters), False
        self._reset()

    def _reset(self) -> None:
        self._left = [self.terms.passes] * len(self._parameters)
        self._complete = 0
        self._order.clear()
        self._ready.clear()
        self._marks.clear()
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)
            bucket.handle = None
            bucket.tensors, bucket.sent, bucket.contexts, bucket.lent = [], [], [], {}

    def _renew(self) -> None:
        """Drop the plan if all ranks have called ``init()`` or ``join()`` since: some ranks have another."""
        if self.position.renew():
            self._planned = None
            self._bucket_of = [None] * len(self._parameters)
            self._buckets = []
            self._reset()

    # -- a round ---------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Reduce all gradients that are not reduced yet, and wait."""
        self._renew()
        self._run_round()
        self._reset()
        if self.terms.zeros_if_unused:
            self._fill_unused()
        self._synchronized = True

    def _run_round(self, *, has_left: bool = False) -> None:
        """Reduce what any rank has; agree anew and go on while parameters have changed."""
        spoiled = self._find_spoiled()
        done: set[int] = set()
        try:
            if self._planned is None:
                self._add_up(np.zeros(1, np.int64), BEGIN)
                self._agree()
            if all(parameter.grad is None for parameter in self._parameters):
                self._warn_of_no_gradient()
            while self._reduce(done, spoiled, has_left=has_left):
                before = self._sparse_planned()
                self._agree()
                done -= self._sparse_planned() - before
        except BaseException as exc:
            handles = [bucket.handle for bucket in self._buckets if bucket.handle is not None]
            errors = [handle.exception() for handle in handles]
            self._reset()
            if isinstance(exc, WithdrawnError) and None in errors:
                raise MismatchError(
                    f"{exc}, in the middle of its backward pass: gradients are reduced in part. Let all ranks"
                    " call the same collectives in their backward passes",
                    self.position.prefix,
                ) from None
            raise
        for index in done:
            self._settled[index] = True

    def _reduce(self, done: set[int], spoiled: str, *, has_left: bool) -> bool:
        """Reduce, by the plan, what any rank has and is not done; return whether parameters have changed.

        Raises
        ------
        MismatchError
            On all ranks: they are at different places, or one of them has spoiled a gradient.
        """
        has = self._find_gradients(done)
        buckets = self._buckets if not done else self._buckets_besides(done)
        for bucket in buckets:
            if bucket.handle is None and all(has[index] for index in bucket.members):
                self._start(bucket, WAITS)
        flags = self._exchange_flags(has, spoiled, has_left=has_left)
        touched = flags[_HEAD:].tolist()
        for bucket in buckets:
            if bucket.handle is None and any(touched[index] for index in bucket.members):
                self._start(bucket, WAITS)
        # A rank that has joined adds zeros, also where the others have gradients that are reduced already.
        is_cut = bool(flags[_ADDED] and flags[_RANKS] < (self.terms.process_set.size() or 0))
        is_wrong = is_cut or flags[_SPOILED] or not Position.are_alike(flags[_PLACE])
        others = [] if is_wrong else self._start_sparse(touched, done)
        for bucket in buckets:
            if bucket.handle is not None:
                self._finish(bucket, touched)
        for index, handle in others:
            self._finish_sparse(index, handle)
        if is_wrong:
            changed = f", and has changed the gradient of {spoiled!r} before it was reduced"
            left = ", and has left a step that it had begun"
            cut = (
                ", and has made another backward pass since gradients were reduced, while a rank has joined:"
                " use no_sync() or backward_passes_per_step"
            )
            self.position.refuse(changed * bool(spoiled) + left * has_left + cut * is_cut)
        done.update(index for index, count in enumerate(touched) if count)
        return bool(flags[_CHANGED]) and not has_left

    def _buckets_besides(self, done: set[int]) -> list[_Bucket]:
        """Return buckets of what the first part of a round has not reduced."""
        left = [[index for index in bucket.members if index not in done] for bucket in self._buckets]
        return [
            _Bucket(f"{bucket.name}, added", members, 0)
            for bucket, members in zip(self._buckets, left, strict=True)
            if members
        ]

    def _find_gradients(self, done: set[int]) -> list[bool]:
        """Return which gradients this rank has to reduce by the plan, and note new sparse ones."""
        assert self._planned is not None
        trainable, sparse = self._planned
        has = []
        for index, planned in enumerate(trainable):
            parameter = self._parameters[index]
            gradient = parameter.grad
            mine = gradient is not None and parameter.requires_grad and not self._settled[index]
            if mine and gradient.is_sparse and index not in sparse:
                self._sparse.add(index)  # its bucket reduces zeros, and the end of the round its rows
            has.append(mine and planned and index not in done)
        return has

    def _exchange_flags(self, has: list[bool], spoiled: str, *, has_left: bool) -> Any:
        """Return the sums of all ranks' flags."""
        flags = np.empty(_HEAD + len(has), np.int64)
        flags[_CHANGED] = (self._trainable(), self._sparse) != self._planned
        flags[_SPOILED] = bool(spoiled)
        flags[_ADDED] = self._added
        flags[_PLACE] = self.position.figures(has_left=has_left)
        flags[_HEAD:] = has
        return self._add_up(flags, FLAGS)

    def _add_up(self, mine: Any, name: str) -> Any:
        """Return the sums of all ranks' numbers; in a backward pass, tell rank 0 if that takes long."""
        process_set, prefix = self.terms.process_set, f"{self.position.prefix}: "
        handle = start(WAITS, mine, None, prefix + name, collectives.Sum, 1.0, 1.0, process_set)
        if self._in_backward and not handle.wait(_PATIENCE_S):
            # Only the first ranks of the set tell it soon: one of them suffices.
            patience = _PATIENCE_S * math.log2(1 + (process_set.rank() or 0))
            while not handle.wait(patience):
                active = context.current()
                active.runtime.tell_round(active.members_of(process_set)[0], prefix)
                patience = min(2 * patience + _PATIENCE_S, _MOST_PATIENCE_S)
        return handle.result()

    def _find_spoiled(self) -> str:
        """Return the name of a gradient that was changed since the backward pass, or an empty text."""
        for index, mark in self._marks.items():
            if _fingerprint(self._parameters[index].grad) != mark:
                return self.names[index]
        return ""

    def _warn_of_no_gradient(self) -> None:
        """Warn once that this rank has no gradient at all, unless all parameters are frozen."""
        if not self._has_warned and any(self._trainable()):
            self._has_warned = True
            warnings.warn(
                "no parameter of this optimizer has a gradient: there was no backward pass, or the model has"
                " other parameters, as after load_state_dict(assign=True): then make the optimizer anew",
                stacklevel=5,
            )

    def _warn_of_late_round(self, exc: WithdrawnError) -> None:
        """Warn once that ranks wait in vain for a backward pass of another one."""
        if not self._has_warned_of_late_round:
            self._has_warned_of_late_round = True
            warnings.warn(
                f"{exc}, before its step(). Gradients are reduced in step() this time, after a wait: with"
                ' DistributedOptimizer(..., reduce_at="step") the ranks never wait in a backward pass',
                stacklevel=3,
            )

    def _fill_unused(self) -> None:
        """Give zeros to parameters that no rank has used."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is None and parameter.requires_grad:
                is_sparse = index in self._sparse_planned()
                parameter.grad = _no_rows(parameter) if is_sparse else _zeros_like(parameter)
                self._settled[index] = True

    # -- buckets ---------------------------------------------------------------------------------------

    def _start_ready(self) -> None:
        for bucket in self._ready:
            self._start(bucket)
        self._ready.clear()

    def _start(self, bucket: _Bucket, waits: int = 0) -> None:
        """Start the reduction of a bucket.

        With ``waits=WAITS`` this thread is about to wait, and so no thread is woken to reduce.
        """
        terms = self.terms
        bucket.tensors = [self._gradient(index, bucket) for index in bucket.members]
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

    def _gradient(self, index: int, bucket: _Bucket) -> Any:
        """Return a parameter's gradient as a dense tensor, which the bucket lends if there is none."""
        parameter = self._parameters[index]
        gradient = parameter.grad
        if gradient is not None and parameter.requires_grad and not gradient.is_sparse:
            return gradient
        is_planned = gradient is not None and parameter.requires_grad and index in self._sparse_planned()
        lent = bucket.lent[index] = gradient.to_dense() if is_planned else _zeros_like(parameter)
        return lent

    def _finish(self, bucket: _Bucket, touched: Sequence[int]) -> None:
        """Wait for a bucket, write what was sent in place of its gradients, and keep what it has lent."""
        assert bucket.handle is not None
        bucket.handle.result()
        for tensor, sent, ctx in zip(bucket.tensors, bucket.sent, bucket.contexts, strict=False):
            result = self.terms.compression.decompress(sent, ctx)
            if result is not tensor:
                tensor.detach().copy_(result)
        for index, lent in bucket.lent.items():
            parameter = self._parameters[index]
            if not (parameter.requires_grad and touched[index]):
                continue
            if index in self._sparse and index not in self._sparse_planned():
                # Sparse on this rank, and new: the end of the round adds up the ranks' rows.
                if lent.any():
                    parameter.grad = parameter.grad + lent.to_sparse(1)
            else:
                parameter.grad = lent

    # -- sparse gradients ------------------------------------------------------------------------------

    def _sparse_planned(self) -> set[int]:
        """Return the parameters whose gradients the ranks have agreed to be sparse."""
        return set() if self._planned is None else self._planned[1]

    def _start_sparse(self, touched: Sequence[int], done: set[int]) -> list[tuple[int, Handle]]:
        """Start the reduction of the sparse gradients that any rank has.

        If they are reduced as dense ones, this finds the rows that any rank has.
        """
        started: list[tuple[int, Handle]] = []
        terms = self.terms
        for index in sorted(self._sparse_planned() - done):
            if not touched[index]:
                continue
            parameter, name = self._parameters[index], f"{self.position.prefix}: {self.names[index]}"
            gradient = parameter.grad if parameter.requires_grad else None
            if terms.sparse_as_dense:
                rows = _find_rows(gradient, parameter)
                handle = collectives.allreduce_async_(
                    rows, name=f"{name}, rows", op=collectives.Max, process_set=terms.process_set
                )
            else:
                if gradient is None:
                    gradient = _no_rows(parameter)
                elif not gradient.is_sparse:
                    gradient = gradient.to_sparse(1)
                handle = sparse_allreduce_async(gradient, name, terms.op, terms.process_set)
            started.append((index, handle))
        return started

    def _finish_sparse(self, index: int, handle: Handle) -> None:
        result, parameter = handle.result(), self._parameters[index]
        if not parameter.requires_grad:
            return
        if self.terms.sparse_as_dense:
            rows = result.nonzero().t()
            values = parameter.grad[rows[0]]
            result = torch.sparse_coo_tensor(
                rows, values, parameter.shape, check_invariants=False, is_coalesced=True
            )
        parameter.grad = result

    # -- agreement -------------------------------------------------------------------------------------

    def _trainable(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters]

    def _agree(self) -> None:
        """Compare the ranks' parameters, and make the buckets that all ranks have."""
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and parameter.grad.is_sparse:
                self._sparse.add(index)
        terms, prefix = self.terms, self.position.prefix
        mine = Description(
            tuple(
                ParameterInfo.of(
                    self.names[index],
                    parameter,
                    trainable=parameter.requires_grad,
                    sparse=index in self._sparse,
                )
                for index, parameter in enumerate(self._parameters)
            ),
            self._groups,
            {
                "backward_passes_per_step": str(terms.passes),
                "op": terms.op.name.title(),
                "gradient_predivide_factor": str(terms.predivide),
                "compression": terms.compression.__qualname__,
                "sparse_as_dense": str(terms.sparse_as_dense),
            },
            tuple(self._order),
        )
        everyone = compare(mine, prefix, terms.process_set)
        for each in everyone:
            self._sparse.update(index for index, p in enumerate(each.parameters) if p.sparse)
        first = everyone[0]
        agreed = [
            msgspec.structs.replace(each, sparse=index in self._sparse and not terms.sparse_as_dense)
            for index, each in enumerate(first.parameters)
        ]
        self._planned = self._trainable(), self._sparse.copy()
        self._bucket_of = [None] * len(self._parameters)
        self._buckets = []
        for members in make_buckets(agreed, first.order, self._groups, _BUCKET_BYTES):
            names = [self.names[index] for index in members]
            what = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
            bucket = _Bucket(f"{prefix}: {what}", members, len(members))
            self._buckets.append(bucket)
            for index in members:
                self._bucket_of[index] = bucket


def _is_nested() -> bool:
    """Return whether the running backward pass is inside of another one, as in a reentrant checkpoint."""
    frame, count = sys._getframe(1), 0
    while frame is not None and count < 2:
        count += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    return count > 1


def _zeros_like(parameter: Any) -> Any:
    return torch.zeros_like(parameter, requires_grad=False)


def _no_rows(parameter: Any) -> Any:
    """Return a sparse gradient of zeros."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty((0, *parameter.shape[1:]))
    return torch.sparse_coo_tensor(
        indices, values, parameter.shape, check_invariants=False, is_coalesced=True
    )


def _find_rows(gradient: Any, parameter: Any) -> Any:
    """Return which rows of a gradient may differ from zero, as 0 and 1; a dense one is not read."""
    is_dense = gradient is not None and not gradient.is_sparse
    rows = parameter.new_full(parameter.shape[:1], is_dense, dtype=torch.uint8, requires_grad=False)
    if gradient is not None and gradient.is_sparse:
        rows[gradient._indices()[0]] = 1
    return rows


def _fingerprint(gradient: Any) -> int:
    """Return a number that almost surely changes with a gradient."""
    if gradient is None:
        return 0
    values = gradient.detach()
    values = (values.coalesce().values() if values.is_sparse else values).contiguous().flatten()
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return int(values.view(integers).sum(dtype=torch.int64)) + 1

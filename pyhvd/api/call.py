"""One public call: from its arguments to a :class:`Handle`.

Owns: the steps that all verbs share. A :class:`Call` finds the context and the process set, names the
tensors, builds their entries and submits them. If this rank refuses the call, the Call announces the refusal,
so that the other ranks do not wait.
"""

from __future__ import annotations

import math
import operator
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pyhvd import arrays
from pyhvd.api.handles import Handle, QueuedHandle
from pyhvd.backends.host import rows_of
from pyhvd.common.text import describe_exception, describe_ranks, describe_traceback
from pyhvd.devices import array_libraries
from pyhvd.devices.array_libraries import View
from pyhvd.devices.base import DeviceView
from pyhvd.devices.pending import pending_in, taken
from pyhvd.devices.streams import mark_ready
from pyhvd.dtypes import BITWISE_OPS, DtypeInfo, ReduceOp
from pyhvd.engine import context
from pyhvd.engine.turns import learn
from pyhvd.errors import (
    DuplicateNameError,
    HorovodInternalError,
    UnsupportedDtypeError,
    UnsupportedOpError,
    UnsupportedShapeError,
)
from pyhvd.native.shared_memory import find_site
from pyhvd.negotiation.messages import UNNAMED, Request, RequestType, member_name, verb
from pyhvd.queue import TensorEntry

if TYPE_CHECKING:
    from pyhvd.api.process_sets import ProcessSet

Completion = Callable[[Any, BaseException | None], None]

# Errors of arguments, which Horovod finds in the collective itself.
_REFUSALS = (UnsupportedOpError, UnsupportedShapeError)


class OwnName(str):
    """A name that pyhvd gives to its own tensors."""

    __slots__ = ()


class Call:
    """Context manager around the body of a verb; the body may change ``kind``.

    If the body raises an error, this rank refuses the call, and announces that to the other ranks. A
    ``grouped`` verb takes a list of tensors. The name of an unnamed call begins with ``prefix``.

    Raises
    ------
    NotInitializedError
        Before ``init()``.
    ValueError
        This rank cannot use the process set, or the name is not a valid str.
    """

    def __init__(
        self,
        kind: RequestType,
        name: str | None,
        process_set: ProcessSet,
        *,
        grouped: bool = False,
        prefix: str = UNNAMED,
    ) -> None:
        self.context = context.current()
        self.set_id, self.ranks = self.context.members_of(process_set)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(self.context.topology.rank)
        given = str(name) if isinstance(name, OwnName) else checked_name(name, kind)
        self._is_unnamed = not given
        self.name = given or self.context.next_name(self.set_id, prefix)
        self.kind = kind
        self._group = self.name if grouped else ""
        self._group_size = 0
        self._entries: list[TensorEntry] = []

    @property
    def has_name(self) -> bool:
        """Whether the call's name is not made up from its number."""
        return not self._is_unnamed

    def members(self, tensors: Any) -> Sequence[Any]:
        """Return the call's tensors as a sequence, of length 1 unless the call is grouped."""
        if not self._group:
            return (tensors,)
        if isinstance(tensors, np.ndarray) or not isinstance(tensors, (list, tuple)):
            raise TypeError(f"grouped_{verb(self.kind)} takes a list of arrays, not {type(tensors).__name__}")
        members = list(tensors)  # the caller may change its own list meanwhile
        self._group_size = len(members)
        return members

    def add(
        self,
        source: View | None,
        target: View | None,
        splits: tuple[int, ...] = (),
        **terms: Any,
    ) -> None:
        """Add one tensor to the call; ``terms`` are fields of its :class:`Request`.

        Raises ValueError for a tensor on another device than this rank's earlier tensors.
        """
        if isinstance(source, DeviceView):
            self.context.settle_on(source.on)
        name = self.name
        if self._group:
            name = member_name(name, len(self._entries), self._group_size)
        if source is not None:
            terms.update(dtype=int(source.info.code), shape=source.shape)
            terms.update(device=source.device, layout=source.layout)
        if splits and self.context.fast_path is not None:
            data = np.array(splits, np.int64).tobytes()
            terms.update(splits=int.from_bytes(blake2b(data, digest_size=8).digest()))
        request = self._request(name, **terms)
        self._entries.append(TensorEntry(self.set_id, request, source, target, _not_submitted, splits))

    def check_root(self, root_rank: int) -> int:
        """Return the root's global rank; raise ValueError unless it is an int, and a member of the set."""
        try:
            root = operator.index(root_rank)
        except TypeError:
            raise ValueError(f"root_rank must be an int, not {root_rank!r}") from None
        if root not in self.ranks:
            raise ValueError(
                f"invalid root rank {root}: the process set has {describe_ranks(self.ranks)}"
                " (root_rank is a global rank)"
            )
        return root

    def submit(
        self,
        inplace: Sequence[Any] | None = None,
        before_end: Callable[[], None] | None = None,
        *,
        alone: bool = False,
    ) -> Handle:
        """Submit all added tensors as one unit.

        Parameters
        ----------
        inplace : sequence, optional
            The caller's arrays, which the handle of an in-place call returns.
        before_end : callable, optional
            Called without arguments when the last added tensor has ended, before the handle completes.
        alone : bool
            Whether to return each output without what comes beside it.
        """
        runtime, entries = self.context.runtime, self._entries
        views = [view for entry in entries for view in (entry.source, entry.target)]
        on_device = [view for view in views if isinstance(view, DeviceView)]
        if on_device:
            mark_ready(on_device)
        pick = _result_on_device if on_device else _result_on_host
        result = partial(pick, inplace=inplace, grouped=bool(self._group), alone=alone)
        handle = QueuedHandle(
            self.name, len(entries), runtime.flush, result, runtime.device_waits, runtime.meter
        )
        if not entries:
            runtime.queue.check_joined(self._request(self.name))
            # This rank waits for no other. A rank whose list is not empty would wait for this one, so it gets
            # an error.
            runtime.queue.announce(
                self.set_id, self._request(self.name, error="its list of tensors is empty")
            )
            return handle
        site = find_site()
        for index, entry in enumerate(entries):
            entry.done, entry.site = partial(handle.complete, index), site
        if self._is_unnamed and (path := self.context.fast_path) is not None:
            requests = [entry.request for entry in entries]
            learn(path, self.set_id, requests, entries[0].splits, self.rank, self.ranks)
        if before_end is not None:
            entries[-1].done = partial(_complete_after, before_end, entries[-1].done)
        runtime.submit(entries)
        return handle

    def _request(self, name: str, **terms: Any) -> Request:
        return Request(self.kind, name, group=self._group, group_size=self._group_size, **terms)

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Announce a call that this rank refuses, and put the verb and the name into the error's text."""
        if exc is None or not isinstance(exc, Exception):
            return
        if isinstance(exc, HorovodInternalError) and not isinstance(exc, _REFUSALS):
            return
        runtime, trace = self.context.runtime, describe_traceback(exc)
        runtime.meter.failed("refused")
        runtime.queue.announce(
            self.set_id, self._request(self.name, error=describe_exception(exc), traceback=trace)
        )
        if not isinstance(exc, DuplicateNameError) and len(exc.args) == 1 and isinstance(exc.args[0], str):
            exc.args = (f"{verb(self.kind)} {self.name!r}: {exc.args[0]}",)


class refusing:  # noqa: N801 - it reads as a function
    """Context manager that announces a call as refused if the body, which prepares it, raises an error."""

    __slots__ = ("_call", "_grouped")

    def __init__(
        self, kind: RequestType, name: str | None, process_set: ProcessSet, *, grouped: bool = False
    ) -> None:
        self._call, self._grouped = (kind, name, process_set), grouped

    def __enter__(self) -> None:
        """Begin the preparation."""

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Announce the error, and let it pass."""
        if isinstance(exc, Exception):
            with Call(*self._call, grouped=self._grouped):
                raise exc


def _not_submitted(result: Any, error: BaseException | None) -> None:
    """Stand in for an entry's ``done`` until its call is submitted."""


def _complete_after(
    first: Callable[[], None], done: Completion, result: Any, error: BaseException | None
) -> None:
    first()
    done(result, error)


# -- tensors: arrays of any library as views, and results as arrays --------------------------------------


def adopt(tensor: Any, *, writing: bool = False, any_layout: bool = False) -> View:
    """Return the view of an array; a numpy array skips the choice of a library.

    See :func:`array_libraries.adopt`.
    """
    if type(tensor) is np.ndarray:
        return arrays.view(tensor, writing=writing)
    return array_libraries.adopt(tensor, writing=writing, any_layout=any_layout)


def _result_on_host(outputs: list[Any], inplace: Sequence[Any] | None, *, grouped: bool, alone: bool) -> Any:
    results = outputs if inplace is None else inplace
    if alone:
        results = [output for output, _ in outputs]
    return list(results) if grouped else results[0]


def _result_on_device(
    outputs: list[Any], inplace: Sequence[Any] | None, *, grouped: bool, alone: bool
) -> Any:
    """Return a call's result; the caller's stream waits for tensors whose work has not ended."""
    if inplace is None:
        outputs = [taken(output) for output in outputs]
    else:
        for each in pending_in(outputs):
            each.follow()
    return _result_on_host(outputs, inplace, grouped=grouped, alone=alone)


# -- checks of arguments ---------------------------------------------------------------------------------


def checked_name(name: str | None, kind: RequestType) -> str:
    """Return the user's name as a plain str, empty for None; raise ValueError for an invalid name."""
    if name is None:
        return ""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{verb(kind)}: name must be a str that is not empty, not {name!r}")
    if UNNAMED in name.split("."):
        raise ValueError(f"{verb(kind)}: pyhvd reserves names with {UNNAMED!r} between dots: rename {name!r}")
    try:
        return name.encode().decode()  # a plain str, even if the name is of a subclass of str
    except UnicodeEncodeError as exc:
        raise ValueError(f"{verb(kind)}: name {name!r} cannot be encoded as UTF-8: {exc}") from None


def check_rows(shape: tuple[int, ...], size: int) -> list[int]:
    """Return each rank's number of rows when dimension 0 is divided; raise UnsupportedShapeError for 0-d."""
    if not shape:
        raise UnsupportedShapeError(
            "a tensor of rank zero (0-d) has no dimension 0: reshape it to (1,) first"
        )
    return rows_of(shape[0], size)


def check_splits(splits: Any, shape: tuple[int, ...], size: int) -> list[int]:
    """Return an alltoall's number of rows for each rank; raise ValueError for invalid splits."""
    shares = check_rows(shape, size)
    if isinstance(splits, np.ma.MaskedArray):
        raise TypeError("splits must not be a masked array, whose mask would be lost: pass splits.filled(0)")
    given = None if splits is None else np.asarray(splits)
    if given is None or given.size == 0:
        if shape[0] % size:
            raise ValueError(
                f"without splits, dimension 0 ({shape[0]}) must divide by the number of ranks ({size})"
            )
        return shares
    if given.dtype.kind not in "iu" or given.ndim != 1:
        raise ValueError(f"splits must be a 1-d sequence of ints, not {given.ndim}-d of {given.dtype}")
    rows = [int(n) for n in given]
    if len(rows) != size:
        raise ValueError(f"splits has {len(rows)} entries, but the process set has {size} ranks")
    if min(rows) < 0:
        raise ValueError(f"splits must not be negative: {rows}")
    if sum(rows) > shape[0]:
        raise ValueError(f"splits {rows} sum to {sum(rows)}, but dimension 0 is {shape[0]}")
    return rows


def resolve_op(op: ReduceOp | None, *, average: bool | None) -> ReduceOp:
    """Return the op of a verb's two arguments; raise ValueError if they are invalid."""
    if average is not None:
        if op is not None:
            raise ValueError("give op or average, not both; average is deprecated")
        if not isinstance(average, (bool, int, np.bool_)):
            raise ValueError(f"average={average!r} is not a bool: was it meant as name={average!r}?")
        text = "average is deprecated: use op=Average or op=Sum"
        warnings.warn(text, DeprecationWarning, stacklevel=_callers_level())
        op = ReduceOp.AVERAGE if average else ReduceOp.SUM
    try:
        return ReduceOp.AVERAGE if op is None else ReduceOp(op)
    except ValueError:
        raise ValueError(f"op={op!r} is none of Average, Sum, Adasum, Min, Max, Product") from None


class Reduction(msgspec.Struct, frozen=True):
    """A checked op with its factors before and after the reduction."""

    op: ReduceOp
    prescale: float
    postscale: float

    @classmethod
    def of(
        cls,
        kind: RequestType,
        op: ReduceOp | None,
        prescale_factor: float,
        postscale_factor: float,
        *,
        average: bool | None,
    ) -> Reduction:
        """Return a verb's checked arguments.

        Raises UnsupportedOpError if the verb does not support the op, and ValueError for invalid arguments.
        """
        chosen = resolve_op(op, average=average)
        if kind is RequestType.REDUCESCATTER and chosen is ReduceOp.ADASUM:
            raise UnsupportedOpError(
                f"reducescatter supports op=Average and op=Sum, not {chosen.name.title()}"
            )
        return cls(chosen, _factor("prescale", prescale_factor), _factor("postscale", postscale_factor))

    def check_ranks(self, ranks: Sequence[int]) -> None:
        """Raise UnsupportedOpError if the op is not defined for this number of ranks."""
        size = len(ranks)
        fewer = 1 << size.bit_length() - 1
        if self.op is ReduceOp.ADASUM and size & (size - 1):
            raise UnsupportedOpError(
                "op=Adasum pairs ranks, so their number must be a power of two, but the process set has"
                f" {size} ({describe_ranks(ranks)}): use a process set of {fewer} of them, or op=Average"
            )

    def check(self, info: DtypeInfo) -> None:
        """Raise UnsupportedDtypeError if the dtype does not support this op, or these factors."""
        if self.op not in info.ops:
            supported = ", ".join(op.name.title() for op in sorted(info.ops)) or "it can be moved"
            hint = ": for bool, Max is 'any' and Min is 'all'" if info.name == "bool" else ""
            if self.op is ReduceOp.ADASUM:
                hint = ": Adasum reduces float16, bfloat16, float32 and float64"
            raise UnsupportedDtypeError(
                f"op={self.op.name.title()} is not defined for {info.name} (only {supported}){hint}"
            )
        if (self.prescale, self.postscale) == (1.0, 1.0):
            return
        if not info.scalable:
            raise UnsupportedDtypeError(f"{info.name} cannot be scaled: leave both factors at 1.0")
        if self.op in BITWISE_OPS:
            raise UnsupportedOpError(f"op={self.op.name.title()} takes no factors: leave both at 1.0")


def _factor(which: str, value: float) -> float:
    try:
        factor = float(value)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"{which}_factor={value!r} is not a number: {exc}") from None
    if not math.isfinite(factor):
        raise ValueError(f"{which}_factor={value!r} is not a finite number")
    return factor


def _callers_level() -> int:
    """Return the ``stacklevel`` for a warning of the caller that shall point outside this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("pyhvd."):
        level, frame = level + 1, frame.f_back
    return level

"""One public call: from its arguments to a Handle.

Owns: what all verbs have in common. Which context and process set; the names of the tensors; building the
entries; and, if the call turns out to be wrong on this rank, telling the others so that they do not wait.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from pyhvd.api.handles import Handle, QueuedHandle
from pyhvd.api.process_sets import ProcessSet, members_of
from pyhvd.backends.host import rows_of
from pyhvd.common.stacks import calling_site
from pyhvd.common.text import describe_exception, describe_ranks, describe_traceback
from pyhvd.devices.array_libraries import View
from pyhvd.devices.base import DeviceView
from pyhvd.devices.pending import PendingArray, taken
from pyhvd.devices.streams import mark_ready
from pyhvd.engine import context
from pyhvd.errors import DuplicateNameError, HorovodInternalError, UnsupportedOpError
from pyhvd.negotiation.messages import HOST, UNNAMED, Request, RequestType, verb
from pyhvd.queue import TensorEntry

T = TypeVar("T")


Part = tuple[Request, View | None, View | None, tuple[int, ...]]
"""A tensor of a call: what the others are told, where it is, where its result goes, splits."""


class OwnName(str):
    """A name that pyhvd gives itself."""

    __slots__ = ()


class Call:
    """Context manager around the body of a verb, which may change ``kind`` once it knows better.

    Parameters
    ----------
    kind : RequestType
        What is called.
    name : str or None
        The user's name.
    process_set : ProcessSet
        Who takes part.
    grouped : bool
        Whether it takes a list.
    prefix : str
        Of the name of an unnamed call.

    Raises
    ------
    NotInitializedError
        Before ``init()``.
    ValueError
        The process set cannot be used by this rank, or the name is no str.
    """

    def __init__(
        self,
        kind: RequestType,
        name: str | None,
        process_set: ProcessSet,
        grouped: bool = False,
        prefix: str = UNNAMED,
    ) -> None:
        self.context = context.current()
        self.set_id, ranks = members_of(self.context, process_set)
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(self.context.topology.rank)
        own = str(name) if isinstance(name, OwnName) else checked_name(name, kind)
        self.name = own or self.context.next_name(self.set_id, prefix)
        self.kind = kind
        self._grouped = grouped
        self._group_size = 0
        self.parts: list[Part] = []

    def members(self, tensors: Any) -> Sequence[Any]:
        """Return the call's tensors: the one, or those of a group."""
        if not self._grouped:
            return (tensors,)
        if isinstance(tensors, np.ndarray) or not isinstance(tensors, (list, tuple)):
            raise TypeError(f"grouped_{verb(self.kind)} takes a list of arrays, not {type(tensors).__name__}")
        members = list(tensors)  # the caller's own list may change meanwhile
        self._group_size = len(members)
        return members

    def add(
        self,
        source: View | None,
        target: View | None,
        *,
        op: int = -1,
        prescale: float = 1.0,
        postscale: float = 1.0,
        root: int = -1,
        splits: tuple[int, ...] = (),
        ranks: tuple[int, ...] = (),
        window: bool = False,
    ) -> None:
        """Add one tensor to what is submitted.

        Raises
        ------
        ValueError
            It is on another device than this rank's tensors before.
        """
        if isinstance(source, DeviceView):
            self.context.settle_on(source.on)
        name = self.name
        if self._grouped:
            name = f"{name}_{len(self.parts) + 1}of{self._group_size}"
        request = Request(
            self.kind,
            name,
            -1 if source is None else int(source.info.code),
            () if source is None else source.shape,
            op,
            prescale,
            postscale,
            root,
            HOST if source is None else source.device,
            self.name if self._grouped else "",
            self._group_size,
            ranks,
            window=window,
        )
        self.parts.append((request, source, target, splits))

    def check_root(self, root_rank: int) -> int:
        """Return the root's global rank.

        Raises
        ------
        ValueError
            It is no int, or no member of the set.
        """
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
        self, inplace: Sequence[Any] | None = None, before_end: Callable[[], None] | None = None
    ) -> Handle:
        """Submit everything added, as one unit.

        Parameters
        ----------
        inplace : sequence, optional
            The caller's own objects, to be returned.
        before_end : callable, optional
            Called by the runtime when the others' answer is there, before anybody hears of it.
        """
        runtime = self.context.runtime
        handle, entries = wrap(self.context, self.set_id, self.name, self.parts, self._result(inplace))
        if not self.parts:
            runtime.check_joined(self.set_id, self._refusal(""))
            # Nothing to wait for here; but ranks whose list is not empty must not wait for this one.
            runtime.announce(self.set_id, self._refusal("its list of tensors is empty"))
            return handle
        mark_ready(
            view
            for _, source, target, _ in self.parts
            for view in (source, target)
            if isinstance(view, DeviceView)
        )
        if before_end is not None:
            entries[-1].done = _after(before_end, entries[-1].done)
        runtime.submit(entries)
        return handle

    def _result(self, inplace: Sequence[Any] | None) -> Callable[[list[Any]], Any]:
        """Return what makes the call's result of those of its tensors."""
        if any(isinstance(source, DeviceView) for _, source, _, _ in self.parts):
            return result_on_device(self._grouped, inplace)
        if self._grouped:
            return list if inplace is None else lambda _: list(inplace)
        return (lambda outputs: outputs[0]) if inplace is None else (lambda _: inplace[0])

    def _refusal(self, text: str, traceback: str = "") -> Request:
        group = self.name if self._grouped else ""
        return Request(
            self.kind, self.name, group=group, group_size=self._group_size, error=text, traceback=traceback
        )

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """If the call is refused here, let the ranks that wait for it know."""
        if exc is None or not isinstance(exc, Exception):
            return
        if isinstance(exc, HorovodInternalError) and not isinstance(exc, UnsupportedOpError):
            return
        what = f"{verb(self.kind)} {self.name!r}: "
        text = describe_exception(exc)
        self.context.runtime.meter.failed("refused")
        self.context.runtime.announce(self.set_id, self._refusal(text, describe_traceback(exc)))
        if not isinstance(exc, DuplicateNameError) and len(exc.args) == 1 and isinstance(exc.args[0], str):
            exc.args = (what + exc.args[0],)


def _after(
    first: Callable[[], None], done: Callable[[Any, BaseException | None], None]
) -> Callable[[Any, BaseException | None], None]:
    """Return what calls one after the other."""

    def both(result: Any, error: BaseException | None) -> None:
        first()
        done(result, error)

    return both


def checked_name(name: str | None, kind: RequestType) -> str:
    """Return the user's name as it travels, empty for none.

    Raises
    ------
    ValueError
        It is no str, is empty, is one of pyhvd's own, or is no text that can be sent.
    """
    if name is None:
        return ""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{verb(kind)}: name must be a str that is not empty, not {name!r}")
    if UNNAMED in name.split("."):
        raise ValueError(f"{verb(kind)}: names with {UNNAMED!r} between dots, like {name!r}, are pyhvd's own")
    try:
        return name.encode().decode()  # a plain str, whatever subclass it was
    except UnicodeEncodeError as exc:
        raise ValueError(f"{verb(kind)}: name {name!r} is no text that can be sent: {exc}") from None


def wrap(
    active: context.Context,
    set_id: int,
    name: str,
    parts: Sequence[Part],
    result: Callable[[list[Any]], Any],
) -> tuple[QueuedHandle, list[TensorEntry]]:
    """Return the handle of a call, and its tensors as they are to be queued."""
    runtime = active.runtime
    handle = QueuedHandle(name, len(parts), runtime.flush, result, runtime.meter)
    site, complete = calling_site(), handle.complete
    return handle, [
        TensorEntry(set_id, request, source, target, partial(complete, part), splits, 0, site)
        for part, (request, source, target, splits) in enumerate(parts)
    ]


def result_on_device(grouped: bool, inplace: Sequence[Any] | None) -> Callable[[list[Any]], Any]:
    """Return what makes a call's result of those of tensors that may be under way.

    The caller's stream waits for them, in place too.
    """
    if inplace is None:
        return _taken_all if grouped else _taken_first

    def result(outputs: list[Any]) -> Any:
        for output in outputs:
            if isinstance(output, PendingArray):
                output.follow()
        return list(inplace) if grouped else inplace[0]

    return result


def _taken_all(outputs: list[Any]) -> list[Any]:
    return [taken(output) for output in outputs]


def _taken_first(outputs: list[Any]) -> Any:
    return taken(outputs[0])


def refusing(
    kind: RequestType,
    name: str | None,
    process_set: ProcessSet,
    prepare: Callable[[], T],
    *,
    grouped: bool = False,
) -> T:
    """Return ``prepare()``, the part of a call that comes before it; if that raises, the call is refused."""
    try:
        return prepare()
    except Exception:
        with Call(kind, name, process_set, grouped=grouped):
            raise


def check_rows(shape: tuple[int, ...], size: int) -> list[int]:
    """Return each rank's share of dimension 0.

    Raises
    ------
    ValueError
        There is no dimension 0.
    """
    if not shape:
        raise ValueError("a tensor of rank zero (0-d) has no dimension 0: reshape it to (1,) first")
    return rows_of(shape[0], size)


def check_splits(splits: Any, shape: tuple[int, ...], size: int) -> list[int]:
    """Return how many rows each rank gets.

    Raises
    ------
    ValueError
        See :func:`pyhvd.api.collectives.alltoall`.
    """
    shares = check_rows(shape, size)
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

"""The mismatch check: compare the ranks' requests for one tensor, and say what differs, rank by rank.

Pure functions over :mod:`pyhvd.negotiation.messages`. The order of the checks is Horovod's: dtype, operation,
shape, scales, reduce op, joined ranks, root, device. Horovod does not send layouts, grouping and the members
of a process set: here layouts follow shapes, and the others come last. Only the first difference is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyhvd.common.text import describe_ranks, describe_values, list_members
from pyhvd.dtypes import BY_CODE, ReduceOp
from pyhvd.negotiation.messages import ErrorInfo, ErrorKind, Request, RequestType, iter_bits, verb

_SAME_SHAPE = frozenset(
    (RequestType.ALLREDUCE, RequestType.ADASUM, RequestType.BROADCAST, RequestType.REDUCESCATTER)
)
_ROWS_DIFFER = frozenset((RequestType.ALLGATHER, RequestType.ALLTOALL))
_NEEDS_ALL = frozenset(
    (RequestType.ALLTOALL, RequestType.BARRIER, RequestType.ADD_PROCESS_SET, RequestType.REMOVE_PROCESS_SET)
)


def _dtype(request: Request) -> str:
    return BY_CODE[request.dtype].name if request.dtype in BY_CODE else "no tensor"


def _op(request: Request) -> str:
    return ReduceOp(request.op).name.capitalize() if request.op >= 0 else "none"


def _group(request: Request) -> str:
    return f"one of {request.group_size} in {request.group!r}" if request.group else "not grouped"


def _layout(layout: str) -> str:
    """Return the words for a layout tag."""
    known = {"": "row-major", "0,2,3,1": "channels_last", "0,2,3,4,1": "channels_last_3d"}
    return known.get(layout, f"dimensions in the order {layout}")


Check = tuple[str, Callable[[Request], Any], Callable[[Request], str]]

_FIRST: tuple[Check, ...] = (
    ("data types", lambda r: r.dtype, _dtype),
    ("operations", lambda r: r.type, lambda r: verb(r.type)),
)
_SHAPES: Check = ("shapes", lambda r: r.shape, lambda r: str(r.shape))
_LAYOUTS: Check = ("memory layouts", lambda r: r.layout, lambda r: _layout(r.layout))
_NDIMS: Check = ("numbers of dimensions", lambda r: len(r.shape), lambda r: f"{len(r.shape)} {r.shape}")
_TRAILING: Check = ("dimensions after the first", lambda r: r.shape[1:], lambda r: str(r.shape))
_SCALES: tuple[Check, ...] = (
    ("prescale factors", lambda r: r.prescale, lambda r: f"{r.prescale!r}"),
    ("postscale factors", lambda r: r.postscale, lambda r: f"{r.postscale!r}"),
    ("reduce ops", lambda r: r.op, _op),
)
_LAST: tuple[Check, ...] = (
    ("root ranks", lambda r: r.root, lambda r: str(r.root)),
    ("devices", lambda r: r.device.partition(":")[0], lambda r: r.device),
    ("grouping", lambda r: (r.group, r.group_size), _group),
    ("process sets", lambda r: r.ranks, lambda r: list_members(r.ranks)),
)


def check(requests: Mapping[Request, int], joined: int) -> ErrorInfo | None:
    """Compare the ranks' requests under one name.

    Parameters
    ----------
    requests : mapping of Request to int
        The global ranks of each distinct request, as a bit vector; not empty.
    joined : int
        Bit vector of the global ranks that have joined and submit nothing.

    Returns
    -------
    ErrorInfo or None
        The first difference, with every rank's value, or None.
    """
    first = next(iter(requests))
    kind = RequestType(first.type)
    shapes: tuple[Check, ...] = ()
    if kind in _SAME_SHAPE or kind in _ROWS_DIFFER:
        shapes = (_SHAPES, _LAYOUTS) if kind in _SAME_SHAPE else (_NDIMS, _TRAILING)
    for what in (*_FIRST, *shapes, *_SCALES):
        if error := _differs(requests, what):
            return error
    if joined and (error := _check_joined(first, kind, joined)):
        return error
    return next((error for what in _LAST if (error := _differs(requests, what))), None)


def sizes_differ(request: Request, sizes: Mapping[int, int]) -> ErrorInfo:
    """Return the error of a grouped call with these numbers of tensors on these ranks."""
    per_rank = {rank: f"{size} tensors" for rank, size in sizes.items()}
    return ErrorInfo(
        ErrorKind.MISMATCH,
        f"Mismatched sizes of the group {request.group!r} ({verb(request.type)}):"
        f" {describe_values(per_rank)}. Every rank must submit the same under one name.",
        per_rank=per_rank,
    )


def _differs(requests: Mapping[Request, int], what: Check) -> ErrorInfo | None:
    label, key, show = what
    request = next(iter(requests))
    first = key(request)
    if all(key(each) == first for each in requests):
        return None
    per_rank: dict[int, str] = {}
    for each, ranks in requests.items():
        per_rank |= dict.fromkeys(iter_bits(ranks), show(each))
    subject = "tensor" if label == "operations" else verb(request.type)
    return ErrorInfo(
        ErrorKind.MISMATCH,
        f"Mismatched {label} of {subject} {request.name!r}: {describe_values(per_rank)}."
        " Every rank must submit the same under one name.",
        per_rank=per_rank,
    )


def _check_joined(first: Request, kind: RequestType, joined: int) -> ErrorInfo | None:
    if kind in _NEEDS_ALL:
        reason = "needs every rank"
    elif kind is RequestType.BROADCAST and joined >> first.root & 1:
        reason = f"has its root on rank {first.root}"
    else:
        return None
    gone = iter_bits(joined)
    return ErrorInfo(
        ErrorKind.MISMATCH,
        f"{verb(first.type)} {first.name!r} {reason}, but {describe_ranks(gone)} already called join()."
        " Call it before the first rank joins or after join() has returned.",
        per_rank=dict.fromkeys(gone, "joined"),
    )

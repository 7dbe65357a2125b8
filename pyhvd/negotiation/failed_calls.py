"""Failed calls: tensors and grouped calls that have failed before every rank has submitted them.

Owns: :class:`FailedCall`, one failure and the ranks that have yet to get its error, and :class:`FailedCalls`,
the failures of one process set. Pure; used by :mod:`pyhvd.negotiation.message_table`.

A grouped call fails as a whole, and each rank gets the error once for each tensor:

1. A rank that submits the group submits all of its tensors, and gets the error once for each of them.
2. A rank that submits a tensor of the group by itself, outside the group, may never submit the other tensors.
   It gets the error once for each tensor that it submits. When it submits the group, or a tensor that it has
   submitted before, that request belongs to a new call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from pyhvd.negotiation.messages import ErrorInfo, Request

Key = tuple[str, str]
"""(group, "") for a grouped call, ("", name) for a tensor."""


@dataclass(slots=True, eq=False)
class FailedCall:
    """One failure of a call: a rank refused the call, or the ranks' requests differ.

    Attributes
    ----------
    error : ErrorInfo
        The cause.
    unheard : set of int
        The ranks that have submitted no tensor of the call yet, and will.
    left : dict of int to int
        By rank that has submitted some tensors of the grouped call: how many it has yet to submit.
    origin : str
        The tensor that the error names; empty if the error names the group.
    group, size : str, int
        Name and number of tensors of the grouped call; ``""`` and 0 for a single tensor. With a group's name,
        size 0 stands for any size.
    names : set of str
        The call's tensors that the coordinator knows so far.
    singles : dict of int to set of str
        By rank that submits the call's tensors outside the group: the tensors that it has submitted.
    number : int
        The failure's place in the order of failures.
    """

    error: ErrorInfo
    unheard: set[int] = field(default_factory=set)
    origin: str = ""
    group: str = ""
    size: int = 0
    names: set[str] = field(default_factory=set)
    singles: dict[int, set[str]] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    number: int = 0
    _errors: dict[str, ErrorInfo] = field(default_factory=dict, init=False)

    @classmethod
    def by(cls, rank: int, request: Request, error: ErrorInfo, others: Iterable[int]) -> FailedCall:
        """Make the failure of a call that ``rank`` refused; ``others`` have yet to get the error."""
        unheard = set(others)
        if request.group:
            return cls(error, unheard, group=request.group, size=request.group_size)
        name = request.name
        return cls(error, unheard, name, names={name}, singles={rank: {name}})

    def error_for(self, name: str) -> ErrorInfo:
        """Return the error for one tensor of the call; its text names the tensor that caused the failure.

        Each name has one error object.
        """
        if name == self.origin or not self.origin:
            return self.error
        if name not in self._errors:
            text = f"Its group failed with {self.origin!r}: {self.error.message}"
            self._errors[name] = replace(self.error, message=text)
        return self._errors[name]

    def count(self, rank: int, request: Request) -> None:
        """Count a request that was in the message table when the call failed; its rank gets the error."""
        if rank not in self.singles and rank not in self.left:
            self.unheard.add(rank)
        self.answer(rank, request)

    def answer(self, rank: int, request: Request) -> bool:
        """Return whether a request belongs to this failure; if so, count it as answered."""
        if (submitted := self.singles.get(rank)) is not None:
            if request.group or request.name in submitted:
                del self.singles[rank]
                return False
            submitted.add(request.name)
        elif not self._awaits(rank) or (request.group and not self._is_of_size(request.group_size)):
            return False
        elif request.group:
            # A rank that refuses a group sends one refusal, not one for each tensor.
            self.unheard.discard(rank)
            left = 0 if request.error else self.left.get(rank, request.group_size) - 1
            self.left[rank] = left
            if not left:
                del self.left[rank]
            if not self.group:
                self.group, self.size = request.group, request.group_size
        else:
            self._forget(rank)
            self.singles[rank] = {request.name}
        if not (request.group and request.error):
            self.names.add(request.name)
        return True

    def _awaits(self, rank: int) -> bool:
        return rank in self.unheard or rank in self.left

    def _forget(self, rank: int) -> None:
        self.unheard.discard(rank)
        self.left.pop(rank, None)

    def excuse(self, rank: int) -> bool:
        """Wait no longer for a rank; return whether the call has waited for it."""
        concerned = self._awaits(rank) or rank in self.singles
        self._forget(rank)
        self.singles.pop(rank, None)
        return concerned

    def _is_of_size(self, size: int) -> bool:
        return self.size == size or not (self.size and size)

    def expects(self, rank: int, name: str) -> bool:
        """Return whether a rank has yet to get the error for a tensor that it submits outside the group."""
        if name not in self.names:
            return False
        if rank in self.singles:
            return name not in self.singles[rank]
        return rank in self.unheard

    def is_open(self) -> bool:
        """Return whether some rank may still submit a tensor of the call."""
        if self.unheard or self.left or not self.group:
            return bool(self.unheard or self.left)
        is_complete = len(self.names) == self.size
        return any(not (is_complete and self.names <= names) for names in self.singles.values())

    def found_by(self) -> list[Key]:
        """Return the keys under which :class:`FailedCalls` lists this failure; see :func:`keys_of`."""
        return [*(("", name) for name in self.names), *([(self.group, "")] if self.group else [])]


def keys_of(request: Request) -> tuple[Key, ...]:
    """Return the keys under which a request's failures are listed; a refusal of a group has one key."""
    key = (request.group, "") if request.group else ("", request.name)
    return (("", request.name), key) if request.group and not request.error else (key,)


class FailedCalls:
    """The failed calls of one process set.

    Attributes
    ----------
    by_key : dict of Key to dict of int to FailedCall
        Open failures by key and number; empty while nothing has failed.
    """

    def __init__(self) -> None:
        self.by_key: dict[Key, dict[int, FailedCall]] = {}
        self._added = 0

    def touches(self, request: Request) -> bool:
        """Return whether a failure may concern a request."""
        return any(key in self.by_key for key in keys_of(request))

    def add(self, failed: FailedCall) -> None:
        """Number a failure, and list it if some rank has yet to get the error."""
        self._added += 1
        failed.number = self._added
        self.update(failed)

    def answer(self, rank: int, request: Request) -> tuple[FailedCall | None, bool]:
        """Find the oldest failure that a rank's request belongs to, and count the request as answered.

        Returns
        -------
        failed : FailedCall or None
            None if the request belongs to no failure.
        is_new : bool
            Whether it is the rank's first request of the failed call, or adds a tensor to the failed call.
        """
        found: dict[int, FailedCall] = {}
        for key in keys_of(request):
            found.update(self.by_key.get(key, {}))
        for _, failed in sorted(found.items()):
            is_new = rank in failed.unheard or request.name not in failed.names
            belongs = failed.answer(rank, request)
            if is_new or not failed.is_open():
                self.update(failed)
            if belongs:
                return failed, is_new
        return None, False

    def excuse(self, joined: Iterable[int]) -> None:
        """Let no failure wait any longer for ranks that have joined.

        Call it after all requests of an event were taken. A joined rank's deferred request was submitted
        before the join, so a failure may still have to answer it.
        """
        for rank in joined:
            calls = {number: each for found in self.by_key.values() for number, each in found.items()}
            for failed in calls.values():
                if failed.excuse(rank):
                    self.update(failed)

    def update(self, failed: FailedCall) -> None:
        """List a failure under all its present keys, or under none if every rank has got the error."""
        is_open = failed.is_open()
        for key in failed.found_by():
            calls = self.by_key.setdefault(key, {})
            if is_open:
                calls[failed.number] = failed
            else:
                calls.pop(failed.number, None)
            if not calls:
                del self.by_key[key]

"""Refusals: tensors and grouped calls that have failed already, of which some ranks have yet to hear.

Owns: :class:`FailedCall`, one failure and who is still to be told, and :class:`FailedCalls`, those of one process
set. Pure: kept by :mod:`pyhvd.negotiation.message_table`.

A grouped call fails as a whole, so what has failed may have several tensors. A rank is told of each one as
it submits it. A rank that submits the group submits all of it: how much is still to come is known, and it
is told of exactly that. A rank that submits a member by itself need not submit the others: it is told of
those too, until it submits the group, or the same member again. Then it has moved on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from pyhvd.negotiation.messages import ErrorInfo, Request

Key = tuple[str, str]


@dataclass(slots=True, eq=False)
class FailedCall:
    """Something has failed: a rank refused it, or what the ranks submitted does not fit together.

    Attributes
    ----------
    error : ErrorInfo
        Why.
    waiting : dict of int to int
        For each rank that has yet to submit all of it, how many tensors are still to come; -1 where the
        rank has sent nothing yet.
    origin : str
        The tensor that the error speaks of; empty where it speaks of the group.
    group, size : str, int
        The grouped call; empty for a tensor by itself, and size 0 for a call of any size.
    names : set of str
        The tensors of it that are known.
    alone : dict of int to set of str
        For each rank that has submitted some of it by themselves, which.
    age, filed : int
        Its number, and under how many keys it is found; for :class:`FailedCalls`.
    """

    error: ErrorInfo
    waiting: dict[int, int] = field(default_factory=dict)
    origin: str = ""
    group: str = ""
    size: int = 0
    names: set[str] = field(default_factory=set)
    alone: dict[int, set[str]] = field(default_factory=dict)
    age: int = 0
    filed: int = 0

    @classmethod
    def by(cls, rank: int, request: Request, error: ErrorInfo, others: Iterable[int]) -> FailedCall:
        """Make the refusal of one rank, of which the others are to be told."""
        waiting = dict.fromkeys(others, -1)
        if request.group:
            return cls(error, waiting, group=request.group, size=request.group_size)
        name = request.name
        return cls(error, waiting, name, names={name}, alone={rank: {name}})

    def error_for(self, name: str) -> ErrorInfo:
        """Return the error as one tensor of the group is told it."""
        if name == self.origin or not self.origin:
            return self.error
        return replace(self.error, message=f"Its group failed with {self.origin!r}: {self.error.message}")

    def count(self, rank: int, request: Request) -> None:
        """A rank has submitted a part of what fails now."""
        if rank not in self.alone:
            self.waiting.setdefault(rank, -1)
        self.tell(rank, request)

    def tell(self, rank: int, request: Request) -> bool:
        """Return whether a request is part of what has failed; its rank counts as told, or as moved on."""
        if (told := self.alone.get(rank)) is not None:
            if request.group or request.name in told:
                del self.alone[rank]
                return False
            told.add(request.name)
        elif rank not in self.waiting or (request.group and not self._is_of_size(request.group_size)):
            return False
        elif request.group:
            # A rank that refuses a group as well says so once, whatever the group's size.
            left = self.waiting[rank]
            left = 0 if request.error else (left if left > 0 else request.group_size) - 1
            if left:
                self.waiting[rank] = left
            else:
                del self.waiting[rank]
            if not self.group:
                self.group, self.size = request.group, request.group_size
        else:
            del self.waiting[rank]
            self.alone[rank] = {request.name}
        if not (request.group and request.error):
            self.names.add(request.name)
        return True

    def _is_of_size(self, size: int) -> bool:
        return self.size == size or not (self.size and size)

    def expects(self, rank: int, name: str) -> bool:
        """Return whether a rank that submits a tensor by itself has yet to be told of it."""
        if name not in self.names:
            return False
        if rank in self.alone:
            return name not in self.alone[rank]
        return self.waiting.get(rank, 0) < 0

    def excuse(self, rank: int) -> None:
        """A rank need not be told."""
        self.waiting.pop(rank, None)
        self.alone.pop(rank, None)

    def is_open(self) -> bool:
        """Return whether some rank may still submit part of it."""
        if self.waiting or not self.group:
            return bool(self.waiting)
        known = len(self.names) == self.size
        return any(not (known and self.names <= told) for told in self.alone.values())

    def found_by(self) -> list[Key]:
        """Return by what it is found; see :func:`keys_of`."""
        return [("", name) for name in self.names] + ([(self.group, "")] if self.group else [])


def keys_of(request: Request) -> tuple[Key, ...]:
    """Return the refusals that concern a request; a refused group is named by the group alone."""
    key = (request.group, "") if request.group else ("", request.name)
    return (("", request.name), key) if request.group and not request.error else (key,)


class FailedCalls:
    """The refusals of one process set, found by tensor and by group."""

    def __init__(self) -> None:
        self._by_key: dict[Key, list[FailedCall]] = {}
        self._added = 0

    def __bool__(self) -> bool:
        return bool(self._by_key)

    def touch(self, request: Request) -> bool:
        """Return whether one of them may concern a request."""
        return any(key in self._by_key for key in keys_of(request))

    def add(self, refusal: FailedCall) -> None:
        """Remember a failure, if any rank has yet to hear of it."""
        if refusal.is_open():
            self._added += 1
            refusal.age = self._added
            self._file(refusal)

    def tell(self, rank: int, request: Request) -> tuple[FailedCall | None, bool]:
        """Find the oldest refusal that a rank's request falls under; the rank counts as told of it.

        Returns
        -------
        refusal : FailedCall or None
            None where nothing like it has failed.
        news : bool
            Whether the rank's part in it, or that this tensor belongs to it, was not known before.
        """
        found = {each.age: each for key in keys_of(request) for each in self._by_key.get(key, ())}
        for _, refusal in sorted(found.items()):
            news = refusal.waiting.get(rank, 0) < 0 or request.name not in refusal.names
            told = refusal.tell(rank, request)
            self.update(refusal)
            if told:
                return refusal, news
        return None, False

    def excuse(self, joined: Iterable[int]) -> None:
        """Ranks that have joined need not be told of anything; what of theirs was deferred came before."""
        for rank in joined if self._by_key else ():
            for refusal in {each.age: each for here in self._by_key.values() for each in here}.values():
                refusal.excuse(rank)
                self.update(refusal)

    def update(self, refusal: FailedCall) -> None:
        """A refusal has changed: find it by all that it is about now, or forget it."""
        if refusal.is_open():
            self._file(refusal)
            return
        for key in refusal.found_by():
            if refusal in (here := self._by_key.get(key, [])):
                here.remove(refusal)
                if not here:
                    del self._by_key[key]
        refusal.filed = 0

    def _file(self, refusal: FailedCall) -> None:
        count = len(refusal.names) + bool(refusal.group)
        for key in refusal.found_by() if refusal.filed != count else ():
            here = self._by_key.setdefault(key, [])
            if refusal not in here:
                here.append(refusal)
        refusal.filed = count

"""Refusals: tensors that have failed already, of which some ranks have yet to hear.

Pure: kept by :mod:`pyhvd.negotiation`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyhvd.messages import ErrorInfo, Request


@dataclass(slots=True)
class Refusal:
    """A tensor, or a grouped call, has failed already: ranks that have yet to submit it are told as they do.

    Either a rank refused it, or it fell with the rest of its group.

    ``waiting`` holds, for each rank that has yet to submit all of it, how many tensors are still to come
    (-1 where the rank has sent nothing yet). ``size`` is the grouped call's, 0 where that is not known.
    """

    error: ErrorInfo
    waiting: dict[int, int]
    size: int = 0

    def concerns(self, request: Request) -> bool:
        """Return whether a request of the same key is meant: calls of one name may differ in size."""
        return not (self.size and request.group_size) or self.size == request.group_size


Key = tuple[str, str]


def key_of(request: Request) -> Key:
    """Return the unit of refusal: a grouped call as a whole, or one tensor."""
    return (request.group, "") if request.group else ("", request.name)


def keys_of(request: Request) -> tuple[Key, ...]:
    """Return the refusals that concern a request; a refused group is named by the group alone."""
    key = key_of(request)
    return (("", request.name), key) if request.group and not request.error else (key,)

"""The response lists that this rank has yet to run, in order, and on rank 0 their delivery.

Only the runtime's thread uses it.

Rank 0 runs a list only after this list and all earlier lists have left for every rank. The reason: MPI does
not progress a queued send while its sender waits outside MPI, as in shared memory. Rank 0 would wait for its
peers in shared memory, and they for their list, or for ranks that wait for an earlier list. The wait is
finite because rank 0 does not wait for later lists: the others can run all earlier lists, and then receive
this one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING

from pyhvd.negotiation.messages import ResponseList, decode_responses, encode

if TYPE_CHECKING:
    from pyhvd.transport.control import ControlTransport, Sending

_STOP_SECONDS = 0.2
"""Time limit (s) for the delivery of the last list, whose receiver may be dead or stopped."""


class ResponseQueue:
    """A queue of response lists.

    Parameters
    ----------
    control : ControlTransport
        Carries the lists from rank 0 to the others.
    """

    def __init__(self, control: ControlTransport) -> None:
        self._control = control
        self._lists: deque[tuple[ResponseList, list[Sending], float]] = deque()
        self._under_way: list[Sending] = []  # known sends, including those of lists for other ranks only

    def hear(self, payload: bytes | bytearray) -> None:
        """Append an arrived list."""
        self._lists.append((decode_responses(payload), [], 0.0))

    def publish(self, responses: ResponseList, audience: Collection[int]) -> None:
        """Send a list to the ranks that it concerns; on rank 0, which may be one of them."""
        payload = encode(responses)
        here = self._control.rank
        earlier = [sending for sending in self._under_way if not sending.gone()]
        self._under_way = earlier + [self._control.send(rank, payload) for rank in audience if rank != here]
        if here in audience:
            self._lists.append((responses, self._under_way, time.monotonic() + _STOP_SECONDS))

    def first(self) -> ResponseList | None:
        """Return the next list if this rank may run it now."""
        if not self._lists:
            return None
        responses, sendings, until = self._lists[0]
        if all(sending.gone() for sending in sendings):
            return responses
        return responses if responses.stop is not None and time.monotonic() >= until else None

    def pop(self) -> ResponseList:
        """Remove and return the first list."""
        return self._lists.popleft()[0]

    def look_at(self) -> float | None:
        """Return when to check the first list again without an event; None for never."""
        if not self._lists or self._lists[0][0].stop is None or self.first() is not None:
            return None
        return self._lists[0][2]

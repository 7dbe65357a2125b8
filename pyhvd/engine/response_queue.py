"""Response lists on their way, and those that this rank is still to carry out, in their order.

Owns: the lists of one rank, and on rank 0 what is known of their delivery. Used by the runtime's thread.

Rank 0 carries out a list only once all others can have it, and all lists before it, whomever they concern.
MPI brings a message that it had to queue no further while its sender is elsewhere, and a collective in
shared memory is elsewhere: its peers would wait for their list, or for other ranks that wait for an earlier
one, and rank 0 for its peers. That it does not wait for later lists keeps the wait finite: the others have
carried out, or can, all that is before this one, and then come to receive it.
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
"""For how long the last list waits for its delivery: it also ends ranks whose peers are gone, or stopped."""


class ResponseQueue:
    """See the module's docstring.

    Parameters
    ----------
    control : ControlTransport
        Carries the lists from rank 0 to the others.
    """

    def __init__(self, control: ControlTransport) -> None:
        self._control = control
        self._lists: deque[tuple[ResponseList, list[Sending], float]] = deque()
        self._under_way: list[Sending] = []  # as far as is known; of lists that concern other ranks, too

    def hear(self, payload: bytes | bytearray) -> None:
        """Take a list that has arrived."""
        self._lists.append((decode_responses(payload), [], 0.0))

    def publish(self, responses: ResponseList, audience: Collection[int]) -> None:
        """Send a list to the ranks that it concerns, of which this one, rank 0, may be one."""
        payload = encode(responses)
        here = self._control.rank
        earlier = [sending for sending in self._under_way if not sending.gone()]
        self._under_way = earlier + [self._control.send(rank, payload) for rank in audience if rank != here]
        if here in audience:
            self._lists.append((responses, self._under_way, time.monotonic() + _STOP_SECONDS))

    def first(self) -> ResponseList | None:
        """Return the next list to carry out, if it may be carried out by now."""
        if not self._lists:
            return None
        responses, sendings, until = self._lists[0]
        if all(sending.gone() for sending in sendings):
            return responses
        return responses if responses.stop is not None and time.monotonic() >= until else None

    def pop(self) -> ResponseList:
        """Return and forget the first list."""
        return self._lists.popleft()[0]

    def look_at(self) -> float | None:
        """Return when to look again at the first list, though nothing has gone out; None: never."""
        if not self._lists or self._lists[0][0].stop is None or self.first() is not None:
            return None
        return self._lists[0][2]

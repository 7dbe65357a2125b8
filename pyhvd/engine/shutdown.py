"""The shutdown barrier: rank 0 hears from every rank before the ranks free their communicators.

A rank says goodbye to the rank above it in the tree after all ranks below it have. Owns the set of ranks that
have said goodbye. A rank may do so before the rank above it ends.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pyhvd.common.text import describe_ranks

if TYPE_CHECKING:
    from pyhvd.transport.control import ControlTransport

_log = logging.getLogger("pyhvd")

GOODBYE = b""
_SECONDS = 10.0


class ShutdownBarrier:
    """The barrier of one rank; only the runtime's thread uses it."""

    def __init__(self, control: ControlTransport) -> None:
        self._control = control
        self._left = set(control.tree.children)

    def hear(self, rank: int) -> None:
        """Note that a rank below this one has said goodbye."""
        self._left.discard(rank)

    def say(self) -> None:
        """Wait until no message is left.

        There is no time limit: a rank that computes without releasing the GIL is late, not lost, and a dead
        rank ends the whole job.
        """
        control = self._control
        warn_at = time.monotonic() + _SECONDS
        while self._left:
            self._left -= {source for source, payload in control.receive() if payload == GOODBYE}
            if time.monotonic() > warn_at:
                busy = describe_ranks(sorted(self._left))
                _log.warning("shutting down: still waiting for %s, busy with something else", busy)
                warn_at += _SECONDS
            if self._left:
                control.wait(0.1)
        if control.rank:
            control.send(control.tree.parent, GOODBYE)
        while not control.drain(_SECONDS):
            _log.warning("shutting down: the last messages have not been taken yet")

"""The end of a rank: the shutdown barrier, and the last messages of a rank whose thread has failed.

By the barrier rank 0 hears from every rank before the ranks free their communicators. A rank says goodbye to
the rank above it in the tree after all ranks below it have. Owns the set of ranks that have said goodbye. A
rank may do so before the rank above it ends.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from pyhvd.common.text import describe_ranks
from pyhvd.negotiation.messages import is_out_of_band
from pyhvd.transport.control import GOODBYE

if TYPE_CHECKING:
    from pyhvd.controller import Node
    from pyhvd.negotiation.messages import ErrorInfo
    from pyhvd.transport.control import ControlTransport

_log = logging.getLogger("pyhvd")

_SECONDS = 10.0
_EARLY_SECONDS = 1.0
"""Time limit (s) for each kind of message that a rank sends after its thread has failed."""


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


def end_early(control: ControlTransport, node: Node, cause: ErrorInfo) -> None:
    """Send the last messages of a rank whose thread has failed: the cause, the lists under way, goodbye."""
    node.stop(cause, time.monotonic())
    if node.coordinator is not None:
        _publish_end(node)
    else:
        _pass_on_end(control, node)
        control.send(control.tree.parent, GOODBYE)
    control.drain(_EARLY_SECONDS)


def _publish_end(node: Node) -> None:
    """Send the lists that were held back, then the last one; each at its place in the ready log."""
    until = time.monotonic() + _EARLY_SECONDS
    for _ in range(2):
        while not node.respond(time.monotonic()) and node.held is not None and time.monotonic() < until:
            time.sleep(1e-3)


def _pass_on_end(control: ControlTransport, node: Node) -> None:
    """On a leader, pass lists on to the ranks below until the last one."""
    node.flush(math.inf)
    until = time.monotonic() + _EARLY_SECONDS
    while node.leader is not None and not node.has_ended() and time.monotonic() < until:
        for source, payload in control.receive():
            if payload and source == control.tree.parent and not is_out_of_band(payload):
                node.take(source, payload, time.monotonic())
        control.wait(0.01)

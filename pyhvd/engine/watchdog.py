"""Sees to it that a rank gets its error although its background thread, or rank 0's, cannot give it one.

Rank 0 ends the job when tensors have waited for too long (:mod:`pyhvd.observe.hang_reporter`). It cannot where it is itself
stopped or dead, nor where its background thread is inside a collective that a rank has entered and does not
finish. So each rank also looks by itself, every now and then, and later than rank 0 would: has anything ended
here since I last looked?

Owns: the thread that looks, and :class:`Standstill`, which is pure. The thread touches nothing of the
runtime's but what any thread may read; what is to be done it is given as functions. There is none where no
shutdown time is set, except on rank 0, which warns.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from pyhvd.observe.stall_inspector import ANSWER_SECONDS

GRACE_SECONDS = 1.0 + ANSWER_SECONDS
"""How much later than rank 0 a rank gives up by itself, beside half the time itself."""


def give_up_after(end_after: float) -> float:
    """Return when (s) a rank gives up that rank 0 should have ended after ``end_after``; 0 for never."""
    return 1.5 * end_after + GRACE_SECONDS if end_after else 0.0


@dataclass(slots=True)
class Standstill:
    """For how long nothing has ended although something is in flight.

    Attributes
    ----------
    longest : float
        Most seconds between two looks that count: of a longer pause this process has been suspended.
    """

    longest: float = math.inf
    _last: float = 0.0
    _progress: Hashable = None
    _since: float = 0.0
    _waiting: bool = False

    def look(self, waiting: bool, progress: Hashable, now: float) -> float:
        """Return for how long (s), given whether something is in flight and what changes as things end."""
        self._since += max(now - self._last - self.longest, 0.0)
        self._last = now
        if not waiting or not self._waiting or progress != self._progress:
            self._since = now
        self._waiting, self._progress = waiting, progress
        return now - self._since


class Watch:
    """The thread.

    Parameters
    ----------
    rank : int
        This rank.
    warn_after, end_after : float
        Seconds; 0 for never.
    look : callable
        ``look()`` returns whether something is in flight, and what changes as things end.
    warn, end : callable
        What to do after the two times; each is called with the seconds that have passed, and returns at once.
    """

    def __init__(
        self,
        rank: int,
        warn_after: float,
        end_after: float,
        look: Callable[[], tuple[bool, Hashable]],
        warn: Callable[[float], None],
        end: Callable[[float], None],
    ) -> None:
        self._warn_after = warn_after
        self._end_after = end_after
        self._look = look
        self._warn = warn
        self._end = end
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._main, name=f"pyhvd-{rank}-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, from whichever thread; it may be about to end by itself."""
        self._over.set()

    def is_here(self) -> bool:
        """Return whether this is the thread that looks."""
        return threading.current_thread() is self._thread

    def join(self) -> None:
        """Wait for its end, which is near after :meth:`stop`; in a callback that it runs, do not."""
        if not self.is_here():
            self._thread.join()

    def _main(self) -> None:
        limits = [each for each in (self._warn_after, self._end_after) if each]
        pause = min(limits) / 4
        standstill = Standstill(2 * pause)
        warned = 0.0
        while not self._over.wait(pause):
            now = time.monotonic()
            passed = standstill.look(*self._look(), now)
            if passed < min(limits):
                warned = 0.0
            elif self._end_after and passed >= self._end_after:
                self._end(passed)
                return
            elif self._warn_after and passed - warned >= self._warn_after:
                warned = passed
                self._warn(passed)

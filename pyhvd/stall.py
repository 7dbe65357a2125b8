"""Which tensors wait for ranks that have not submitted them, and for how long already.

Pure: told the time and what is pending. Rank 0's runtime asks it now and then, only while something waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyhvd.controller import Stalled
from pyhvd.messages import ErrorInfo, ErrorKind
from pyhvd.validation import describe_ranks

_NAMED = 6


class StallInspector:
    """Decides when to warn and when to give up.

    Parameters
    ----------
    warn_after : float
        Seconds; 0 turns the inspector off.
    end_after : float
        Seconds after which the job is ended; 0 for never.
    unannounced : bool
        Whether tensors may come to wait without a message, so that one has to look for them.
    """

    def __init__(self, warn_after: float, end_after: float, unannounced: bool = False) -> None:
        self._unannounced = unannounced
        self._warn_after = warn_after
        self._end_after = end_after
        self._next = 0.0
        self._silent_until = 0.0

    def next_look(self, now: float) -> float | None:
        """Return when (s) to look again, or None for never."""
        if not self._warn_after:
            return None
        self._next = max(self._next, now)
        return self._next

    def look(self, pending: Sequence[Stalled], now: float) -> tuple[str, ErrorInfo | None]:
        """Return a warning (or an empty text), and the error that ends the job (or None)."""
        period = min(self._warn_after, self._end_after or self._warn_after)
        oldest = min((p.since for p in pending), default=now)
        self._next = now + max(min(period, oldest + period - now), period / 4)
        if self._unannounced:
            self._next = min(self._next, now + period / 4)
        late = [p for p in pending if now - p.since >= self._warn_after]
        if not late:
            return "", None
        over = [p for p in late if self._end_after and now - p.since >= self._end_after]
        if over:
            text = (
                f"after {self._end_after:g} s (PYHVD_STALL_SHUTDOWN_TIME_SECONDS) {self._describe(over, now)}"
            )
            missing = {p.name: list(p.missing) for p in over}
            return "", ErrorInfo(ErrorKind.STALL, f"the job was ended {text}", missing=missing)
        if now < self._silent_until:
            return "", None
        due = oldest + self._end_after if self._end_after else now + self._warn_after
        self._silent_until = min(now + self._warn_after, due)
        self._next = min(self._next, self._silent_until) if self._unannounced else self._silent_until
        return (
            f"some ranks wait for tensors that others have not submitted: {self._describe(late, now)}",
            None,
        )

    def _describe(self, stalled: Sequence[Stalled], now: float) -> str:
        by_missing: dict[tuple[int, ...], list[Stalled]] = {}
        for each in stalled:
            by_missing.setdefault(each.missing, []).append(each)
        parts = []
        for missing, tensors in by_missing.items():
            names = ", ".join(repr(t.name) for t in tensors[:_NAMED]) + ", ..." * (len(tensors) > _NAMED)
            oldest = max(now - t.since for t in tensors)
            parts.append(f"{names} not submitted by {describe_ranks(missing)} (for {oldest:.0f} s)")
        return "; ".join(parts)

"""Whom the others waited for: who submitted a tensor last, and for how long it had been awaited by then.

Pure: told the time. The coordinator keeps it for what goes by message; on the board, ``charge()`` in
``ready_table.c`` does the same.
"""

from __future__ import annotations


class StragglerStats:
    """Counts, by rank.

    Times that overlap count once, for whoever came first: a set's ranks together are charged with no more
    than has passed.

    Parameters
    ----------
    size : int
        Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._tensors = [0] * size
        self._seconds = [0.0] * size
        self._charged: dict[int, float] = {}

    def count(self, process_set: int, rank: int, since: float, now: float, tensors: int = 1) -> None:
        """A rank has submitted, as the last one, what others have awaited since then (s)."""
        since = max(since, self._charged.get(process_set, since))
        self._tensors[rank] += tensors
        if now > since:
            self._seconds[rank] += now - since
            self._charged[process_set] = now

    def totals(self) -> list[tuple[int, float]]:
        """Return, for each rank, the tensors that it was the last to submit, and the seconds awaited."""
        return list(zip(self._tensors, self._seconds, strict=True))

"""What a launcher sets in the process of a rank that it supervises."""

from __future__ import annotations

from collections.abc import Callable

supervised = False
"""Whether a launcher watches this rank; if so, it reports the rank's failure and ends the job."""

tell_up: Callable[[bool], None] | None = None
"""Set by ``python -m pyhvd.run``; called with True after ``init()`` and with False before the shutdown."""


def is_up(up: bool) -> None:
    """Tell the launcher whether pyhvd is up; while it is, a rank that exits leaves others waiting."""
    if tell_up is not None:
        tell_up(up)

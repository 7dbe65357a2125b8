"""Whether this rank runs under ``python -m pyhvd.run``, which shows why it failed, and ends the job."""

from __future__ import annotations

from collections.abc import Callable

supervised = False
"""Set by the launcher in the rank's process: then nothing else need end the job after a failure."""

tell_up: Callable[[bool], None] | None = None
"""Set by ``python -m pyhvd.run``: called with whether pyhvd is up, when it has come up and before it goes."""


def is_up(up: bool) -> None:
    """Let who watches this rank know whether it may just go: while pyhvd is up, others count on it."""
    if tell_up is not None:
        tell_up(up)

"""From which line each rank has submitted a tensor, for the case that what they submitted differs.

Pure: kept by :mod:`pyhvd.negotiation.message_table`. A line travels with a full request only, so what is known of a cached
tensor is where it came from when the ranks learned of it. Bounded: of too many tensors the first are dropped.
"""

from __future__ import annotations

import sys

from msgspec.structs import replace

from pyhvd.common.text import describe_values
from pyhvd.negotiation.messages import ErrorInfo

MOST = 4096
"""Tensors whose lines are known."""


class CallSites:
    """The lines of one process set, by tensor and rank."""

    def __init__(self) -> None:
        self._sites: dict[str, dict[int, str]] = {}

    def note(self, name: str, rank: int, site: str) -> None:
        """Remember from where a rank has submitted a tensor; an empty ``site`` is not known."""
        if not site:
            return
        if name not in self._sites and len(self._sites) >= MOST:
            del self._sites[next(iter(self._sites))]
        self._sites.setdefault(name, {})[rank] = sys.intern(site)

    def forget(self, name: str) -> None:
        """A tensor has been answered, and the ranks will not remember it."""
        self._sites.pop(name, None)

    def add_to(self, error: ErrorInfo, *names: str) -> ErrorInfo:
        """Return a mismatch with the lines at which these tensors were submitted."""
        known: dict[int, str] = {}
        for name in names:
            known.update(self._sites.get(name, {}))
        sites = {rank: known[rank] for rank in sorted(error.per_rank) if rank in known}
        if not sites:
            return error
        return replace(error, message=f"{error.message} Submitted at: {describe_values(sites)}.", sites=sites)

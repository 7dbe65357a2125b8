"""The backends of this rank's process sets: made at a set's first batch, shared by sets of the same ranks.

Owns: which sets share a backend, and when a backend is made and closed. The runtime's thread calls all but
``abort``. Both steps are collective over the ranks of the sets, and no rank waits in vain:

1. A backend is made at the first batch of a set. All members carry out this batch, also those that have
   joined, at the same place in the order of response lists.
2. A backend is closed with the removal of the last set of its ranks. All of these ranks are members of each
   such set, so they add, use and remove these sets in one order.
3. At the end the backends are closed in the order of their lowest sets. By then all members of a set have
   carried out the same batches, so each has made the same backends.

The backend of all ranks exists from the start until the end. A batch of the ready table comes later than the
set's first batch, as no call of the set is remembered before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from pyhvd.backends.base import Pieces
from pyhvd.backends.host import HostBackend
from pyhvd.negotiation.messages import GLOBAL_SET
from pyhvd.transport.fabric import Fabric

Ranks = tuple[int, ...]


@dataclass(slots=True)
class _Sharing:
    """The sets of the same ranks, and their backend once one of them has had a batch."""

    sets: set[int] = field(default_factory=set)
    backend: HostBackend | None = None


class SetBackends(dict[int, HostBackend]):
    """By process set, the backends of sets that have had a batch; see the module's docstring.

    Parameters
    ----------
    everyone : HostBackend
        The backend of all ranks; owned.
    make : callable
        Returns the backend of some ranks, from their fabric and these ranks; collective over them.
    """

    def __init__(self, everyone: HostBackend, make: Callable[[Fabric, Ranks], HostBackend]) -> None:
        super().__init__({GLOBAL_SET: everyone})
        self._make = make
        self._pieces: Pieces | None = None
        ranks = tuple(range(everyone.size))
        self._ranks: dict[int, Ranks] = {GLOBAL_SET: ranks}
        self._sharing: dict[Ranks, _Sharing] = {ranks: _Sharing({GLOBAL_SET}, everyone)}

    def add(self, set_id: int, ranks: Ranks) -> None:
        """Note a new set of which this rank is a member."""
        self._ranks[set_id] = ranks
        self._sharing.setdefault(ranks, _Sharing()).sets.add(set_id)

    def open(self, set_id: int) -> HostBackend:
        """Return the backend for a set's first batch; make it unless another set has it. Collective."""
        ranks = self._ranks[set_id]
        sharing = self._sharing[ranks]
        if sharing.backend is None:
            backend = self._make(self[GLOBAL_SET].fabric.subset(ranks, set_id), ranks)
            if self._pieces is not None:
                backend.resize(self._pieces)
            sharing.backend = backend
        self[set_id] = sharing.backend
        return sharing.backend

    def remove(self, set_id: int) -> None:
        """Forget a set; close its backend if no other set of these ranks is left. Collective."""
        ranks = self._ranks.pop(set_id, None)
        if ranks is None:  # this rank is not a member
            return
        self.pop(set_id, None)
        self._sharing[ranks].sets.remove(set_id)
        if not self._sharing[ranks].sets:
            self._close(ranks)

    def resize(self, pieces: Pieces) -> None:
        """Use other piece sizes from now on, in every set."""
        self._pieces = pieces
        for backend in self._every():
            backend.resize(pieces)

    def abort(self, note: bytes) -> None:
        """Abort the collectives of every set, all even if one abort fails. From any thread."""
        with contextlib.ExitStack() as aborts:
            for backend in reversed(self._every()):
                aborts.callback(backend.abort, note)

    def close(self) -> None:
        """Close all backends. Collective."""
        self.clear()
        for ranks in sorted(self._sharing, key=lambda ranks: min(self._sharing[ranks].sets)):
            self._close(ranks)

    def _close(self, ranks: Ranks) -> None:
        sharing = self._sharing.pop(ranks)
        if sharing.backend is not None:
            sharing.backend.close()

    def _every(self) -> list[HostBackend]:
        # list() copies in one step: another thread may add a set.
        return [each.backend for each in list(self._sharing.values()) if each.backend is not None]

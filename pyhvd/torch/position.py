"""Where each rank is in its training loop, so that ranks notice when they take different steps together.

Owns the counts of a rank's calls of ``step()`` and ``zero_grad()``, and the names of an optimizer's
collectives. All ranks begin at zero together: after ``init()`` and after each ``join()``. Knows no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from pyhvd.api.objects import allgather_object
from pyhvd.api.process_sets import ProcessSet
from pyhvd.api.topology import rank
from pyhvd.common.text import describe_values
from pyhvd.engine import context
from pyhvd.errors import MismatchError

_MODULUS = 1 << 16  # so that the sums of squares of 10,000 ranks, and their products, stay below 2**63

FIGURES = 6
"""How many numbers of a rank :meth:`Position.figures` returns."""


class Position:
    """One rank's place in the loop of one optimizer.

    Attributes
    ----------
    prefix : str
        How the names of the optimizer's collectives begin, such as ``"gradients.0"``. The number counts the
        optimizers of the process set, in the order in which this rank has made them, or has first used them
        since ``init()`` or ``join()``.
    steps, zeroings : int
        Calls of ``step()`` and ``zero_grad()`` since the ranks began together.
    """

    def __init__(self, process_set: ProcessSet) -> None:
        self.prefix = ""
        self.steps = self.zeroings = 0
        self._process_set = process_set
        self._kept: tuple[str, context.Counts] | None = None
        self.renew()

    def renew(self) -> bool:
        """Begin anew if all ranks have called ``init()`` or ``join()`` since; return whether they have."""
        if self._kept is not None and not self._kept[1].restarted:
            return False
        active = context.current_holder().context
        if active is None or active.runtime.is_forked():
            return False
        set_id, _ = active.members_of(self._process_set)
        self._kept = active.keep_name(set_id, "gradients", self._kept)
        self.prefix = self._kept[0]
        self.restart()
        return True

    def restart(self) -> None:
        """Count from zero, on all ranks alike."""
        self.steps = self.zeroings = 0

    def figures(self, *, has_left: bool = False) -> tuple[int, ...]:
        """Return numbers whose sums over the ranks tell :meth:`are_alike` whether the ranks agree.

        ``has_left`` is whether this rank has left the step before its end. A rank that has joined adds zeros.
        """
        steps, zeroings = self.steps % _MODULUS, self.zeroings % _MODULUS
        return 1, int(has_left), steps, steps * steps, zeroings, zeroings * zeroings

    @staticmethod
    def are_alike(sums: Sequence[int]) -> bool:
        """Return whether all ranks had the same figures.

        Numbers are equal if, and only if, the square of their sum is their count times the sum of their
        squares (the Cauchy-Schwarz inequality).
        """
        ranks, have_left, steps, steps_squared, zeroings, zeroings_squared = map(int, sums)
        return (
            have_left in (0, ranks)
            and steps * steps == ranks * steps_squared
            and zeroings * zeroings == ranks * zeroings_squared
        )

    def refuse(self, note: str = "") -> NoReturn:
        """Raise the error that names each rank's place, and its note; every rank calls it."""
        mine = f"{_times(self.steps, 'step')}, {_times(self.zeroings, 'call')} of zero_grad(){note}"
        everyone = allgather_object((rank(), mine), f"{self.prefix}: places", self._process_set)
        self.restart()
        raise MismatchError(
            f"{self.prefix}: the ranks are at different places of their training loops:"
            f" {describe_values(dict(everyone))}. Their gradients belong to different steps and must not be"
            " averaged. Call step() and zero_grad() equally often on all ranks: let all ranks agree to leave"
            " out a batch (allreduce a flag with op=hvd.Max), and let a rank whose data have ended call"
            " hvd.join()",
            self.prefix,
        )


def _times(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"

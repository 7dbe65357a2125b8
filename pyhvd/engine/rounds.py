"""Rank 0 lets ranks leave the round of a backward pass if another rank needs them elsewhere.

A round (:mod:`pyhvd.torch.reducer`) ends a backward pass, and waits there for all ranks. A rank that makes no
backward pass in a step has its round in ``step()``. If it waits before that for a call that the others have
behind their backward pass, all would wait for ever. So a rank that has waited for some time in such a round
says so to rank 0 (:class:`~pyhvd.negotiation.messages.StillInRound`). If rank 0 finds such a circle, it gives
the round's tensors back, unreduced, to the ranks that have submitted them: these have their round later too.

A circle is certain only for a rank that waits. So rank 0 asks it twice, and it must have waited for the same
tensors both times. The invariant: what is given back was submitted by no rank that lacks in the round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyhvd.controller import Coordinator, Stalled
from pyhvd.negotiation.messages import (
    PROTOCOL_VERSION,
    ErrorInfo,
    ErrorKind,
    StackReport,
    StackRequest,
    StillInRound,
    encode,
    iter_bits,
)
from pyhvd.observe.hang_reporter import RankLocations
from pyhvd.observe.stall_inspector import MOST_ASKED

FLAGS = "flags"
"""Name, behind the prefix, of the tensor that a rank submits last before it waits in a round."""
BEGIN = "begin"
"""The same, if the ranks do not know each other's parameters yet."""

Waits = frozenset[tuple[int, str, float]]
"""The set, name and time of each tensor that a rank has submitted, and that waits for others."""


def find_circle(stalled: Sequence[Stalled], process_set: int, prefix: str) -> dict[int, Waits]:
    """Return the ranks that lack in a round, and have submitted only what its waiting ranks lack.

    Returns
    -------
    dict of int to Waits
        By rank, those tensors. Empty while a rank that lacks in the round has submitted some of its tensors:
        that rank is in its backward pass.
    """
    round_ = [each for each in stalled if each.process_set == process_set and each.name.startswith(prefix)]
    ends = [each for each in round_ if each.name in (prefix + FLAGS, prefix + BEGIN)]
    if len(ends) != 1 or any(each.submitted & ends[0].missing for each in round_):
        return {}
    waiting = ends[0].submitted
    found: dict[int, Waits] = {}
    for rank in iter_bits(ends[0].missing):
        waits = [each for each in stalled if each.submitted >> rank & 1]
        if waits and all(each.missing & waiting for each in waits):
            found[rank] = frozenset((each.process_set, each.name, each.since) for each in waits)
    return found


Round = tuple[int, str]
"""A round's process set, and how the names of its tensors begin."""


class RoundKeeper:
    """Rank 0's part; it runs on the runtime's thread, and never waits.

    Parameters
    ----------
    coordinator : Coordinator
        Knows what waits, and gives it back.
    where : RankLocations
        Answers for this rank, as the others answer.
    send : callable
        ``send(rank, payload)``: by the control transport.
    """

    def __init__(
        self, coordinator: Coordinator, where: RankLocations, send: Callable[[int, bytes], object]
    ) -> None:
        self._coordinator = coordinator
        self._where = where
        self._send = send
        self._number = 0  # of the last question: below zero, as the hang reporter's are not
        self._asked: dict[int, Round] = {}  # by question, the round that it is about: its last one
        self._waited: dict[Round, dict[int, Waits]] = {}  # for what a rank waited when it was asked last

    def hear(self, message: StillInRound, now: float) -> None:
        """Look at a round in which a rank has long waited, and ask the ranks of a circle."""
        round_ = message.process_set, message.prefix
        self._coordinator.recall_all()
        circle = find_circle(self._coordinator.stalled(now), *round_)
        before = self._waited.pop(round_, {})
        self._asked = {number: each for number, each in self._asked.items() if each != round_}
        if not circle:
            return
        self._waited[round_] = {rank: waits for rank, waits in before.items() if circle.get(rank) == waits}
        self._number -= 1
        self._asked[self._number] = round_
        for rank in sorted(circle)[:MOST_ASKED]:
            if rank == self._where.rank:
                self.take(rank, self._where.report(self._number), now)
            else:
                self._send(rank, encode(StackRequest(PROTOCOL_VERSION, self._number)))

    def take(self, rank: int, report: StackReport, now: float) -> None:
        """Take a rank's answer; give the round back if it waits, and has waited before."""
        round_ = self._asked.get(report.number)
        if round_ is None:
            return
        waited = self._waited[round_]
        waits = find_circle(self._coordinator.stalled(now), *round_).get(rank)
        if not report.waits or waits is None:
            waited.pop(rank, None)
        elif waited.get(rank) != waits:
            waited[rank] = waits
        else:
            process_set, prefix = round_
            first = min(name for _, name, _ in waits)
            text = f"{prefix}rank {rank} makes no backward pass now, and waits for {first!r}"
            self._coordinator.withdraw(process_set, prefix, ErrorInfo(ErrorKind.WITHDRAWN, text, rank))
            del self._asked[report.number], self._waited[round_]

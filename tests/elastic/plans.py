"""The random faults of one elastic job.

Rules
-----
1. Between three failures there is a new commit; otherwise the job would rightly end.
2. Ranks fail before a commit of their generation, at `EARLY` points, or after three commits, at `LATE` ones.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

EARLY = ("import", "wire-up", "handshake", "init", "sync", "callback")
# In the vault it is the first rank of a host.
VAULT = ("copying", "before_seal", "after_seal")
LATE = ("func", "exchange", "committed", *VAULT)
_RAISES = ("import", "init", "callback", "func", "committed")
_GENERATIONS = 12
_MOST_FAILURES = 2
# A cold start is in wire-up later than a forked rank.
_WIRE_UP_MS = (5, 80)
ON_ONE = ("kill", "kill", "kill two", "kill all", "stop", "zygote")
AGENT = "agent"
OF_HOSTS = ("crash", "freeze", "cut off", "no power")
BRIEF = ("freeze", "cut off")
"""A host that is whole again soon goes on as if nothing had happened."""
MILD = ("stop", "zygote")
"""After these the ranks go on."""


@dataclass(frozen=True)
class Plan:
    """What happens to one job.

    Attributes
    ----------
    inner : tuple of str
        Arguments of the program.
    outer : tuple of tuple of str
        Faults from outside. Those of a group follow each other at once.
    """

    inner: tuple[str, ...]
    outer: tuple[tuple[str, ...], ...]

    @property
    def raises(self) -> bool:
        """Whether a rank raises an exception."""
        return any(fault.endswith(":raise") for fault in self.inner)

    def may_strike(self, generation: int, count: int) -> bool:
        """Return whether so many failures, after a commit in a generation, keep rule 1."""
        here = self._made(LATE, (generation,))
        return (
            count + here + self._made(EARLY, range(generation + 1, generation + count + here + 2))
            <= _MOST_FAILURES
        )

    def _made(self, points: Iterable[str], generations: Iterable[int]) -> int:
        words = [fault.split(":") for fault in self.inner]
        return sum(point in points and int(number) in generations for point, number, *_ in words)


def draw_plan(draw: random.Random, hosts: int, simulated: bool, groups: int) -> Plan:
    """Choose faults.

    Parameters
    ----------
    draw : random.Random
        Chooses.
    hosts : int
        The number of agents.
    simulated : bool
        Whether the hosts are simulated, so that they can fail.
    groups : int
        How many groups of faults come from outside, at most.
    """
    kinds = [*ON_ONE, *([AGENT] if hosts > 1 else []), *(OF_HOSTS if simulated else ())]
    outer = [tuple(draw.choices(kinds, k=draw.choice((1, 1, 1, 2)))) for _ in range(draw.randint(1, groups))]
    return Plan(tuple(_draw_inner(draw, hosts)), tuple(outer))


def _draw_inner(draw: random.Random, hosts: int) -> Iterable[str]:
    in_a_row = 0  # failures without a commit in between
    for generation in range(_GENERATIONS):
        chance = draw.random()
        if chance < 0.2 and in_a_row < _MOST_FAILURES:
            in_a_row += 1
            yield _draw_point(draw, draw.choice(EARLY), generation, hosts)
        elif chance < 0.5:
            in_a_row = 1
            yield _draw_point(draw, draw.choice(LATE), generation, hosts)
        else:
            in_a_row = 0


def _draw_point(draw: random.Random, point: str, generation: int, hosts: int) -> str:
    rank = draw.choice((0, 2) if hosts > 1 else (0,)) if point in VAULT else draw.randrange(4)
    action = ""
    if point == "wire-up":
        action = f":{draw.randint(*_WIRE_UP_MS)}"
    elif point in _RAISES and draw.random() < 0.2:
        action = ":raise"
    elif point in VAULT and draw.random() < 0.3:
        action = ":late"
    return f"{point}:{generation}:{rank}{action}"

"""The autotuner's search: which knobs to try next, from the samples so far.

Pure: no clock, no I/O, no threads; the same samples give the same search. :mod:`pyhvd.engine.autotuner`
measures, and tells the ranks.

The algorithm is a pattern search (Hooke and Jeeves, "Direct search solution of numerical and statistical
problems", 1961) on ladders of values, each twice the one before:

1. It starts at the defaults and changes one knob at a time, first by long strides, then by short ones. It
   continues in a direction while that helps. The value of a place is the median of a few samples.
2. Noise may mislead this short, greedy search. At the end it measures the last place again, in turns with
   the defaults. It keeps that place only if it is faster by more than a margin, and by more than the
   spread of the defaults' samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Generator, Sequence

import msgspec

from pyhvd.negotiation.messages import Tuning

LADDERS: dict[str, tuple[float, ...]] = {
    "fusion_threshold": tuple(1 << k for k in range(20, 29)),
    "chunk_size": tuple(1 << k for k in range(15, 21)),
    "staging_size": tuple(1 << k for k in range(18, 25)),
    "cycle_time_ms": (0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
}
"""The values to try, with Config's defaults among them; knobs are tried in this order."""

LARGEST_CHUNK = int(LADDERS["chunk_size"][-1])
"""Bytes of a slot in the windows of a tuned job."""

STRIDES = (3, 1)
"""Rungs of a ladder per stride of the search."""

REPEATS = 3
"""Samples of a place in the search."""

CONFIRMATIONS = 5
"""Samples of the last place, and of the defaults, at the end."""

MOST_PLACES = 24
"""Places to measure, the defaults included, before the search stops."""

GAIN = 0.01
"""Relative gain that a place needs for the search to move there."""

MARGIN = 0.03
"""Relative gain over the defaults that the last place needs to be kept."""

_Plan = Generator[tuple[str, Tuning], float, Tuning]


class Search:
    """One search, from the defaults to the kept place.

    Parameters
    ----------
    defaults : Tuning
        The start, and the result unless another place is better.
    free : collection of str
        Fields of :class:`Tuning` that may change; the others keep their defaults. A value that is not on its
        ladder does not change either.
    warmup : int
        Samples to drop at the start.

    Attributes
    ----------
    current : Tuning
        The knobs of the next sample; once ``done``, the result.
    state : str
        Purpose of the next sample: ``"warmup"``, ``"search"`` or ``"confirm"``; or ``"done"``.
    gain : float
        Once ``done``: relative gain of the result over the defaults, measured in turns; 0.0 if the defaults
        are kept.
    """

    def __init__(self, defaults: Tuning, free: Collection[str], warmup: int = 3) -> None:
        self._defaults = defaults
        self._free = [
            knob for knob, ladder in LADDERS.items() if knob in free and getattr(defaults, knob) in ladder
        ]
        self.current = defaults
        self.state = "done"
        self.gain = 0.0
        self._plan = self._run(warmup)
        if self._free:
            self.state, self.current = next(self._plan)

    @property
    def done(self) -> bool:
        """Whether the search has ended."""
        return self.state == "done"

    def feed(self, nbytes: float, seconds: float) -> None:
        """Add a sample of ``current``, and choose the next knobs; not after the end.

        Parameters
        ----------
        nbytes : float
            Bytes reduced or moved.
        seconds : float
            Duration of the sample; more than 0.
        """
        try:
            self.state, self.current = self._plan.send(nbytes / seconds)
        except StopIteration as end:
            self.state, self.current = "done", end.value

    def _run(self, warmup: int) -> _Plan:
        for _ in range(warmup):
            yield "warmup", self._defaults
        best = yield from self._climb()
        if best != self._defaults and (yield from self._confirm(best)):
            return best
        return self._defaults

    def _climb(self) -> _Plan:
        best = self._defaults
        rate = yield from self._measure(best)
        tried = {best}
        for stride in STRIDES:
            for knob in self._free:
                for direction in (-stride, stride):
                    before = best
                    while len(tried) < MOST_PLACES:
                        place = _step(best, knob, direction)
                        if place in tried:
                            break
                        tried.add(place)
                        found = yield from self._measure(place)
                        if found <= rate * (1 + GAIN):
                            break
                        best, rate = place, found
                    if best != before:
                        break  # this direction helped: the opposite one leads back
        return best

    def _measure(self, place: Tuning) -> Generator[tuple[str, Tuning], float, float]:
        rates = [0.0] * REPEATS
        for k in range(REPEATS):
            rates[k] = yield "search", place
        return statistics.median(rates)

    def _confirm(self, best: Tuning) -> Generator[tuple[str, Tuning], float, bool]:
        """Measure both places in turns, so that noise affects both; the defaults last."""
        winners, defaults = [], []
        for _ in range(CONFIRMATIONS):
            winners.append((yield "confirm", best))
            defaults.append((yield "confirm", self._defaults))
        winner, default = statistics.median(winners), statistics.median(defaults)
        if winner <= default + max(MARGIN * default, 2 * _spread(defaults)):
            return False
        self.gain = winner / default - 1 if default else 0.0
        return True


def _step(place: Tuning, knob: str, stride: int) -> Tuning:
    """Return the place ``rungs`` further, or at the end of the ladder."""
    ladder = LADDERS[knob]
    rung = ladder.index(getattr(place, knob)) + stride
    return msgspec.structs.replace(place, **{knob: ladder[min(max(rung, 0), len(ladder) - 1)]})


def _spread(rates: Sequence[float]) -> float:
    """Return the median absolute deviation of samples; it ignores one or two outliers."""
    middle = statistics.median(rates)
    return statistics.median(abs(rate - middle) for rate in rates)

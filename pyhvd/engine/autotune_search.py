"""Autotuning's search: which knobs to try next, given how fast the last ones were.

Pure: it is fed with samples and asked for knobs; no clock, no I/O, no threads. The same samples lead to the
same search. Measuring, and telling the ranks, is the business of :mod:`pyhvd.engine.autotuner`.

The algorithm is a pattern search (Hooke and Jeeves, "Direct search solution of numerical and statistical
problems", 1961) on ladders of values a factor of two apart: from the defaults, one knob at a time, in long
strides and then in short ones, on in a direction as long as it helps. A place is worth the median of a few
samples. The search is short and greedy, and the machine may have been busy with other things meanwhile. So
the place that it ends at is measured again at the end, in turns with the defaults, and is taken only if it is
faster by more than a margin, and by more than the defaults' own samples differ.
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
"""The values that are tried, in the order in which knobs are; Config's defaults are among them."""

LARGEST_CHUNK = int(LADDERS["chunk_size"][-1])
"""Bytes: windows of a job that is tuned have slots of this size."""

STRIDES = (3, 1)
"""Rungs of a ladder that one step of the search goes."""

REPEATS = 3
"""Samples of a place in the search."""

CONFIRMATIONS = 5
"""Samples of the winner, and of the defaults, at the end."""

MOST_PLACES = 24
"""Places that are measured, the defaults included, before the search ends where it is."""

GAIN = 0.01
"""By what part a place must be faster for the search to go there."""

MARGIN = 0.03
"""By what part the winner must be faster than the defaults to be kept."""

_Plan = Generator[tuple[str, Tuning], float, Tuning]


def most_samples(warmup: int) -> int:
    """Return the number of samples after which every search has ended."""
    return warmup + REPEATS * MOST_PLACES + 2 * CONFIRMATIONS


class Search:
    """One search, from the defaults to the place that is kept.

    Parameters
    ----------
    defaults : Tuning
        Where it begins, and where it ends unless something is better.
    free : collection of str
        Fields of :class:`Tuning` that may be changed; the others stay as the defaults have them. A value that
        is not on its ladder is not changed either.
    warmup : int
        Samples that are thrown away before anything is compared.

    Attributes
    ----------
    current : Tuning
        What the next sample is to be taken with; once ``done``, what is kept.
    state : str
        What the next sample is for: ``"warmup"``, ``"search"`` or ``"confirm"``; or ``"done"``.
    gain : float
        Once ``done``: by what part the winner was faster than the defaults when both were measured in turns;
        0.0 if the defaults are kept.
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
        """Take the sample that was taken with ``current``, and choose what comes next.

        Parameters
        ----------
        nbytes : float
            Bytes that were reduced or moved.
        seconds : float
            In how much time; more than 0.

        Raises
        ------
        ValueError
            The search is done, or the time is not positive.
        """
        if self.done:
            raise ValueError("the search has ended: it takes no more samples")
        if not seconds > 0 or nbytes < 0:
            raise ValueError(f"{nbytes} bytes in {seconds} s is no sample")
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
                        break  # it was the right direction: the other one leads back
        return best

    def _measure(self, place: Tuning) -> Generator[tuple[str, Tuning], float, float]:
        rates = [0.0] * REPEATS
        for k in range(REPEATS):
            rates[k] = yield "search", place
        return statistics.median(rates)

    def _confirm(self, best: Tuning) -> Generator[tuple[str, Tuning], float, bool]:
        """Measure in turns, so that what else goes on hits both; the defaults last."""
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
    """Return the place so many rungs further, or at the end of the ladder."""
    ladder = LADDERS[knob]
    rung = ladder.index(getattr(place, knob)) + stride
    return msgspec.structs.replace(place, **{knob: ladder[min(max(rung, 0), len(ladder) - 1)]})


def _spread(rates: Sequence[float]) -> float:
    """Return the median distance of samples from their median: one or two outliers do not count."""
    middle = statistics.median(rates)
    return statistics.median(abs(rate - middle) for rate in rates)

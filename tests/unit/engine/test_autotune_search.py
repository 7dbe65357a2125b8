"""Autotuning's search on model machines: it ends, finds the best, and is never worse than the defaults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, strategies as st

from pyhvd.config import Config
from pyhvd.engine.autotune_search import (
    CONFIRMATIONS,
    LADDERS,
    LARGEST_CHUNK,
    MARGIN,
    MOST_PLACES,
    REPEATS,
    Search,
)
from pyhvd.engine.autotuner import tuning_of
from pyhvd.native import shared_memory
from pyhvd.negotiation.messages import Tuning

DEFAULTS = tuning_of(Config())
Rate = Callable[[Tuning], float]


def most_samples(warmup: int) -> int:
    """Return an upper bound of the samples of a search."""
    return warmup + REPEATS * MOST_PLACES + 2 * CONFIRMATIONS


@dataclass
class Run:
    """A search that has ended, and its samples."""

    search: Search
    samples: list[tuple[str, Tuning]] = field(default_factory=list)


def follow(
    rate: Rate,
    free: tuple[str, ...] = tuple(LADDERS),
    noise: Callable[[], float] = lambda: 1.0,
    warmup: int = 3,
) -> Run:
    """Search a machine that moves ``rate(tuning)`` bytes per second."""
    run = Run(Search(DEFAULTS, free, warmup))
    while not run.search.done:
        run.samples.append((run.search.state, run.search.current))
        assert len(run.samples) <= most_samples(warmup), "the search does not end"
        run.search.feed(rate(run.search.current) * noise(), 1.0)
    return run


def peak(**best: float) -> Rate:
    """Return a machine that gets slower with each knob's distance from its best value."""

    def rate(tuning: Tuning) -> float:
        return 1e9 / (1 + sum(0.2 * abs(math.log2(getattr(tuning, knob) / at)) for knob, at in best.items()))

    return rate


def test_the_defaults_are_on_the_ladders() -> None:
    for knob, ladder in LADDERS.items():
        assert getattr(DEFAULTS, knob) in ladder
        assert list(ladder) == sorted(set(ladder))
    assert set(LADDERS) == set(Tuning.__struct_fields__)


def test_every_chunk_of_the_ladder_suits_a_window() -> None:
    assert max(LADDERS["chunk_size"]) == LARGEST_CHUNK
    for chunk in LADDERS["chunk_size"]:
        assert chunk % shared_memory.CHUNK_UNIT == 0
        assert shared_memory.FLAT <= chunk <= LARGEST_CHUNK


@pytest.mark.parametrize("knob", LADDERS)
def test_it_finds_the_best_value_of_each_knob(knob: str) -> None:
    for best in LADDERS[knob]:
        run = follow(peak(**{knob: best}))
        assert getattr(run.search.current, knob) == best
        others = [each for each in LADDERS if each != knob]
        assert [getattr(run.search.current, each) for each in others] == [
            getattr(DEFAULTS, each) for each in others
        ]


def test_it_finds_the_best_of_all_knobs_together() -> None:
    best = Tuning(4 << 20, 4.0, 64 << 10, 1 << 20)
    run = follow(peak(**msgspec.structs.asdict(best)))
    assert run.search.current == best
    assert run.search.gain > 1.0


def test_a_machine_to_which_nothing_matters_keeps_the_defaults() -> None:
    run = follow(lambda _: 5e9)
    assert run.search.current == DEFAULTS
    assert run.search.gain == 0.0
    assert len({tuning for _, tuning in run.samples}) <= 1 + 2 * 2 * len(LADDERS)


def test_the_defaults_are_measured_last_in_turns_with_the_winner() -> None:
    run = follow(peak(chunk_size=1 << 16))
    confirmed = [tuning for state, tuning in run.samples if state == "confirm"]
    assert confirmed == [run.search.current, DEFAULTS] * (len(confirmed) // 2)
    assert run.samples[-1] == ("confirm", DEFAULTS)


def test_a_gain_that_does_not_last_is_not_kept() -> None:
    """The machine is slow only during the first measurement of the defaults."""
    samples = 0

    def rate(tuning: Tuning) -> float:
        nonlocal samples
        samples += 1
        return 1e9 if samples <= 6 else 2e9 + tuning.chunk_size

    assert follow(rate).search.current == DEFAULTS


def test_less_than_the_margin_is_not_kept() -> None:
    for gain, kept in ((MARGIN * 0.9, False), (MARGIN * 1.1, True)):
        rate = 1.0 + gain
        run = follow(lambda tuning, rate=rate: rate if tuning.chunk_size != DEFAULTS.chunk_size else 1.0)  # type: ignore[misc]
        assert (run.search.current != DEFAULTS) == kept


def test_warm_up_is_thrown_away() -> None:
    for warmup in (0, 3, 7):
        run = follow(peak(cycle_time_ms=4.0), warmup=warmup)
        states = [state for state, _ in run.samples]
        assert states[:warmup] == ["warmup"] * warmup
        assert states[warmup] == "search"
        assert run.search.current.cycle_time_ms == 4.0


@given(
    free=st.sets(st.sampled_from(sorted(LADDERS))),
    best=st.fixed_dictionaries({knob: st.sampled_from(ladder) for knob, ladder in LADDERS.items()}),
)
def test_knobs_that_are_held_stay(free: set[str], best: dict[str, float]) -> None:
    run = follow(peak(**best), tuple(free))
    for _, tuning in [*run.samples, ("done", run.search.current)]:
        assert all(getattr(tuning, knob) == getattr(DEFAULTS, knob) for knob in LADDERS if knob not in free)
    if not free:
        assert run.samples == []


def test_a_value_beside_its_ladder_is_held() -> None:
    search = Search(msgspec.structs.replace(DEFAULTS, chunk_size=300 * 128), tuple(LADDERS), 0)
    while not search.done:
        assert search.current.chunk_size == 300 * 128
        search.feed(search.current.fusion_threshold, 1.0)


tables = st.dictionaries(st.integers(0, 10_000), st.floats(1e6, 1e11), min_size=1, max_size=40)


def _rate_of(table: dict[int, float]) -> Rate:
    """Return a machine whose rates are arbitrary but reproducible."""
    values = list(table.values())
    return lambda tuning: values[hash(msgspec.structs.astuple(tuning)) % len(values)]


@given(table=tables, warmup=st.integers(0, 4))
def test_never_worse_than_the_defaults(table: dict[int, float], warmup: int) -> None:
    rate = _rate_of(table)
    run = follow(rate, warmup=warmup)
    assert rate(run.search.current) >= rate(DEFAULTS)
    assert len({tuning for _, tuning in run.samples}) <= MOST_PLACES


@given(table=tables, data=st.data())
def test_never_worse_than_the_defaults_with_noise_below_half_the_margin(
    table: dict[int, float], data: st.DataObject
) -> None:
    rate = _rate_of(table)
    amplitude = MARGIN / 2 - 1e-3
    random = data.draw(st.randoms(use_true_random=False))
    run = follow(rate, noise=lambda: random.uniform(1 - amplitude, 1 + amplitude))
    assert rate(run.search.current) >= rate(DEFAULTS)


@given(table=tables, seconds=st.lists(st.floats(1e-9, 1e6), min_size=1, max_size=20))
def test_any_samples_at_all_end_it(table: dict[int, float], seconds: list[float]) -> None:
    rate, search, taken = _rate_of(table), Search(DEFAULTS, tuple(LADDERS), 2), 0
    while not search.done:
        search.feed(rate(search.current), seconds[taken % len(seconds)])
        taken += 1
        assert taken <= most_samples(2)


@given(rates=st.lists(st.floats(0, 1e12), min_size=most_samples(3), max_size=most_samples(3)))
def test_the_same_samples_lead_to_the_same_search(rates: list[float]) -> None:
    paths = []
    for _ in range(2):
        search, path = Search(DEFAULTS, tuple(LADDERS), 3), []
        for rate in rates:
            if search.done:
                break
            path.append((search.state, search.current))
            search.feed(rate, 1.0)
        assert search.done
        paths.append((path, search.current, search.gain))
    assert paths[0] == paths[1]

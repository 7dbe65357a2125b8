"""Autotuning with ranks as threads: changes of the knobs change no result, and a search ends."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import pyhvd as hvd
from pyhvd.engine import autotuner, context
from pyhvd.engine.autotune_search import LARGEST_CHUNK
from pyhvd.negotiation.messages import Tuning
from pyhvd.testing import RanksFailed, run_ranks
from tests.conformance import determinism
from tests.ranks.test_lanes import Step, program, several_threads, steps

VALUES: dict[str, list[float]] = {
    "fusion_threshold": [0, 1, 3000, 100_000, 1 << 27],
    "cycle_time_ms": [0.0, 0.2, 1.0],
    "chunk_size": [16384, 16384 + 128, 70 * 1024, 1 << 18, LARGEST_CHUNK],
    "staging_size": [20_000, 50_000, 1 << 22],
}


class Restless:
    """A search that never ends, and changes all knobs after each sample."""

    changes = 0

    def __init__(self, defaults: Tuning, free: object, warmup: int) -> None:
        self.current = defaults
        self.state = "search"
        self.done = False
        self.gain = 0.0
        self._random = random.Random(5)

    def feed(self, nbytes: float, seconds: float) -> None:
        Restless.changes += 1
        before = self.current
        while self.current == before:
            self.current = Tuning(**{knob: self._random.choice(v) for knob, v in VALUES.items()})  # type: ignore[arg-type]


@contextmanager
def restless() -> Iterator[dict[str, Any]]:
    """Make autotuning change the knobs permanently; yield the configuration for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotuner, "Search", Restless)
        patch.setattr(autotuner, "SHORTEST_SAMPLE", 0.0)
        make = autotuner.Tuner
        patch.setattr(autotuner, "Tuner", lambda search, _, sampler, log: make(search, 0, sampler, log))
        Restless.changes = 0
        yield {"autotune": True, "autotune_warmup_samples": 0}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("size", [2, 3])
@settings(max_examples=40)
@given(plan=st.lists(steps, min_size=1, max_size=8), leaving=st.integers(0, 3))
def test_the_same_program_while_the_knobs_change(
    size: int, fast: bool, plan: list[Step], leaving: int
) -> None:
    knobs = {"fast_lane": fast, "dynamic_process_sets": True}
    leaving = min(leaving, len(plan))
    want = run_ranks(size, program, plan, leaving, knobs=knobs)
    with restless() as more:
        assert run_ranks(size, program, plan, leaving, knobs={**knobs, **more}) == want


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_several_threads_while_the_knobs_change(size: int, fast: bool) -> None:
    want = run_ranks(size, several_threads, 30, knobs={"fast_lane": fast})
    with restless() as more:
        assert run_ranks(size, several_threads, 30, knobs={"fast_lane": fast, **more}) == want
        assert Restless.changes


@pytest.mark.parametrize("fast", [True, False])
def test_bits_do_not_depend_on_what_is_tuned(fast: bool) -> None:
    want = run_ranks(3, determinism.digests, knobs={"fast_lane": fast})
    with restless() as more:
        assert run_ranks(3, determinism.digests, knobs={"fast_lane": fast, **more}) == want
        assert Restless.changes


def _train(enough: Callable[[], bool]) -> Tuning:
    """Reduce a few gradients repeatedly until rank 0 has enough samples; return this rank's knobs."""
    gradients = [np.full(n, hvd.rank() + 1.0, np.float32) for n in (10, 3000, 60_000)]
    for _ in range(20_000):
        handles = [hvd.allreduce_async(g, name=f"g{k}", op=hvd.Sum) for k, g in enumerate(gradients)]
        assert all((handle.result() == hvd.size() * (hvd.size() + 1) / 2).all() for handle in handles)
        if hvd.broadcast(np.array([enough()]), 0, name="enough")[0]:
            break
    else:
        raise AssertionError("the search does not end")
    # After the barrier, rank 0's decision is in force on every rank.
    hvd.barrier()
    runtime = context.current().runtime
    return runtime.tuning


@pytest.mark.parametrize("fast", [True, False])
def test_a_search_ends_and_every_rank_has_what_it_found(
    fast: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(autotuner, "SHORTEST_SAMPLE", 0.0)
    caplog.set_level(logging.INFO, "pyhvd")
    path = tmp_path / "tuned.csv"
    found = run_ranks(
        3,
        _train,
        lambda: ",done," in path.read_text(),
        knobs={
            "fast_lane": fast,
            "autotune": True,
            "autotune_log": str(path),
            "autotune_steps_per_sample": 2,
            "cycle_time_ms": 0.5,
        },
    )
    assert len(set(map(repr, found))) == 1
    assert found[0].cycle_time_ms == 0.5, "it was given"
    kept = [record.message for record in caplog.records if record.message.startswith("autotune:")]
    assert len(kept) == 1, "one rank says it, once"
    for value in (found[0].fusion_threshold, found[0].chunk_size, found[0].staging_size):
        assert f"={value}" in kept[0]


def test_a_rank_keeps_the_cycle_time_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYHVD_CYCLE_TIME", "3")
    with restless() as more:
        tunings = run_ranks(2, _train, _after(200), knobs={"fast_lane": True, **more})
    assert [tuning.cycle_time_ms for tuning in tunings] == [3.0, 3.0]


def _after(calls: int) -> Callable[[], bool]:
    left = iter(range(calls))
    return lambda: next(left, None) is None


def test_a_log_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "tuned.csv")
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, lambda: None, knobs={"autotune": True, "autotune_log": path})
    assert isinstance(failed.value.__cause__, ValueError)
    text = f"PYHVD_AUTOTUNE_LOG={path!r} cannot be written: No such file or directory"
    assert text in str(failed.value.__cause__)


def test_an_error_at_the_start_names_the_variable_that_the_user_has_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    monkeypatch.setenv("HOROVOD_AUTOTUNE_LOG", str(tmp_path / "missing" / "tuned.csv"))
    with pytest.raises(RanksFailed, match=r"HOROVOD_AUTOTUNE_LOG='.*' cannot be written"):
        run_ranks(2, lambda: None)

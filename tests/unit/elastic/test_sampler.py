"""The sampler: over an epoch's committed batches every index occurs once, but for the padded tail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from pyhvd.elastic import ElasticSampler


@contextmanager
def playing(rank: int, size: int) -> Iterator[None]:
    with mock.patch.multiple("pyhvd.elastic.sampler", rank=lambda: rank, size=lambda: size):
        yield


def make(rank: int, size: int, state: dict[str, Any], length: int, **options: Any) -> ElasticSampler:
    with playing(rank, size):
        sampler = ElasticSampler(length, **options)
        sampler.load_state_dict(state)
    return sampler


class Generation:
    """Ranks that take batches in step, and commit."""

    def __init__(self, size: int, state: dict[str, Any], length: int, **options: Any) -> None:
        self.samplers = [make(rank, size, state, length, **options) for rank in range(size)]
        self.left = [list(each) for each in self.samplers]
        self.taken: list[int] = []  # since the last commit

    def step(self, batch: int) -> bool:
        """Take a batch on every rank that has one; return whether all ranks had one."""
        parts = [left[:batch] for left in self.left]
        for sampler, part in zip(self.samplers, parts, strict=True):
            if part:
                sampler.record_batch(0, len(part))
            self.taken += part
        self.left = [left[batch:] for left in self.left]
        return all(parts)

    def commit(self) -> tuple[list[int], dict[str, Any]]:
        """Return the indices that this commits, and the state."""
        count = sum(each.take_recorded() for each in self.samplers)
        for each in self.samplers:
            each.add_recorded(count)
        states = [each.state_dict() for each in self.samplers]
        assert all(state == states[0] for state in states)
        taken, self.taken = self.taken, []
        return taken, states[0]


# Ranks of a generation, the size of batches, steps between commits, commits until it ends, lost steps.
GENERATIONS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.integers(0, 4), st.integers(0, 2)),
    max_size=5,
)


@given(st.integers(0, 40), GENERATIONS, st.integers(1, 9), st.booleans(), st.booleans(), st.integers(-2, 2))
def test_every_index_occurs_once(
    length: int, generations: list[tuple[int, ...]], last: int, shuffle: bool, pad: bool, seed: int
) -> None:
    options = {"shuffle": shuffle, "pad": pad, "seed": seed}
    state, logged = {"epoch": 3, "processed_num": 0}, list[int]()
    ends = [(*each, False) for each in generations] + [(last, 2, 1, 99, 0, True)]
    for size, batch, between, commits, lost, is_last in ends:
        generation = Generation(size, state, length, **options)
        for _ in range(commits):
            whole = all(generation.step(batch) for _ in range(between))
            while not whole and any(generation.left):  # no commit in the middle of the uneven end
                generation.step(batch)
            taken, state = generation.commit()
            logged += taken
        assert not is_last or not any(generation.left)
        for _ in range(lost):
            generation.step(batch)
    counts = Counter(logged)
    assert set(counts) == set(range(length))
    assert state["processed_num"] == length
    extra = len(logged) - length
    assert extra < 9 if pad else extra == 0


@given(st.integers(0, 40), st.integers(1, 9), st.booleans())
def test_ranks_divide_what_is_left(length: int, size: int, pad: bool) -> None:
    samplers = [make(rank, size, {"epoch": 0, "processed_num": 0}, length, pad=pad) for rank in range(size)]
    parts = [list(each) for each in samplers]
    assert [len(each) for each in samplers] == [len(part) for part in parts]
    lengths = [len(part) for part in parts]
    if pad:
        assert set(lengths) == {-(-length // size)}
    else:
        assert max(lengths) - min(lengths) <= 1
        assert lengths == sorted(lengths, reverse=True)
    together = Counter(index for part in parts for index in part)
    assert set(together) == set(range(length))
    assert max(together.values(), default=1) <= (1 if not pad else -(-size // max(length, 1)) + 1)


def test_an_order_depends_on_seed_and_epoch_alone() -> None:
    def order(epoch: int = 0, size: int = 1, **options: Any) -> list[int]:
        generation = Generation(size, {"epoch": epoch, "processed_num": 0}, 24, **options)
        return [index for several in zip(*generation.left, strict=True) for index in several]

    assert order() == order() == order(size=3) == order(size=8)
    assert len({tuple(order(epoch, seed=seed)) for epoch in range(3) for seed in (-1, 0, 1)}) == 9
    assert order(shuffle=False) == list(range(24)) == order(epoch=1, shuffle=False)


def test_an_epoch_begins_anew_at_its_number() -> None:
    with playing(0, 2):
        sampler = ElasticSampler(range(10), shuffle=False)
        sampler.record_batch(0, 2)
        assert sampler.state_dict() == {"epoch": 0, "processed_num": 4}
        sampler.set_epoch(0)  # before the first batch after a restart
        assert sampler.processed_num == 4
        sampler.set_epoch(1)
        assert sampler.state_dict() == {"epoch": 1, "processed_num": 0}
        sampler.record_batch(0, 5)
        sampler.load_state_dict(sampler.state_dict())
        sampler.set_epoch(1)  # after a restart: the program has yet to count the epoch
        assert list(sampler) == []
        sampler.set_epoch(1)  # the same epoch again
        assert (sampler.processed_num, len(sampler)) == (0, 5)


def test_the_state_of_horovods_sampler_is_loaded() -> None:
    sampler = make(1, 3, {"epoch": 2, "processed_num": 4}, 10, shuffle=False)
    assert list(sampler) == [5, 8]
    assert len(sampler) == 2
    assert list(make(0, 3, {"epoch": 2, "processed_num": 99}, 10)) == []


@pytest.mark.parametrize(("pad", "numbers"), [(True, [3, 3, 9]), (False, [3, 2, 8])])
def test_the_numbers_of_horovods_sampler(pad: bool, numbers: list[int]) -> None:
    samplers = [make(rank, 3, {"epoch": 1, "processed_num": 2}, 10, seed=4, pad=pad) for rank in range(3)]
    first, _, last = samplers
    together = [index for turn in zip_longest(*samplers) for index in turn if index is not None]
    for sampler in samplers:
        assert sampler.remaining_indices == together[:8]
        assert sampler.total_size == numbers[2]
    assert [first.num_samples, last.num_samples] == numbers[:2] == [len(first), len(last)]
    first.record_batch(0, 1)
    first.add_recorded(3)
    assert first.remaining_indices == together[:8]  # as when the epoch was last divided
    with playing(0, 3):
        first.reset()
    assert first.remaining_indices == together[3:8]
    assert (first.num_samples, first.total_size) == ((2, 6) if pad else (2, 5))


def test_a_length_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^dataset=-1: expected a dataset, or a length of 0 or more$"):
        ElasticSampler(-1)
    with pytest.raises(TypeError):
        ElasticSampler("abc".__iter__())  # type: ignore[arg-type]

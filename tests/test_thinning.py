"""The choice of combinations that the plain run of the suite makes."""

from __future__ import annotations

import itertools

import pytest

from tests.thinning import choose


@pytest.mark.parametrize("lengths", [(1, 1), (5, 1), (2, 3), (4, 4, 4), (30, 4)])
def test_every_value_occurs_in_few_combinations(lengths: tuple[int, ...]) -> None:
    axes = [[(axis, value) for value in range(length)] for axis, length in enumerate(lengths)]
    combinations = list(itertools.product(*axes))
    chosen = [combinations[index] for index in choose(combinations)]
    assert {value for each in chosen for value in each} == {value for axis in axes for value in axis}
    assert len(chosen) == max(lengths)


def test_values_are_used_evenly() -> None:
    combinations = list(itertools.product("abcdefgh", (1, 2, 3, 4)))
    counts = [combinations[index][1] for index in choose(combinations)]
    assert sorted(counts) == [1, 1, 2, 2, 3, 3, 4, 4]


def test_a_value_that_has_few_combinations_is_not_lost() -> None:
    combinations = [("a", 1), ("a", 2), ("a", 3), ("b", 2)]
    assert {combinations[index] for index in choose(combinations)} >= {("b", 2), ("a", 1), ("a", 3)}


def test_a_single_axis_is_whole() -> None:
    assert choose([("a",), ("b",), ("c",)]) == [0, 1, 2]

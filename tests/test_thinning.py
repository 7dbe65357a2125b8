"""The choice of combinations that the plain run of the suite makes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

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


PARAMETRISED = """
import pytest
from hypothesis import given, strategies

@pytest.mark.parametrize("letter", "abc")
@pytest.mark.parametrize("number", [1, 2])
def test_pairs(letter, number): pass

@pytest.mark.any_mpi
def test_any_mpi(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.slowest
def test_slowest(): pass

@given(strategies.integers())
def test_search(number): pass
"""


def test_the_rest_is_what_was_left_out_and_the_searches(tmp_path: Path) -> None:
    path = tmp_path / "test_parametrised.py"
    path.write_text(PARAMETRISED)

    def collected(*options: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "--collect-only", "-q", *options]
        said = subprocess.run([*command, str(path)], capture_output=True, text=True, check=True).stdout
        return {line.partition("::")[2] for line in said.splitlines() if "::" in line}

    plain, rest = collected("--second-mpi"), collected("--second-mpi", "--rest")
    assert len(plain) == 3 + 1
    assert plain & rest == {"test_search"}
    assert plain | rest == collected("--full") - {"test_any_mpi", "test_slowest"}
    assert len(plain | rest) == 6 + 2

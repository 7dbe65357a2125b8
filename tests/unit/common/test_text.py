"""Texts about ranks, hosts and values: word for word for few of them, and bounded for many."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from pyhvd.common.text import (
    cut_lines,
    describe_hosts,
    describe_import_error,
    describe_ranks,
    describe_values,
    list_hosts,
    list_members,
    list_numbers,
    list_some,
)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (None, 'prometheus-client, which is not installed: pip install "pyhvd[metrics]"'),
        (
            "import missing_part",
            "prometheus-client, which is installed, but its import fails:"
            " ModuleNotFoundError: No module named 'missing_part'",
        ),
        (
            "raise ImportError('libx.so.1: cannot open shared object file')",
            "prometheus-client, which is installed, but its import fails:"
            " ImportError: libx.so.1: cannot open shared object file",
        ),
    ],
)
def test_a_package_that_cannot_be_imported_is_absent_or_broken(
    source: str | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [each for each in sys.modules if each.partition(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    if source is not None:
        (tmp_path / "prometheus_client.py").write_text(source)
    importlib.invalidate_caches()
    with pytest.raises(ImportError) as caught:
        importlib.import_module("prometheus_client.parser")
    assert describe_import_error(caught.value, "prometheus-client", "metrics") == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([5, 1, 0, 2], "ranks 0-2, 5"),
        (range(10_000), "ranks 0-9999"),
        (range(0, 32, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30"),
        (range(0, 34, 2), "ranks 0, 2, 4, 6, ... 30, 32 (17 ranks)"),
        (range(1, 10_000, 2), "ranks 1, 3, 5, 7, ... 9997, 9999 (5,000 ranks)"),
        ([*range(80), *range(100, 10_000, 8)], "ranks 0-79, 100, 108, 116, ... 9988, 9996 (1,318 ranks)"),
    ],
)
def test_ranks(ranks: Sequence[int], text: str) -> None:
    assert describe_ranks(ranks) == text


def test_a_note_shares_the_parentheses() -> None:
    assert describe_ranks([1, 2], "all ranks of host a") == "ranks 1-2 (all ranks of host a)"
    assert (
        describe_ranks(range(0, 80, 2), "of one host")
        == "ranks 0, 2, 4, 6, ... 76, 78 (40 ranks: of one host)"
    )


@given(st.sets(st.integers(0, 60), max_size=25))
def test_the_ranges_of_few_numbers_hold_all_of_them(numbers: set[int]) -> None:
    text = list_numbers(numbers)
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= {*range(int(first), int(last or first) + 1)}
    assert found == numbers if "..." not in text else found < numbers


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["a"], "host a"),
        (["h0", "h1", "h2"], "hosts h0, h1, h2"),
        ([f"h{i}" for i in range(1250)], "hosts h0-h1249 (1,250 hosts)"),
        ([f"n{i:03d}.lab" for i in range(5, 14)], "hosts n005.lab-n013.lab (9 hosts)"),
        (
            [f"10.0.0.{i}" for i in range(9, 12)] + ["b"] * 6,
            "hosts 10.0.0.9-10.0.0.11, b, b, b, b, b, b (9 hosts)",
        ),
        ([f"h{i}" for i in range(0, 40, 2)], "hosts h0, h2, h4, h6, ... h36, h38 (20 hosts)"),
    ],
)
def test_hosts(names: Sequence[str], text: str) -> None:
    assert describe_hosts(names) == text


def test_names_without_the_next_number_make_no_range() -> None:
    names = ["a", "b", "n1", "n02", "m3", "m03", "x9", "x10", "x011"]
    assert list_hosts(names) == "a, b, n1, n02, m3, m03, x9-x10, x011"


def test_values() -> None:
    assert describe_values({3: "(4,)", 0: "(3,)", 2: "(3,)", 1: "(3,)"}) == "ranks 0-2: (3,); rank 3: (4,)"
    assert describe_values({rank: f"({rank},)" for rank in range(10_000)}) == (
        "rank 0: (0,); rank 1: (1,); rank 2: (2,); rank 3: (3,); ... rank 9998: (9998,); rank 9999: (9999,)"
        " (10,000 different values)"
    )


def test_lists_of_many_items_are_cut() -> None:
    assert list_some([*range(16)], " ") == " ".join(map(str, range(16)))
    assert list_some([*range(17)], " ") == "0 1 2 3 ... 15 16"
    assert cut_lines(["a", "b"], 2, "lines") == ["a", "b"]
    assert cut_lines([1, 2, 3, 4], 2, "hosts") == ["1", "2", "  ... and 2 more hosts"]
    assert (list_members((0, 2)), list_members(range(17))) == ("[0, 2]", "ranks 0-16")

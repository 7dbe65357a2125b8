"""The examples run and print the results that follow from the number of ranks."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.mpi.harness import run_mpi
from tests.mpi.launch import ROOT, mpiexec_path

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.skipif(mpiexec_path() is None, reason="no mpiexec beside this interpreter or on PATH"),
]
needs_sklearn = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn, which brings the digits, is missing"
)

EPOCHS = 30
"""The default of digits.py."""


def _example(n: int, name: str, *arguments: object) -> str:
    """Run an example on `n` ranks; return its output."""
    argv = [sys.executable, "-m", "pyhvd.run", str(ROOT / "examples" / name), *map(str, arguments)]
    run = run_mpi(n, argv, timeout=60)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"
    return run.stdout


@pytest.mark.parametrize("n", [1, 2, 3])
def test_hello(n: int) -> None:
    shown: dict[str, list[str]] = {}
    label = ""
    for line in _example(n, "hello.py").splitlines():
        label = line[:45].strip() or label
        shown.setdefault(label, []).append(line[45:])
    ranks = range(n)
    total = n * (n + 1) / 2
    product = float(np.prod(np.arange(1.0, n + 1)))
    expected: dict[str, list[Any]] = {
        "ranks": [n],
        "allreduce, Sum of [r+1, 10(r+1)]": [[total, 10 * total]],
        "allreduce, Average of [r+1, 10(r+1)]": [[total / n, 10 * total / n]],
        "allreduce, Min of [r+1, 10(r+1)]": [[1.0, 10.0]],
        "allreduce, Max of [r+1, 10(r+1)]": [[float(n), 10.0 * n]],
        "allreduce, Product of [r+1, 10(r+1)]": [[product, 10**n * product]],
        "allreduce_, the same in place": [[total, 10 * total]],
        "grouped_allreduce, Sum of [r], [1, 0.5]": [f"[{sum(ranks)}], [{float(n)}, {n / 2}]"],
        "reducescatter, Sum of [0 ... size]": [f"{rows}   on rank {r}" for r, rows in _scattered(n)],
        "grouped_reducescatter of it and 10 times it": [
            f"{rows}, {[10 * row for row in rows]}   on rank {r}" for r, rows in _scattered(n)
        ],
        "allgather of r+1 rows [r]": [[r for r in ranks for _ in range(r + 1)]],
        "grouped_allgather of [r], [-r]": [f"{list(ranks)}, {[-r for r in ranks]}"],
        "broadcast of [r, r] from the last rank": [[n - 1, n - 1]],
        "broadcast_, in place, from rank 0": [[0, 0]],
        "alltoall of [10r, 10r+1, ...]": [f"{[10 * s + r for s in ranks]}   on rank {r}" for r in ranks],
        "alltoall of [r, ...], d rows to rank d": [
            f"{[s for s in ranks for _ in range(r)]}   on rank {r}" for r in ranks
        ],
        "broadcast_object from rank 0": [{"from": 0}],
        "allgather_object, sizes may differ": [["a", "ab", "abc"][:n]],
        "allreduce_async of 0.5, then synchronize": [n / 2],
        "barrier": ["passed"],
        **{f"ranks that take part in step {step}": [n - step] for step in ranks},
        "join: the last rank to join was": [0],
    }
    assert shown == {what: [str(each) for each in values] for what, values in expected.items()}


def _scattered(n: int) -> list[tuple[int, list[int]]]:
    """Return each rank's rows of the sum of n arrays [0 ... n]: of n + 1 rows, rank 0 gets two."""
    rows = [n * row for row in range(n + 1)]
    return [(r, rows[:2] if r == 0 else [rows[r + 1]]) for r in range(n)]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return the results of digits.py on 1 and on 4 ranks, by number of ranks."""
    folder: Path = tmp_path_factory.mktemp("digits")
    left: dict[int, dict[str, Any]] = {}
    for n in (1, 4):
        losses, saved = folder / f"{n}.json", folder / f"{n}.npz"
        printed = _example(n, "digits.py", "--losses", losses, "--save", saved)
        with np.load(saved) as parameters:
            left[n] = {**json.loads(losses.read_text()), "printed": printed, "parameters": dict(parameters)}
    return left


@needs_sklearn
@pytest.mark.parametrize("n", [1, 4])
def test_digits_are_recognised(n: int, digits: dict[int, dict[str, Any]]) -> None:
    last = digits[n]["printed"].splitlines()[-1]
    match = re.fullmatch(r"held-out accuracy (\d+\.\d)% \(450 images\), (\d) ranks?, \d+\.\d s", last)
    assert match is not None, last
    assert float(match[1]) >= 95.0
    assert digits[n]["accuracy"] >= 0.95
    assert int(match[2]) == n == digits[n]["ranks"]


@needs_sklearn
def test_digits_curve_does_not_depend_on_the_number_of_ranks(digits: dict[int, dict[str, Any]]) -> None:
    alone, shared = (np.array(digits[n]["losses"]) for n in (1, 4))
    # 1347 images in batches of 64: the last of the 22 steps has 3, so that rank 3 of 4 joins before it.
    assert alone.shape == shared.shape == (22 * EPOCHS,)
    np.testing.assert_allclose(shared, alone, rtol=0, atol=1e-5)
    assert alone[-22:].mean() < 0.05 * alone[:22].mean()
    for name, parameter in digits[1]["parameters"].items():
        np.testing.assert_allclose(digits[4]["parameters"][name], parameter, rtol=0, atol=1e-5)


@needs_sklearn
@pytest.mark.slow
def test_digits_with_fewer_examples_per_step_than_ranks(tmp_path: Path) -> None:
    """Rank 2 has no example in any step, and joins at once."""
    curves = []
    for n in (1, 3):
        path = tmp_path / f"{n}.json"
        options = ["--batch-size", 2, "--epochs", 1, "--lr", 0.001, "--losses", path]
        assert "held-out accuracy" in _example(n, "digits.py", *options)
        curves.append(json.loads(path.read_text())["losses"])
    np.testing.assert_allclose(curves[1], curves[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("wait", [0, 1])
def test_async_overlap(wait: int) -> None:
    options = ["--layers", 6, "--size", 100, "--repeats", 3, "--wait", wait]
    printed = _example(2, "async_overlap.py", *options).splitlines()
    assert printed[0] == "6 gradients, 0.5 MB in all, 2 ranks; median of a step:"
    assert [line.split("  ")[1] for line in printed[1:4]] == [
        "computation alone",
        "one after the other",
        "overlapped",
    ]
    assert printed[-1] == "all sums are right"

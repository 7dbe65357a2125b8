"""Test the GPU example with numpy in place of CuPy: its result is the same for any number of ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyhvd.testing import run_ranks

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "cupy_logreg.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("cupy_logreg", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_any_number_of_ranks_learns_the_same(example: Any) -> None:
    options = example.parse(["--examples", "1001", "--features", "8", "--steps", "60"])
    single = run_ranks(1, example.train, np, options)[0]
    assert single[0] == pytest.approx(np.log(2), rel=1e-3)
    assert single[1] < 0.75 * single[0]
    for first, last, weights in run_ranks(3, example.train, np, options):
        assert (first, last) == pytest.approx(single[:2], rel=1e-4)
        np.testing.assert_allclose(weights, single[2], rtol=1e-3, atol=1e-4)


def test_what_makes_no_sense_is_refused(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        example.parse(["--steps", "0"])
    assert "--steps and --features must be at least 1" in capsys.readouterr().err

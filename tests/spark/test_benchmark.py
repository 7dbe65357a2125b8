"""The benchmark inside Spark runs at a tiny size, and all averages are correct. No figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.spark_ranks import add_totals, check_average, gradient
from tests.spark.cluster import ROOT

_LIMIT_S = 200.0


@pytest.mark.slowest
@pytest.mark.timeout(_LIMIT_S + 20)
def test_question(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="make test-spark installs it")
    command = [sys.executable, "-m", "benchmarks.questions.spark", "--tiny", "--results", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("spark-*.json")
    (run,) = json.loads(path.read_text())["runs"]
    assert "pyspark" in run["machine"]["versions"]
    assert any(note.startswith("Spark ") for note in run["notes"])
    start, step = run["outcomes"]
    whole, *phases, empty = start["figures"]
    assert (whole["name"], empty["name"]) == ("pyhvd", "an empty barrier job of Spark's")
    # The sum of the slowest phases is at least the slowest rank's whole time.
    parts = np.array([each["samples"] for each in phases])
    assert parts.shape == (3, 2)
    assert np.all(whole["samples"] <= parts.sum(axis=0) + 1e-4)
    assert {each["name"]: len(each["samples"]) for each in step["figures"]} == {
        "pyhvd": 2,
        "pyhvd, over TCP as between hosts": 2,
        "treeAggregate + broadcast": 2,
    }
    assert all(each["min"] > 0 for outcome in run["outcomes"] for each in outcome["figures"])


def test_wrong_averages_are_found() -> None:
    total = add_totals(None, gradient(0, 4000))
    total = add_totals(total, gradient(1, 4000))
    assert total is not None
    with pytest.raises(ValueError, match=r"over 2 ranks: element 0 is 3\.0 instead of 1\.5"):
        check_average(total, 2)
    total /= 2
    check_average(total, 2)
    total[123] = np.nan
    with pytest.raises(ValueError, match="element 123 is nan"):
        check_average(total, 2)

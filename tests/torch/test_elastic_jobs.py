"""Training loops in elastic jobs whose ranks are killed: the weights are those of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.elastic.conftest import mpich
from tests.many_hosts import LOCAL
from tests.mpi.launch import ROOT
from tests.torch import elastic_loops
from tests.torch.elastic_loops import KINDS, RESULT

__all__ = ["mpich"]

_PATIENCE_S = 300.0
pytestmark = pytest.mark.timeout(_PATIENCE_S + 20)
# Else each rank imports it anew, for its first optimizer.
_PRELOAD = ("--preload", "torch._dynamo")
_POINTS = ("after", "inside", "before")
_EXACT = {"rtol": 1e-9, "atol": 1e-12}
_HALF = {"rtol": 1e-2, "atol": 1e-3}


def run(folder: Path, flags: Sequence[str], steps: int, faults: Sequence[str]) -> dict[str, Any]:
    """Run the program to its end; return what rank 0 has found."""
    ended = subprocess.run(
        [sys.executable, "-m", "pyhvd.run", *_PRELOAD, *flags, elastic_loops.__file__, str(steps), *faults],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    result: dict[str, Any] = torch.load(folder / RESULT, weights_only=False)
    assert len(result["sizes"]) == steps
    return result


def check_kinds(result: dict[str, Any]) -> None:
    """Check that each kind of loop has come as far as in one process."""
    alone = elastic_loops.train_alone(result["sizes"])
    for kind, own, wanted in zip(KINDS, result["kinds"], alone, strict=True):
        close = _HALF if kind is elastic_loops.Compressed else _EXACT
        try:
            torch.testing.assert_close(own, wanted, **close)
        except AssertionError as exc:
            raise AssertionError(kind.__name__) from exc


def faults_in(kinds: Sequence[type[elastic_loops.Loop]], size: int) -> list[str]:
    """Return a fault for each kind of loop, each in a generation of its own, at points and ranks in turns."""
    return [
        ":".join(
            [
                str(number),
                kind.__name__,
                "joins" if kind is elastic_loops.Uneven else _POINTS[number % 3],
                str((number + 1) % size),
            ]
        )
        for number, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(("size", "first"), [(3, 0), (4, 1)])
def test_a_rank_is_killed_in_each_kind_of_loop(size: int, first: int, tmp_path: Path) -> None:
    faults = faults_in(KINDS[first::2], size)
    result = run(tmp_path, ["-n", str(size), "--min-np", str(size)], len(faults) + 2, faults)
    assert result["generation"] == len(faults)
    assert set(result["sizes"]) == {size}
    check_kinds(result)


@pytest.mark.parametrize("size", [3, 4])
def test_a_job_goes_on_with_fewer_ranks(size: int, tmp_path: Path) -> None:
    """A host is lost, and then one of the ranks that are left is killed."""
    flags = ["-H", f"east:{size - 1},west:1", "--launch-agent", LOCAL, "--min-np", str(size - 1)]
    flags += ["--blacklist-cooldown-range", "3600", "3600"]
    faults = [f"0:Passes:after-host:{size - 1}", "1:Uneven:joins:1"]
    result = run(tmp_path, flags, 5, faults)
    assert result["generation"] == 2
    assert result["sizes"] == [size] + [size - 1] * 4
    check_kinds(result)

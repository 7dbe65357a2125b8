"""Elastic jobs of Keras: a rank is killed in the middle of ``fit()``, and the job goes on from its commit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi.launch import ROOT

_PROGRAM = Path(__file__).with_name("keras_elastic_loop.py")
_PATIENCE_S = 500.0


@pytest.mark.timeout(_PATIENCE_S + 20)
@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_an_epoch_goes_on_where_it_was_committed(backend: str) -> None:
    for name in ("keras", backend):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name}: not installed")
    env = {
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "pyhvd.run", "-n", "2", "--min-np", "2", str(_PROGRAM)],
        env={**os.environ, **env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout, ended.stderr)
    # The second epoch began again after its second batch: the third was trained, but not committed.
    assert "generation 1, began [(0, 0), (1, 0), (1, 2), (2, 0)]" in ended.stdout

"""The benchmark of torch.distributed over pyhvd at tiny sizes: every contender's result is right."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.questions import torchdist
from tests.mpi.test_benchmarks import LIMIT, needs_mpi, run, the_report


@pytest.mark.slowest
@needs_mpi
@pytest.mark.timeout(LIMIT + 20)
def test_torch_distributed_beside_gloo(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run("-m", "benchmarks.questions.torchdist", "--tiny", "--results", tmp_path)
    (job,) = the_report(tmp_path, "torchdist")["runs"]
    found = {outcome["label"]: outcome for outcome in job["outcomes"]}
    assert {torchdist.GRADIENTS, torchdist.LAYERS, torchdist.BARRIER} < found.keys()
    assert len(found) == 2 + 1 + 1 + len(torchdist.CALLS) + 1
    for outcome in found.values():
        assert len(outcome["figures"]) >= 2

"""examples/torch_ddp.py under each launcher."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi.launch import ROOT, mpi_environment, mpiexec_command

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None, reason="scikit-learn, which brings the digits, is missing"
)

LAUNCHERS = {
    "pyhvdrun": [sys.executable, "-m", "pyhvd.run", "-n", "2"],
    "mpiexec": [*mpiexec_command(2), sys.executable],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_it_trains(tmp_path: Path, launcher: str) -> None:
    command = [*LAUNCHERS[launcher], str(ROOT / "examples" / "torch_ddp.py")]
    environment = mpi_environment(tmp_path, {"PYTHONPATH": str(ROOT)})
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    if "environment variable RANK expected" in done.stderr:
        pytest.skip(f"pyhvd does not set RANK and MASTER_PORT under {launcher}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"held-out accuracy ([\d.]+)% \(450 images\), 2 ranks", done.stdout)
    assert found, done.stdout
    assert float(found[1]) >= 97.0

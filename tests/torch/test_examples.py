"""The examples of torch that need no data."""

from __future__ import annotations

import subprocess
import sys

from tests.mpi.launch import ROOT


def test_the_resnet_example() -> None:
    command = [sys.executable, "-m", "pyhvd.run", "-n", "2", f"{ROOT}/examples/torch_resnet.py"]
    small = "--layers 50 --width 4 --batch-size 2 --image-size 32 --rounds 1 --steps 1 --warmup 1 --fp16"
    done = subprocess.run(
        [*command, *small.split()], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ResNet-50, 0.2 million parameters, on ")
    assert float(lines[-1].removesuffix(" images/s on 2 ranks")) > 0

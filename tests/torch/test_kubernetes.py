"""The command of examples/kubernetes/job-torchrun.yaml on simulated hosts that have the pods' names."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
import torch  # noqa: F401 - these tests need it

from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.rank_env import MPICH
from tests.manifests import container
from tests.pods import Pods, make_pods

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_library().family != MPICH, reason="the image has MPICH"),
]

_PROGRAM = """
import os, socket
import numpy as np, pyhvd as hvd
hvd.init()
total = hvd.allreduce(np.ones(3), op=hvd.Sum).tolist()
os.write(1, f"{hvd.rank()} {socket.gethostname()} {total}\\n".encode())
"""


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    yield from make_pods(tmp_path_factory)


def test_each_pod_runs_torchrun(pods: Pods) -> None:
    pods.program(_PROGRAM)
    command = [word.replace("node 4", "node 2") for word in container("job-torchrun.yaml")["command"]]
    started: list[subprocess.Popen[str]] = [
        pods.start(f"train-{number}", command, {"JOB_COMPLETION_INDEX": str(number), "OMP_NUM_THREADS": "1"})
        for number in range(2)
    ]
    ended = [(*pod.communicate(timeout=90), pod.returncode) for pod in started]
    said = [line for out, _, _ in ended for line in sorted(out.splitlines())]
    assert said == [f"{rank} train-{rank // 2} [4.0, 4.0, 4.0]" for rank in range(4)], ended
    assert [code for _, _, code in ended] == [0, 0]

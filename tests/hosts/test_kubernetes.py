"""The commands of examples/kubernetes on simulated hosts that have the names and files of the pods.

The tests change the numbers of ranks, and folders that all hosts of a bed share.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest

from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.rank_env import MPICH
from tests.manifests import container
from tests.pods import NAMES, WORKERS, Pods, first_of, make_pods
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.any_mpi,
    pytest.mark.skipif(find_library().family != MPICH, reason="the image has MPICH"),
]

_PROGRAM = """
import socket
import numpy as np, pyhvd as hvd
hvd.init()
print(hvd.rank(), socket.gethostname(), hvd.allreduce(np.ones(3), op=hvd.Sum).tolist())
"""
_ELASTIC = """
import os, time
import pyhvd as hvd
hvd.init()

@hvd.elastic.run
def train(state):
    while not hvd.broadcast_object(os.path.exists("go"), 0):
        state.step += 1
        if hvd.rank() == 0:
            with open("steps", "a") as file:
                print(state.step, hvd.size(), file=file)
        state.commit()
        time.sleep(0.05)

train(hvd.elastic.ObjectState(step=0))
"""


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    yield from make_pods(tmp_path_factory)


def test_an_indexed_job(pods: Pods) -> None:
    """Pod 0 is up before pod 1."""
    pods.program(_PROGRAM)
    command = [word.replace(":4", ":2") for word in container("job.yaml")["command"]]
    first = pods.start("train-0", command, {"JOB_COMPLETION_INDEX": "0"})
    second = pods.start("train-1", command, {"JOB_COMPLETION_INDEX": "1"})
    out, err = first.communicate(timeout=60)
    assert (first.returncode, sorted(out.splitlines())) == (
        0,
        [f"[{rank}]<stdout>:{rank} train-{rank // 2} [4.0, 4.0, 4.0]" for rank in range(4)],
    ), err
    assert second.poll() is None
    os.kill(first_of(second), signal.SIGTERM)
    assert second.wait(10) == 0


@pytest.fixture
def workers(pods: Pods) -> Iterator[list[subprocess.Popen[str]]]:
    """The workers of an MPIJob, and the operator's files in the launcher."""
    hostfile = "".join(f"{name}:2\n" for name in WORKERS)
    script = "#!/bin/sh\n" + "".join(f"echo {name}\n" for name in WORKERS)
    write = 'cd /etc/mpi && printf "$1" > hostfile && printf "$2" > discover_hosts.sh && chmod +x *.sh'
    pods.hosts["launcher"].do("bash", "-c", write, "bash", hostfile, script)
    for manifest in ("mpijob.yaml", "mpijob-elastic.yaml"):
        assert container(manifest, "Worker")["command"] == ["/usr/sbin/sshd", "-De"]
    started = [pods.start(name, ["/usr/sbin/sshd", "-De"]) for name in NAMES[:2]]
    yield started
    for worker in started:
        os.kill(first_of(worker), signal.SIGTERM)
        assert worker.wait(10) == 0


_LAUNCHER = {"K_MPI_JOB_ROLE": "launcher", "HYDRA_HOST_FILE": "/etc/mpi/hostfile"}


@pytest.mark.usefixtures("workers")
def test_an_mpijob(pods: Pods) -> None:
    pods.program(_PROGRAM)
    job = pods.start("launcher", container("mpijob.yaml", "Launcher")["command"], _LAUNCHER)
    out, err = job.communicate(timeout=60)
    assert (job.returncode, sorted(out.splitlines())) == (
        0,
        [f"[{rank}]<stdout>:{rank} train-{rank // 2} [4.0, 4.0, 4.0]" for rank in range(4)],
    ), err


@pytest.mark.usefixtures("workers")
def test_an_elastic_mpijob_whose_pods_are_evicted(pods: Pods) -> None:
    """A worker's hook drains it; SIGTERM ends the launcher with code 75; the next one goes on."""
    pods.program(_ELASTIC)
    steps = pods.folder / "steps"
    changed = {"=4": "=1", "/tmp/leaving": "/run/leaving", "/state": str(pods.folder)}
    pattern = re.compile("|".join(map(re.escape, changed)))

    def change(found: re.Match[str]) -> str:
        return changed[found[0]]

    words = container("mpijob-elastic.yaml", "Launcher")["command"]
    command = [pattern.sub(change, word) for word in words]
    assert sum(word != now for word, now in zip(words, command, strict=True)) == 5

    def sizes() -> list[int]:
        return [int(line.split()[1]) for line in steps.read_text().splitlines()] if steps.exists() else []

    job = pods.start("launcher", command, _LAUNCHER)
    wait_until(lambda: 2 in sizes() or job.poll() is not None)
    hook = container("mpijob-elastic.yaml", "Worker")["lifecycle"]["preStop"]["exec"]["command"]
    pods.start("train-1", [pattern.sub(change, word) for word in hook])
    wait_until(lambda: sizes()[-1:] == [1] or job.poll() is not None)
    os.kill(first_of(job), signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 75, err
    done = len(sizes())
    pods.hosts["train-1"].do("rm", "/run/leaving")
    job = pods.start("launcher", command, _LAUNCHER)
    wait_until(lambda: len(sizes()) > done + 3 or job.poll() is not None)
    (pods.folder / "go").touch()
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    numbers = [int(line.split()[0]) for line in steps.read_text().splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))  # no step is lost, and none is done twice
    assert not list(pods.folder.glob("train.resume*"))

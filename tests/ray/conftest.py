"""One Ray cluster of two nodes for all tests here; after each, none of its agents and ranks may be left."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
CPUS, GPUS = 4, 2
STORE = 80 << 20
GONE_S = 15.0
_MARK = "PYHVD_TEST_RAY"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Yield a cluster; its second node says that it has GPUs."""
    pytest.importorskip("ray", reason="make test-ray installs it")
    if not sys.platform.startswith("linux"):
        pytest.skip("agents need Linux")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ[_MARK] = str(uuid.uuid4())
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": CPUS, "object_store_memory": STORE, "include_dashboard": False},
    )
    made.add_node(num_cpus=CPUS, num_gpus=GPUS, object_store_memory=STORE)
    ray.init(made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(autouse=True)
def _nothing_remains(cluster: Any) -> Iterator[None]:
    yield
    wait_until(lambda: not left(), GONE_S)


def left() -> list[str]:
    """Return the command lines of agents, guardians and ranks that run."""
    mark = f"{_MARK}={os.environ[_MARK]}".encode()
    found = []
    for process in Path("/proc").iterdir():
        try:
            command = (process / "cmdline").read_bytes()
            if b"pyhvd.job" in command and mark in (process / "environ").read_bytes():
                found.append(command.replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found

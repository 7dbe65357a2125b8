"""A node of the cluster is removed. The last test here: the cluster stays without it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import pyhvd as hvd
from tests.ray import functions
from tests.ray.test_executor import SOON_S, make
from tests.waiting import wait_until


def test_a_removed_node_is_named(cluster: Any) -> None:
    import ray

    executor = make(num_hosts=2)
    executor.start()
    try:
        head = executor.run(functions.variable, ("HOROVOD_HOSTNAME",)).index(_name_of(cluster.head_node))
        pids = executor.run(os.getpid)
        references = executor.run_remote(time.sleep, (1000,))
        (node,) = [each for each in cluster.list_all_nodes() if each is not cluster.head_node]
        begun = time.monotonic()
        cluster.remove_node(node)
        with pytest.raises(hvd.RankFailedError, match=rf"rank {1 - head} of 2 on host .* is lost"):
            ray.get(references[head])
        print(f"named {time.monotonic() - begun:.2f} s after the removal began")
        assert time.monotonic() - begun < 2 * SOON_S
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), SOON_S)
        with pytest.raises(hvd.LaunchError, match="ranks have ended"):
            executor.run(functions.rank)
    finally:
        executor.shutdown()


def _name_of(node: Any) -> str:
    return f"{socket.gethostname()}_{node.node_id[:8]}"

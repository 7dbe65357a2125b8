"""Elastic ranks on Ray: ranks, agents and nodes are lost, nodes come, and training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import pyhvd as hvd
from pyhvd.ray import ElasticRayExecutor, RayError, RayExecutor, StartTimeoutError
from tests.elastic.work import SUM, train
from tests.ray import functions
from tests.ray.conftest import CPUS, STORE
from tests.ray.test_executor import START_S
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(240)
NAMED_S = 2.0


def make(**given: Any) -> RayExecutor:
    return RayExecutor(RayExecutor.create_settings(timeout_s=START_S), **given)


@contextmanager
def following(executor: RayExecutor, folder: Path) -> Iterator[Future[list[int]]]:
    """Yield a call that takes steps; end it with the context."""
    executor.start()
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(executor.run, functions.follow, (str(folder),))
        try:
            yield call
        finally:
            (folder / "end").touch()


def sizes(folder: Path) -> list[tuple[int, int]]:
    """Return generation and size of the steps, without repetitions."""
    steps = folder / "steps"
    lines = steps.read_text().splitlines() if steps.exists() else []
    return list(dict.fromkeys((int(generation), int(size)) for generation, size in map(str.split, lines)))


def test_a_killed_rank_is_started_again(cluster: Any) -> None:
    executor = make(min_workers=2, max_workers=2)
    with pytest.raises(RayError, match=r"call start\(\) first"):
        executor.run(train)
    executor.start(functions.Counter, (10,), {"step": 2}, extra_env_vars={"GIVEN": "value"})
    assert executor.run(train, ("rank",)) == [(0, 2, SUM, 1), (1, 2, SUM, 1)]
    logged: list[Any] = []
    counted = executor.execute(
        lambda counter: (counter.count(), functions.variable("GIVEN"), functions.log_values(2)),
        callbacks=[logged.append],
    )
    assert counted == [(12, "value", rank) for rank in range(2)]
    assert logged == [{"rank": 0, "number": number} for number in range(2)]
    executor.shutdown()


def test_a_lost_agent_costs_its_node(cluster: Any) -> None:
    executor = make(min_workers=2, max_workers=2)
    executor.start()
    assert executor.run(train, ("agent",)) == [(0, 2, SUM, 1), (1, 2, SUM, 1)]


def test_nodes_come_and_go(cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pyhvd")
    executor = make(min_workers=1, max_workers=3, cpus_per_worker=CPUS)
    with following(executor, tmp_path) as call:
        wait_until(lambda: sizes(tmp_path) or call.done(), START_S)
        node = cluster.add_node(num_cpus=CPUS, object_store_memory=STORE)
        try:
            wait_until(lambda: sizes(tmp_path)[-1][1] == 3 or call.done(), START_S)
        finally:
            begun = time.monotonic()
            cluster.remove_node(node, allow_graceful=False)
        wait_until(lambda: "is lost" in caplog.text or call.done(), START_S)
        named_s = time.monotonic() - begun
        wait_until(lambda: sizes(tmp_path)[-1][1] == 2 or call.done(), START_S)
    assert call.result() == [2, 2]
    assert sizes(tmp_path) == [(0, 2), (1, 3), (2, 2)]
    assert named_s < 4 * NAMED_S  # the rest is for a busy machine
    print(f"the removed node was named after {named_s:.2f} s")


def test_the_reset_limit(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    executor = make(min_workers=2, max_workers=2, reset_limit=0)
    executor.start()
    with pytest.raises(hvd.RankFailedError, match=r"rank 1 of 2 on host .* failed: ValueError: not again"):
        executor.run(train, ("always",))
    assert "the ranks were started again 0 times, as often as reset_limit allows" in caplog.text


def test_too_few_nodes(cluster: Any) -> None:
    # Ray's list of nodes may still have the one that an earlier test removed.
    executor = make(min_workers=10 * CPUS, elastic_timeout=0.5)
    text = rf"after 0\.5 s .* have room for [1-9]\d* of at least {10 * CPUS} ranks"
    with pytest.raises(StartTimeoutError, match=text):
        executor.start()


class OneNode:
    """A discovery of the user's: one rank on one node."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        return {self.name: 1}


def test_the_older_executor_and_a_discovery_of_the_users(cluster: Any) -> None:
    settings = ElasticRayExecutor.create_settings(timeout_s=START_S)
    settings.discovery = OneNode(cluster.head_node.node_ip_address)
    executor = ElasticRayExecutor(settings, env_vars={"GIVEN": "x"}, override_discovery=False)
    executor.start()
    assert executor.run(lambda: functions.variable("GIVEN")) == ["x"]

    def log_and_wait() -> None:
        functions.log_values(1)
        time.sleep(1000)

    def refuse(value: Any) -> None:
        raise KeyError(value["number"])

    with pytest.raises(KeyError, match="0"):
        executor.run(log_and_wait, callbacks=[refuse])

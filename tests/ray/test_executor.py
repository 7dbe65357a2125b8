"""``RayExecutor``: ranks that live from start() to shutdown(), on a cluster of two nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pyhvd as hvd
from pyhvd.errors import RemoteError
from pyhvd.ray import RayError, StartTimeoutError
from tests.ray import functions
from tests.ray.conftest import CPUS
from tests.waiting import wait_until

START_S = 90
SOON_S = 8.0
"""A loss is named within 2 s; the rest is for a busy machine."""


def make(**given: Any) -> Any:
    from pyhvd.ray import RayExecutor

    return RayExecutor(RayExecutor.create_settings(timeout_s=START_S), **given)


@pytest.fixture
def four(cluster: Any) -> Iterator[Any]:
    """Yield an executor with four ranks and an executable."""
    executor = make(num_workers=4)
    executor.start(functions.Counter, (10,), {"step": 2}, extra_env_vars={"GIVEN": "value"})
    yield executor
    executor.shutdown()


def test_calls_find_the_state_of_earlier_ones(four: Any) -> None:
    import ray

    assert four.num_workers == 4
    pids = four.run(os.getpid)
    assert [four.run(functions.add_up) for _ in range(2)] == [[(known, 10)] * 4 for known in (False, True)]
    assert four.execute(lambda executable: executable.count()) == [12] * 4
    assert four.execute_single(lambda executable: executable.count()) == 14
    assert four.execute(lambda executable: executable.value) == [14, 12, 12, 12]
    assert ray.get(four.run_remote(functions.rank)) == [0, 1, 2, 3]
    references = [four.run_remote(lambda k=k: (functions.rank(), k)) for k in range(5)]
    assert [ray.get(each) for each in reversed(references)] == [
        [(rank, k) for rank in range(4)] for k in reversed(range(5))
    ]
    assert four.run(lambda a, b: a + b, (1,), {"b": 2}) == [3] * 4
    assert four.run(os.getpid) == pids
    got: list[Any] = []
    assert four.run(functions.log_values, (3,), callbacks=[got.append]) == [0, 1, 2, 3]
    assert got == [{"rank": 0, "number": number} for number in range(3)]
    assert four.execute(lambda _: functions.log_values(1), callbacks=[got.append]) == [0, 1, 2, 3]
    assert len(got) == 4
    _check_environment(four)


def _check_environment(executor: Any) -> None:
    assert executor.run(functions.variable, ("GIVEN",)) == ["value"] * 4
    assert executor.run(functions.variable, ("OMP_NUM_THREADS",)) == ["1"] * 4
    for name in ("PYTHONBREAKPOINT", "CUDA_VISIBLE_DEVICES", "RAY_JOB_ID"):
        assert executor.run(functions.variable, (name,)) == [None] * 4
    (names,) = set(map(tuple, executor.run(lambda: sorted(n for n in os.environ if n.startswith("RAY_")))))
    assert set(names) <= {"RAY_ADDRESS", "RAY_AUTH_MODE"}


def test_a_failure_names_the_rank_and_ends_all(four: Any) -> None:
    import ray

    pids = four.run(os.getpid)
    begun = time.monotonic()
    references = four.run_remote(time.sleep, (1000,))
    waiting = four.run_remote(functions.rank)
    os.kill(pids[2], 9)
    with pytest.raises(hvd.RankFailedError, match=r"rank 2 of 4 .*SIGKILL"):
        ray.get(references)
    assert time.monotonic() - begun < SOON_S
    with pytest.raises(hvd.RankFailedError, match=r"rank 2 of 4 .*SIGKILL"):
        ray.get(waiting)
    with pytest.raises(RayError, match="ranks have ended, as an earlier call has failed: rank 2"):
        four.run(functions.rank)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), SOON_S)
    four.shutdown()
    four.start()
    with pytest.raises(hvd.RankFailedError, match=r"rank 1 of 4 .* failed: KeyError") as failed:
        four.run(functions.fail_on, (1,))
    assert isinstance(failed.value.__cause__, KeyError)
    assert isinstance(failed.value.__cause__.__cause__, RemoteError)
    assert "fail_on" in str(failed.value.__cause__.__cause__)


def test_a_traceback_comes_by_reference_too(four: Any) -> None:
    import ray

    with pytest.raises(hvd.RankFailedError, match=r"rank 3 of 4 .* failed: KeyError") as failed:
        ray.get(four.run_remote(functions.fail_on, (3,)))
    assert 'raise KeyError("lost")' in str(failed.value)


def test_an_executable_that_cannot_be_made(cluster: Any) -> None:
    executor = make(num_workers=2)
    with pytest.raises(hvd.RankFailedError, match=r"rank 1 of 2 .* failed: ValueError: no such file"):
        executor.start(functions.Broken)
    with pytest.raises(RayError, match=r"call start\(\) first"):
        executor.run(functions.rank)


def test_a_killed_actor_is_named(four: Any) -> None:
    import ray

    pids = four.run(os.getpid)
    references = four.run_remote(time.sleep, (1000,))
    begun = time.monotonic()
    ray.kill(next(iter(four._ranks.actors.values()))[0])
    with pytest.raises(hvd.RankFailedError, match=r"rank 0 of 4 on host .* is lost"):
        four.run(time.sleep, (1000,))
    assert time.monotonic() - begun < SOON_S
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(references)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), SOON_S)


def test_hosts_are_nodes_of_their_own(cluster: Any) -> None:
    executor = make(num_hosts=2, num_workers_per_host=2)
    executor.start()
    try:
        assert executor.run(functions.add_up) == [(False, 10)] * 4
        names = executor.run(functions.variable, ("HOROVOD_HOSTNAME",))
        assert names[0] == names[1] != names[2] == names[3]
    finally:
        executor.shutdown()


def test_ranks_see_the_gpus_of_their_host(cluster: Any) -> None:
    executor = make(num_workers=2, use_gpu=True)
    executor.start()
    try:
        assert executor.run(functions.variable, ("CUDA_VISIBLE_DEVICES",)) == ["0,1"] * 2
    finally:
        executor.shutdown()


def test_too_few_resources(cluster: Any) -> None:
    from pyhvd.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=1), num_workers=3 * CPUS)
    with pytest.raises(TimeoutError, match=r"Ray has not placed .*\{'CPU': 1\}.* within 1 s") as failed:
        executor.start()
    assert isinstance(failed.value, StartTimeoutError)


def test_the_current_placement_group_is_used(cluster: Any) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    def train(workers: int) -> Any:
        executor = make(num_workers=workers)
        executor.start()
        try:
            free = ray.available_resources()["CPU"]
            return executor.run(functions.add_up), free
        finally:
            executor.shutdown()

    group = placement_group([{"CPU": 1}, {"CPU": 2}], strategy="STRICT_PACK")
    try:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        inside = ray.remote(train).options(num_cpus=0, scheduling_strategy=strategy)
        assert ray.get(inside.remote(3)) == ([(False, 6)] * 3, 2 * CPUS - 3)
        with pytest.raises(ValueError, match="has room for 3 of 4 ranks"):
            ray.get(inside.remote(4))
    finally:
        remove_placement_group(group)

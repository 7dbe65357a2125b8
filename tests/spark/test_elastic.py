"""pyhvd.spark.run_elastic: ranks and tasks are lost, and training goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.work import SUM, train, train_until_moved
from tests.spark.cluster import LOOPBACK, WORKERS, Cluster
from tests.spark.session import SessionProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionProcess]:
    pytest.importorskip("pyspark", reason="make test-spark installs it")
    # In local mode, Spark retries a task only if the number after the cores says so.
    made = SessionProcess("local[3,4]", tmp_path_factory.mktemp("elastic") / "driver.log", 3)
    yield made
    made.close()


def test_a_killed_rank_is_started_again(session: SessionProcess, mark: dict[str, str]) -> None:
    answer = session.run(train, "rank", elastic=True, num_proc=2, env=mark)
    assert answer.results == [(0, 2, SUM, 1), (1, 2, SUM, 1)], answer


def test_a_lost_task_comes_back_as_another_host(session: SessionProcess, mark: dict[str, str]) -> None:
    answer = session.run(train, "agent", elastic=True, num_proc=3, min_num_proc=2, env=mark)
    assert [result[2] for result in answer.results] == [SUM] * len(answer.results), answer
    assert len(answer.results) in (2, 3), answer
    assert answer.results[0][3] >= 1, answer


def test_without_a_fault_nothing_is_started_again(session: SessionProcess, mark: dict[str, str]) -> None:
    answer = session.run(train, elastic=True, max_num_proc=3, env=mark)
    assert answer.results == [(rank, 3, SUM, 0) for rank in range(3)], answer


def test_a_store_holds_commits_during_the_job(
    session: SessionProcess, mark: dict[str, str], tmp_path: Path
) -> None:
    answer = session.run(train, "all", elastic=True, num_proc=2, env=mark, store=str(tmp_path / "store"))
    assert [result[2] for result in answer.results] == [SUM] * 2, answer
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_the_same_error_each_time_ends_the_job(session: SessionProcess, mark: dict[str, str]) -> None:
    answer = session.run(train, "always", elastic=True, num_proc=2, env=mark)
    assert (answer.error, answer.cause) == ("RankFailedError", "not again"), answer
    assert "rank 1 of 2" in answer.text, answer


def test_too_few_tasks(session: SessionProcess, mark: dict[str, str]) -> None:
    """The elastic timeout holds after a loss, and not at the start."""
    times = {"start_timeout": 4, "elastic_timeout": 1}
    answer = session.run(train, elastic=True, num_proc=4, env=mark, **times)
    assert answer.error == "StartTimeoutError", answer
    assert "less than 4 tasks have started within 4 s" in answer.text, answer


def test_too_few_tasks_after_a_loss(session: SessionProcess, mark: dict[str, str]) -> None:
    """The lost task comes back later than that."""
    answer = session.run(train, "late agent", elastic=True, num_proc=2, elastic_timeout=0.1, env=mark)
    assert answer.error == "SparkError", answer
    assert answer.text.startswith("too few hosts after 0.1 s (elastic_timeout): "), answer


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_proc": 2, "min_num_proc": 3}, "min_num_proc=3, num_proc=2, max_num_proc=2"),
        ({"num_proc": 2, "max_num_proc": 1}, "max_num_proc=1"),
        ({"num_proc": 2, "min_np": 3}, "min_num_proc=3, num_proc=2, max_num_proc=2"),
        ({"num_proc": 2, "reset_limit": -1}, "reset_limit=-1"),
        ({"num_proc": 2, "elastic_timeout": 0}, "elastic_timeout=0"),
    ],
)
def test_bad_arguments(session: SessionProcess, arguments: dict[str, int], text: str) -> None:
    answer = session.run(train, elastic=True, **arguments)
    assert answer.error == "ValueError", answer
    assert text in answer.text, answer


DECOMMISSIONS = {"spark.decommission.enabled": "true"}
OPTIONS = " ".join(f"-D{name}={value}" for name, value in DECOMMISSIONS.items())


@pytest.fixture
def leaving(tmp_path: Path) -> Iterator[tuple[Cluster, dict[str, Path], SessionProcess]]:
    """Yield a cluster whose workers can be decommissioned, their logs, and a session on it."""
    pytest.importorskip("pyspark", reason="make test-spark installs it")
    cluster = Cluster(tmp_path, LOOPBACK)
    try:
        logs = {
            name: cluster.start_worker(
                name, LOOPBACK, {"PYHVD_SPARK_HOST_SALT": name, "SPARK_WORKER_OPTS": OPTIONS}
            )
            for name in WORKERS
        }
        for log in logs.values():
            cluster.wait_for_worker(log)
        session = SessionProcess(cluster.url, tmp_path / "driver.log", 4, conf=DECOMMISSIONS)
        # An executor that is registered gets no task before it has started. So let each one run tasks first:
        # then two tasks are on two workers.
        started = session.run(os.getpid, num_proc=4)
        assert len(set(started.results)) == 4, started
        yield cluster, logs, session
        session.close()
    finally:
        cluster.close()


def test_a_decommissioned_executor_is_drained_and_its_task_moves(
    leaving: tuple[Cluster, dict[str, Path], SessionProcess], mark: dict[str, str], tmp_path: Path
) -> None:
    cluster, logs, session = leaving
    session.begin(train_until_moved, str(tmp_path), elastic=True, num_proc=2, min_num_proc=1, env=mark)
    steps = tmp_path / "steps"
    wait_until(lambda: steps.exists() and steps.read_text().count("\n") > 3)
    cluster.decommission(logs["a"])
    answer = session.end(90)
    assert [result[1] for result in answer.results] == ["b", "b"], answer
    lines = [line.split() for line in steps.read_text().splitlines()]
    assert [int(step) for _, step, _ in lines] == list(range(1, len(lines) + 1))  # none was taken twice
    sizes = [(generation, size) for generation, _, size in lines]
    assert list(dict.fromkeys(sizes)) == [("0", "2"), ("1", "1"), ("2", "2")]
    said = (tmp_path / "driver.log").read_text().splitlines()
    drained = [line for line in said if line.startswith("host task ") and "is drained" in line]
    assert [line.partition(" is drained: ")[2] for line in drained] == [
        "its executor is being decommissioned"
    ]
    name = drained[0].partition(" is drained")[0]
    assert any(line.startswith("generation 1: ") and f"{name} left" in line for line in said), said

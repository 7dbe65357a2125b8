"""pyhvd.spark.run_elastic: ranks and tasks are lost, and training goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.elastic.work import SUM, train
from tests.spark.session import SessionProcess

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


def test_the_same_error_each_time_ends_the_job(session: SessionProcess, mark: dict[str, str]) -> None:
    answer = session.run(train, "always", elastic=True, num_proc=2, env=mark)
    assert (answer.error, answer.cause) == ("RankFailedError", "not again"), answer
    assert "rank 1 of 2" in answer.text, answer


def test_too_few_tasks(session: SessionProcess, mark: dict[str, str]) -> None:
    answer = session.run(train, elastic=True, num_proc=4, start_timeout=4, env=mark)
    assert answer.error == "StartTimeoutError", answer
    assert "less than 4 tasks have started within 4 s" in answer.text, answer


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_proc": 2, "min_num_proc": 3}, "min_num_proc=3, num_proc=2, max_num_proc=2"),
        ({"num_proc": 2, "max_num_proc": 1}, "max_num_proc=1"),
        ({"num_proc": 2, "reset_limit": -1}, "reset_limit=-1"),
        ({"num_proc": 2, "elastic_timeout": 0}, "elastic_timeout=0"),
    ],
)
def test_bad_arguments(session: SessionProcess, arguments: dict[str, int], text: str) -> None:
    answer = session.run(train, elastic=True, **arguments)
    assert answer.error == "ValueError", answer
    assert text in answer.text, answer

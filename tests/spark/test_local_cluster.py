"""pyhvd.spark.run on Spark's own cluster in one process, and the devices that Spark gives to tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.cluster import spark_environment
from tests.spark.failing import devices, fail, one_error, place, rank_number
from tests.spark.session import SessionProcess

_GPUS = """#!/bin/sh
echo '{"name": "gpu", "addresses": ["5", "7"]}'
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionProcess]:
    """Yield a session with two workers of three cores; each worker reports two GPUs."""
    pytest.importorskip("pyspark", reason="make test-spark installs it")
    folder = tmp_path_factory.mktemp("local-cluster")
    script = folder / "gpus"
    script.write_text(_GPUS)
    script.chmod(0o755)
    conf = {
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "2",
        "spark.task.resource.gpu.amount": "1",
    }
    home = home_of_its_own(folder / "home")
    made = SessionProcess(
        "local-cluster[2,3,1024]", folder / "driver.log", 6, conf=conf, env={"SPARK_HOME": str(home)}
    )
    yield made
    made.close()


def home_of_its_own(folder: Path) -> Path:
    """Return a writable SPARK_HOME, because the workers of a local-cluster write their logs there."""
    folder.mkdir()
    for entry in Path(spark_environment()["SPARK_HOME"]).iterdir():
        (folder / entry.name).symlink_to(entry)
    return folder


def test_ranks_of_all_executors_are_one_world(session: SessionProcess, mark: dict[str, str]) -> None:
    answer = session.run(place, num_proc=4, env=mark)
    assert [rest for _, *rest in answer.results] == [[rank, 4, 0, 1, 6] for rank in range(4)], answer


def test_as_many_ranks_by_default_as_tasks_get_their_gpu(
    session: SessionProcess, mark: dict[str, str]
) -> None:
    assert session.run(rank_number, env=mark).results == [0, 1, 2, 3]


def test_as_many_ranks_by_default_as_tasks_get_their_cores(mark: dict[str, str], tmp_path: Path) -> None:
    conf = {"spark.task.cpus": "2", "spark.default.parallelism": "7"}
    session = SessionProcess("local[5]", tmp_path / "driver.log", 7, conf=conf)
    try:
        assert session.run(rank_number, env=mark).results == [0, 1]
    finally:
        session.close()


def test_one_error_and_the_session_goes_on(
    session: SessionProcess, mark: dict[str, str], tmp_path: Path
) -> None:
    answer = session.run(fail, "executor", str(tmp_path / "when"), num_proc=4, env=mark)
    assert answer.error == "RankFailedError", answer
    assert re.search(one_error("worker").replace("rank 2", r"rank \d"), answer.text), answer
    answer = session.run(rank_number, num_proc=4, env=mark, start_timeout=60)
    assert answer.results == [0, 1, 2, 3], answer


def test_each_rank_knows_the_gpus_of_its_task(session: SessionProcess, mark: dict[str, str]) -> None:
    answer = session.run(devices, num_proc=4, env=mark)
    assert sorted(answer.results) == [["5"], ["5"], ["7"], ["7"]], answer
    for name in ("PYHVD_SPARK_USE_LOCAL_RANK_GPU_INDEX", "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX"):
        answer = session.run(devices, num_proc=4, env=mark | {name: "1"})
        assert answer.results == [["0"], ["1"], ["2"], ["3"]], answer

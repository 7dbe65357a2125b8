"""A failing pyhvd.spark.run raises one error, leaves no process behind, and the session continues."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import pyhvd as hvd
import pyhvd.spark
from tests.spark.conftest import interrupted_when_running, marked, wait_for_ranks, wait_until_gone
from tests.spark.failing import ONE_ERROR, abort, fail, fork, one_error, only_rank_0, rank_number, wait
from tests.spark.session import SessionProcess


@pytest.mark.parametrize("how", list(ONE_ERROR))
def test_one_error_and_the_session_goes_on(
    spark: Any, mark: dict[str, str], tmp_path: Path, how: str
) -> None:
    when = tmp_path / "when"
    with pytest.raises(hvd.RankFailedError, match=one_error(how)) as caught:
        pyhvd.spark.run(fail, (how, str(when)), num_proc=4, env=mark)
    took = time.monotonic() - float(when.read_text())
    print(f"{how}: {took:.2f} s")
    if how == "raise":
        assert 'raise KeyError("no such column")' in str(caught.value.__cause__)
    assert took < ONE_ERROR[how][1]
    assert pyhvd.spark.run(rank_number, num_proc=4, env=mark, start_timeout=60) == [0, 1, 2, 3]


def test_mpi_abort(spark: Any, mark: dict[str, str]) -> None:
    with pytest.raises(hvd.RankFailedError, match=r"rank 1 of 2 .* called MPI_Abort with code 9"):
        pyhvd.spark.run(abort, num_proc=2, env=mark)


def test_a_rank_that_never_starts_pyhvd(spark: Any, mark: dict[str, str]) -> None:
    with pytest.raises(hvd.RankFailedError, match=r"every rank must call pyhvd\.init"):
        pyhvd.spark.run(only_rank_0, num_proc=2, env=mark)


def test_a_forked_child_is_not_taken_for_its_rank(spark: Any, mark: dict[str, str]) -> None:
    assert pyhvd.spark.run(fork, num_proc=2, env=mark) == [(1, 2.0)] * 2


def test_a_python_that_is_not_there(spark: Any, mark: dict[str, str]) -> None:
    with pytest.raises(hvd.RankFailedError, match=r"could not be started: .*nonesuch"):
        pyhvd.spark.run(rank_number, num_proc=2, env=mark, executable="/nonesuch/python")


def test_ctrl_c(spark: Any, mark: dict[str, str], tmp_path: Path) -> None:
    with interrupted_when_running(tmp_path):
        pyhvd.spark.run(wait, (str(tmp_path),), num_proc=2, env=mark)
    assert pyhvd.spark.run(rank_number, num_proc=2, env=mark) == [0, 1]


def test_no_rank_outlives_a_driver_that_is_killed(mark: dict[str, str], cluster: str, tmp_path: Path) -> None:
    session = SessionProcess("local[2]", tmp_path / "driver.log", slots=2)
    try:
        session.begin(wait, str(tmp_path), num_proc=2, env=mark)
        wait_for_ranks(tmp_path, 2)
        assert (
            sum("pyhvd.job.process.guardian" in line for line in marked().values()) == 4
        )  # two ranks, two guardians
        session.kill()
        wait_until_gone()
    finally:
        session.kill()

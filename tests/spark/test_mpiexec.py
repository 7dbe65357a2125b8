"""pyhvd.spark.run(launcher="mpiexec") behaves like launcher="pmi"; needs Open MPI."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import pyhvd as hvd
import pyhvd.spark
from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.rank_env import OPENMPI
from tests.spark.cluster import MARK
from tests.spark.conftest import interrupted_when_running
from tests.spark.failing import ONE_ERROR, fail, one_error, rank_number, wait
from tests.spark.test_run import allreduce

run = functools.partial(pyhvd.spark.run, launcher="mpiexec")
_PATIENCE_S = 15.0
_DAEMONS_S = 3.0  # mpiexec takes up to this long to end its daemons
LAUNCHED = pytest.mark.usefixtures("no_launcher_is_left")
_LAUNCHER = re.compile(
    r"mpiexec|prterun|prted|pyhvd\.job\.(mpi\.openmpi\.(launch_agent|rank_proxy)|process\.command_main)"
)


@pytest.fixture(scope="module")
def open_mpi() -> None:
    if find_library().family != OPENMPI:
        pytest.skip("launcher='mpiexec' needs Open MPI")


def test_another_mpi_is_refused(spark: Any) -> None:
    if find_library().family == OPENMPI:
        pytest.skip("mpi4py uses Open MPI")
    with pytest.raises(pyhvd.spark.UnsupportedLauncherError, match=r"needs Open MPI.*use launcher='pmi'"):
        run(rank_number, num_proc=2)


@pytest.fixture
def no_launcher_is_left(spark: Any, open_mpi: None) -> Iterator[None]:
    """Check after a test that no mpiexec, launch agent, daemon or rank proxy is left."""
    yield
    until = time.monotonic() + _PATIENCE_S
    while (left := _launchers()) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []


def _launchers() -> list[str]:
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            if process.name.isdigit() and "=".join(MARK).encode() in (process / "environ").read_bytes():
                command = (process / "cmdline").read_text().replace("\0", " ")
                if _LAUNCHER.search(command):
                    found.append(command)
    return found


@LAUNCHED
@pytest.mark.parametrize("size", [2, 3, 4])
def test_results_come_in_rank_order(spark: Any, mark: dict[str, str], size: int) -> None:
    results = run(allreduce, (2.0,), {"offset": 1.0}, num_proc=size, env=mark)
    total = size * (size - 1) + size
    assert [(rank, each) for rank, *_, each in results] == [(rank, total) for rank in range(size)]


@LAUNCHED
def test_arguments_reach_mpiexec(spark: Any, mark: dict[str, str]) -> None:
    with pytest.raises(pyhvd.spark.SparkError, match="nonesuch"):
        run(rank_number, num_proc=2, env=mark, extra_mpi_args="--nonesuch-option")
    assert run(rank_number, num_proc=2, env=mark) == [0, 1]


@LAUNCHED
@pytest.mark.parametrize("how", [how for how in ONE_ERROR if how != "guardian"])
def test_one_error_and_the_session_goes_on(
    spark: Any, mark: dict[str, str], tmp_path: Path, how: str
) -> None:
    when = tmp_path / "when"
    with pytest.raises(hvd.RankFailedError, match=one_error(how)) as caught:
        run(fail, (how, str(when)), num_proc=4, env=mark)
    took = time.monotonic() - float(when.read_text())
    print(f"{how}: {took:.2f} s")
    if how == "raise":
        assert 'raise KeyError("no such column")' in str(caught.value.__cause__)
    assert took < ONE_ERROR[how][1] + _DAEMONS_S
    assert run(rank_number, num_proc=4, env=mark, start_timeout=60) == [0, 1, 2, 3]


@LAUNCHED
def test_ctrl_c(spark: Any, mark: dict[str, str], tmp_path: Path) -> None:
    with interrupted_when_running(tmp_path):
        run(wait, (str(tmp_path),), num_proc=2, env=mark)
    assert run(rank_number, num_proc=2, env=mark) == [0, 1]


def _own_rows() -> list[float]:
    hvd.init()
    rows: list[float] = pyhvd.spark.partition().read()["x"].tolist()
    return rows


@LAUNCHED
def test_ranks_have_their_parts_of_a_dataframe(spark: Any, mark: dict[str, str]) -> None:
    df = spark.createDataFrame([(float(number),) for number in range(20)], ["x"])
    parts = run(_own_rows, num_proc=4, env=mark, df=df)
    assert len(parts) == 4
    assert sorted(number for part in parts for number in part) == [float(number) for number in range(20)]


@LAUNCHED
def test_without_barrier(spark: Any, mark: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyhvd.spark.api._use_barrier", lambda conf: False)
    assert run(rank_number, num_proc=4, env=mark) == [0, 1, 2, 3]


@LAUNCHED
def test_the_driver_needs_an_mpiexec(
    spark: Any, mark: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pyhvd.job.mpi.flavour._candidates", lambda: iter([os.fspath(tmp_path)]))
    with pytest.raises(
        pyhvd.spark.SparkError, match="launcher='mpiexec' needs an mpiexec on the driver: no mpiexec"
    ):
        run(rank_number, num_proc=2, env=mark)

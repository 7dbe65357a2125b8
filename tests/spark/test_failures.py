"""pyhvd.spark.run where something fails: one error, nothing left behind, and the session goes on."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pyhvd as hvd
import pyhvd.spark
from tests.spark.conftest import marked

# From the failure to the error, with what a busy machine adds to the second that it should take.
_SOON_S = 4.0
_SILENT_S = 9.0
_BAD = 2


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def python_worker() -> int:
    """The Python worker whose task this rank belongs to: its keeper's parent."""
    return parent_of(os.getppid())


def executor() -> int:
    """The JVM of this rank's executor: the Python worker's parent is the daemon that Spark has started."""
    pid = python_worker()
    while "java" not in os.path.basename(os.readlink(f"/proc/{pid}/exe")):
        pid = parent_of(pid)
    return pid


def fail(how: str, when: str) -> None:
    """Fail on one rank while the others wait for it."""
    import numpy as np

    hvd.init()
    hvd.allreduce(np.ones(1))
    if hvd.rank() == _BAD:
        subprocess.Popen(["sleep", "1000"])
        Path(when).write_text(str(time.time()))
        FAILURES[how]()
    hvd.allreduce(np.ones(1))


def _raise() -> None:
    raise KeyError("no such column")


def _signal(pid: int, number: signal.Signals) -> None:
    os.kill(pid, number)
    time.sleep(1000)


FAILURES: dict[str, Callable[[], object]] = {
    "raise": _raise,
    "exit": lambda: sys.exit(3),
    "leave": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "keeper": lambda: _signal(os.getppid(), signal.SIGKILL),
    "worker": lambda: _signal(python_worker(), signal.SIGKILL),
    "executor": lambda: _signal(executor(), signal.SIGKILL),
    "freeze": lambda: _signal(python_worker(), signal.SIGSTOP),
}


def rank_number() -> int:
    hvd.init()
    return hvd.rank()


@pytest.mark.parametrize(
    ("how", "text", "within"),
    [
        ("raise", r"failed: KeyError: 'no such column'", _SOON_S),
        ("exit", r"called sys.exit\(3\) and returned nothing", _SOON_S),
        ("leave", r"ended with exit code 0 before the function returned", _SOON_S),
        ("kill", r"was killed by SIGKILL", _SOON_S),
        ("keeper", r"and its keeper were killed", _SOON_S),
        ("worker", r"is lost: its Spark task is gone", _SOON_S),
        ("executor", r"is lost: its Spark task is gone", _SOON_S),
        ("freeze", r"has been silent for 5 s: its host is frozen", _SILENT_S),
    ],
)
def test_one_error_and_the_session_goes_on(
    spark: Any, mark: dict[str, str], tmp_path: Path, how: str, text: str, within: float
) -> None:
    when = tmp_path / "when"
    who = "[23]" if how == "executor" else _BAD  # both ranks of the executor are lost at the same time
    with pytest.raises(
        hvd.RankFailedError, match=rf"rank {who} of 4 on host \S+ \(Spark task \d\) {text}"
    ) as caught:
        pyhvd.spark.run(fail, (how, str(when)), num_proc=4, env=mark)
    took = time.time() - float(when.read_text())
    print(f"{how}: {took:.2f} s")
    if how == "raise":
        assert 'raise KeyError("no such column")' in str(caught.value.__cause__)
    assert took < within
    assert pyhvd.spark.run(rank_number, num_proc=4, env=mark, start_timeout=60) == [0, 1, 2, 3]


def abort() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 1:
        MPI.COMM_WORLD.Abort(9)
    MPI.COMM_WORLD.Barrier()


def test_mpi_abort(spark: Any, mark: dict[str, str]) -> None:
    with pytest.raises(hvd.RankFailedError, match=r"rank 1 of 2 .* called MPI_Abort with code 9"):
        pyhvd.spark.run(abort, num_proc=2, env=mark)


def only_rank_0() -> int:
    if int(os.environ["PMI_RANK"]) == 0:
        hvd.init()
    return 0


def test_a_rank_that_never_starts_pyhvd(spark: Any, mark: dict[str, str]) -> None:
    with pytest.raises(hvd.RankFailedError, match=r"every rank must call pyhvd\.init"):
        pyhvd.spark.run(only_rank_0, num_proc=2, env=mark)


def test_a_python_that_is_not_there(spark: Any, mark: dict[str, str]) -> None:
    with pytest.raises(hvd.RankFailedError, match=r"could not be started: .*nonesuch"):
        pyhvd.spark.run(rank_number, num_proc=2, env=mark, executable="/nonesuch/python")


def signal_when_running(mark: dict[str, str], done: threading.Event) -> None:
    while not done.wait(0.1):
        if len(marked()) >= 4:  # two ranks, two keepers
            _thread.interrupt_main()
            return


def sleep() -> None:
    hvd.init()
    time.sleep(1000)


def test_ctrl_c(spark: Any, mark: dict[str, str]) -> None:
    done = threading.Event()
    thread = threading.Thread(target=signal_when_running, args=(mark, done))
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            pyhvd.spark.run(sleep, num_proc=2, env=mark)
    finally:
        done.set()
        thread.join()
    assert pyhvd.spark.run(rank_number, num_proc=2, env=mark) == [0, 1]


_DRIVER = """
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[2]").config("spark.driver.memory", "512m")
builder.config("spark.driver.host", "127.0.0.1").config("spark.ui.enabled", "false").getOrCreate()
import pyhvd.spark
from tests.spark.test_failures import sleep
pyhvd.spark.run(sleep, num_proc=2)
"""


def test_no_rank_outlives_a_driver_that_is_killed(mark: dict[str, str], cluster: str) -> None:
    env = os.environ | mark | {"PYSPARK_PYTHON": sys.executable}
    driver = subprocess.Popen([sys.executable, "-c", _DRIVER], env=env, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while sum("rank_process" in line for line in marked().values()) < 4 and time.monotonic() < until:
            time.sleep(0.1)
        assert sum("rank_process" in line for line in marked().values()) == 4
    finally:
        driver.kill()
        driver.wait()
    # That nothing is left is what the fixture checks.

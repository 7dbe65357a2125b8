"""One cluster and one session for all tests here; after each test, none of its ranks may be left."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.spark.cluster import JAVA_OPTIONS, MARK, ROOT, standalone_cluster
from tests.spark.session import SETTINGS

_MARK = f"PYHVD_TEST_MARK=rank-of-{uuid.uuid4()}"
GONE_S = 15.0
"""A frozen Python worker is killed by Spark within 2 s, its rank with it; the rest is for a busy machine."""
_START_S = 60.0


@pytest.fixture(scope="session", autouse=True)
def _java_options() -> Iterator[None]:
    """Give the options of the cluster's JVMs to those that programs of tests start too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", JAVA_OPTIONS)
        yield


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of the master."""
    pytest.importorskip("pyspark", reason="make test-spark installs it")
    with standalone_cluster(tmp_path_factory.mktemp("spark")) as url:
        yield url


@pytest.fixture(scope="session")
def spark(cluster: str) -> Iterator[Any]:
    """Yield a session on the whole cluster."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ[MARK[0]] = MARK[1]
    address = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    builder = SparkSession.builder.master(cluster).appName("pyhvd tests")
    for name, value in (SETTINGS | address).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    _wait_for_slots(session)
    yield session
    session.stop()


def _wait_for_slots(session: Any, slots: int = 4) -> None:
    """Wait until both executors have registered."""
    until = time.monotonic() + 60
    while session.sparkContext.defaultParallelism < slots and time.monotonic() < until:
        time.sleep(0.2)


@pytest.fixture
def mark() -> Iterator[dict[str, str]]:
    """Yield variables by which a test's ranks and their children are found; check that none is left."""
    name, value = _MARK.split("=")
    yield {name: value}
    wait_until_gone()


def wait_until_gone(timeout: float = GONE_S) -> None:
    """Wait until no rank, and no process that a rank started, is left on any host; fail at the time limit."""
    until = time.monotonic() + timeout
    while (left := marked()) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == {}


def wait_for_ranks(folder: Path, size: int) -> None:
    """Wait until a number of ranks are in :func:`tests.spark.failing.wait`."""
    until = time.monotonic() + _START_S
    while len(there := list(folder.glob("rank-?"))) < size:
        assert time.monotonic() < until, there
        time.sleep(0.05)


def marked() -> dict[int, str]:
    """Return ids and command lines of the ranks' processes."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if _MARK.encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:  # the process has just ended, or is another user's
            continue
    return found


@contextmanager
def interrupted_when_running(folder: Path) -> Iterator[None]:
    """Interrupt this process's main thread once both ranks are in :func:`tests.spark.failing.wait`."""
    done = threading.Event()

    def interrupt() -> None:
        while not done.wait(0.1):
            if len(list(folder.glob("rank-?"))) == 2:
                _thread.interrupt_main()
                return

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        done.set()
        thread.join()

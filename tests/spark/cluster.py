"""A standalone Spark cluster for this test run, started from the pip package."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pyhvd.job.mpi.flavour import find_library
from pyhvd.job.mpi.rank_env import OPENMPI
from pyhvd.spark import use_java

ROOT = Path(__file__).resolve().parents[2]
_START_S = 60.0
# Each JVM of the tests lives for minutes: its optimizing compiler takes more CPU time than it saves.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
CORES = 2
WORKERS = ("a", "b")
# All processes of the cluster and of the driver have it in their environment.
MARK = ("PYHVD_TEST_CLUSTER", str(uuid.uuid4()))


@dataclass(frozen=True)
class Place:
    """The host on which a daemon runs.

    Attributes
    ----------
    address : str
        Address on which the daemon listens.
    command : callable
        Returns a command line that runs another one on that host.
    """

    address: str
    command: Callable[[Sequence[str]], list[str]] = list


LOOPBACK = Place("127.0.0.1")


class Cluster:
    """A master and its workers.

    Parameters
    ----------
    folder : Path
        For logs and Spark's files.
    head : Place
        The master's host.
    """

    def __init__(self, folder: Path, head: Place) -> None:
        self._folder = folder
        # If two workers make it at once, mkdirs() of Java fails for one, which then starts no executor.
        (folder / "local").mkdir(exist_ok=True)
        self._stack = ExitStack()
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        log = folder / "master.log"
        try:
            self._start("master.Master", head, (), log, {})
            self.url = _wait_for(log, r"Starting Spark master at (\S+)")
        except BaseException:
            self.close()
            raise

    def start_worker(
        self, name: str, place: Place, env: Mapping[str, str], cores: int = CORES, memory: str = "1g"
    ) -> Path:
        """Start a worker; return its log, which :meth:`wait_for_worker` reads."""
        log = self._folder / f"worker-{len(self._workers) + 1}-{name}.log"
        size = ("--cores", str(cores), "--memory", memory, "--work-dir", str(self._folder / name))
        self._workers[log.name] = self._start("worker.Worker", place, (*size, self.url), log, env)
        return log

    def wait_for_worker(self, log: Path) -> None:
        """Wait until the master has registered the worker."""
        _wait_for(log, r"(Successfully registered with master)")

    def decommission(self, log: Path) -> None:
        """Tell a worker, by its log, that its host will be taken away."""
        self._workers[log.name].send_signal(signal.SIGPWR)

    def close(self) -> None:
        """End the master and all workers."""
        self._stack.close()

    def _start(
        self, name: str, place: Place, arguments: Sequence[str], log: Path, env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        listening = ("--host", place.address, "--port", "0", "--webui-port", "0")
        own = {
            "SPARK_LOCAL_IP": place.address,
            "SPARK_LOCAL_DIRS": str(self._folder / "local"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
        }
        command = [str(_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]
        return self._stack.enter_context(
            _daemon(
                place.command([*command, *listening, *arguments]),
                {**spark_environment(), **own, **env},
                log,
            )
        )


@contextmanager
def standalone_cluster(
    folder: Path, cores: int = CORES, memory: str = "1g", hosts: bool = True
) -> Iterator[str]:
    """Yield the URL of a master with two workers on loopback; they count as two hosts, or as one."""
    cluster = Cluster(folder, LOOPBACK)
    try:
        logs = [
            cluster.start_worker(
                name,
                Place(LOOPBACK.address, _named(name)),
                {"PYHVD_SPARK_HOST_SALT": name if hosts else ""},
                cores,
                memory,
            )
            for name in WORKERS
        ]
        for log in logs:
            cluster.wait_for_worker(log)
        yield cluster.url
    finally:
        cluster.close()


def spark_environment() -> dict[str, str]:
    """Return the environment in which Spark's processes find Java, this Python, and the tested tree."""
    return os.environ | {
        MARK[0]: MARK[1],
        "SPARK_HOME": str(_home()),
        "JAVA_HOME": use_java(),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }


def _home() -> Path:
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@contextmanager
def _daemon(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    # However the tests are killed, the kernel ends the processes that they started (util-linux).
    with_us = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*with_us, *command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        # In a separate session, so that executors end with their worker.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue
            break
        process.poll()


def _named(name: str) -> Callable[[Sequence[str]], list[str]]:
    """Return a function that gives a worker's command its own host name, for Open MPI; needs root."""
    if find_library().family != OPENMPI:
        return list
    rename = ("unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', f"worker-{name}")
    return lambda command: [*rename, *command]


def _wait_for(log: Path, pattern: str) -> str:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if found := re.search(pattern, log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.1)
    raise TimeoutError(f"{log.name} never said {pattern!r}:\n{log.read_text(errors='replace')[-3000:]}")

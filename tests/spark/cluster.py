"""A standalone Spark cluster of this test run's own, started from the pip package."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pyhvd.spark import use_java

ROOT = Path(__file__).resolve().parents[2]
_START_S = 60.0
CORES = 2
WORKERS = ("a", "b")


@contextmanager
def standalone_cluster(
    folder: Path, salts: Sequence[str] = WORKERS, cores: int = CORES, memory: str = "1g"
) -> Iterator[str]:
    """Yield the URL of a master with a worker per salt; those of different salts count as different hosts."""
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    home = Path(spec.origin).parent
    env = os.environ | {
        "SPARK_HOME": str(home),
        "JAVA_HOME": use_java(),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
    }
    with ExitStack() as stack:
        place = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        log = folder / "master.log"
        stack.enter_context(_daemon(home, "master.Master", place, env, log))
        url = _wait_for(log, r"Starting Spark master at (\S+)")
        logs = [folder / f"worker-{number}.log" for number in range(len(salts))]
        for salt, log in zip(salts, logs, strict=True):
            size = ("--cores", str(cores), "--memory", memory, "--work-dir", str(log.with_suffix("")))
            own = env | {"PYHVD_SPARK_HOST_SALT": salt}
            stack.enter_context(_daemon(home, "worker.Worker", (*place, *size, url), own, log))
        for log in logs:
            _wait_for(log, r"(Successfully registered with master)")
        yield url


@contextmanager
def _daemon(
    home: Path, name: str, arguments: tuple[str, ...], env: Mapping[str, str], log: Path
) -> Iterator[None]:
    command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield
    finally:
        # A session of its own: executors end with their worker.
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


def _wait_for(log: Path, pattern: str) -> str:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if found := re.search(pattern, log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.1)
    raise TimeoutError(f"{log.name} never said {pattern!r}:\n{log.read_text(errors='replace')[-3000:]}")

"""A Spark session in a process of its own, on a host of its own where that is wanted: told what to run, it answers.

``python -m tests.spark.session DESCRIPTOR`` is that process. A process has one session at most, and what has
network namespaces of its own must begin in them: so the tests only speak to it.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.spark.cluster import LOOPBACK, Place, spark_environment

_START_S = 90.0
SETTINGS = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@dataclass
class Answer:
    """What came of a run.

    Attributes
    ----------
    results : list
        What the ranks returned.
    error : str
        Name of the type of what was raised; "" if nothing was.
    text : str
        Its text.
    cause : str
        Text of its ``__cause__``.
    missing : list of int
        Of a StartTimeoutError.
    output : str
        What the ranks wrote to stdout, as the driver shows it.
    when : float
        time.monotonic() of the return; one clock for all namespaces.
    """

    results: list[Any] = field(default_factory=list)
    error: str = ""
    text: str = ""
    cause: str = ""
    missing: list[int] = field(default_factory=list)
    output: str = ""
    when: float = 0.0


class SessionProcess:
    """The process, as its tests see it.

    Parameters
    ----------
    master : str
        Spark's.
    log : Path
        What the process says goes there.
    slots : int
        How many there must be before the session counts as started.
    place : Place
        Where it runs.
    conf : mapping of str to str
        Settings of Spark.
    """

    def __init__(
        self, master: str, log: Path, slots: int, place: Place = LOOPBACK, conf: Mapping[str, str] | None = None
    ) -> None:
        self._connection, theirs = Pipe()
        self._log = log
        address = {"spark.driver.host": place.address, "spark.driver.bindAddress": place.address}
        with log.open("wb") as file, theirs:
            self._process = subprocess.Popen(
                place.command([sys.executable, "-m", __name__, str(theirs.fileno())]),
                env=spark_environment() | {"SPARK_LOCAL_IP": place.address},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection.send((master, slots, SETTINGS | address | dict(conf or {})))
        self._hear(_START_S)

    def begin(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Have it call pyhvd.spark.run."""
        self._connection.send((function, args, options))

    def end(self, timeout: float) -> Answer:
        """Return what came of it; fail if nothing has by then."""
        answer = self._hear(timeout)
        assert isinstance(answer, Answer)
        return answer

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 90.0, **options: Any) -> Answer:
        """Have it call pyhvd.spark.run, and wait."""
        self.begin(function, *args, **options)
        return self.end(timeout)

    def interrupt(self) -> None:
        """Do what Ctrl-C on its terminal does: all of the foreground gets the signal."""
        os.killpg(self._process.pid, signal.SIGINT)

    def kill(self) -> None:
        """End it as the kernel does when memory is short: nothing of it cleans up."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End it well, if it still can be."""
        self._connection.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            raise AssertionError("the Spark session did not end within 20 s") from None

    def _hear(self, timeout: float) -> Any:
        try:
            if self._connection.poll(timeout):
                return self._connection.recv()
            reason = f"said nothing for {timeout:g} s"
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(1)  # for the stacks
        except EOFError:
            reason = f"ended with {self._process.wait(10)}"
        said = self._log.read_text(errors="replace")[-6000:]
        raise AssertionError(f"the process of the Spark session {reason}; its log:\n{said}")


def _answer(function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Answer:
    import pyhvd.spark

    answer, out = Answer(), io.StringIO()
    try:
        answer.results = pyhvd.spark.run(function, args, stdout=out, **options)
    except BaseException as exc:
        answer.error, answer.text = type(exc).__name__, str(exc)
        answer.cause = str(exc.__cause__)
        answer.missing = getattr(exc, "missing", [])
    answer.when = time.monotonic()
    answer.output = out.getvalue()
    return answer


def main(descriptor: int) -> None:
    """Make the session that is asked for, then run what is asked for, until nobody asks any more."""
    import faulthandler

    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    from pyspark.sql import SparkSession

    connection: Connection[Any, Any] = Connection(descriptor)
    master, slots, conf = connection.recv()
    builder = SparkSession.builder.master(master).appName("pyhvd tests")
    for name, value in conf.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    until = time.monotonic() + _START_S
    while session.sparkContext.defaultParallelism < slots and time.monotonic() < until:
        time.sleep(0.1)
    connection.send(session.sparkContext.defaultParallelism)
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            break
        connection.send(_answer(*asked))
    session.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]))

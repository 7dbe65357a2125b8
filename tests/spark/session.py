"""A Spark session in a process of its own (tests.spark.session_process), as its tests see it.

A process has one session at most, and what is to be on a host of a bed must begin there: so tests only tell
it what to run, and hear what came of that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tests.spark.cluster import LOOPBACK, Place, spark_environment

START_S = 90.0
"""Seconds until a session has its slots."""
SETTINGS = {
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    # How often Spark looks for the slots of a job in barrier mode, say until a lost executor is back.
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
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
    env : mapping of str to str
        Variables beside those that it has in any case.
    """

    def __init__(
        self,
        master: str,
        log: Path,
        slots: int,
        place: Place = LOOPBACK,
        conf: Mapping[str, str] = {},
        env: Mapping[str, str] = {},
    ) -> None:
        self._connection, theirs = Pipe()
        self._log = log
        address = {"spark.driver.host": place.address, "spark.driver.bindAddress": place.address}
        with log.open("wb") as file, theirs:
            self._process = subprocess.Popen(
                place.command([sys.executable, "-m", "tests.spark.session_process", str(theirs.fileno())]),
                env=spark_environment() | {"SPARK_LOCAL_IP": place.address, **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        try:
            self._connection.send((master, slots, SETTINGS | address | dict(conf)))
            self._hear(START_S)
        except BaseException:
            self.kill()
            raise

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

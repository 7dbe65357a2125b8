"""A Spark session in a separate process (tests.spark.session_process), controlled by tests.

A process has one session at most, and a session on a host of a test bed must start there. Tests therefore
only send it functions to run, and receive the results.
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

from tests.spark.cluster import JAVA_OPTIONS, LOOPBACK, Place, spark_environment

START_S = 90.0
"""Seconds until a session has its slots."""
SETTINGS = {
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    # How often Spark looks for the slots of a barrier job, for example until a lost executor is back.
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@dataclass
class Answer:
    """The result of a run.

    Attributes
    ----------
    results : list
        The ranks' results.
    error : str
        Name of the exception's type; "" without an exception.
    text : str
        Text of the exception.
    cause : str
        Text of its ``__cause__``.
    missing : list of int
        Of a StartTimeoutError.
    output : str
        The ranks' stdout, as the driver shows it.
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
    """The process with the session.

    Parameters
    ----------
    master : str
        URL of Spark's master.
    log : Path
        File for the process's output.
    slots : int
        Number of Spark slots that must exist before the session counts as started.
    place : Place
        Host of the process.
    conf : mapping of str to str
        Settings of Spark.
    env : mapping of str to str
        Additional environment variables.
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
        """Start pyhvd.spark.run in the process."""
        self._connection.send((function, args, options))

    def end(self, timeout: float) -> Answer:
        """Return the result of the run; fail at the time limit."""
        answer = self._hear(timeout)
        assert isinstance(answer, Answer)
        return answer

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 90.0, **options: Any) -> Answer:
        """Call pyhvd.spark.run, or run_elastic if `elastic`, in the process, and wait for the result."""
        self.begin(function, *args, **options)
        return self.end(timeout)

    def interrupt(self) -> None:
        """Send SIGINT to the foreground process group, as Ctrl-C on a terminal does."""
        os.killpg(self._process.pid, signal.SIGINT)

    def kill(self) -> None:
        """End the process by SIGKILL, so that nothing cleans up."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """End the process cleanly, if it still runs."""
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

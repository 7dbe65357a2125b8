"""How jobs on Ray end that nobody ends in order: the driver dies, or gets Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ray.test_executor import SOON_S, START_S
from tests.waiting import wait_until

PROGRAM = """
import os, pathlib, sys, time
import ray
from pyhvd.ray import RayExecutor

def wait(folder):
    (pathlib.Path(folder) / os.environ["HOROVOD_RANK"]).write_text(str(os.getpid()))
    time.sleep(1000)

ray.init(sys.argv[1], log_to_driver=False)
executor = RayExecutor(RayExecutor.create_settings(timeout_s=90), num_workers=2)
executor.start()
try:
    executor.run(wait, (sys.argv[2],))
except KeyboardInterrupt:
    executor.shutdown()
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_driver_is_ended(cluster: Any, tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-c", PROGRAM, cluster.address, str(tmp_path)]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        files = [tmp_path / "0", tmp_path / "1"]
        wait_until(lambda: all(each.exists() and each.read_text() for each in files), START_S)
        pids = [each.read_text() for each in files]
        job.send_signal(number)
        shown, _ = job.communicate(timeout=START_S)
        assert shown == ("interrupted\n" if number == signal.SIGINT else "")
    finally:
        job.kill()
        job.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), SOON_S)

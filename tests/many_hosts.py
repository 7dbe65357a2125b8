"""Start ``pyhvdrun`` on several hosts, for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pyhvd.job.mpi.rank_env import OPENMPI

PATIENCE_S = 60.0
LOCAL = "env PYHVD_HOST_SALT={host} sh -c {command}"
NAMED = (
    """env PYHVD_HOST_SALT={host} unshare --uts sh -c 'hostname "$0" && exec sh -c "$1"' {host} {command}"""
)


def local_agent(family: str) -> str:
    """Return the command of agents on this host for ranks of an MPI; skip the test if there is none.

    Open MPI identifies hosts by their names.
    """
    if family != OPENMPI:
        return LOCAL
    probe = ["unshare", "--uts", "hostname", "h1"]
    if shutil.which(probe[0]) is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("Open MPI needs hosts of different names, which unshare --uts cannot make here")
    return NAMED


_WAIT = """
import os, sys, time
import numpy as np, pyhvd as hvd

hvd.init()
hvd.allreduce(np.ones(4), name="first")
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
if hvd.rank() in {ranks}:
    {act}
while True:
    time.sleep(0.05)
"""


@dataclass
class Ended:
    """How a job ended."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line on the screen."""
        return self.err.splitlines()[-1]


class Launcher:
    """Starts jobs in a folder.

    Parameters
    ----------
    folder : Path
        The folder.
    agent : str or None
        The command in place of ssh.
    env : mapping of str to str
        Variables of the launcher.
    place : callable
        Returns the command line that runs a command on the launcher's host.
    """

    def __init__(
        self,
        folder: Path,
        agent: str | None = LOCAL,
        env: Mapping[str, str] = {},
        place: Callable[[Sequence[str]], list[str]] = list,
    ) -> None:
        self.folder = folder
        self._agent = agent
        self._env = env
        self._place = place

    def script(self, text: str) -> str:
        """Write a script; return its name."""
        (self.folder / "script.py").write_text(textwrap.dedent(text))
        return "script.py"

    def start(
        self,
        *arguments: str,
        hosts: str = "h1:2,h2:2",
        agent: str | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> subprocess.Popen[str]:
        """Start a job; `agent` is the command in place of the launcher's."""
        flags = ["-H", hosts]
        if command := agent or self._agent:
            flags += ["--launch-agent", command]
        return subprocess.Popen(
            self._place([sys.executable, "-m", "pyhvd.run", *flags, *arguments]),
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self._env},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )

    def run(self, *arguments: str, **how: Any) -> Ended:
        """Run a job to its end; see :meth:`start`."""
        return end_of(self.start(*arguments, **how))


def end_of(job: subprocess.Popen[str]) -> Ended:
    """Wait for the end of a job, and kill it if that does not come."""
    try:
        out, err = job.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        job.kill()
        raise
    return Ended(job.returncode, out, err)


def start_waiting(
    launcher: Launcher,
    hosts: str,
    act: str = "pass",
    ranks: Sequence[int] = (2,),
    agent: str | None = None,
) -> subprocess.Popen[str]:
    """Start a job of 4 ranks, and return when all are up; `ranks` do `act` when the file `go` exists."""
    script = launcher.script(_WAIT.replace("{act}", act).replace("{ranks}", repr(tuple(ranks))))
    job = launcher.start(script, hosts=hosts, agent=agent)
    assert job.stdout is not None
    for _ in range(4):
        line = job.stdout.readline()
        assert line.endswith("up\n"), (line, end_of(job))
    return job

"""``python -m tests.elastic.demo``: train the digits while ranks are killed, and a host comes and goes.

The hosts are this one, under several names. Each few epochs a rank is killed; a host is added, and later
taken away. Then the same training runs without faults.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.many_hosts import LOCAL

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "elastic_digits.py"
_WAIT_S = 1.0
_LOOK_S = 0.1
_PATIENCE_S = 180.0
_ACCURACY = re.compile(r"held-out accuracy ([\d.]+)%")
_SEED = 3


def main() -> int:
    """Run the example with faults and without; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="pyhvd-demo-") as name:
        folder = Path(name)
        hosts = folder / "hosts"
        script = folder / "discover"
        script.write_text(f"#!/bin/sh\ncat {hosts}\n")
        script.chmod(0o700)
        hosts.write_text("east:2\n")
        print("==> with faults: ranks are killed, and host west comes and goes", flush=True)
        faulty = _run(["--min-np", "2", "--max-np", "4", "--host-discovery-script", str(script)], hosts)
        print("==> without faults", flush=True)
        plain = _run(["-n", "2"], None)
    if faulty is None or plain is None:
        return 1
    print(f"==> held-out accuracy {faulty:.1f}% with faults, {plain:.1f}% without", flush=True)
    return int(abs(faulty - plain) > 2.0)


def _run(flags: list[str], hosts: Path | None) -> float | None:
    """Run the example; return its accuracy in per cent, or None if it failed."""
    agent = [] if hosts is None else ["--launch-agent", LOCAL]
    command = [sys.executable, "-m", "pyhvd.run", *flags, *agent, str(EXAMPLE), "--pause", "0.02"]
    job = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    guard = threading.Timer(_PATIENCE_S, job.kill)
    guard.start()
    faults = iter(()) if hosts is None else _faults(job.pid, hosts)
    accuracy = None
    assert job.stdout is not None
    for line in job.stdout:
        print(line, end="", flush=True)
        if found := _ACCURACY.search(line):
            accuracy = float(found[1])
        else:
            next(faults, None)
    guard.cancel()
    return accuracy if job.wait() == 0 else None


def _faults(launcher: int, hosts: Path) -> Iterator[None]:
    """After each line of the ranks kill one of them, but add a host first, and take it away at the end."""
    draw = random.Random(_SEED)
    hosts.write_text("east:2\nwest:2\n")
    yield
    for _ in range(5):
        time.sleep(_WAIT_S)
        while not (ranks := ranks_of(launcher)):  # between two generations
            time.sleep(_LOOK_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(draw.choice(ranks), signal.SIGKILL)
        yield
    hosts.write_text("east:2\n")


def ranks_of(launcher: int) -> list[int]:
    """Return the ranks among what a launcher has started: each leads a group in its guardian's session."""
    children: dict[int, list[int]] = {}
    ranks = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, rest = int(path.parent.name), path.read_text().rpartition(")")[2].split()
            parent, group, session = map(int, rest[1:4])
            children.setdefault(parent, []).append(pid)
            if group == pid != session:
                ranks.add(pid)
    found, left = [], [launcher]
    while left:
        pid = left.pop()
        left += children.get(pid, [])
        found += [pid] if pid in ranks else []
    return found


if __name__ == "__main__":
    sys.exit(main())

"""``make demo-hosts``: pyhvdrun trains the digits on two simulated hosts with two ranks each, over ssh."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.bed import bed, why_not
from tests.hosts import sshd
from tests.hosts.sshd import Sshd
from tests.mpi.launch import ROOT, mpi_version


def main() -> int:
    """Run the example; return its exit code."""
    if reason := why_not() or sshd.why_not():
        raise SystemExit(f"no simulated hosts with ssh on this machine: {reason}")
    print(
        f"==> training examples/digits.py on hosts east and west, 2 ranks each, {mpi_version()}", flush=True
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pyhvd-demo-")))
        made = stack.enter_context(bed(("east", "west"), folder))
        path = Sshd(made, folder, stack).path
        job = [sys.executable, "-m", "pyhvd.run", "-H", "east:2,west:2", "examples/digits.py"]
        settings = [f"PATH={path}", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"]
        command = made.head.command(["env", f"--chdir={ROOT}", *settings, *job])
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

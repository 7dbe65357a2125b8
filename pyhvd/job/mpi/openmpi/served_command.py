"""A command that starts programs of pyhvd: mpiexec on the driver's host, its daemon on each host."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from pyhvd.job.messages import FromProgram
from pyhvd.job.mpi.openmpi.local_server import LocalServer
from pyhvd.job.mpi.openmpi.settings import short_temporary_directory
from pyhvd.job.process.private_folder import PrivateFolder
from pyhvd.job.process.supervised import GuardianCommand, SupervisedProcess
from pyhvd.transport.tcp.connection import Connection

# How long the guardian may take beyond the grace of its command.
_KILL_S = 2.0


class ServedCommand(SupervisedProcess):
    """A shell command, with a private folder as its TMPDIR, and a server for the programs that it starts.

    Open MPI's daemons refuse to start beside files that a killed job left, so each has a folder of its own.

    Parameters
    ----------
    command : str
        For the shell.
    env : mapping of str to str
        Its environment, to which the server's variables are added.
    on_message : callable
        See :class:`LocalServer`.
    on_output, on_end : callable
        See :class:`SupervisedProcess`.
    grace : float
        Seconds from SIGTERM to SIGKILL when the command is ended; 0 sends SIGKILL at once.

    Attributes
    ----------
    server : LocalServer
        The server.

    Raises
    ------
    OSError
        The folder cannot be made, or the command cannot be started.
    """

    def __init__(
        self,
        command: str,
        env: Mapping[str, str],
        on_message: Callable[[Connection, FromProgram], None],
        on_output: Callable[[bytes], None],
        on_end: Callable[[], None],
        grace: float = 0.0,
    ) -> None:
        self._folder = PrivateFolder(short_temporary_directory())
        path = self._folder.path
        with ExitStack() as undo:
            undo.callback(self._folder.close)
            self.server = LocalServer(path, on_message)
            undo.callback(self.server.close)
            guardian = GuardianCommand(
                "pyhvd.job.process.command_main",
                [str(grace), path, command],
                {**env, **self.server.variables, "TMPDIR": path},
                flags=("-P",),  # the guardian must not import what the working directory has
            )
            super().__init__(guardian, lambda _, data: on_output(data), on_end, kill_s=grace + _KILL_S)
            undo.pop_all()

    def register(self, selector: selectors.BaseSelector) -> None:
        """See :meth:`SupervisedProcess.register`."""
        super().register(selector)
        self.server.register(selector)

    def close(self) -> None:
        """End the command and all that it started, close the server, and remove the folder."""
        super().close()
        self.server.close()
        self._folder.close()

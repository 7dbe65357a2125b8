"""A server for the programs that mpiexec and its daemons start: launch agents and rank proxies.

The driver serves launch agents, and an agent serves the rank proxies of its host. The server listens on a
Unix socket in a private folder. A program finds the socket's path and key in its environment. The server
decodes nothing that a program sends before the program has proved that it holds the key.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, MutableMapping

from pyhvd.job.messages import FromDriver, FromProgram, decode_from_program, encode
from pyhvd.transport.tcp.connection import HANDSHAKE_S, Connection, Secret
from pyhvd.transport.tcp.session import ChannelError, Role, Session

_PATH = "_PYHVD_JOB_SOCKET"
_KEY = "_PYHVD_JOB_KEY"
VARIABLES = frozenset({_PATH, _KEY})
"""The names of the variables by which a program finds its server."""


class LocalServer:
    """Serves programs of this host.

    Parameters
    ----------
    folder : str
        A private folder, where the socket is made.
    on_message : callable
        Called with the connection of a program, and each message that arrives there.

    Raises
    ------
    OSError
        The socket cannot be made.
    """

    def __init__(self, folder: str, on_message: Callable[[Connection, FromProgram], None]) -> None:
        self._secret = Secret()
        self._path = os.path.join(folder, "socket")
        self._on_message = on_message
        self._programs: list[Connection] = []
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(self._path)
            self._listener.listen(socket.SOMAXCONN)
            self._listener.setblocking(False)
        except OSError:
            self._listener.close()
            raise

    @property
    def variables(self) -> dict[str, str]:
        """The variables by which :func:`call_server` finds this server."""
        return {_PATH: self._path, _KEY: self._secret.reveal().hex()}

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register the sockets; the data of each key is the function to call when its socket is readable."""
        self._selector = selector
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def tell_all(self, message: FromDriver) -> None:
        """Do :func:`tell` for each connected program."""
        for program in self._programs:
            tell(program, message)

    def close(self) -> None:
        """Close all sockets."""
        self._listener.close()
        for program in self._programs:
            program.close()

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        program = Connection(peer, Session(self._secret.reveal(), Role.SERVER))
        self._programs.append(program)
        self._selector.register(program, selectors.EVENT_READ, lambda: self._hear(program))

    def _hear(self, program: Connection) -> None:
        try:
            for record in program.pump_in():
                self._on_message(program, decode_from_program(record))
        except ChannelError:
            program.open = False
        if not program.open:
            self._selector.unregister(program)
            self._programs.remove(program)
            program.close()


def tell(program: Connection, message: FromDriver) -> None:
    """Send a message to a program; do nothing if the program has ended, or has not proved the key."""
    if program.open and program.authenticated:
        program.send(encode(message))


def call_server(environ: MutableMapping[str, str] = os.environ) -> Connection:
    """Connect to the server, and remove its variables from the environment.

    Raises
    ------
    ChannelError
        The server cannot be reached, or the variables are missing or wrong.
    """
    try:
        path = environ.pop(_PATH)
        key = bytes.fromhex(environ.pop(_KEY))
    except (KeyError, ValueError):
        raise ChannelError("a job of pyhvd starts this program; do not start it by hand") from None
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(path)
        server = Connection(peer, Session(key, Role.CLIENT))
        server.shake_hands(HANDSHAKE_S)
    except OSError as exc:
        peer.close()
        raise ChannelError(f"the job of pyhvd is over ({path}: {exc})") from None
    except BaseException:
        peer.close()
        raise
    return server

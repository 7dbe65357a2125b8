"""An agent's part in a probe of the network: it listens, and connects to other agents. Carries nothing else.

A connection proves only that one host reaches another: the listener sends a token, the caller reads it, and
both close. The token tells the wanted listener from any other program at that address. It is no secret.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress

from pyhvd.job.messages import TOKEN, Dial, Dialed, Listen, Listening, Target
from pyhvd.transport.tcp.connection import listen

Tell = Callable[[Listening | Dialed], None]


class Prober:
    """The sockets of one probe; they are served by the owner of the selector.

    Parameters
    ----------
    wanted : Listen
        Where to listen.
    selector : selectors.BaseSelector
        Calls a ready key's ``data`` without arguments.
    tell : callable
        Sends a message to the driver.
    """

    def __init__(self, wanted: Listen, selector: selectors.BaseSelector, tell: Tell) -> None:
        self._probe = wanted.probe
        self._token = wanted.token
        self._selector = selector
        self._tell = tell
        self._ports = range(wanted.ports[0], wanted.ports[1] + 1)
        self._sockets: set[socket.socket] = set()
        tell(Listening(wanted.probe, [self._listen(address) for address in wanted.addresses]))

    def dial(self, wanted: Dial) -> None:
        """Connect to the targets; tell each outcome as soon as it is known."""
        if wanted.probe != self._probe:
            return
        for number, target in enumerate(wanted.targets):
            self._dial(number, target)

    def close(self) -> None:
        """Close all sockets."""
        for each in list(self._sockets):
            self._forget(each)

    def _listen(self, address: str) -> int:
        """Listen on a free port of an address; return it, or 0."""
        try:
            listener = listen(address, socket.SOMAXCONN, self._ports)
        except (OSError, ValueError):
            return 0
        self._follow(listener, lambda: self._answer(listener))
        return int(listener.getsockname()[1])

    def _answer(self, listener: socket.socket) -> None:
        with suppress(OSError):
            peer, _ = listener.accept()
            with peer:
                peer.setblocking(False)
                peer.send(self._token)

    def _dial(self, number: int, target: Target) -> None:
        family = socket.AF_INET6 if ":" in target.address else socket.AF_INET
        caller = socket.socket(family, socket.SOCK_STREAM)
        caller.setblocking(False)
        read = bytearray()

        def receive() -> None:
            if caller not in self._sockets:
                return  # an earlier event of this turn has ended the probe
            try:
                data = caller.recv(TOKEN - len(read))
            except BlockingIOError:
                return
            except OSError as exc:
                self._end(number, caller, os.strerror(exc.errno or 0))
                return
            read.extend(data)
            if len(read) == TOKEN or not data:
                other = "another program has answered"
                self._end(number, caller, "" if read == target.token else other)

        self._follow(caller, receive)
        try:
            caller.connect((target.address, target.port))
        except BlockingIOError:
            pass
        except OSError as exc:
            self._end(number, caller, os.strerror(exc.errno or 0))

    def _end(self, number: int, caller: socket.socket, error: str) -> None:
        self._forget(caller)
        self._tell(Dialed(self._probe, number, error))

    def _follow(self, each: socket.socket, callback: Callable[[], None]) -> None:
        self._sockets.add(each)
        self._selector.register(each, selectors.EVENT_READ, callback)

    def _forget(self, each: socket.socket) -> None:
        self._sockets.discard(each)
        self._selector.unregister(each)
        each.close()

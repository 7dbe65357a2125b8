"""The socket by which ``python -m pyhvd elastic drain`` asks the launcher of an elastic job to drain a host.

It is in the user's folder (:mod:`pyhvd.common.user_folder`), so that no other user can connect. A request is
one packet: the name of a host. The answer is one packet: a line of text, which begins with ``error:`` if the
host is not drained.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from pyhvd.common.user_folder import find_folders, make_folder

_LONGEST = 4096
_ANSWER_S = 10.0
_YOUNG_S = 10.0
_ERROR = "error: "


class DrainError(Exception):
    """A host is not drained; the text says why."""


class DrainSocket:
    """The launcher's end, which never blocks.

    Raises
    ------
    OSError
        There is no private folder, or its path is too long.
    """

    def __init__(self) -> None:
        self._path = make_folder() / f"elastic-{os.getpid()}.socket"
        self._path.unlink(missing_ok=True)  # of an earlier process of this number
        _remove_left(self._path.parent)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(os.fspath(self._path))
        self._listener.listen()
        self._peers: list[socket.socket] = []

    def serve(self, drain: Callable[[str], str]) -> None:
        """Take the requests that have come.

        Parameters
        ----------
        drain : callable
            Drains a host by its name. Returns a text; raises :class:`DrainError`.
        """
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self._listener.accept()
                peer.setblocking(False)
                self._peers.append(peer)
        for peer in list(self._peers):
            try:
                host = peer.recv(_LONGEST)
                if host:
                    peer.send(_answer(drain, host.decode(errors="replace")).encode()[:_LONGEST])
            except BlockingIOError:
                continue
            except OSError:
                pass  # the command has ended
            self._peers.remove(peer)
            peer.close()

    def close(self) -> None:
        """End the socket, and remove it."""
        self._path.unlink(missing_ok=True)
        for each in (self._listener, *self._peers):
            each.close()


def _answer(drain: Callable[[str], str], host: str) -> str:
    try:
        return drain(host)
    except DrainError as exc:
        return f"{_ERROR}{exc}"


def find_jobs() -> dict[int, Path]:
    """Return the sockets of this user's elastic jobs, by the process of their launchers."""
    found = [path for folder in find_folders() for path in folder.glob("elastic-*.socket")]
    jobs = {int(path.stem.removeprefix("elastic-")): path for path in found}
    return {pid: path for pid, path in sorted(jobs.items()) if _is_served(path)}


def _remove_left(folder: Path) -> None:
    """Remove the sockets of launchers that were killed; a young one may not listen yet."""
    for path in folder.glob("elastic-*.socket"):
        with contextlib.suppress(OSError):
            if time.time() > path.lstat().st_mtime + _YOUNG_S and not _is_served(path):
                path.unlink()


def _is_served(path: Path) -> bool:
    try:
        _connect(path).close()
    except OSError:
        return False
    return True


def _connect(path: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        peer.settimeout(_ANSWER_S)
        peer.connect(os.fspath(path))
    except OSError:
        peer.close()
        raise
    return peer


def ask_to_drain(path: Path, host: str) -> str:
    """Ask the launcher to drain a host; return what it says.

    Raises
    ------
    DrainError
        It does not drain the host, or does not answer.
    """
    try:
        with _connect(path) as peer:
            peer.send(host.encode())
            answer = peer.recv(_LONGEST).decode(errors="replace")
    except OSError as exc:
        raise DrainError(f"the launcher of the job does not answer: {exc}") from exc
    if not answer or answer.startswith(_ERROR):
        raise DrainError(answer.removeprefix(_ERROR) or "the job has ended")
    return answer

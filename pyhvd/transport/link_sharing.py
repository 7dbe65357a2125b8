"""Shares descriptors among the ranks of one host: each rank's eventfds, and the leader's sockets.

Owns the Unix sockets on which descriptors pass; the lowest local rank is the leader. Each other rank

    follower -> leader   local rank, with its eventfds
    leader -> follower   count, with that many descriptors; again until all are sent
    follower -> leader   one byte for each such message

1. The leader listens in a folder that only its user may enter, and serves only processes of its user.
2. A message has at most ``_MOST`` descriptors (the kernel accepts 253). The next one is sent after the byte
   for the one before, so few descriptors are in flight: their number is limited for each user.
3. Every wait has a time limit.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Sequence

_NUMBER = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: process, user, group
_FD = array.array("i").itemsize
_MOST = 250


def listen(backlog: int, stack: contextlib.ExitStack) -> tuple[socket.socket, str]:
    """Return a Unix socket that listens in a new folder, and its path; the stack closes and removes both."""
    try:
        # A short path: a socket's has 107 bytes. Of a rank that is killed, segments.sweep() removes it later.
        folder = tempfile.mkdtemp(prefix="pyhvd-links-", dir="/dev/shm")
    except OSError:
        folder = tempfile.mkdtemp(prefix="pyhvd-")
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    path = os.path.join(folder, "links")
    listener.bind(path)
    listener.listen(backlog)
    return listener, path


def lead(
    listener: socket.socket, own: Sequence[int], size: int, sockets: Sequence[int], until: float
) -> list[int]:
    """Gather the eventfds of all local ranks, and give these and the sockets to each; return the eventfds.

    The returned descriptors, in the order of local ranks, are the caller's; ``own`` are the first.

    Raises
    ------
    OSError
        A local rank is missing at ``until``, or broke the protocol.
    """
    bells = {0: list(own)}
    peers = []
    with contextlib.ExitStack() as failed, contextlib.ExitStack() as stack:
        while len(bells) < size:
            _limit(listener, until)
            peer, _ = listener.accept()
            stack.callback(peer.close)
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                continue
            number, fds = _receive(peer, until)
            for fd in fds:
                failed.callback(os.close, fd)
            if len(fds) != len(own) or number in bells or number >= size:
                raise OSError(f"local rank {number} of {size} sent {len(fds)} descriptors, not {len(own)}")
            bells[number] = fds
            peers.append(peer)
        ordered = [bell for number in range(size) for bell in bells[number]]
        for peer in peers:
            _give(peer, [*ordered, *sockets], until)
        failed.pop_all()
    return ordered


def follow(path: str, local_rank: int, own: Sequence[int], count: int, until: float) -> list[int]:
    """Give the leader this rank's eventfds; return the ``count`` descriptors that the leader gives.

    Raises
    ------
    OSError
        The leader does not answer until then, or broke the protocol.
    """
    with contextlib.ExitStack() as failed, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as leader:
        _limit(leader, until)
        leader.connect(path)
        _send(leader, local_rank, own, until)
        taken: list[int] = []
        while len(taken) < count:
            number, fds = _receive(leader, until)
            for fd in fds:
                failed.callback(os.close, fd)
            taken += fds
            if number != len(fds) or not fds or len(taken) > count:
                raise OSError(f"local rank 0 sent {len(taken)} descriptors; expected are {count}")
            leader.sendall(b"+")
        failed.pop_all()
    return taken


def _give(peer: socket.socket, fds: Sequence[int], until: float) -> None:
    for first in range(0, len(fds), _MOST):
        part = fds[first : first + _MOST]
        _send(peer, len(part), part, until)
        if not peer.recv(1):
            raise OSError("a local rank closed its connection")


def _send(peer: socket.socket, number: int, fds: Sequence[int], until: float) -> None:
    _limit(peer, until)
    socket.send_fds(peer, [_NUMBER.pack(number)], fds)


def _receive(peer: socket.socket, until: float) -> tuple[int, list[int]]:
    _limit(peer, until)
    # Not socket.recv_fds: Python 3.11's ignores the flags, so a process started meanwhile would inherit.
    room = socket.CMSG_LEN(_MOST * _FD)
    data, ancillary, flags, _ = peer.recvmsg(_NUMBER.size, room, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += array.array("i", content)
    cut = bool(flags & socket.MSG_CTRUNC)
    if cut or len(data) != _NUMBER.size:
        for fd in fds:
            os.close(fd)
        cause = os.strerror(errno.EMFILE) if cut else "a local rank closed its connection"
        raise OSError(cause)
    return _NUMBER.unpack(data)[0], fds


def _limit(peer: socket.socket, until: float) -> None:
    """Let the socket's next wait end at ``until``; TimeoutError then is an OSError."""
    peer.settimeout(max(until - time.monotonic(), 1e-3))

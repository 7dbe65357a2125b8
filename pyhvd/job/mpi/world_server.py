"""The world server: a process that lets ranks without an MPI launcher form one MPI world.

:mod:`pyhvd.job.mpi.store_world` starts it as a child of rank 0. It must not be a thread of rank 0: MPI_Init
may keep the GIL until all ranks are in. This module imports little, so that the process is up within 0.2 s.

    rank -> server   the handshake of :mod:`pyhvd.transport.tcp.session`: both ends prove the world's key
    rank -> server   hello: rank, number of ranks, process id, host hash
    server -> rank   place: local rank, local size; or a refusal       when all ranks are here
    then both        lines of PMI-1, without a session; and UP, when MPI_Init has returned

1. Nothing is parsed before the peer has proved the key. Hellos have a fixed size, lines of PMI-1 a limit.
2. Peers without a proof are dropped after 10 s, and the oldest first if they are many. None blocks the loop.
3. Nothing follows a place until the rank has received it. So no byte of PMI-1 is read by the session.
4. Listening ends when all ranks are here.
5. The process ends when the last connection closes, when rank 0 is lost before all ranks are here, or at the
   deadline. It tells the deadline to the ranks that are here, with the numbers of those that are missing.
6. If a rank ends before all ranks are up, waits in vain for one that has ended, or calls MPI_Abort, all
   connections close. MPI then ends the ranks that wait for the server.
7. MPICH's ranks of one host wait for each other in shared memory, too, where they learn of no end. So the
   server kills the ranks on its own host 5 s later, if torchrun has not ended them by then: those that are
   not up, or all after MPI_Abort.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyhvd.common.text import describe_ranks
from pyhvd.job.mpi.pmi import MAX_LINE, Abort, PmiError, PmiServer
from pyhvd.transport.tcp.connection import HANDSHAKE_S, NO_DESCRIPTORS, Connection
from pyhvd.transport.tcp.session import ChannelError, Role, Session

UP = b"cmd=pyhvd_up\n"
"""What a rank sends when MPI_Init has returned; the server does not answer."""

_HELLO = struct.Struct("!III16s")
_PLACE = struct.Struct("!II")
_STRANGERS = 64
_TICK_S = 1.0
# After an attempt to accept for which there were no descriptors.
_REST_S = 0.05
# How long a rank may take to read its place or its refusal.
_DRAIN_S = 2.0
_MOST_PID = (1 << 31) - 1
# How long torchrun may take to end the ranks of a world that cannot form.
_MERCY_S = 5.0
_CHUNK = 4096
# The first probe of an idle connection, the time between two, in seconds, and how many may be lost.
_PROBES = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))


class WorldError(Exception):
    """The ranks cannot form a world; the text is for the user."""


def hello(rank: int, size: int, pid: int, host: str) -> bytes:
    """Return the hello of a rank; ``host`` is its host hash."""
    return _HELLO.pack(rank, size, pid, host.encode())


def read_place(record: bytes) -> tuple[int, int]:
    """Return the local rank and the local size that the server has sent; raise WorldError for a refusal."""
    if len(record) != _PLACE.size + 1 or record[:1] != b"+":
        raise WorldError(record[1:].decode(errors="replace"))
    local_rank, local_size = _PLACE.unpack(record[1:])
    return local_rank, local_size


@dataclass(eq=False)
class _Guest:
    """A connection before PMI-1; the rank is -1 until its hello."""

    connection: Connection
    rank: int = -1
    pid: int = 0
    host: bytes = b""


class Gathering:
    """The world server until all ranks are here.

    Parameters
    ----------
    size : int
        The number of ranks.
    key : bytes
        The world's key.
    own : socket.socket
        The connection to rank 0, which rank 0 made; owned.
    listeners : sequence of socket.socket
        Where the other ranks connect; they do not block; owned.
    until : float
        The deadline, a time of time.monotonic().
    """

    def __init__(
        self, size: int, key: bytes, own: socket.socket, listeners: Sequence[socket.socket], until: float
    ) -> None:
        self._size, self._key, self._listeners, self._until = size, key, listeners, until
        self._began = time.monotonic()
        self._seats: dict[int, _Guest] = {}
        self._strangers: dict[_Guest, None] = {}  # without a hello, in the order of their arrival
        self._selector = selectors.DefaultSelector()
        self._first = self._admit(own)
        for listener in listeners:
            self._selector.register(listener, selectors.EVENT_READ, listener)

    def run(self) -> PmiLoop:
        """Wait until all ranks are here; return what serves them from now on.

        Raises
        ------
        WorldError
            Rank 0 is lost, the deadline has passed, or PMI-1 cannot describe the places of the ranks. The
            ranks that are here know it.
        """
        try:
            while len(self._seats) < self._size:
                self._turn()
            return self._close_doors()
        except WorldError as exc:
            refusal = b"-" + str(exc).encode()
            for guest in self._seats.values():
                guest.connection.send(refusal)
                guest.connection.drain(_DRAIN_S)
            raise
        finally:
            for listener in self._listeners:
                listener.close()
            for guest in self._strangers:
                guest.connection.close()
            self._selector.close()

    def _turn(self) -> None:
        now = time.monotonic()
        if now >= self._until:
            missing = [rank for rank in range(self._size) if rank not in self._seats]
            raise WorldError(
                f"{describe_ranks(missing)} of {self._size} did not come within"
                f" {self._until - self._began:.0f} s: each rank must call hvd.init() or init_process_group()"
            )
        for key, _ in self._selector.select(min(_TICK_S, self._until - now)):
            if isinstance(key.data, _Guest):
                self._hear(key.data)
            else:
                self._accept(key.data)
        for guest in list(self._strangers):
            if guest is not self._first and time.monotonic() > guest.connection.began + HANDSHAKE_S:
                self._drop(guest)

    def _admit(self, sock: socket.socket) -> _Guest:
        guest = _Guest(Connection(sock, Session(self._key, Role.SERVER)))
        self._strangers[guest] = None
        self._selector.register(guest.connection, selectors.EVENT_READ, guest)
        return guest

    def _accept(self, listener: socket.socket) -> None:
        most = self._size + _STRANGERS
        try:
            self._admit(listener.accept()[0])
        except OSError as exc:
            if exc.errno not in NO_DESCRIPTORS:
                return
            most = 0
            time.sleep(_REST_S)
        others = (guest for guest in self._strangers if guest is not self._first)
        if len(self._strangers) > most and (oldest := next(others, None)) is not None:
            self._drop(oldest)

    def _hear(self, guest: _Guest) -> None:
        if guest.connection.fileno() < 0:  # an earlier event of this turn dropped it
            return
        try:
            for record in guest.connection.pump_in():
                self._take_hello(guest, record)
        except ChannelError:
            pass
        if not guest.connection.open:
            self._drop(guest)

    def _take_hello(self, guest: _Guest, record: bytes) -> None:
        """Give a rank its seat. A rank that comes again has given its first connection up."""
        if len(record) != _HELLO.size or guest.rank >= 0:
            raise self._refuse(guest, "the server expects one hello")
        rank, size, pid, host = _HELLO.unpack(record)
        known = size == self._size and rank < size and 1 < pid <= _MOST_PID
        if not known or (rank == 0) is not (guest is self._first):
            raise self._refuse(guest, f"rank {rank} of {size} has no place in a world of {self._size} ranks")
        if rank in self._seats:
            self._drop(self._seats[rank])
        del self._strangers[guest]
        guest.rank, guest.pid, guest.host = rank, pid, host
        self._seats[rank] = guest

    def _refuse(self, guest: _Guest, why: str) -> ChannelError:
        guest.connection.send(b"-" + why.encode())
        guest.connection.open = False
        return ChannelError(why)

    def _drop(self, guest: _Guest) -> None:
        if guest is self._first:
            raise WorldError("rank 0 has ended before all ranks were here")
        self._selector.unregister(guest.connection)
        guest.connection.close()
        self._strangers.pop(guest, None)
        if self._seats.get(guest.rank) is guest:
            del self._seats[guest.rank]

    def _close_doors(self) -> PmiLoop:
        """Let nobody in any more, send the ranks their places, and return what :meth:`run` does."""
        for listener in self._listeners:
            listener.close()
        guests = [self._seats[rank] for rank in range(self._size)]
        numbers = {host: number for number, host in enumerate(dict.fromkeys(guest.host for guest in guests))}
        hosts = [numbers[guest.host] for guest in guests]
        try:
            server = PmiServer(hosts)
        except PmiError as exc:
            raise WorldError(str(exc)) from exc
        sizes, placed = Counter(hosts), Counter[int]()
        for host, guest in zip(hosts, guests, strict=True):
            guest.connection.send(b"+" + _PLACE.pack(placed[host], sizes[host]))
            guest.connection.drain(_DRAIN_S)
            placed[host] += 1
        pids = {guest.rank: guest.pid for host, guest in zip(hosts, guests, strict=True) if host == hosts[0]}
        return PmiLoop(server, [guest.connection.detach() for guest in guests], pids)


class PmiLoop:
    """The world server after all ranks are here: it answers their lines of PMI-1.

    Parameters
    ----------
    server : PmiServer
        The values and the barrier.
    sockets : sequence of socket.socket
        Each rank's connection, which does not block; owned.
    pids : mapping of int to int
        The processes of the ranks on this host, by rank.

    Attributes
    ----------
    world : str
        The name of the world.
    clean : bool
        Whether each rank that has ended had called MPI_Finalize.
    """

    def __init__(self, server: PmiServer, sockets: Sequence[socket.socket], pids: Mapping[int, int]) -> None:
        self._server, self._pids = server, pids
        self._sockets = dict(enumerate(sockets))
        self._begun = [b""] * len(sockets)
        self._ending = set(self._sockets)  # the ranks that are not up: if one fails, these must end
        self._finalized: set[int] = set()
        self._selector = selectors.DefaultSelector()
        for rank, sock in self._sockets.items():
            keep_alive(sock)
            self._selector.register(sock, selectors.EVENT_READ, rank)
        self.world = server.name
        self.clean = True

    def run(self) -> None:
        """Answer until all connections are closed.

        Raises
        ------
        WorldError
            A rank ended before all were up, waits in vain for one that has ended, or sent what is no PMI-1.
            All connections are closed.
        """
        try:
            while self._sockets:
                for key, _ in self._selector.select():
                    if key.data in self._sockets:
                        self._read(key.data)
        except Abort:  # MPI has said so on stderr
            self.clean = False
            self._ending = set(self._sockets)
        except PmiError as exc:
            self.clean = False
            raise WorldError(str(exc)) from exc
        finally:
            self._end_waiting()
            self._selector.close()

    def _end_waiting(self) -> None:
        """Close all connections, and kill those ranks here that must end, if they do not by themselves."""
        waiting = {}
        for rank, sock in self._sockets.items():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
            if rank in self._ending and rank in self._pids:
                waiting[sock] = self._pids[rank]
            else:
                self._selector.unregister(sock)
                sock.close()
        until = time.monotonic() + _MERCY_S
        while waiting and (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if _receive(ready) == b"":
                    self._selector.unregister(ready)
                    ready.close()
                    del waiting[ready]
        for sock, pid in waiting.items():  # the connection is open, so the number is still that of the rank
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            sock.close()

    def _read(self, rank: int) -> None:
        data = _receive(self._sockets[rank])
        if data is None:
            return
        if not data:
            self._leave(rank)
            return
        *lines, self._begun[rank] = (self._begun[rank] + data).split(b"\n")
        if max(map(len, [*lines, self._begun[rank]])) > 2 * MAX_LINE:
            raise PmiError(f"rank {rank} wrote to the descriptor of its PMI server")
        for line in lines:
            if line == UP[:-1]:
                self._ending.discard(rank)
                continue
            answers = self._server.handle(rank, line.decode(errors="replace"))
            if line.startswith(b"cmd=finalize"):
                self._finalized.add(rank)
            for each, answer in answers:
                self._send(each, answer.encode())

    def _send(self, rank: int, answer: bytes) -> None:
        """Send an answer. A rank waits for each, so a full socket means that it reads none."""
        try:
            whole = rank not in self._sockets or self._sockets[rank].send(answer) == len(answer)
        except OSError:
            whole = True  # its connection is lost: the next read shows it
        if not whole:
            raise PmiError(f"rank {rank} does not read the answers of its PMI server")

    def _leave(self, rank: int) -> None:
        sock = self._sockets.pop(rank)
        self._selector.unregister(sock)
        sock.close()
        self.clean = self.clean and rank in self._finalized
        self._server.leave(rank)
        if self._ending and rank not in self._finalized:
            raise PmiError(
                f"rank {rank} has ended before all ranks had left MPI_Init: its own output says why"
            )


def _receive(sock: socket.socket) -> bytes | None:
    """Return what has arrived on a connection; empty at its end, None if it was not ready."""
    try:
        return sock.recv(_CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def serve(gathering: Gathering) -> int:
    """Serve one world until it has ended; return the exit code."""
    loop = None
    try:
        loop = gathering.run()
        loop.run()
    except WorldError as exc:
        with contextlib.suppress(OSError):  # rank 0 has ended, and with it its stderr
            print(f"pyhvd: {exc}", file=sys.stderr, flush=True)
        return 1
    finally:
        if loop is not None and not loop.clean:
            from pyhvd.job.process.segments import remove_of_world

            remove_of_world(loop.world)
    return 0


def keep_alive(sock: socket.socket) -> None:
    """Let the kernel probe an idle connection, so that a lost host ends it and firewalls do not forget it."""
    with contextlib.suppress(OSError):  # no TCP
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES:
            if (option := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def main(arguments: Sequence[str]) -> int:
    """Serve a world whose key is on stdin; return the exit code.

    The arguments are the number of ranks, the time limit in seconds, and descriptors: rank 0's connection,
    then the listening sockets.
    """
    size, seconds, own, *listeners = arguments
    _raise_descriptor_limit()
    key = sys.stdin.buffer.read()
    sockets = [socket.socket(fileno=int(each)) for each in (own, *listeners)]
    return serve(Gathering(int(size), key, sockets[0], sockets[1:], time.monotonic() + float(seconds)))


def _raise_descriptor_limit() -> None:
    import resource

    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

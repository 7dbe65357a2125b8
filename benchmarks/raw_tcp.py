"""Raw TCP between the ranks of several hosts: the floor of an allreduce across hosts.

Each rank has a connection to the rank with the same local number on each other host. An exchange moves over
every connection, in both directions at once, what any allreduce must move: of n bytes on H hosts, every host
sends and receives 2 n (H - 1) / H. Nothing is summed.
"""

from __future__ import annotations

import select
import socket

from benchmarks.harness import FLOOR, Contender, World
from benchmarks.mpi import MPI
from benchmarks.tensors import Tensors

LINK = "raw TCP, the link's limit"
_PIECE = 1 << 20
# With more unsent bytes, three senders to one host overflow the queue of its 1 Gbit/s link, and lose packets.
_SEND_BUFFER = 128 << 10
_CONNECT_S = 20.0


class Rails:
    """This rank's connections to the ranks with the same local number; needs as many ranks on each host.

    Raises
    ------
    ValueError
        The hosts have different numbers of ranks.
    """

    def __init__(self, world: World) -> None:
        node = world.comm.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
        if len(set(world.comm.allgather(node.Get_size()))) != 1:
            raise ValueError("raw TCP needs the same number of ranks on each host")
        self.local_size = node.Get_size()
        cross = world.comm.Split(node.Get_rank(), key=world.rank)
        self.hosts, here = cross.Get_size(), cross.Get_rank()
        self._sockets: list[socket.socket] = []
        with socket.create_server((socket.gethostbyname(socket.gethostname()), 0)) as server:
            server.settimeout(_CONNECT_S)
            for address in cross.allgather(server.getsockname())[:here]:
                self._add(socket.create_connection(address, _CONNECT_S))
            for _ in range(here + 1, self.hosts):
                self._add(server.accept()[0])
        cross.Free()
        node.Free()
        self._bytes = memoryview(bytearray(2 * _PIECE))

    def _add(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        connection.setblocking(False)
        self._sockets.append(connection)

    def exchange(self, nbytes: int) -> None:
        """Send `nbytes` on each connection, and receive as many.

        Raises
        ------
        ConnectionError
            A peer has closed a connection.
        """
        poll = select.poll()
        of = {each.fileno(): each for each in self._sockets}
        unsent, unread = dict.fromkeys(of, nbytes), dict.fromkeys(of, nbytes)
        for number in of:
            poll.register(number, select.POLLIN | select.POLLOUT)
        left = len(of) if nbytes else 0
        while left:
            for number, events in poll.poll():
                if events & select.POLLOUT and unsent[number]:
                    unsent[number] -= of[number].send(self._bytes[: min(_PIECE, unsent[number])])
                if events & ~select.POLLOUT:
                    room = self._bytes[_PIECE : _PIECE + min(_PIECE, unread[number])]
                    got = of[number].recv_into(room)
                    if not got:
                        raise ConnectionError("a peer has closed its connection")
                    unread[number] -= got
                wanted = (select.POLLOUT if unsent[number] else 0) | (select.POLLIN if unread[number] else 0)
                if wanted:
                    poll.modify(number, wanted)
                else:
                    poll.unregister(number)
                    left -= 1


def link_limit(rails: Rails, tensors: Tensors) -> Contender:
    """Return the floor of an allreduce of these tensors."""
    nbytes = -(-2 * tensors.nbytes // (rails.hosts * rails.local_size))
    return Contender(LINK, lambda: rails.exchange(nbytes), kind=FLOOR)

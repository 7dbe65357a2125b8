"""A fabric over the ranks of several hosts: a window on each host, and links between the hosts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyhvd.arrays import Bytes, address
from pyhvd.common.text import describe_ranks
from pyhvd.dtypes import Code, ReduceOp
from pyhvd.native import shared_memory
from pyhvd.transport.fabric import Aborted, Fabric, LinkLost, PerRank, Unavailable, allgather_bytes
from pyhvd.transport.link_carrier import CarrierChoice, OpenCarrier, choose_carrier
from pyhvd.transport.link_layout import Layout, parents_of
from pyhvd.transport.links import LinkOptions, Links, open_links
from pyhvd.transport.moves import Move, MoveLayout
from pyhvd.transport.shm import OpenWindow, Segment, ShmFabric, area_bytes

CHUNK_MOST = 3 << 18
"""Bytes up to which a chunk grows with the number of hosts."""
_NOTE_SECONDS = 0.5
# The reduction by which carriers are compared: its number of float32, how often it is done at most, and the
# time after which two suffice. The first one may open MPI's connections.
_TRIAL = 1 << 18
_TRIALS = 5
_TRIAL_S = 0.02


class HostsFabric(ShmFabric):
    """Moves bytes through the host's window, and over the links; see :class:`pyhvd.transport.fabric.Fabric`.

    Parameters
    ----------
    inner : Fabric
        The set's other fabric, by which ranks make subsets, and open and close windows and links. Owned.
    segment : Segment
        The memory of this host's window; owned.
    window : Window
        This rank's end of the window, with an exchange over the links.
    exchange : Exchange
        That exchange.
    links : Links
        This rank's connections; owned.
    ranks : sequence of int
        The global ranks of the set.

    Attributes
    ----------
    layout : MoveLayout
        Says which bytes of a collective go where.
    choice : CarrierChoice
        What carries the bytes of the rails, and why; from :meth:`choose_carrier` on.
    """

    choice: CarrierChoice
    _all: HostsFabric
    _fast_path: shared_memory.FastPath | None = None

    def __init__(
        self,
        inner: Fabric,
        segment: Segment,
        window: shared_memory.Window,
        exchange: shared_memory.Exchange,
        links: Links,
        ranks: Sequence[int],
    ) -> None:
        self.hosts = links.layout.members
        names = [name.decode() for name in allgather_bytes(inner, socket.gethostname().encode())]
        self._places = [(names[each[0]], [ranks[rank] for rank in each]) for each in self.hosts]
        self.layout = MoveLayout(self.hosts, inner.rank)
        self._exchange = exchange
        self._links = links
        self._followers: list[HostsFabric] = []  # of the fabric of all ranks: all sets' fabrics
        self._all = self
        super().__init__(inner, segment, window)

    def alltoall(self, send: Bytes, recv: Bytes) -> None:
        """Send block r to rank r; all blocks of all ranks have one length."""
        nbytes, layout = len(send) // self.size, self.layout
        first, end = self.rank * nbytes, (self.rank + 1) * nbytes
        recv[first:end] = send[first:end]
        table = np.full((layout.ranks, 2, self.size), nbytes)
        largest = nbytes * layout.slices**2
        self.run_moves(layout.alltoall(table, self.window.chunk, largest), address(send), address(recv))

    def alltoallv(self, send: Bytes, send_counts: PerRank, recv: Bytes, recv_counts: PerRank) -> None:
        """Send block r to rank r."""
        counts = np.array([send_counts, recv_counts], np.int64)
        first, start = counts[:, : self.rank].sum(axis=1)
        own = counts[0, self.rank]
        recv[start : start + own] = send[first : first + own]
        chunk, layout = self.window.chunk, self.layout
        table = np.empty((layout.ranks, *counts.shape), np.int64)
        table[layout.local] = counts
        if layout.slices > 1:
            mine, into = address(table[layout.local]), address(table)
            self.run_moves([layout.gather_locally(counts.nbytes)], mine, into)
        moves = layout.alltoall(table, chunk)
        agreed = self._largest([move.longest for move in moves])
        moves = [move._replace(longest=n) for move, n in zip(moves, agreed, strict=True)]
        self.run_moves(moves, address(send), address(recv))

    exchange = alltoallv

    def pairwise_exchange(self, partner: int, send: Bytes, recv: Bytes) -> None:
        """Exchange blocks with a partner."""
        sent, received = [0] * self.size, [0] * self.size
        sent[partner], received[partner] = len(send), len(recv)
        self.alltoallv(send, sent, recv, received)

    def broadcast(self, buffer: Bytes, root: int) -> None:
        """Copy the root's buffer to every rank's."""
        at = address(buffer)
        self.run_moves(self.layout.broadcast(len(buffer), root, self.window.chunk), at, at)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self._largest([0])

    def subset(self, ranks: Sequence[int], tag: int) -> Fabric:
        """Return the other fabric's subset, whose waits end when a host is lost or has sent a note."""
        made = super().subset(ranks, tag)
        if self._fast_path is not None:
            made.pause_by(self._pause)
        return made

    def _pause(self, seconds: float) -> None:
        """Wait some seconds; raise Aborted or LinkLost if a host is lost or has sent a note."""
        assert self._fast_path is not None
        if (told := self._fast_path.await_lost(seconds)) is not None:
            raise self.error_of(*told)

    def run_moves(self, moves: Iterable[Move], source: int, target: int) -> None:
        """Move bytes from an address to one; all ranks of the set call it with moves of one layout."""
        for move in moves:
            self.check(done=self.window.move(move, source, target))

    def choose_carrier(self, options: LinkOptions, largest_chunk: int) -> None:
        """Choose what carries the bytes of the rails; collective, before the first operation."""

        def open_mpi(fabric: Fabric) -> OpenCarrier | str:
            if options.open_mpi is None:
                return "the ranks are not processes of MPI"
            if largest_chunk > shared_memory.MPI_MOST:
                return f"a chunk of {largest_chunk} bytes is too large for a message of MPI"
            return options.open_mpi(fabric)

        self.choice = choose_carrier(self.inner, options.carrier, open_mpi, self._measure)
        self._carry_by(None if self.choice.mpi is None else self.choice.mpi.native)

    def _carry_by(self, carrier: shared_memory.MpiCarrier | None) -> None:
        """Change the carrier, after all ranks have ended their operations."""
        rails = self._links.rails
        owned = [k for k, rail in enumerate(rails) if any(peer is not None for peer in rail)]
        peers = [[ranks[k * len(ranks) // len(rails)] for ranks in self.hosts] for k in owned]
        self.inner.barrier()
        self._exchange.carry_by(carrier, peers)
        self.inner.barrier()

    def _measure(self, carrier: shared_memory.MpiCarrier | None) -> float:
        """Return the seconds of the fastest of some reductions by a carrier, on the slowest rank."""
        self._carry_by(carrier)
        array = np.zeros(_TRIAL, np.float32)
        times: list[float] = []
        while len(times) < 2 or (len(times) < _TRIALS and self._slowest(sum(times)) < _TRIAL_S):
            begun = time.perf_counter()
            self._reduce(array, Code.FLOAT32, ReduceOp.SUM)
            times.append(time.perf_counter() - begun)
        return self._slowest(min(times))

    def _slowest(self, seconds: float) -> float:
        """Return the longest time of all ranks."""
        return self._largest([round(seconds * 1e9)])[0] / 1e9

    def make_agreement(self) -> shared_memory.Agreement:
        """Return the agreement between the hosts over this rank's links."""
        links = self._links
        connections = [-1 if peer is None else peer.fileno() for peer in links.agreement]
        parents = parents_of(len(self.hosts))
        return shared_memory.Agreement(
            self.rank, self.hosts, parents, connections, links.bells, links.background_bells
        )

    @property
    def control(self) -> Mapping[int, socket.socket]:
        """The control connections, by rank; they are open until this object is closed."""
        return self._links.control

    def addresses(self, host: int) -> tuple[str, str]:
        """Return the two addresses of this rank's first rail to a host: the own one, and the host's."""
        peer = next(peer for rail in self._links.rails if (peer := rail[host]) is not None)
        return peer.getsockname()[0], peer.getpeername()[0]

    def count_in(self, counters: shared_memory.RailCounters, numbers: Sequence[int]) -> None:
        """Count what crosses to other hosts; ``numbers`` has, by global rank, the number of its host."""
        self._exchange.count_in(counters, [numbers[ranks[0]] for _, ranks in self._places])

    def follow(self, fabric: HostsFabric, fast_path: shared_memory.FastPath) -> None:
        """Learn from the fast path, and from the fabric of all ranks, when a host is lost, and why.

        Several process sets may share this fabric: only the first call has an effect.
        """
        if self in fabric._followers:
            return
        self._all, self._fast_path = fabric, fast_path
        fabric._followers.append(self)
        fast_path.watch(self._exchange)

    def look_at_hosts(self) -> None:
        """Raise Aborted or LinkLost if the fast path has found another host lost, or a set's rail broken."""
        if self._fast_path is None:
            return
        if (lost := self._fast_path.lost()) is not None:
            raise self.error_of(*lost)
        if self._fast_path.has_given_up():
            for each in self._followers:
                if each._exchange.lost is not None:
                    each.check(done=False)

    def abort(self, note: bytes) -> None:
        """Interrupt the ranks of this host, and end the connections to all others."""
        if self._fast_path is not None:
            self._fast_path.tell_hosts(note)
        for peer in self._rails():
            with contextlib.suppress(OSError):  # it has failed already, or is closed
                peer.shutdown(socket.SHUT_RDWR)
        super().abort(note)

    def close(self) -> None:
        """Free window, links and fabric; collective."""
        if self in self._all._followers:
            self._all._followers.remove(self)
        if self.choice.mpi is not None:
            for peer in self._rails():
                with contextlib.suppress(OSError):  # the peer has left already
                    peer.send(b"\0")  # native/src/links/link.h, invariant 7
            self.choice.mpi.close()
        self._links.close()
        super().close()

    def _rails(self) -> list[socket.socket]:
        return [peer for rail in self._links.rails for peer in rail if peer is not None]

    def check(self, *, done: bool) -> None:
        """Raise LinkLost if a connection has failed, or Aborted if a local rank has aborted the window."""
        if not done and self.window.note() is None:
            error = self._await_word()
            if error is None and self._exchange.lost is not None:
                host, number = self._exchange.lost
                error = self.error_of(host, self.layout.here, number, b"")
            if error is not None:
                raise error
        super().check(done=done)

    def error_of_connection(self, rank: int, number: int) -> Aborted | LinkLost:
        """Return the exception for a control connection that has failed with an errno, or 0 (closed)."""
        host = next(g for g, ranks in enumerate(self.hosts) if rank in ranks)
        return self._await_word() or self.error_of(host, self.layout.here, number, b"")

    def _await_word(self) -> Aborted | LinkLost | None:
        """Return the exception for a host that has sent a note or is lost, if there is one soon.

        The rank that ended a connection may have sent a note.
        """
        told = None if self._fast_path is None else self._fast_path.await_lost(_NOTE_SECONDS)
        return None if told is None else self._all.error_of(*told)

    def _gather(self, send: int, recv: Bytes, counts: PerRank) -> None:
        into = address(recv) + sum(counts[: self.rank])
        if send != into:
            ctypes.memmove(into, send, counts[self.rank])
        self.run_moves(self.layout.gather(counts, self.window.chunk), send, address(recv))

    def _largest(self, values: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' values, for each."""
        array = np.array(values, np.int64)
        self._reduce(array, Code.INT64, ReduceOp.MAX)
        return [int(value) for value in array]

    def _reduce(self, array: NDArray[Any], code: Code, op: ReduceOp) -> None:
        """Reduce an array of all ranks, in place."""
        at, starts = np.array([address(array)], np.int64), np.array([0, len(array)], np.int64)
        self.check(done=self.window.allreduce(at, at, starts, code, op, 1.0, 1.0))

    def error_of(self, host: int, finder: int, number: int, note: bytes) -> Aborted | LinkLost:
        """Return the exception for a host that has sent a note, or that another host found lost.

        Parameters
        ----------
        host, finder : int
            The host, and the one whose connection to it has failed.
        number : int
            The errno of that connection; 0: a process of the host has ended.
        note : bytes
            The host's note; empty if it is lost.
        """
        if note:
            return Aborted(note)
        places = [self._places[each] for each in (finder, host)]
        ends = [f"host {name} ({describe_ranks(ranks)})" for name, ranks in places]
        why = os.strerror(number) if number else "a process there has ended"
        text = f"the connection from {ends[0]} to {ends[1]} has failed: {why}"
        return LinkLost(text, self._places[host][1][0])


def chunk_across(chunk_size: int, hosts: int) -> int:
    """Return the bytes of a chunk of a set that spans hosts: more than on one host.

    A frame between hosts costs more than a copy within a host. Measured on 2 and 4 hosts with 16 and 64 MiB:
    with half as many bytes again 10 to 30 % faster than with 256 KiB, and no slower than with more. Every
    chunk is cut into a frame for each host, so chunks grow with the number of hosts. More than CHUNK_MOST
    would cost shared memory, and on slow links the agreement's messages wait behind two chunks
    (docs/performance_notes.md).
    """
    base = chunk_size * 3 // 2
    grown = max(base, min(base * hosts // 4, CHUNK_MOST))
    return grown // shared_memory.CHUNK_UNIT * shared_memory.CHUNK_UNIT


def open_hosts_fabric(
    fabric: Fabric,
    ranks: Sequence[int],
    hosts: Sequence[int],
    open_window: OpenWindow,
    options: LinkOptions,
    chunk_size: int,
    largest_chunk: int,
    *,
    agreement: bool,
) -> HostsFabric | Unavailable:
    """Return a fabric with windows and links for ranks of several hosts; collective, one outcome for all.

    Parameters
    ----------
    fabric : Fabric
        The set's fabric; the result owns it.
    ranks : sequence of int
        The global ranks of the set.
    hosts : sequence of int
        By set rank, a number that tells the hosts apart.
    open_window : callable
        Makes shared memory for the ranks of a host.
    options : LinkOptions
        How to make links.
    agreement : bool
        Whether the hosts shall be able to agree over the links.
    chunk_size, largest_chunk : int
        Bytes of a chunk of a set on one host, now and at most.
    """
    place = Layout(fabric.rank, hosts, agreement=agreement)
    chunk, largest = (chunk_across(each, place.hosts) for each in (chunk_size, largest_chunk))
    if place.hosts > shared_memory.MAX_HOSTS:
        return Unavailable(f"a process set has links between at most {shared_memory.MAX_HOSTS} hosts")
    local = fabric.subset(place.members[place.host], 0)
    opened = open_window(local, area_bytes(largest, shared_memory.ACROSS_SLOTS))
    local.close()
    cause = opened.cause if isinstance(opened, Unavailable) else ""
    if causes := [text.decode() for text in allgather_bytes(fabric, cause.encode()) if text]:
        return Unavailable(f"no shared memory on a host: {causes[0]}")
    assert isinstance(opened, Segment)
    links = open_links(fabric, place, options)
    if isinstance(links, Unavailable):
        return links
    rails = [
        [-1 if peer is None else peer.fileno() for peer in rail]
        for rail in links.rails
        if any(peer is not None for peer in rail)
    ]
    exchange = shared_memory.Exchange(
        place.host, place.hosts, place.local_rank, place.local_size, place.slices, rails, links.bells
    )
    window = shared_memory.Window(place.local_rank, opened.areas, chunk, largest, exchange)
    made = HostsFabric(fabric, opened, window, exchange, links, ranks)
    made.choose_carrier(options, largest)
    return made

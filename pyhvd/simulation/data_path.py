"""What a collective costs: steps, bytes between hosts, and CPU time, by the algorithms of the real data path.

The formulas are those of docs/mechanisms.md, "What a collective costs" and "Collectives over MPI". They
follow ``native/src/window``, ``transport/moves.py``, ``backends/host.py`` and ``backends/two_level.py``.
docs/scaling.md explains the model, which is pure.

1. Up to 64 hosts have links. A batch is cut into chunks, which overlap: its time is that of the first chunk's
   whole way, and for each further chunk that of the slowest stage: the link, or the CPU of a rank.
2. A rank is one thread, so the CPU times of its copies, sums and system calls add up. If a host has more
   ranks than cores, they take turns.
3. More hosts use MPI: pieces follow one another without overlap.

Left out: losses and queues of the network; that fewer chunks are in flight on slow links; caches, beside the
rates that a machine is said to have; opening a process set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pyhvd.backends.adasum import BATCH, FLAT as ADASUM_FLAT
from pyhvd.backends.host import FLAT as MPI_FLAT
from pyhvd.backends.two_level import piece_across
from pyhvd.native import shared_memory
from pyhvd.negotiation.messages import RequestType
from pyhvd.simulation.network import Network
from pyhvd.transport.hosts import chunk_across

KIB = 1024
PAYLOAD, PAYLOAD_TENSORS, PAYLOAD_HOSTS = 2 * KIB, 16, 8
"""A batch with no more of these travels with the agreement: ``agreement/payloads.h``."""
FLAT = 16 * KIB
"""Up to so many bytes are reduced in one step: ``PYHVD_FLAT`` of ``window/window.h``."""
WHOLE = 256 * KIB
"""Up to so many bytes of a chunk, over all other hosts, its slices are sent whole: ``exchange/exchange.h``.

With two hosts these are the bytes of one slice.
"""
_TERMS = 256
"""Bytes of counts, or of dot products, about."""
_ON_WIRE = 1514 / 1448
"""Bytes of Ethernet frames for each byte that TCP carries."""
RING = 512 * KIB
"""MPICH gathers more bytes than these in a ring, and fewer in log2 p steps."""


class Cost(NamedTuple):
    """What a collective costs.

    Attributes
    ----------
    seconds : float
        From when its last rank enters it until its end.
    link : float
        Seconds for which the busiest link is busy.
    cpu : float
        Seconds of work, in its copies, sums and system calls, of the busiest core.
    latency : float
        Seconds for which neither works: its steps wait for messages to arrive.
    """

    seconds: float = 0.0
    link: float = 0.0
    cpu: float = 0.0
    latency: float = 0.0

    @property
    def bound(self) -> str:
        """What takes most of the time: "link", "CPU" or "latency"."""
        parts = {"link": self.link, "CPU": self.cpu, "latency": self.latency}
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True)
class Machine:
    """What a host can do. The defaults are an Intel Xeon's, by docs/performance.md and its notes.

    Attributes
    ----------
    copy : float
        Bytes per second that a core copies into the window, or out of it. 64 MiB on 2 ranks take 5.5 ms.
    reduce : float
        Bytes per second that a core's reduction kernel reads, of all inputs. From the same figure.
    tcp : float
        CPU seconds for each byte that a core sends or receives. Raw TCP exchanges 64 MiB in 18 ms at 2x1.
    cores : int
        Cores of each host.
    shared_cores : bool
        Whether all hosts share the cores of one machine, as those of tests/bed.py do.
    frame : float
        CPU seconds of sending, or receiving, a frame of an exchange, beside its bytes.
    chunk : float
        CPU seconds of a chunk beside its bytes: its stages, and what local ranks tell each other.
    tensor : float
        CPU seconds of each tensor of a batch. A grouped call takes 15 ns more for each tensor.
    call : float
        CPU seconds of a batch. 4 bytes on one host take 1 us.
    python : float
        CPU seconds of a collective, or a part of one, that Python lays out: every one but an allreduce.
    """

    copy: float = 30e9
    reduce: float = 30e9
    tcp: float = 0.134e-9
    cores: int = 32
    shared_cores: bool = False
    frame: float = 2e-6
    chunk: float = 2e-6
    tensor: float = 15e-9
    call: float = 1e-6
    python: float = 50e-6

    def sharers(self, hosts: int, local_ranks: int) -> float:
        """Return how many ranks take turns on a core."""
        ranks = hosts * local_ranks if self.shared_cores else local_ranks
        return max(ranks / self.cores, 1.0)


@dataclass(frozen=True)
class _Chunks:
    """Equal chunks, one behind the other.

    Attributes
    ----------
    count : int
        How many.
    cpu : float
        CPU seconds of the busiest rank, for each.
    wire : float
        Bytes that the busiest host sends, or receives, for each.
    steps : int
        How many messages between hosts follow one another in each.
    """

    count: int
    cpu: float
    wire: float = 0.0
    steps: int = 0


_Stretch = Sequence[_Chunks]
"""Chunks that overlap. A stretch begins when the one before has ended."""


@dataclass(frozen=True)
class DataPath:
    """The data path of a cluster of equal hosts.

    Parameters
    ----------
    network : Network
        Connects the hosts.
    machine : Machine
        What a host can do.
    chunk_size, staging_size : int
        The knobs.
    """

    network: Network
    machine: Machine = field(default_factory=Machine)
    chunk_size: int = 256 * KIB
    staging_size: int = 4096 * KIB

    def __call__(
        self, kind: RequestType, nbytes: int, hosts: int, local_ranks: int, tensors: int = 1
    ) -> Cost:
        """Return what a collective costs.

        Parameters
        ----------
        kind : RequestType
            The collective.
        nbytes : int
            Bytes of the batch: of each rank's tensors; of an allgather's results.
        hosts, local_ranks : int
            Number of hosts, and of ranks on each.
        tensors : int
            Number of tensors in the batch.
        """
        formulas = _SimulatedLinks if hosts <= shared_memory.MAX_HOSTS else _Mpi
        case = formulas(self, hosts, local_ranks, nbytes, tensors)
        sharers = self.machine.sharers(hosts, local_ranks)
        # A step ends with the last of the messages from all other hosts.
        step = self.network.latency + self.network.jitter * (1 - 1 / hosts)
        costs = [self._overlap(stretch, sharers, step) for stretch in case.stretches(kind)]
        return Cost(*map(sum, zip(*costs, strict=True)))

    def _overlap(self, stretch: _Stretch, sharers: float, step: float) -> Cost:
        """Return the cost of chunks that overlap: the first one's way, then the slowest stage of each."""
        seconds = link = cpu = latency = 0.0
        for chunks in stretch:
            if not chunks.count:
                continue
            busy, wire = chunks.cpu * sharers, chunks.wire / self.network.rate * _ON_WIRE
            wait = chunks.steps * step
            way, slowest = busy + wire + wait, max(busy, wire)
            period = max(slowest, way / shared_memory.ACROSS_SLOTS)
            later = chunks.count - int(not seconds)  # than the first chunk of the stretch
            seconds += later * period + (0.0 if seconds else way)
            latency += later * (period - slowest) + (0.0 if latency else wait)
            link += chunks.count * wire
            cpu += chunks.count * busy
        return Cost(seconds, link, cpu, latency)


class _TimedMoves:
    """The work of one batch, on `hosts` hosts with `local` ranks each: `p` ranks."""

    def __init__(self, path: DataPath, hosts: int, local: int, nbytes: int, tensors: int) -> None:
        self.machine, self.network = path.machine, path.network
        self.hosts, self.local, self.p = hosts, local, hosts * local
        self.others = hosts - 1
        self.n, self.tensors = nbytes, tensors
        self.chunk = chunk_across(path.chunk_size, hosts) if hosts > 1 else path.chunk_size
        self.staging = path.staging_size

    def stretches(self, kind: RequestType) -> Iterable[_Stretch]:
        """Return the stretches of a collective, by the method of its name; without one it takes no time."""
        formula = getattr(self, kind.name.lower(), None)
        moves = kind == RequestType.BARRIER or (self.n and self.p > 1)
        return formula() if formula is not None and moves else []

    def copies(self, nbytes: float) -> float:
        """Return the CPU time of copying."""
        return nbytes / self.machine.copy

    def sums(self, nbytes: float) -> float:
        """Return the CPU time of a reduction that reads so many bytes."""
        return nbytes / self.machine.reduce

    def frames(self, count: float, nbytes: float) -> float:
        """Return the CPU time of sending or receiving frames, with so many bytes in all."""
        return count * self.machine.frame + nbytes * self.machine.tcp

    def enters(self, parts: float = 1.0) -> _Stretch:
        """Return what a collective costs that Python lays out, in so many parts."""
        return [_Chunks(1, parts * self.machine.python + self.tensors * self.machine.tensor)]

    def pieces(self, limit: int) -> Iterable[int]:
        """Yield the sizes of the pieces of the batch, of at most `limit` bytes."""
        yield from [limit] * (self.n // limit)
        if rest := self.n % limit:
            yield rest


class _SimulatedLinks(_TimedMoves):
    """A window on each host, and links between hosts."""

    def barrier(self) -> Iterable[_Stretch]:
        return [self.enters(), [self._flat(8)]]

    # -- reductions

    def allreduce(self) -> Iterable[_Stretch]:
        call = [_Chunks(1, self.machine.call + self.tensors * self.machine.tensor)]
        if self._rides():
            return [call]
        if self.n <= FLAT:
            return [call, [self._flat(self.n)]]
        full, rest = divmod(self.n, self.chunk)
        packed = 1.0 - (1.0 - 1.0 / (full + bool(rest))) ** (self.tensors - 1)
        reduced = self._exchanged if self.others else self._in_window
        return [call, [reduced(full, self.chunk, packed), reduced(int(rest > 0), rest, packed)]]

    def _rides(self) -> bool:
        return 1 < self.hosts <= PAYLOAD_HOSTS and self.n <= PAYLOAD and self.tensors <= PAYLOAD_TENSORS

    def _flat(self, nbytes: int) -> _Chunks:
        """Return a reduction in one step: each rank reduces all, and sends the host's result on its rail."""
        local = self.copies(nbytes) + (self.sums(nbytes * self.local) if self.local > 1 else 0.0)
        across = self.frames(2 * self.others, 2 * nbytes * self.others) + self.sums(nbytes * self.hosts)
        return _Chunks(
            1,
            self.machine.chunk + local + (across if self.others else 0.0),
            nbytes * self.others * self.local,
            int(self.others > 0),
        )

    def _in_window(self, count: int, chunk: int, _: float) -> _Chunks:
        """Return chunks on one host: pack what others reduce, reduce, return the result, unpack."""
        passed = chunk * (self.local - 1) / self.local
        return _Chunks(count, self.machine.chunk + self.copies(3 * passed) + self.sums(chunk))

    def _exchanged(self, count: int, chunk: int, packed: float) -> _Chunks:
        """Return chunks on several hosts; a share of them is packed also by a rank that is alone."""
        part, hosts, others = chunk / self.local, self.hosts, self.others
        if self.local > 1:
            local = self.copies(2 * chunk - part) + self.sums(chunk)
        else:
            local = packed * self.copies(2 * chunk)
        if (chunk * others if others > 1 else part) <= WHOLE:
            sent, steps, across = part * others, 1, self.sums(part * hosts)
        else:
            sent, steps, across = 2 * part * others / hosts, 2, self.sums(part)
        cpu = self.machine.chunk + local + across + self.frames(2 * steps * others, 2 * sent)
        return _Chunks(count, cpu, sent * self.local, steps)

    def reducescatter(self) -> Iterable[_Stretch]:
        """Yield the chunks: packed, reduced among the local ranks, then among hosts."""
        yield [_Chunks(1, self.machine.call + self.tensors * self.machine.tensor)]
        if self._rides():
            return
        if self.n <= FLAT:
            yield [self._flat(self.n)]
            return
        full, rest = divmod(self.n, self.chunk)
        yield [self._scattered(full, self.chunk), self._scattered(int(rest > 0), rest)]

    def _scattered(self, count: int, chunk: int) -> _Chunks:
        """Return chunks of which each rank gets a portion."""
        part = chunk / self.local
        local = self.copies(chunk - part) + self.sums(chunk) if self.local > 1 else 0.0
        sent = part * self.others / self.hosts
        across = self.frames(2 * self.others, 2 * sent) + self.sums(part) if self.others else 0.0
        cpu = self.machine.chunk + local + across
        return _Chunks(count, cpu, sent * self.local, int(self.others > 0))

    def adasum(self) -> Iterable[_Stretch]:
        """Yield the levels: partners exchange halves of their vectors, and later bring the results back."""
        if self.n * self.p <= ADASUM_FLAT:
            yield self.enters()
            yield [self._gathered(self.n * self.p)]
            yield [_Chunks(1, self.sums(4 * self.n * self.p))]
            return
        for piece in self.pieces(max(BATCH, self.n // self.tensors)):
            yield [_Chunks(1, self.copies(2 * piece) if self.tensors > 1 else 0.0)]
            for level in range(math.ceil(math.log2(self.p))):
                half = piece / 2 ** (level + 1)
                across = half * self.local if 2**level >= self.local and self.others else 0.0
                copied = half if across and self.local == 1 else 2 * half
                move = self._moved(across or half, 2, across, copied)
                yield self.enters(3)
                yield [move]
                yield [_Chunks(1, self.sums(4 * half))]
                yield [self._flat(_TERMS) if across else _Chunks(1, self.machine.call)]
                yield [move]

    # -- moves

    def allgather(self) -> Iterable[_Stretch]:
        yield self.enters()
        yield [self._gathered(self.n)]
        if self.tensors > 1:
            yield [_Chunks(1, self.copies(self.n / self.p + self.n))]

    def _gathered(self, nbytes: float) -> _Chunks:
        """Return a move that brings every rank all ranks' blocks."""
        block = nbytes / self.hosts
        return self._moved(block, self.hosts, block * self.others, nbytes if self.local > 1 else block)

    def broadcast(self) -> Iterable[_Stretch]:
        yield self.enters()
        copied = self.n if self.local > 1 else 0.0
        yield [self._moved(self.n, 1, self.n * self.others, copied, both=False)]

    def alltoall(self) -> Iterable[_Stretch]:
        """Yield the counts: to their receivers, among local ranks, and the largest; then the rows."""
        block = self.n * self.local / self.hosts
        yield self.enters(4)
        if self.others:
            yield [self._moved(_TERMS, 2 * self.others, _TERMS * self.others, 0.0)]
            yield [self._flat(_TERMS)]
        copied = 2 * self.n if self.local > 1 else self.n / self.p
        yield [self._moved(block, 2 * self.others, block * self.others, copied)]

    def _moved(self, lane: float, lanes: int, wire: float, copied: float, *, both: bool = True) -> _Chunks:
        """Return a move.

        Parameters
        ----------
        lane, lanes : float, int
            Bytes of a lane, and the number of lanes that share a slot.
        wire, copied : float
            Bytes that a host sends, and that a rank copies.
        both : bool
            Whether the busiest host receives as many bytes as it sends.
        """
        count = max(math.ceil(lane * max(lanes, 1) / self.local / self.chunk), 1)
        ways = (1 + both) * int(wire > 0)
        moved = self.frames(ways * self.others, ways * wire / self.local / count)
        cpu = self.machine.chunk + moved + self.copies(copied / count)
        return _Chunks(count, cpu, wire / count, int(wire > 0))


class _Mpi(_TimedMoves):
    """MPI for all bytes, as there are too many hosts for links: pieces follow one another."""

    def barrier(self) -> Iterable[_Stretch]:
        return [self.enters(), self._gather(self.p, self.p)]

    def allreduce(self) -> Iterable[_Stretch]:
        """Yield each piece: reduced on each host, then each rank's slice on its rail; and to all ranks."""
        for piece in self.pieces(piece_across(self.staging, self.local)):
            part = piece / self.local
            several = self.local > 1
            yield self.enters(1 + 2 * several)
            yield [_Chunks(1, self.copies(2 * piece) if self.tensors > 1 else 0.0)]
            if several:
                yield [_Chunks(1, self.copies(3 * piece - part) + self.sums(piece))]
            if part * self.hosts <= MPI_FLAT:
                yield self._gather(part * self.hosts, self.hosts)
                yield [_Chunks(1, self.sums(part * self.hosts))]
            else:
                yield self._trade(part, self.hosts)
                yield [_Chunks(1, self.sums(part))]
                yield self._gather(part, self.hosts)

    def reducescatter(self) -> Iterable[_Stretch]:
        for piece in self.pieces(self.staging):
            yield self.enters()
            yield self._trade(piece, self.p)
            yield [_Chunks(1, self.copies(piece * (1 + 1 / self.p)) + self.sums(piece))]

    def adasum(self) -> Iterable[_Stretch]:
        for piece in self.pieces(max(BATCH, self.n // self.tensors)):
            for level in range(math.ceil(math.log2(self.p))):
                half = piece / 2 ** (level + 1)
                wire = half * self.local if 2**level >= self.local else 0.0
                yield self.enters(3)
                yield [_Chunks(1, self.sums(4 * half))]
                for nbytes in (half, _TERMS, half):
                    yield [self._messages(1, nbytes, wire and nbytes * self.local, 1)]

    def allgather(self) -> Iterable[_Stretch]:
        return [self.enters(), self._gather(self.n, self.p)]

    def broadcast(self) -> Iterable[_Stretch]:
        """Return a tree for few bytes; for many, a piece for each rank, and then all pieces for all."""
        depth = math.ceil(math.log2(self.p))
        if self.n <= RING:
            return [self.enters(), [self._messages(depth, self.n * depth, self.n * self.local, depth)]]
        return [self.enters(), [self._messages(depth, self.n, self.n, depth)], self._gather(self.n, self.p)]

    def alltoall(self) -> Iterable[_Stretch]:
        return [self.enters(2), self._trade(8 * self.p, self.p), self._trade(self.n, self.p)]

    def _trade(self, nbytes: float, ranks: int) -> _Stretch:
        """Return what gives each of some ranks its part of every one's bytes: all messages at once.

        `ranks` are all ranks, or those of each rail at the same time, one on each host.
        """
        away = nbytes * self.others / self.hosts
        return [self._messages(ranks - 1, nbytes, away * self.local, 1)]

    def _gather(self, nbytes: float, ranks: int) -> _Stretch:
        """Return what gives each of some ranks the parts of all: in steps that double them, or in a ring."""
        away = nbytes * self.others / self.hosts
        if nbytes > RING:
            rings = self.p // ranks
            return [self._messages(ranks - 1, nbytes, nbytes * rings, ranks - 1)]
        depth = math.ceil(math.log2(ranks))
        return [self._messages(depth, nbytes, away * self.local, depth)]

    def _messages(self, count: int, nbytes: float, wire: float, steps: int) -> _Chunks:
        """Return messages of a rank, with what it sends in all, and what its host sends to others."""
        message = 2 * count * self.network.message_cpu
        return _Chunks(1, message + self.frames(0, 2 * nbytes), wire, steps)

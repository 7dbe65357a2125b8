"""What a machine can do, for ``python -m benchmarks simulation``: ``simulation_probe.py KIND [PORT [HOST]]``.

The measurements know nothing of the steps that the simulator predicts. A process measures its memory, its
calls, or TCP with another process: one listens at a port, and the other also names its host. Each prints one
line of JSON. CPU times are the process's own, so they hold also while it waits for a core. Those of TCP are
of the system calls that move bytes.
"""

from __future__ import annotations

import json
import os
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

import pyhvd as hvd
from pyhvd import _fusion
from pyhvd.arrays import address
from pyhvd.dtypes import Code, ReduceOp

KIB, MIB = 1 << 10, 1 << 20
# An array that no cache holds; the chunks in which pyhvd moves it between hosts; and large and small frames.
TOTAL, CHUNK, FRAMES = 96 * MIB, 384 * KIB, (192 * KIB, 16 * KIB)
MESSAGE = 128
_REPEATS, _ROUNDS, _CALLS, _WAKES = 7, 500, 300, 100
_CONNECT_S = 20.0


Clock = Callable[[], float]


def median_of(run: Callable[[], object], repeats: int = _REPEATS, clock: Clock = time.perf_counter) -> float:
    """Return the median of the seconds of a call; the first call is a warm-up."""
    times = []
    for _ in range(repeats + 1):
        begun = clock()
        run()
        times.append(clock() - begun)
    return statistics.median(times[1:])


def memory() -> dict[str, float]:
    """Measure a core's rates: copies between an array and slots in the cache, and sums of both."""
    array = np.ones(TOTAL // 4, np.float32)
    slots = np.ones((4, CHUNK // 4), np.float32)
    chunks = np.split(array, TOTAL // CHUNK)

    def copy() -> None:
        for number, chunk in enumerate(chunks):
            slots[number % 4] = chunk
            chunk[:] = slots[(number + 1) % 4]

    def reduce() -> None:
        for number, chunk in enumerate(chunks):
            sources = np.array([address(chunk), address(slots[number % 4])], np.int64)
            _fusion.reduce(address(chunk), sources, chunk.size, Code.FLOAT32, ReduceOp.SUM, 0.5)

    read = 2 * TOTAL
    return {
        "copy": read / median_of(copy, clock=time.process_time),
        "reduce": read / median_of(reduce, clock=time.process_time),
    }


def calls() -> dict[str, float]:
    """Measure a cached call on a rank that is alone."""
    hvd.init()
    named = [(np.ones(256, np.float32), f"probe.{t}") for t in range(20)]

    def step() -> None:
        handles = [hvd.allreduce_async_(array, name=name, op=hvd.Average) for array, name in named]
        for handle in handles:
            hvd.synchronize(handle)

    return {"call": median_of(step, _CALLS) / len(named)}


class Peer:
    """A connection to a host, or to whoever connects if the host's name is empty.

    Attributes
    ----------
    first : bool
        Whether this end sends first.
    busy, calls : float, int
        CPU time of the system calls that have moved bytes, and their number.
    """

    def __init__(self, port: str, host: str) -> None:
        self.first = bool(host)
        self._out = memoryview(bytearray(b"1") * TOTAL)
        self._into = memoryview(bytearray(4 * FRAMES[0]))
        self.busy, self.calls = 0.0, 0
        self._tick = median_of(time.process_time, 100, time.process_time) / 2
        if host:
            self._socket = _call(host, int(port))
        else:
            with socket.create_server(("", int(port))) as server:
                server.settimeout(_CONNECT_S)
                self._socket = server.accept()[0]
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setblocking(False)

    def exchange(self, frame: int) -> None:
        """Send an array, and receive as many bytes into a few frames, with so many bytes at a time."""
        sent = got = 0
        while sent < TOTAL or got < TOTAL:
            before = sent + got
            if sent < TOTAL:
                sent += self._send(sent, min(frame, TOTAL - sent))
            if got < TOTAL:
                got += self._receive(got % len(self._into), min(frame, TOTAL - got))
            if sent + got == before:
                os.sched_yield()

    def ping(self) -> None:
        """Send a message, and receive one; or the other way round."""
        for move in (self._send, self._receive) if self.first else (self._receive, self._send):
            while not move(0, MESSAGE):
                os.sched_yield()

    def _send(self, at: int, nbytes: int) -> int:
        return self._move(self._socket.send, self._out[at : at + nbytes])

    def _receive(self, at: int, nbytes: int) -> int:
        return self._move(self._socket.recv_into, self._into[at : at + nbytes])

    def _move(self, call: Callable[[memoryview], int], view: memoryview) -> int:
        """Send or receive what can be moved at once; return how many bytes that is."""
        begun = time.process_time()
        try:
            moved = call(view)
        except BlockingIOError:
            return 0
        self.busy += time.process_time() - begun - self._tick
        self.calls += 1
        return moved

    def sleep(self) -> None:
        """Wait until a message comes, without a core."""
        select.select([self._socket], [], [])


def _call(host: str, port: int) -> socket.socket:
    until = time.monotonic() + _CONNECT_S
    while True:
        try:
            return socket.create_connection((host, port), _CONNECT_S)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def bulk(port: str, host: str = "") -> dict[str, float]:
    """Measure the CPU time of TCP for each byte sent or received, and for each system call."""
    peer = Peer(port, host)
    busy, calls = [], []
    for size in FRAMES:
        found = []
        for _ in range(_REPEATS):
            before = peer.busy, peer.calls
            peer.exchange(size)
            found.append((peer.busy - before[0], peer.calls - before[1]))
        busy.append(statistics.median(each for each, _ in found))
        calls.append(statistics.median(each for _, each in found))
    frame = max(busy[1] - busy[0], 0.0) / (calls[1] - calls[0])
    return {"tcp": (busy[0] - calls[0] * frame) / (2 * TOTAL), "frame": frame}


def latency(port: str, host: str = "") -> dict[str, float]:
    """Measure the time of a message from one host to another, and of the calls at both ends."""
    peer = Peer(port, host)

    def rounds() -> None:
        for _ in range(_ROUNDS):
            peer.ping()

    one_way = median_of(rounds) / (2 * _ROUNDS)
    return {"latency": one_way, "message": peer.busy / peer.calls}


def waking(port: str, host: str = "") -> dict[str, float]:
    """Measure the time of a message to a receiver that sleeps, and of the answer to one that does not."""
    peer, times = Peer(port, host), []
    for _ in range(_WAKES):
        if peer.first:
            time.sleep(0.001)
            begun = time.perf_counter()
        else:
            peer.sleep()
        peer.ping()
        if peer.first:
            times.append(time.perf_counter() - begun)
    return {"woken": statistics.median(times)} if times else {}


KINDS: dict[str, Callable[..., dict[str, float]]] = {
    "memory": memory,
    "calls": calls,
    "bulk": bulk,
    "latency": latency,
    "waking": waking,
}


def main(arguments: Sequence[str]) -> None:
    """Measure what is asked for."""
    kind, *rest = arguments
    print(json.dumps(KINDS[kind](*rest)))


if __name__ == "__main__":
    main(sys.argv[1:])

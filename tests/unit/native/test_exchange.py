"""Reductions over several hosts: windows of some ranks each, linked by sockets, compared with the kernels."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pyhvd import _fusion
from pyhvd.dtypes import BY_CODE, Code, ReduceOp
from pyhvd.native import shared_memory
from tests.thinning import examples
from tests.unit.native.test_window import Array, addresses, random_array, starts_of

CHUNK = shared_memory.FLAT
TIMEOUT = 60.0
Job = Callable[[int, shared_memory.Window], Any]


class Hosts:
    """Windows of ranks on several hosts.

    Parameters
    ----------
    layout : sequence of int
        The number of ranks of each host; ranks are numbered host by host.
    chunk, capacity : int
        Bytes of a chunk, and of a slot.
    connect : callable, optional
        Makes two connected sockets that do not block.
    """

    def __init__(
        self,
        layout: Sequence[int],
        chunk: int = CHUNK,
        capacity: int = 0,
        connect: Callable[[], tuple[socket.socket, socket.socket]] | None = None,
    ) -> None:
        self.layout = layout
        self.windows: list[shared_memory.Window] = []
        self.exchanges: list[shared_memory.Exchange] = []
        self.sockets: dict[tuple[int, int, int], socket.socket] = {}
        self.bells: list[list[int]] = [[os.eventfd(0, os.EFD_NONBLOCK) for _ in range(n)] for n in layout]
        self._memory: list[Array] = []
        slices = max(layout)
        for k in range(slices):
            for a in range(len(layout)):
                for b in range(a + 1, len(layout)):
                    self.sockets[k, a, b], self.sockets[k, b, a] = (connect or _connected_pair)()
        for host, ranks in enumerate(layout):
            self._open(host, ranks, slices, chunk, capacity or chunk)

    def _open(self, host: int, ranks: int, slices: int, chunk: int, capacity: int) -> None:
        nbytes = shared_memory.area_bytes(capacity, shared_memory.ACROSS_SLOTS) + 128
        memory = [np.empty(nbytes, np.uint8) for _ in range(ranks)]
        self._memory += memory
        areas = [-(-part.__array_interface__["data"][0] // 128) * 128 for part in memory]
        for rank in range(ranks):
            owned = [k for k in range(slices) if k * ranks // slices == rank]
            hosts = len(self.layout)
            rails = [
                [self.sockets[k, host, g].fileno() if g != host else -1 for g in range(hosts)] for k in owned
            ]
            exchange = shared_memory.Exchange(host, hosts, rank, ranks, slices, rails, self.bells[host])
            window = shared_memory.Window(rank, areas, chunk, capacity, exchange)
            window.clear()
            self.exchanges.append(exchange)
            self.windows.append(window)

    def run(self, job: Job) -> list[Any]:
        """Run ``job(rank, window)`` on a thread for each rank; return the results."""
        results: list[Any] = [None] * len(self.windows)
        errors: list[BaseException] = []

        def play(rank: int) -> None:
            try:
                results[rank] = job(rank, self.windows[rank])
            except BaseException as exc:
                errors.append(exc)
                self.close()

        threads = [threading.Thread(target=play, args=(r,), daemon=True) for r in range(len(self.windows))]
        for thread in threads:
            thread.start()
        until = time.monotonic() + TIMEOUT
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0.0))
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        if errors:
            raise errors[0]
        return results

    def cut(self, host: int) -> None:
        """End all connections of a host."""
        for (_, a, _), each in self.sockets.items():
            if a == host:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections."""
        for host in range(len(self.layout)):
            self.cut(host)

    def __del__(self) -> None:
        for each in self.sockets.values():
            each.close()
        for bells in self.bells:
            for bell in bells:
                os.close(bell)


def _connected_pair() -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for each in pair:
        each.setblocking(False)
    return pair


def _slow_pair(rate: float) -> tuple[socket.socket, socket.socket]:
    """Return two sockets that do not block, connected by threads that pass `rate` bytes per second on."""
    (a, near), (b, far) = socket.socketpair(), socket.socketpair()
    for each in (a, b):
        each.setblocking(False)

    def relay(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                time.sleep(len(data) / rate)
                target.sendall(data)
        target.close()

    for ends in ((near, far), (far, near)):
        threading.Thread(target=relay, args=ends, daemon=True).start()
    return a, b


def oracle(layout: Sequence[int], parts: list[Array], code: int, op: int, factor: float) -> Array:
    """Reduce the ranks of each host in order, then the hosts in order."""
    partial: list[Array] = []
    first = 0
    for ranks in layout:
        own = parts[first : first + ranks]
        first += ranks
        partial.append(own[0] if ranks == 1 else np.empty_like(own[0]))
        if ranks > 1 and own[0].size:
            _fusion.reduce(addresses([partial[-1]])[0], addresses(own), own[0].size, code, op, 1.0)
    out = np.empty_like(parts[0])
    if out.size:
        _fusion.reduce(addresses([out])[0], addresses(partial), out.size, code, op, factor)
    return out


def reduce(
    window: shared_memory.Window,
    sources: list[Array | None],
    targets: list[Array | None],
    counts: list[int],
    code: int = Code.FLOAT32,
    op: int = ReduceOp.SUM,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> bool:
    srcs = np.array([0 if a is None else a.__array_interface__["data"][0] for a in sources], np.int64)
    dsts = np.array([0 if a is None else a.__array_interface__["data"][0] for a in targets], np.int64)
    return window.allreduce(srcs, dsts, starts_of(counts), code, op, prescale, postscale)


LAYOUTS = [(1, 1), (2, 2), (1, 1, 1, 1), (3, 1), (1, 2, 4), (2, 1, 1)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("inplace", [True, False])
def test_an_allreduce_sums_host_by_host(layout: tuple[int, ...], inplace: bool) -> None:
    hosts = Hosts(layout)
    size = sum(layout)
    for total in (1, 7, 4096, 4097, 20_000, 70_001, 700_001):
        parts = [random_array(np.random.default_rng(r), total, np.float32) for r in range(size)]
        expected = oracle(layout, parts, Code.FLOAT32, ReduceOp.SUM, 0.25)

        def job(rank: int, window: shared_memory.Window, parts: list[Array] = parts) -> Array:
            source = parts[rank].copy()
            target = source if inplace else np.empty_like(source)
            assert reduce(window, [source], [target], [source.size], postscale=0.25)
            assert inplace or source.tobytes() == parts[rank].tobytes()
            return target

        for result in hosts.run(job):
            assert result.tobytes() == expected.tobytes()


CASES = [
    (row.code, op) for row in BY_CODE.values() for op in sorted(row.ops - {ReduceOp.AVERAGE, ReduceOp.ADASUM})
]


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data(), layout=st.sampled_from(LAYOUTS), chunk=st.sampled_from([CHUNK, 4 * CHUNK]))
def test_random_jobs_one_behind_the_other(data: st.DataObject, layout: tuple[int, ...], chunk: int) -> None:
    size = sum(layout)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    jobs = []
    for _ in range(data.draw(st.integers(1, 6))):
        code, op = data.draw(st.sampled_from(CASES))
        counts = data.draw(
            st.lists(st.integers(0, data.draw(st.sampled_from([5, 3000, 60_000]))), max_size=5)
        )
        joined = {r for r in range(size) if data.draw(st.integers(0, 9)) == 0}
        prescale = data.draw(st.sampled_from([1.0, 0.5])) if BY_CODE[code].name.startswith("float") else 1.0
        inplace, dropped = data.draw(st.booleans()), data.draw(st.booleans())
        jobs.append((code, op, counts, joined, prescale, inplace, dropped))
    hosts = Hosts(layout, chunk)
    inputs = []
    for code, _, counts, *_ in jobs:
        item = BY_CODE[code].itemsize
        inputs.append([[_values(rng, code, n, item) for n in counts] for _ in range(size)])

    def job(rank: int, window: shared_memory.Window) -> list[list[Array | None]]:
        results = []
        for (code, op, counts, joined, prescale, inplace, dropped), values in zip(jobs, inputs, strict=True):
            sources = [None if rank in joined else each.copy() for each in values[rank]]
            targets: list[Array | None] = [
                each if inplace and each is not None else np.empty_like(values[rank][k])
                for k, each in enumerate(sources)
            ]
            if dropped and rank in joined:
                targets = [None] * len(targets)
            assert reduce(window, sources, targets, counts, code, op, prescale, 1.0)
            results.append(targets)
        return results

    outcomes = hosts.run(job)
    for index, ((code, op, counts, joined, prescale, *_), values) in enumerate(
        zip(jobs, inputs, strict=True)
    ):
        for k, count in enumerate(counts):
            parts = [_prepared(values[r][k], code, op, prescale, r in joined) for r in range(size)]
            expected = oracle(layout, parts, code, op, 1.0) if count else values[0][k]
            for rank in range(size):
                if (result := outcomes[rank][index][k]) is not None:
                    assert result.tobytes() == expected.tobytes(), (index, k, rank)


def _values(rng: np.random.Generator, code: int, count: int, item: int) -> Array:
    names = {Code.BFLOAT16: "uint16", Code.BOOL: "bool"}
    name = names.get(Code(code), BY_CODE[code].name)
    if code == Code.BFLOAT16:
        return (rng.normal(size=count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    array = random_array(rng, count, np.dtype(name))
    assert array.itemsize == item
    return array


def _prepared(values: Array, code: int, op: int, prescale: float, joined: bool) -> Array:
    out = np.empty_like(values)
    source = 0 if joined else int(addresses([values])[0])
    ptrs, counts = np.array([source], np.int64), np.array([values.size], np.int64)
    _fusion.pack(int(addresses([out])[0]), ptrs, counts, code, op, prescale)
    return out


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("total", [100, 1_000_000])
def test_a_late_rank_is_waited_for_asleep(layout: tuple[int, ...], total: int) -> None:
    hosts = Hosts(layout)
    used: list[float] = []

    def job(rank: int, window: shared_memory.Window) -> Array:
        array = np.full(total, float(rank), np.float32)
        if rank == 0:
            time.sleep(1.0)
        before = time.thread_time()
        assert reduce(window, [array], [array], [total])
        if rank:
            used.append(time.thread_time() - before)
        return array

    for result in hosts.run(job):
        assert (result == sum(range(sum(layout)))).all()
    assert max(used) < 0.3, used


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (1, 1, 1), (3, 1)], ids=str)
@pytest.mark.parametrize("total", [100, 1_000_000])
def test_what_crosses_is_counted(layout: tuple[int, ...], total: int) -> None:
    hosts = Hosts(layout)
    number = [5, 3, 4]  # of the job's hosts; the exchange's are 0, 1, ...
    counters = [shared_memory.RailCounters(6) for _ in hosts.exchanges]
    for exchange, each in zip(hosts.exchanges, counters, strict=True):
        exchange.count_in(each, number[: len(layout)])
    begun = threading.Barrier(sum(layout))

    others = counters[: sum(layout[:-1])]

    def bytes_sent() -> list[int]:
        return [sum(row[0] for row in each.read()) for each in others]

    def job(rank: int, window: shared_memory.Window) -> None:
        for late in (False, True):
            begun.wait()
            before, until = bytes_sent(), time.monotonic() + 10
            begun.wait()
            if late and rank >= len(others):
                while any(map(int.__eq__, before, bytes_sent())) and time.monotonic() < until:
                    time.sleep(0.001)  # the others have yet to begin
                time.sleep(0.3)
            array = np.ones(total, np.float32)
            assert reduce(window, [array], [array], [total])

    hosts.run(job)
    last_host = len(layout) - 1
    sent, received = np.zeros((6, 6), np.int64), np.zeros((6, 6), np.int64)
    places = [host for host, ranks in enumerate(layout) for _ in range(ranks)]
    for host, each in zip(places, counters, strict=True):
        rows = each.read()
        mine, late = number[host], number[last_host]
        assert sum(last for _, _, last, _ in rows) == 2
        assert rows[mine][:2] == (0, 0)
        if host != last_host:
            # Of several chunks, the last one may come from a third host.
            assert rows[late][2] >= (total == 100 or len(layout) == 2)
            # A loaded machine may let a rank wait later than it has sent, and lengthens each wait.
            assert 0.05e9 < rows[late][3] < 5e9
        sent[mine] += [row[0] for row in rows]
        received[mine] += [row[1] for row in rows]
    assert (sent == received.T).all()
    # Chunks of 16 KiB go whole, each slice on its rail; a flat operation goes on all rails.
    part = total * 4 * (1 if total * 4 > shared_memory.FLAT else max(layout))
    for a, b in ((a, b) for a in number[: len(layout)] for b in number[: len(layout)] if a != b):
        assert 2 * part < sent[a, b] < 2.02 * part + 500


@pytest.mark.parametrize(
    ("layout", "share"), [((3, 3, 3), 4 / 3), ((2, 2, 2, 2), 3 / 2), ((4, 4), 1)], ids=str
)
def test_hosts_with_several_ranks_send_no_byte_more(layout: tuple[int, ...], share: float) -> None:
    """A large allreduce of n bytes sends 2 n (H - 1) / H from each of H hosts, for any number of ranks."""
    hosts = Hosts(layout, chunk=384 * 1024)
    counters = [shared_memory.RailCounters(len(layout)) for _ in hosts.exchanges]
    for exchange, each in zip(hosts.exchanges, counters, strict=True):
        exchange.count_in(each, range(len(layout)))
    total = 10 * 384 * 1024 // 4

    def job(_: int, window: shared_memory.Window) -> None:
        array = np.ones(total, np.float32)
        assert reduce(window, [array], [array], [total])
        assert (array == sum(layout)).all()

    hosts.run(job)
    sent = sum(row[0] for each in counters for row in each.read())
    assert share <= sent / (4 * total * len(layout)) < 1.01 * share


def test_hosts_need_valid_numbers() -> None:
    (exchange, _) = Hosts((1, 1)).exchanges
    for wrong in ([0], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="do not number 2 of 2 hosts"):
            exchange.count_in(shared_memory.RailCounters(2), wrong)


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("total", [100, 1_000_000])
def test_a_lost_connection_names_the_host(layout: tuple[int, ...], total: int) -> None:
    hosts = Hosts(layout)
    missing = sum(layout) - 1

    def job(rank: int, window: shared_memory.Window) -> bool | None:
        if rank == missing:
            hosts.cut(len(layout) - 1)
            window.abort(b"gone")
            return None
        array = np.ones(total, np.float32)
        return reduce(window, [array], [array], [total])

    first_host = layout[0]
    outcomes = hosts.run(job)
    assert outcomes[:first_host] == [False] * first_host
    for exchange in hosts.exchanges[:first_host]:
        assert exchange.lost is not None
        assert exchange.lost[0] == len(layout) - 1


@pytest.mark.parametrize("layout", [(1, 1), (2, 1)], ids=str)
def test_a_slow_link_has_less_in_flight(layout: tuple[int, ...]) -> None:
    """At 50 MB/s there are 512 KiB in flight: 2 chunks of 256 KiB, or as many small ones as there can be."""
    hosts = Hosts(layout, chunk=1 << 18, connect=lambda: _slow_pair(5e7))
    total = 1 << 20

    def job(rank: int, window: shared_memory.Window) -> list[int]:
        depths = []
        for chunk in (1 << 18, 1 << 14):
            window.resize(chunk)
            for _ in range(2):
                array = np.full(total, float(rank), np.float32)
                assert reduce(window, [array], [array], [total])
                assert (array == sum(range(sum(layout)))).all()
                depths.append(hosts.exchanges[rank].depth)
        return depths

    for depths in hosts.run(job):
        assert depths == [2, 2, 4, 4]


@settings(deadline=None, max_examples=examples(30))
@given(data=st.data(), layout=st.sampled_from(LAYOUTS))
def test_every_rank_may_have_its_own_depth(data: st.DataObject, layout: tuple[int, ...]) -> None:
    hosts = Hosts(layout)
    total = 100_000
    depths = [
        data.draw(st.lists(st.integers(2, shared_memory.ACROSS_SLOTS), min_size=3, max_size=3))
        for _ in range(sum(layout))
    ]
    parts = [random_array(np.random.default_rng(r), total, np.float32) for r in range(sum(layout))]
    expected = oracle(layout, parts, Code.FLOAT32, ReduceOp.SUM, 1.0).tobytes()

    def job(rank: int, window: shared_memory.Window) -> None:
        for depth in depths[rank]:
            hosts.exchanges[rank].depth = depth
            array = parts[rank].copy()
            assert reduce(window, [array], [array], [total])
            assert array.tobytes() == expected

    hosts.run(job)


def test_a_frame_of_another_length_is_an_error() -> None:
    hosts = Hosts((1, 1))

    def job(rank: int, window: shared_memory.Window) -> bool:
        array = np.ones(100 + rank, np.float32)
        return reduce(window, [array], [array], [array.size])

    assert hosts.run(job) == [False, False]
    assert {exchange.lost for exchange in hosts.exchanges} & {(0, 71), (1, 71)}


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="2 to 64 hosts"):
        shared_memory.Exchange(0, 1, 0, 1, 1, [[-1]], [0])
    with pytest.raises(ValueError, match="rank 0 of 1 owns 2 of 2 slices, not 1"):
        shared_memory.Exchange(0, 2, 0, 1, 2, [[-1, 3]], [0])

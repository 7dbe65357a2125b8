"""Test ranks that are threads of several simulated hosts."""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
from dataclasses import astuple
from functools import partial
from threading import Event
from typing import Any, cast

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.controller import Node
from pyhvd.engine.context import current
from pyhvd.engine.fast_path import FastPathAdapter
from pyhvd.negotiation.messages import Request, RequestList, RequestType
from pyhvd.testing import run_ranks
from pyhvd.transport import link_layout
from pyhvd.transport.tree import Tree
from pyhvd.transport.world import Topology
from tests.conformance import disagreements, joining, refusals, sets
from tests.conformance.cases import SECONDS, Case, Cases, each, on_threads, outcome
from tests.conformance.endings import ENDINGS
from tests.ranks.test_aborts import check_error


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        ([0, 0, 1, 1], [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
        ([5, 5, 5, 2], [(0, 3, 0, 2), (1, 3, 0, 1), (2, 3, 0, 1), (0, 1, 1, 2)]),
        ([0, 1, 0, 1], [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
    ],
)
def test_place_of_a_rank(hosts: list[int], places: list[tuple[int, ...]]) -> None:
    lowest = tuple(hosts.index(host) for host in hosts)
    even = len({hosts.count(host) for host in hosts}) == 1
    for rank, place in enumerate(places):
        assert astuple(Topology.of(rank, hosts)) == (rank, 4, *place, even, lowest)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 2]])
def test_collectives_and_sets_over_several_hosts(hosts: list[int]) -> None:
    def rank() -> None:
        here = hvd.rank()
        assert hvd.local_size() == hosts.count(hosts[here])
        half = hvd.add_process_set([1, 2])
        for step in range(3):
            assert hvd.allreduce(np.full(3, here), name="a", op=hvd.Sum).tolist() == [6, 6, 6]
            gathered = hvd.allgather(np.full(here + 1, step), name="b")
            assert gathered.tolist() == [step] * 10
            if here in (1, 2):
                assert hvd.allreduce(np.ones(2), name="c", op=hvd.Sum, process_set=half).tolist() == [2, 2]
        assert hvd.join() in range(4)

    run_ranks(4, rank, timeout=SECONDS, knobs={"dynamic_process_sets": True}, hosts=hosts)


def test_sets_of_several_hosts_have_links() -> None:
    def rank() -> list[str]:
        added = [hvd.add_process_set(ranks) for ranks in ([0, 1], [1, 2])]
        for one in added:
            if one.included():
                hvd.barrier(one)  # the first batch makes the backend
        names = [backend.name for backend in current().runtime._executor.backends.values()]
        hvd.barrier()
        return names

    knobs = {"dynamic_process_sets": True}
    assert run_ranks(4, rank, timeout=SECONDS, knobs=knobs, hosts=[0, 0, 1, 1])[1] == [
        "LINKS",
        "SHM",
        "LINKS",
    ]


@pytest.mark.parametrize("knobs", [{"check": "results,finite"}, {"cache_capacity": 0}])
def test_hosts_send_beats_though_no_tensor_uses_the_fast_path(knobs: dict[str, Any]) -> None:
    def rank() -> bool:
        for step in range(5):
            assert hvd.allreduce(np.full(3, step), name="a", op=hvd.Sum).tolist() == [2 * step] * 3
        fast_path = current().fast_path
        assert fast_path is None or (fast_path.position() > 0 and not fast_path.delegates)
        return fast_path is not None

    assert run_ranks(2, rank, timeout=SECONDS, knobs=knobs, hosts=[0, 1]) == [True, True]
    assert run_ranks(2, rank, timeout=SECONDS, knobs=knobs) == [False, False]


def test_each_rank_needs_a_host() -> None:
    with pytest.raises(ValueError, match="hosts has 2 numbers, but needs one for each of 3 ranks"):
        run_ranks(3, lambda: None, hosts=[0, 1])


LAYOUTS = ([0, 0, 1, 1], [0, 1, 1, 2])


@pytest.fixture(params=LAYOUTS, ids=str)
def hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return each rank's host; each leader has one leader below it, so the tree is deep.

    Of three hosts the last one has a parent in the tree of hosts.
    """
    monkeypatch.setattr(Tree, "of", partial(Tree.of, fan_out=1))
    monkeypatch.setattr(link_layout, "FLAT", 1)
    layout: list[int] = request.param
    return layout


@each(Cases([*disagreements.CASES, *refusals.CASES, *joining.CASES, *joining.IN_SETS, *sets.DYNAMIC]), 4)
def test_messages_through_leaders(case: Case, size: int, hosts: list[int]) -> None:
    on_threads(case, size, hosts, dynamic_process_sets=True)


@pytest.mark.parametrize("name", ENDINGS)
def test_ending(name: str, hosts: list[int]) -> None:
    def rank() -> None:
        ENDINGS[name](int(threading.current_thread().name.removeprefix("rank-")), 4)

    run_ranks(4, rank, timeout=SECONDS, init=False, hosts=hosts)


@pytest.mark.parametrize("bad", range(4))
def test_a_ranks_failure_is_heard_on_every_host(
    bad: int, hosts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine of a rank breaks, which may be a leader: the ranks that wait below it get the last list."""

    def breaks(_: FastPathAdapter, fresh: list[tuple[int, Request]]) -> list[tuple[int, Request]]:
        if any(request.name == "break" for _, request in fresh):
            raise MemoryError("no room")
        return fresh

    monkeypatch.setattr(FastPathAdapter, "before_sending", breaks)

    def call() -> None:
        hvd.barrier()  # a slow rank may still be in it when it hears of the failure
        hvd.allreduce(np.ones(1), name="break" if hvd.rank() == bad else "x")

    def rank() -> None:
        check_error(outcome(call), victim=bad)

    run_ranks(4, rank, timeout=SECONDS, hosts=hosts)


def test_a_late_rank_of_another_host_is_reported(hosts: list[int], caplog: pytest.LogCaptureFixture) -> None:
    over = Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "not submitted by rank 3, submitted by ranks 0-2" in record.getMessage():
                over.set()

    def rank() -> None:
        hvd.barrier()
        if hvd.rank() == 3:
            assert over.wait(20)
        assert hvd.allreduce(np.ones(4), name="x", op=hvd.Sum).tolist() == [4] * 4

    handler = Heard()
    logging.getLogger("pyhvd").addHandler(handler)
    try:
        run_ranks(4, rank, timeout=SECONDS, knobs={"stall_check_time_seconds": 0.3}, hosts=hosts)
    finally:
        logging.getLogger("pyhvd").removeHandler(handler)
    assert any("has not submitted 'x': it is at" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("layout", [[0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]], ids=str)
def test_every_way_across_hosts_gives_the_same_bits(layout: list[int]) -> None:
    """By links or by MPI's algorithms, by message or from the cache, alone or fused."""

    def rank() -> list[bytes]:
        found = []
        for dtype in (np.float16, np.float32, np.float64, np.int32):
            for n in (1, 1000, 70_000):
                rng = np.random.default_rng([n, hvd.rank()])
                part = (rng.normal(size=n) * 100).astype(dtype)
                name = f"{np.dtype(dtype).name}.{n}"
                results = [hvd.allreduce(part, name=name, op=hvd.Sum) for _ in range(3)]
                twice = hvd.grouped_allreduce([part, part[: n // 2]], name=name + "g", op=hvd.Sum)
                assert len({each.tobytes() for each in [*results, twice[0]]}) == 1
                assert twice[1].tobytes() == results[0][: n // 2].tobytes()
                scattered = hvd.reducescatter(part, name=name + "s", op=hvd.Sum)
                first = sum(n // hvd.size() + (r < n % hvd.size()) for r in range(hvd.rank()))
                assert scattered.tobytes() == results[0][first : first + len(scattered)].tobytes()
                found.append(results[0].tobytes())
        return found

    ways = [{}, {"links": False}, {"fast_lane": False}]
    outcomes = [run_ranks(len(layout), rank, timeout=SECONDS, hosts=layout, knobs=knobs) for knobs in ways]
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("layout", [[0, 1], [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 1, 2]], ids=str)
@pytest.mark.parametrize("chunk_size", [16 * 1024, 256 * 1024])
def test_bytes_move_across_hosts(layout: list[int], chunk_size: int) -> None:
    """Through few lanes and many chunks, or many lanes and few chunks."""
    size = len(layout)

    def rows_of(sender: int, receiver: int, n: int) -> int:
        return (sender * 3 + receiver * 5) % 4 * n // 3

    def values(sender: int, receiver: int, n: int) -> np.ndarray:
        return np.arange(rows_of(sender, receiver, n), dtype=np.int64) * (100 * sender + receiver + 1)

    def rank() -> None:
        me = hvd.rank()
        for n in (0, 1, 50, 30_000):
            parts = [np.full((rows_of(r, 0, n), 3), r, np.int32) for r in range(size)]
            assert (hvd.allgather(parts[me], name=f"g{n}") == np.concatenate(parts)).all()
            for root in range(size):
                sent = np.full(n, me, np.float64)
                assert (hvd.broadcast(sent, root, name=f"b{n}.{root}") == root).all()
            splits = [rows_of(me, r, n) for r in range(size)]
            data = np.concatenate([values(me, r, n) for r in range(size)])
            out, received = hvd.alltoall(data, splits, name=f"a{n}")
            assert received.tolist() == [rows_of(r, me, n) for r in range(size)]
            assert (out == np.concatenate([values(r, me, n) for r in range(size)])).all()
            if n and size in (2, 4):
                same = hvd.allreduce(np.arange(n) + 1.0, name=f"d{n}", op=hvd.Adasum)
                assert np.allclose(same, np.arange(n) + 1.0)

    run_ranks(size, rank, timeout=SECONDS, hosts=layout, knobs={"chunk_size": chunk_size})


def test_a_cached_tensor_that_waits_names_the_late_rank(caplog: pytest.LogCaptureFixture) -> None:
    """The ranks of the other host have marked it, some of them or all."""
    late = (1, 3)
    over = Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "not submitted by ranks 1, 3, submitted by ranks 0, 2" in record.getMessage():
                over.set()

    def rank() -> None:
        for _ in range(3):
            hvd.allreduce(np.ones(4), name="x", op=hvd.Sum)
        if hvd.rank() in late:
            assert over.wait(20)
        assert hvd.allreduce(np.ones(4), name="x", op=hvd.Sum).tolist() == [4] * 4

    handler = Heard()
    logging.getLogger("pyhvd").addHandler(handler)
    try:
        run_ranks(4, rank, timeout=SECONDS, knobs={"stall_check_time_seconds": 0.3}, hosts=[0, 0, 1, 1])
    finally:
        logging.getLogger("pyhvd").removeHandler(handler)


def _note_what_rank_1_sends(awaited: str, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], Event]:
    """Return the kinds of what rank 1 sends, and an event that is set with the first of a kind."""
    sent: list[str] = []
    told, submit = Event(), Node.submit

    def send(node: Node, message: RequestList, now: float) -> None:
        submit(node, message, now)
        if current().topology.rank == 1:
            sent.extend("tensor" for _ in message.bits)
            for _, request in message.requests:
                kind = "join" if request.type == RequestType.JOIN else "tensor"
                sent.append("refusal" if request.error else kind)
            if awaited in sent:
                told.set()

    monkeypatch.setattr(Node, "submit", send)
    return sent, told


@pytest.mark.parametrize("in_a_set", [False, True])
@pytest.mark.parametrize("what", ["join", "refusal"])
def test_it_comes_after_the_messages_about_tensors_marked_before_it(
    what: str, in_a_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It recalls their slots, so the rank submits them again, and rank 0 would not expect that."""
    sent, told = _note_what_rank_1_sends(what, monkeypatch)

    def member(process_set: hvd.ProcessSet) -> None:
        mine = np.array([10.0 ** hvd.rank()])
        submit = partial(hvd.allreduce_async, mine, name="x", op=hvd.Sum, process_set=process_set)
        for _ in range(3):
            submit().result()
        if hvd.rank() == 1:
            sent.clear()
            handle = submit()
            handle.flush()
            if what == "refusal":
                with pytest.raises(hvd.DuplicateNameError):
                    submit()
        else:
            assert told.wait(20)
            handle = submit()
        if what == "join":
            hvd.join()
        assert handle.result().tolist() == [11.0]
        if what == "refusal" and hvd.rank() == 0:
            with pytest.raises(hvd.RankFailedError, match="rank 1 refused it"):
                submit().result()
        assert submit().result().tolist() == [11.0]

    def rank() -> None:
        members = hvd.add_process_set([0, 1]) if in_a_set else hvd.global_process_set
        if members.included():
            member(members)
        elif what == "join":
            hvd.join()
        if in_a_set:
            assert hvd.remove_process_set(members)

    hosts = [0, 1, 1] if in_a_set else [0, 1]
    run_ranks(len(hosts), rank, timeout=SECONDS, hosts=hosts, knobs={"dynamic_process_sets": in_a_set})
    assert sent[:2] == ["tensor", what]


def test_a_marked_tensor_whose_cache_slot_another_takes() -> None:
    """The slot is recalled and given away at one place of the order; the tensor must go by message."""
    one = np.ones(1)

    def rank() -> None:
        for step in range(5):
            for _ in range(3):
                for name in ("x", "y"):
                    hvd.allreduce(one, name=f"{name}{step}", op=hvd.Sum)
            if early := hvd.rank() == 1:
                handle = hvd.allreduce_async(one, name=f"x{step}", op=hvd.Sum)
                handle.flush()
            hvd.allreduce(one, name=f"z{step}", op=hvd.Sum)
            if not early:
                handle = hvd.allreduce_async(one, name=f"x{step}", op=hvd.Sum)
            assert handle.result().tolist() == [2.0]

    run_ranks(2, rank, timeout=SECONDS, hosts=[0, 1], knobs={"cache_capacity": 2})


@pytest.mark.parametrize("alone", [2, 3])
def test_a_cached_tensor_that_one_rank_of_another_host_waits_for_is_reported(
    alone: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank 0 sees the marks of neither host; with a set of that host alone, too."""
    over = Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if f"submitted by rank {alone} " in record.getMessage():
                over.set()

    def rank() -> None:
        both = hvd.add_process_set([2, 3])
        sets = [hvd.global_process_set, *([both] if hvd.rank() > 1 else [])]
        for members in sets:
            for _ in range(3):
                hvd.allreduce(np.ones(4), name="x", op=hvd.Sum, process_set=members)
        for members in sets[:: -1 if hvd.rank() > 1 else 1]:
            if hvd.rank() != alone:
                assert over.wait(20)
            out = hvd.allreduce(np.ones(4), name="x", op=hvd.Sum, process_set=members)
            assert out[0] == members.size()

    handler = Heard()
    logging.getLogger("pyhvd").addHandler(handler)
    knobs = {"stall_check_time_seconds": 0.3, "dynamic_process_sets": True}
    try:
        run_ranks(4, rank, timeout=SECONDS, knobs=knobs, hosts=[0, 0, 1, 1])
    finally:
        logging.getLogger("pyhvd").removeHandler(handler)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1]], ids=str)
def test_a_broken_rail_fails_the_cached_calls(hosts: list[int]) -> None:
    """The other connections stay: one of several ranks of a host has ended, or its rail has failed."""
    last = len(hosts) - 1

    def reduce_until_an_error() -> None:
        for step in range(100_000):
            hvd.allreduce(np.ones(400), name="x", op=hvd.Sum)  # too large to travel without the rails
            if step == 20 and hvd.rank() == last:
                fabric = cast(Any, current().runtime._executor.backends[0].fabric)
                for peer in [each for rail in fabric._links.rails for each in rail if each is not None]:
                    peer.shutdown(socket.SHUT_RDWR)

    def rank() -> None:
        ends = r"the connection from host \S+ \(ranks? .*\) to host \S+ \(ranks? .*\) has failed"
        with pytest.raises(hvd.RankFailedError, match=ends):
            reduce_until_an_error()

    run_ranks(len(hosts), rank, timeout=SECONDS, hosts=hosts)


@pytest.mark.parametrize("count", [9, 12, 16])
def test_many_hosts_agree_in_a_tree(count: int) -> None:
    """By messages and from the cache; with a set inside one host, recalls and a join."""
    hosts = [*range(count), count - 1]
    size = len(hosts)

    def rank() -> int:
        here = hvd.rank()
        pair = hvd.add_process_set([size - 2, size - 1])
        for step in range(12):
            order = [(k + here) % 6 for k in range(6)]
            handles = [hvd.allreduce_async(np.full(3, here + k), name=f"t{k}", op=hvd.Sum) for k in order]
            for k, handle in zip(order, handles, strict=True):
                assert hvd.synchronize(handle).tolist() == [size * (size - 1) // 2 + k * size] * 3
            # Another shape recalls the slot.
            assert hvd.allreduce(np.ones(1 + step // 4), name="changes", op=hvd.Sum)[0] == size
            if here >= size - 2:
                assert hvd.allreduce(np.ones(2), name="p", op=hvd.Sum, process_set=pair).tolist() == [2, 2]
        if here % 2:
            assert hvd.allreduce(np.ones(2), name="odd", op=hvd.Sum).tolist() == [size // 2] * 2
        hvd.join()
        return hvd.metrics().responses["fast"]

    assert min(run_ranks(size, rank, timeout=SECONDS, knobs={"dynamic_process_sets": True}, hosts=hosts)) > 10


NINE = list(range(9))
"""Hosts of a tree: 3 tops, each with two others below it."""


def vanish() -> int:
    """End what this rank's host sends to its neighbours in the tree; return how many it has.

    The GIL is kept meanwhile: otherwise a neighbour might end too, and be reported to the next one.
    """
    links = cast(Any, current().runtime)._executor.backends[0].fabric._links
    fds = [peer.fileno() for peer in links.agreement if peer is not None]
    keeps_gil = ctypes.PyDLL(None)
    assert not any(keeps_gil.shutdown(fd, socket.SHUT_WR) for fd in fds)
    return len(fds)


@pytest.mark.parametrize(("lost", "neighbours"), [(1, 4), (8, 1)])
def test_a_host_that_is_lost_is_known_to_all_hosts(lost: int, neighbours: int) -> None:
    """A top, or a host below one: all others name it."""

    def call() -> None:
        for step in range(100_000):
            hvd.allreduce(np.ones(4), name="x", op=hvd.Sum)
            if step == 20 and hvd.rank() == lost:
                assert vanish() == neighbours

    def rank() -> None:
        error = outcome(call)
        assert isinstance(error, hvd.RankFailedError), repr(error)
        assert hvd.rank() == lost or f"(rank {lost})" in str(error), error

    run_ranks(9, rank, timeout=SECONDS, hosts=NINE)


@pytest.mark.parametrize("bad", [0, 1, 4, 8])
def test_a_failure_is_heard_through_the_tree(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all other ranks wait for cached tensors."""

    works = FastPathAdapter.before_sending

    def breaks(self: FastPathAdapter, fresh: list[tuple[int, Request]]) -> list[tuple[int, Request]]:
        if any(request.name == "break" for _, request in fresh):
            raise MemoryError("no room")
        return works(self, fresh)

    monkeypatch.setattr(FastPathAdapter, "before_sending", breaks)

    def call() -> None:
        for _ in range(5):
            hvd.allreduce(np.ones(1), name="x")
        hvd.allreduce(np.ones(1), name="break" if hvd.rank() == bad else "x")

    def rank() -> None:
        check_error(outcome(call), victim=bad)

    run_ranks(9, rank, timeout=SECONDS, hosts=NINE)

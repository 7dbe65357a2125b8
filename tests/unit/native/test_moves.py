"""Moves over several hosts: bytes between windows that are linked by sockets, compared with numpy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pyhvd.arrays import address
from pyhvd.dtypes import Code, ReduceOp
from pyhvd.native import shared_memory
from pyhvd.transport import moves
from pyhvd.transport.moves import Move, MoveLayout, Portions
from tests.thinning import examples
from tests.unit.native.test_exchange import CHUNK, LAYOUTS, Hosts, oracle, reduce
from tests.unit.native.test_window import Array

LENGTHS = (0, 0, 1, 15, 16, 100, 5000, 40_000, 200_000, 900_000)


def places(layout: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each host."""
    numbers = iter(range(sum(layout)))
    return [[next(numbers) for _ in range(ranks)] for ranks in layout]


def run(window: shared_memory.Window, made: Iterable[Move], source: int, target: int) -> bool:
    return all(window.move(each, source, target) for each in made)


def gather(window: shared_memory.Window, layout: MoveLayout, blocks: list[Array], rank: int) -> Array:
    """Gather every rank's block."""
    counts = [len(block) for block in blocks]
    out = np.zeros(sum(counts), np.uint8)
    first = sum(counts[:rank])
    out[first : first + counts[rank]] = blocks[rank]
    assert run(window, layout.gather(counts, window.chunk), address(out) + first, address(out))
    return out


def alltoall(window: shared_memory.Window, layout: MoveLayout, blocks: list[list[Array]], rank: int) -> Array:
    """Exchange blocks; every rank knows all of them here."""
    sizes = np.array([[len(block) for block in row] for row in blocks], np.int64)
    table = np.stack([np.stack([sizes[q], sizes[:, q]]) for q in layout.neighbours])
    send, recv = np.concatenate(blocks[rank]), np.zeros(table[layout.local, 1].sum(), np.uint8)
    at, own = sum(len(blocks[q][rank]) for q in range(rank)), blocks[rank][rank]
    recv[at : at + len(own)] = own
    largest = layout.largest_trade(sizes)
    assert run(window, layout.alltoall(table, window.chunk, largest), address(send), address(recv))
    return recv


@settings(deadline=None, max_examples=examples(60))
@given(data=st.data(), layout=st.sampled_from([*LAYOUTS, (1, 1, 2, 1, 1, 1)]))
def test_random_moves_one_behind_the_other(data: st.DataObject, layout: tuple[int, ...]) -> None:
    size, hosts = sum(layout), Hosts(layout, CHUNK, 8 * CHUNK)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    kinds = data.draw(
        st.lists(st.sampled_from(["gather", "alltoall", "reduce", "resize"]), min_size=1, max_size=8)
    )
    plan: list[tuple[str, list[list[Array]]]] = []
    for kind in kinds:
        lengths = rng.choice(LENGTHS, (size, size)) // (size if kind == "alltoall" else 1)
        plan.append((kind, [[rng.integers(0, 256, n, np.uint8) for n in row] for row in lengths]))
    chunk_sizes = [CHUNK * int(rng.integers(1, 9)) for _ in plan]

    def job(rank: int, window: shared_memory.Window) -> list[Array]:
        mine, results = MoveLayout(places(layout), rank), []
        for (kind, blocks), chunk in zip(plan, chunk_sizes, strict=True):
            if kind == "gather":
                results.append(gather(window, mine, [row[0] for row in blocks], rank))
            elif kind == "alltoall":
                results.append(alltoall(window, mine, blocks, rank))
            elif kind == "reduce":
                out = np.full(len(blocks[0][0]) // 4, rank, np.float32)
                assert reduce(window, [out], [out], [out.size])
                results.append(out)
            else:
                window.resize(chunk)
        return results

    for rank, results in enumerate(hosts.run(job)):
        found = iter(results)
        for kind, blocks in plan:
            if kind == "gather":
                assert next(found).tobytes() == b"".join(row[0].tobytes() for row in blocks)
            elif kind == "alltoall":
                assert next(found).tobytes() == b"".join(row[rank].tobytes() for row in blocks)
            elif kind == "reduce":
                assert (next(found) == sum(range(size))).all()


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (1, 2, 1)], ids=str)
def test_long_lanes_go_past_the_caches(layout: tuple[int, ...]) -> None:
    size, hosts = sum(layout), Hosts(layout, 16 * CHUNK)
    rng = np.random.default_rng(size)
    blocks = [[rng.integers(0, 256, (5 << 20) + 3 * q, np.uint8) for q in range(size)] for _ in range(size)]

    def job(rank: int, window: shared_memory.Window) -> tuple[Array, Array]:
        mine = MoveLayout(places(layout), rank)
        return gather(window, mine, [row[0] for row in blocks], rank), alltoall(window, mine, blocks, rank)

    for rank, (all_first, own) in enumerate(hosts.run(job)):
        assert all_first.tobytes() == b"".join(row[0].tobytes() for row in blocks)
        assert own.tobytes() == b"".join(row[rank].tobytes() for row in blocks)


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (3, 1), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 1000, 300_000])
@pytest.mark.parametrize("prescale", [1.0, 0.5])
def test_portions_have_the_bits_of_an_allreduce(layout: tuple[int, ...], count: int, prescale: float) -> None:
    size, hosts = sum(layout), Hosts(layout)
    counts = [count + rank % 2 for rank in range(size)]
    parts = [np.random.default_rng(r).normal(size=sum(counts)).astype(np.float32) for r in range(size)]
    scaled = [(part * np.float32(prescale)).astype(np.float32) for part in parts]
    whole = oracle(layout, scaled, Code.FLOAT32, ReduceOp.SUM, 2.0)

    def job(rank: int, window: shared_memory.Window) -> Array:
        portions = Portions.of(counts, rank, MoveLayout(places(layout), rank).by_slice)
        out, starts = np.zeros(counts[rank], np.float32), np.array([0, sum(counts)], np.int64)
        src, dst = (np.array([address(each)], np.int64) for each in (parts[rank], out))
        terms = Code.FLOAT32, ReduceOp.SUM, prescale, 2.0
        assert window.allreduce(src, dst, starts, *terms, portions)
        return out

    for rank, out in enumerate(hosts.run(job)):
        first = sum(counts[:rank])
        assert out.tobytes() == whole[first : first + counts[rank]].tobytes()


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (1, 1, 1)], ids=str)
def test_a_late_rank_is_waited_for_asleep(layout: tuple[int, ...]) -> None:
    hosts, used = Hosts(layout), []
    blocks = [np.full(100_000, rank, np.uint8) for rank in range(sum(layout))]

    def job(rank: int, window: shared_memory.Window) -> Array:
        if rank == 0:
            time.sleep(1.0)
        before = time.thread_time()
        out = gather(window, MoveLayout(places(layout), rank), blocks, rank)
        if rank:
            used.append(time.thread_time() - before)
        return out

    for out in hosts.run(job):
        assert out.tobytes() == np.concatenate(blocks).tobytes()
    assert max(used) < 0.3, used


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("count", [100, 1_000_000])
def test_a_lost_connection_names_the_host(layout: tuple[int, ...], count: int) -> None:
    hosts = Hosts(layout)
    missing = sum(layout) - 1

    def job(rank: int, window: shared_memory.Window) -> bool | None:
        if rank == missing:
            hosts.cut(len(layout) - 1)
            window.abort(b"gone")
            return None
        out = np.zeros(count * sum(layout), np.uint8)
        at, counts = address(out), [count] * sum(layout)
        made = MoveLayout(places(layout), rank).gather(counts, window.chunk)
        done = run(window, made, at + rank * count, at)
        # Others may not notice by themselves, if they only wait for this rank.
        window.abort(b"lost")
        hosts.cut(next(g for g, ranks in enumerate(places(layout)) if rank in ranks))
        return done

    last = layout[-1]
    assert hosts.run(job)[:-last] == [False] * (sum(layout) - last)
    lost = [exchange.lost[0] for exchange in hosts.exchanges[:-last] if exchange.lost is not None]
    assert len(layout) - 1 in lost


def test_a_frame_of_another_length_is_an_error() -> None:
    hosts = Hosts((1, 1), 2 * CHUNK)

    def job(rank: int, window: shared_memory.Window) -> bool:
        out = np.zeros(300, np.uint8)
        counts, at = [100 + rank, 100 + rank], address(out)
        return run(window, MoveLayout([[0], [1]], rank).gather(counts, window.chunk), at, at)

    assert hosts.run(job) == [False, False]
    assert {exchange.lost for exchange in hosts.exchanges} & {(0, 71), (1, 71)}


@settings(deadline=None, max_examples=examples(40))
@given(
    layout=st.sampled_from([(1, 1, 1), (2, 1, 2), (1, 3, 1, 1), (2, 2, 2)]),
    nbytes=st.integers(1600, 20_000),
    data=st.data(),
)
def test_a_broadcast_is_relayed(layout: tuple[int, ...], nbytes: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, sum(layout) - 1))
    values = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    hosts, crossed = Hosts(layout, CHUNK), []

    def job(rank: int, window: shared_memory.Window) -> Array:
        mine = MoveLayout(places(layout), rank)
        out = values.copy() if rank == root else np.zeros(nbytes, np.uint8)
        made = list(mine.broadcast(nbytes, root, 1 << 18))
        if mine.local == 0:
            crossed.append(sum(int(move.lanes[move.out[g]]) for move in made for g in _others(mine, move)))
        assert run(window, made, address(out), address(out))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves, "RELAYED", 1600)
        patch.setattr(moves, "_RAMP", (100, 300, 400))
        patch.setattr(moves, "_SEGMENT", 1000)
        assert all(out.tobytes() == values.tobytes() for out in hosts.run(job))
    assert sum(crossed) == nbytes * (len(layout) - 1)
    assert max(crossed) == nbytes


def _others(layout: MoveLayout, move: Move) -> list[int]:
    return [g for g, lane in enumerate(move.out.tolist()) if lane >= 0 and g != layout.here]


def test_each_byte_crosses_once_per_host() -> None:
    """An allgather and a broadcast send a host's bytes to each host, not to each rank."""
    layout, count = (2, 2), 100_000
    for rank in range(4):
        mine = MoveLayout(places(layout), rank)
        for counts, sent in (([count] * 4, 2 * count), ([0, count, 0, 0], count * (rank < 2))):
            (move,) = mine.gather(counts, CHUNK * 16)
            lanes = [move.out[g] for g in range(2) if g != mine.here]
            assert sum(int(move.lanes[lane]) for lane in lanes if lane >= 0) == sent


def test_wrong_arguments_are_refused() -> None:
    window = Hosts((1, 1)).windows[0]
    none, lanes = np.empty((0, 4), np.int64), np.array([100], np.int64)
    to, back = np.array([-1, 0], np.int64), np.array([-1, -1], np.int64)
    good = Move(none, none, lanes, to, back, single=False, relays=False, direct=False, owned=1, longest=100)
    part = np.array([[0, 50, 60, 4096]], np.int64)
    twice = np.array([[0, 50, 6, 4096]] * 2, np.int64)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("1 lanes do not suit a rank with 1025 slices", {"owned": 1025}),
        ("0 lanes do not suit", {"lanes": lanes[:0]}),
        ("expected 2 lane numbers", {"out": to[:1]}),
        ("there is no lane 1", {"out": to + 1}),
        ("part 0 is not within a lane", {"sources": part}),
        ("part 1 is not behind", {"targets": twice}),
        ("part 0 of a direct move is not all of lane 0", {"targets": twice[:1], "direct": True}),
        ("lane 0 of a direct move has no source", {"direct": True}),
    ]
    for text, changed in wrong:
        with pytest.raises(ValueError, match=text):
            window.move(good._replace(**changed), 0, 0)

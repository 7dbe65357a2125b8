"""The shared window: every operation compared with numpy, in rank order, with ranks as threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pyhvd import _fusion
from pyhvd.dtypes import BY_CODE, Code, ReduceOp
from pyhvd.native import shared_memory

Array = npt.NDArray[Any]
CHUNK = shared_memory.FLAT  # the smallest chunk: small arrays have many chunks
TIMEOUT = 30.0


def on_threads(
    size: int,
    body: Callable[[int, shared_memory.Window], Any],
    chunk: int = CHUNK,
    capacity: int | None = None,
) -> list[Any]:
    """Run ``body(rank, window)`` on threads that share a window; return the results by rank."""
    memory = [np.empty(shared_memory.area_bytes(capacity or chunk) + 128, np.uint8) for _ in range(size)]
    areas = [-(-part.__array_interface__["data"][0] // 128) * 128 for part in memory]
    results: list[Any] = [None] * size
    errors: list[BaseException] = []
    cleared = threading.Barrier(size)

    def play(rank: int) -> None:
        window = shared_memory.Window(rank, areas, chunk, capacity)
        window.clear()
        cleared.wait(TIMEOUT)
        try:
            results[rank] = body(rank, window)
        except BaseException as exc:
            errors.append(exc)
            window.abort(b"")

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads), "a rank hangs in the window"
    if errors:
        raise errors[0]
    return results


def addresses(arrays: list[Array]) -> npt.NDArray[np.int64]:
    return np.array([a.__array_interface__["data"][0] for a in arrays], np.int64)


def starts_of(counts: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def reduce_oracle(parts: list[Array], code: int, op: int, factor: float) -> Array:
    """Reduce in rank order by the kernel, which other tests check."""
    out = np.empty_like(parts[0])
    if out.size:
        _fusion.reduce(addresses([out])[0], addresses(parts), out.size, code, op, factor)
    return out


def random_array(rng: np.random.Generator, count: int, dtype: Any) -> Array:
    if np.dtype(dtype).kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    if np.dtype(dtype).kind in "iu":
        return rng.integers(0, 100, count).astype(dtype)
    values = rng.normal(size=count) * 10.0 ** rng.integers(-3, 3, count)
    imaginary = 1j * rng.normal(size=count) if np.dtype(dtype).kind == "c" else 0.0
    result: Array = (values + imaginary).astype(dtype)
    return result


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("total", [1, 7, 4096, 4097, 20_000, 70_001])
@pytest.mark.parametrize("inplace", [True, False])
def test_allreduce_is_the_reduction_in_rank_order(size: int, total: int, inplace: bool) -> None:
    parts = [random_array(np.random.default_rng(r), total, np.float32) for r in range(size)]
    expected = reduce_oracle(parts, Code.FLOAT32, ReduceOp.SUM, 0.25)

    def body(rank: int, window: shared_memory.Window) -> Array:
        source = parts[rank].copy()
        target = source if inplace else np.empty_like(source)
        counts = starts_of([total])
        for _ in range(3 if not inplace else 1):
            assert window.allreduce(
                addresses([source]), addresses([target]), counts, Code.FLOAT32, ReduceOp.SUM, 1.0, 0.25
            )
        if not inplace:
            assert (source == parts[rank]).all()
        return target

    for result in on_threads(size, body):
        assert result.tobytes() == expected.tobytes()


CASES = [
    (row.name, op)
    for row in BY_CODE.values()
    for op in sorted(row.ops - {ReduceOp.AVERAGE, ReduceOp.ADASUM})
    if row.name != "bfloat16"
]


@pytest.mark.parametrize(("name", "op"), CASES)
def test_every_dtype_and_op_with_many_tensors(name: str, op: ReduceOp) -> None:
    size, counts = 3, [0, 1, 5, 3000, 0, 9000, 17, 12_345]
    info = next(row for row in BY_CODE.values() if row.name == name)
    prescale = 0.5 if info.scalable else 1.0
    given = [
        [random_array(np.random.default_rng((r, i)), n, name) for i, n in enumerate(counts)]
        for r in range(size)
    ]

    def scaled(array: Array) -> Array:
        out = array.copy()
        if out.size and prescale != 1.0:
            _fusion.scale(addresses([out])[0], addresses([array])[0], out.size, info.code, prescale)
        return out

    expected = [
        reduce_oracle([scaled(given[r][i]) for r in range(size)], info.code, op, 1.0)
        for i in range(len(counts))
    ]

    def body(rank: int, window: shared_memory.Window) -> list[Array]:
        targets = [np.empty_like(a) for a in given[rank]]
        where = addresses(given[rank]), addresses(targets), starts_of(counts)
        assert window.allreduce(*where, info.code, op, prescale, 1.0)
        return targets

    for result in on_threads(size, body):
        for got, want in zip(result, expected, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
@pytest.mark.parametrize("total", [100, 30_000])
def test_a_joined_rank_brings_the_neutral_element_and_takes_nothing(op: ReduceOp, total: int) -> None:
    parts = [random_array(np.random.default_rng(r), total, np.float64) for r in range(2)]
    expected = reduce_oracle(parts, Code.FLOAT64, op, 1.0)

    def body(rank: int, window: shared_memory.Window) -> Array | None:
        counts, nothing = starts_of([total]), np.zeros(1, np.int64)
        if rank == 1:
            assert window.allreduce(nothing, nothing, counts, Code.FLOAT64, op, 1.0, 1.0)
            return None
        target = parts[rank // 2].copy()
        assert window.allreduce(addresses([target]), addresses([target]), counts, Code.FLOAT64, op, 1.0, 1.0)
        return target

    first, joined, last = on_threads(3, body)
    assert joined is None
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(last, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("longest", [0, 1, 1000, 16_384, 100_000])
def test_gather_of_uneven_blocks(size: int, longest: int) -> None:
    counts = [longest * (r + 1) // size if r % 2 == 0 else longest // 3 for r in range(size)]
    blocks = [np.random.default_rng(r).integers(0, 256, n).astype(np.uint8) for r, n in enumerate(counts)]
    expected = np.concatenate(blocks)

    def body(rank: int, window: shared_memory.Window) -> Array:
        out = np.zeros(sum(counts), np.uint8)
        assert window.gather(
            int(addresses([blocks[rank]])[0]),
            int(addresses([out])[0]),
            np.array(counts, np.int64),
        )
        return out

    for result in on_threads(size, body):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("unit", [0, 1, 100, 30_000])
def test_alltoall_of_uneven_blocks(size: int, unit: int) -> None:
    counts = [[unit * ((r + 2 * q) % 3) for q in range(size)] for r in range(size)]
    blocks = [
        [np.random.default_rng((r, q)).integers(0, 256, counts[r][q]).astype(np.uint8) for q in range(size)]
        for r in range(size)
    ]

    def body(rank: int, window: shared_memory.Window) -> Array:
        send = np.concatenate(blocks[rank])
        arriving = [counts[q][rank] for q in range(size)]
        recv = np.zeros(sum(arriving), np.uint8)
        assert window.alltoall(
            int(addresses([send])[0]),
            np.array(counts[rank], np.int64),
            int(addresses([recv])[0]),
            np.array(arriving, np.int64),
        )
        return recv

    for rank, result in enumerate(on_threads(size, body)):
        np.testing.assert_array_equal(result, np.concatenate([blocks[q][rank] for q in range(size)]))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("unit", [0, 1, 100, 30_000])
def test_swap_in_pairs(size: int, unit: int) -> None:
    """Lengths differ between pairs and between the two ranks of a pair, and the pairs change."""

    def block(rank: int, distance: int) -> Array:
        count = unit * (rank // 2 + rank * distance % 3)
        return np.random.default_rng((rank, distance)).integers(0, 256, count).astype(np.uint8)

    def body(rank: int, window: shared_memory.Window) -> bool:
        for distance in (1, size // 2, 1):
            partner = rank ^ distance
            send, want = block(rank, distance), block(partner, distance)
            recv = np.zeros_like(want)
            there, here = (int(addresses([each])[0]) for each in (send, recv))
            assert window.pairwise_exchange(partner, there, send.size, here, recv.size)
            np.testing.assert_array_equal(recv, want)
        return True

    assert all(on_threads(size, body))


def test_swap_without_a_partner_is_refused() -> None:
    def body(rank: int, window: shared_memory.Window) -> None:
        for partner in (rank, -1, 2):
            with pytest.raises(ValueError, match=f"{partner} is no partner of rank {rank} of 2"):
                window.pairwise_exchange(partner, 0, 0, 0, 0)

    on_threads(2, body)


@pytest.mark.parametrize("size", [2, 4])
def test_any_sequence_of_operations_with_ranks_that_dawdle(size: int) -> None:
    """All operations share slots, flat buffers and counters, so they are mixed, and ranks pause at random."""
    plan = np.random.default_rng(7).integers(0, 5, 300)

    def body(rank: int, window: shared_memory.Window) -> bool:
        dawdle = np.random.default_rng(rank)
        pause = threading.Event()
        for step, kind in enumerate(plan):
            if dawdle.random() < 0.05:
                pause.wait(dawdle.random() * 2e-3)
            values = np.full([3, 5000, 40_000, 1, 20_000][kind], step + rank, np.int64)
            if kind == 3:
                assert window.barrier()
                counts = np.array([8] * size, np.int64)
                out = np.zeros(size, np.int64)
                window.gather(int(addresses([values])[0]), int(addresses([out])[0]), counts)
                assert out.tolist() == [step + q for q in range(size)]
                continue
            where = addresses([values])
            if kind == 4:
                partner = rank ^ (1 + step % (size - 1) // 2)
                count, theirs = (1000 * (r + 1) for r in (rank, partner))
                heard = np.zeros(theirs, np.int64)
                window.pairwise_exchange(
                    partner, int(where[0]), 8 * count, int(addresses([heard])[0]), 8 * theirs
                )
                assert (heard == step + partner).all()
                continue
            window.allreduce(where, where, starts_of([values.size]), Code.INT64, ReduceOp.SUM, 1.0, 1.0)
            assert (values == size * step + size * (size - 1) // 2).all()
        return True

    assert all(on_threads(size, body))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_chunks_change_their_size_between_operations_with_ranks_that_dawdle(size: int) -> None:
    """A rank that is ahead fills slots of the new size while others still empty slots of the old size."""
    capacity = 8 * CHUNK
    rng = np.random.default_rng(11)
    sizes = [CHUNK, CHUNK + 128, 3 * CHUNK, capacity]
    plan = [
        (sizes[rng.integers(4)], int(rng.integers(0, 3)), int(rng.integers(1, 60_000))) for _ in range(200)
    ]

    def body(rank: int, window: shared_memory.Window) -> bool:
        dawdle = np.random.default_rng(rank)
        pause = threading.Event()
        for step, (chunk, kind, count) in enumerate(plan):
            if dawdle.random() < 0.1:
                pause.wait(dawdle.random() * 2e-3)
            window.resize(chunk)
            values = np.arange(count) + step + rank
            where = addresses([values])
            if kind == 0:
                out = np.zeros(size * count, np.int64)
                block = [8 * count] * size
                window.gather(int(where[0]), int(addresses([out])[0]), np.array(block, np.int64))
                assert (out.reshape(size, count) - np.arange(count) - step == np.c_[np.arange(size)]).all()
                continue
            prescale = 1.0 if kind == 1 else 2.0
            window.allreduce(where, where, starts_of([count]), Code.INT64, ReduceOp.SUM, prescale, 1.0)
            sums = size * (np.arange(count) + step) + size * (size - 1) // 2
            assert (values == int(prescale) * sums).all()
        return True

    assert all(on_threads(size, body, CHUNK, capacity))


def test_chunks_must_fit_their_slots() -> None:
    def body(rank: int, window: shared_memory.Window) -> None:
        for chunk in (0, CHUNK - 128, CHUNK + 1, 2 * CHUNK + 128):
            with pytest.raises(ValueError, match="a chunk is a multiple of 128 bytes, and 16384 at least"):
                window.resize(chunk)
        window.resize(2 * CHUNK)

    on_threads(1, body, CHUNK, 2 * CHUNK)


def test_abort_ends_every_wait() -> None:
    def body(rank: int, window: shared_memory.Window) -> bool:
        if rank == 2:
            window.abort(b"no room")
            return False
        return window.barrier()

    assert on_threads(3, body) == [False, False, False]


@pytest.mark.parametrize("count", [3, 40_000])
def test_an_abort_wakes_sleepers_and_whoever_comes_finds_the_first_note(count: int) -> None:
    """Rank 1 sleeps in the window, rank 2 enters later; both abort with other notes, and read rank 0's."""
    aborted = threading.Event()

    def body(rank: int, window: shared_memory.Window) -> tuple[bool, bytes | None, bytes | None]:
        before = window.note()
        if rank == 0:
            time.sleep(0.05)  # usually rank 1 sleeps by now; the result is the same if not
            window.abort(b"rank 0 has failed")
            window.abort(b"and again")
            aborted.set()
            return False, before, window.note()
        if rank == 2:
            assert aborted.wait(TIMEOUT)
        values = np.ones(count)
        where = addresses([values])
        args = (where, where, starts_of([count]), Code.FLOAT64, ReduceOp.SUM, 1.0, 1.0)
        done = window.allreduce(*args)
        window.abort(b"a rank that only follows")
        return done, before, window.note()

    assert on_threads(3, body) == [(False, None, b"rank 0 has failed")] * 3


def test_what_all_have_done_their_part_of_ends_well_in_an_aborted_window() -> None:
    """Rank 0 writes its part and leaves by the abort; rank 1 enters after that, and gets the right result."""
    left = threading.Event()

    def body(rank: int, window: shared_memory.Window) -> tuple[bool, list[float]]:
        values = np.full(3, rank + 1.0)
        where = addresses([values])

        def abort() -> None:
            time.sleep(0.05)
            window.abort(b"later")

        helper = threading.Thread(target=abort)
        if rank == 0:
            helper.start()
        else:
            assert left.wait(TIMEOUT)
        done = window.allreduce(where, where, starts_of([3]), Code.FLOAT64, ReduceOp.SUM, 1.0, 1.0)
        if rank == 0:
            left.set()
            helper.join(TIMEOUT)
        return done, values.tolist()

    assert on_threads(2, body) == [(False, [1.0] * 3), (True, [3.0] * 3)]


def test_a_note_has_a_limit() -> None:
    def body(rank: int, window: shared_memory.Window) -> None:
        with pytest.raises(ValueError, match="a note has 8192 bytes at most, not 8193"):
            window.abort(bytes(shared_memory.NOTE + 1))
        assert window.note() is None
        note = bytes(range(256)) * (shared_memory.NOTE // 256)
        window.abort(note)
        assert window.note() == note

    on_threads(1, body)


def test_what_makes_no_window_is_refused() -> None:
    with pytest.raises(ValueError, match="aligned"):
        shared_memory.Window(0, [64], CHUNK)
    with pytest.raises(ValueError, match="chunk"):
        shared_memory.Window(0, [128], 100)
    with pytest.raises(ValueError, match="does not suit"):
        shared_memory.Window(0, [128], 2 * CHUNK, CHUNK)
    with pytest.raises(ValueError, match="at most"):
        shared_memory.Window(0, [128] * (shared_memory.MAX_LOCAL + 1), CHUNK)

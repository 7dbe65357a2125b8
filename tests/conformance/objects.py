"""Cases of Python objects and of compression."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance.cases import SEVERAL, Cases, is_last, last, outcome
from tests.conformance.oracle import BF16, DTYPES, SUMMABLE, inputs, reduced, rows, same

CASES = Cases()


@CASES.add()
def objects_of_all_kinds() -> None:
    for root in range(hvd.size()):
        things: list[Any] = [None, 0, "text", b"", {"a": [1, (2, 3)]}, [], {1.5, None}]
        for thing in things:
            given = thing if hvd.rank() == root else "irrelevant"
            assert hvd.broadcast_object(given, root) == thing
    function = hvd.broadcast_object((lambda x: x + hvd.rank()) if hvd.rank() == 0 else None)
    assert function(1) == hvd.rank() + 1
    mine = {"rank": hvd.rank()}
    got = hvd.broadcast_object(mine, last())
    assert (got is mine) == is_last()
    assert hvd.broadcast_object() is None


@CASES.add()
def gathered_objects() -> None:
    size, rank = hvd.size(), hvd.rank()
    assert hvd.allgather_object(None) == [None] * size
    assert hvd.allgather_object([rank] * rank) == [[r] * r for r in range(size)]
    assert hvd.allgather_object("x" * (1000 * rank), name="named") == ["x" * (1000 * r) for r in range(size)]
    array = hvd.allgather_object(np.arange(rank))
    assert [len(each) for each in array] == list(range(size))


@CASES.add()
def large_objects() -> None:
    blob = np.random.default_rng(hvd.rank()).bytes(3_000_000 + hvd.rank())
    want = np.random.default_rng(last()).bytes(3_000_000 + last())
    assert hvd.broadcast_object(blob, last()) == want
    gathered = hvd.allgather_object(blob[: 1_000_000 * (hvd.rank() % 2 + 1)])
    assert [len(each) for each in gathered] == [1_000_000 * (r % 2 + 1) for r in range(hvd.size())]


@CASES.add()
def unpicklable_objects() -> None:
    lock: Any = threading.Lock()
    for name in (None, "pickled"):
        error = outcome(lambda name=name: hvd.broadcast_object(lock if hvd.rank() == 0 else 1, 0, name))  # type: ignore[misc]
        assert isinstance(error, TypeError if hvd.rank() == 0 else hvd.RankFailedError), repr(error)
        assert hvd.broadcast_object(hvd.rank(), 0, name) == 0
        error = outcome(lambda name=name: hvd.allgather_object(lock if is_last() else 1, name))  # type: ignore[misc]
        assert isinstance(error, TypeError if is_last() else hvd.RankFailedError), repr(error)
        if not is_last():
            assert isinstance(error, hvd.RankFailedError)
            assert error.rank == last()
        assert hvd.allgather_object(hvd.rank(), name) == list(range(hvd.size()))


@CASES.add(*SEVERAL)
def wrong_roots_of_objects() -> None:
    for name in (None, "rooted"):
        error = outcome(lambda name=name: hvd.broadcast_object(1, 99 if is_last() else 0, name))  # type: ignore[misc]
        assert isinstance(error, ValueError if is_last() else hvd.RankFailedError), repr(error)
        error = outcome(lambda name=name: hvd.broadcast_object(1, 1 if is_last() else 0, name))  # type: ignore[misc]
        assert isinstance(error, hvd.MismatchError), repr(error)
        assert hvd.broadcast_object(hvd.rank(), 0, name) == 0


# -- compression ---------------------------------------------------------------------------------------


@CASES.add()
def fp16_compression() -> None:
    size, rank = hvd.size(), hvd.rank()
    for name in SUMMABLE:
        parts = inputs(name, (6, 2), size)
        floating = DTYPES[name].kind == "f"
        small = [part.astype(np.float16) for part in parts] if floating else parts
        want = reduced(hvd.Sum, small).astype(DTYPES[name])
        how: dict[str, Any] = {"op": hvd.Sum, "compression": hvd.Compression.fp16}
        same(hvd.allreduce(parts[rank], **how), want, name)
        same(hvd.grouped_allreduce([parts[rank], parts[rank]], **how)[1], want, name)
        same(hvd.reducescatter(parts[rank], **how), want[rows(6, size, rank)], name)
        same(hvd.grouped_reducescatter([parts[rank]], **how)[0], want[rows(6, size, rank)], name)
        same(
            hvd.allreduce(parts[rank], op=hvd.Sum, compression=hvd.Compression.none), reduced(hvd.Sum, parts)
        )
    assert hvd.allreduce(np.full(2, 1e6), compression=hvd.Compression.fp16).tolist() == [np.inf] * 2


class ToBfloat16(hvd.Compressor):
    """A user's compressor: it sends bfloat16, and returns float64."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor in bfloat16, and its shape."""
        return tensor.astype(BF16).reshape(-1), tensor.shape

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in float64 and in its original shape."""
        assert tensor.dtype == BF16
        return tensor.astype(np.float64).reshape(ctx)


@CASES.add()
def a_users_compressor() -> None:
    mine = np.full((2, 3), 1.0 + hvd.rank(), np.float32)
    want = np.full((2, 3), float(sum(range(1, hvd.size() + 1))))
    same(hvd.allreduce(mine, op=hvd.Sum, compression=ToBfloat16), want)
    for got in hvd.grouped_allreduce([mine, mine], op=hvd.Sum, compression=ToBfloat16):
        same(got, want)
    assert mine.dtype == np.float32
    with pytest.raises(NotImplementedError):
        hvd.Compressor.compress(mine)

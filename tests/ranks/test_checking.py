"""PYHVD_CHECK: every rank detects one rank's wrong result, for every verb, without false alarms."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.arrays import Bytes, TensorView
from pyhvd.backends.host import HostBackend
from pyhvd.backends.shm import make_backend
from pyhvd.engine import context
from pyhvd.testing import run_ranks

SIZE = 3
BAD = 1
CHECKED = {"check": "results", "dynamic_process_sets": True}

Verb = Callable[[str], Any]


def _rank_rows(rows: int = 4) -> Any:
    return np.full((rows, 5), hvd.rank() + 1, np.float32)


VERBS: dict[str, Verb] = {
    "allreduce": lambda name: hvd.allreduce(_rank_rows(), name=name),
    "allreduce_": lambda name: hvd.allreduce_(_rank_rows(), name=name, op=hvd.Max),
    "grouped_allreduce": lambda name: hvd.grouped_allreduce([_rank_rows(), _rank_rows(2)], name=name),
    "reducescatter": lambda name: hvd.reducescatter(_rank_rows(), name=name, op=hvd.Sum),
    "grouped_reducescatter": lambda name: hvd.grouped_reducescatter([_rank_rows()], name=name),
    "allgather": lambda name: hvd.allgather(_rank_rows(hvd.rank() + 1), name=name),
    "grouped_allgather": lambda name: hvd.grouped_allgather([_rank_rows(), _rank_rows(1)], name=name),
    "broadcast": lambda name: hvd.broadcast(_rank_rows(), 0, name=name),
    "alltoall": lambda name: hvd.alltoall(_rank_rows(6), name=name),
}


class _Flipper:
    """A backend that flips one bit of one rank's result, once the test arms it."""

    def __init__(self, inner: HostBackend) -> None:
        self._inner = inner
        self.armed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _flip(self, target: Bytes | None) -> None:
        if self.armed and target is not None and len(target) and self._inner.rank == BAD:
            target[len(target) // 2] ^= 1
            self.armed = False

    def allreduce(self, sources: Any, targets: Sequence[TensorView | None], *rest: Any) -> None:
        self._inner.allreduce(sources, targets, *rest)
        self._flip(targets[-1].bytes if targets[-1] is not None else None)

    def reducescatter(self, sources: Any, targets: Sequence[TensorView | None], *rest: Any) -> None:
        self._inner.reducescatter(sources, targets, *rest)
        self._flip(targets[-1].bytes if targets[-1] is not None else None)

    def allgather(self, sources: Any, targets: Sequence[Bytes], counts: Any) -> None:
        self._inner.allgather(sources, targets, counts)
        self._flip(targets[-1])

    def broadcast(self, buffer: Bytes, root: int) -> None:
        self._inner.broadcast(buffer, root)
        self._flip(buffer)

    def alltoall(self, send: Any, send_counts: Any, recv: Bytes, recv_counts: Any) -> None:
        self._inner.alltoall(send, send_counts, recv, recv_counts)
        self._flip(recv)


@pytest.fixture
def flippers(monkeypatch: pytest.MonkeyPatch) -> list[_Flipper]:
    """The ranks' backends, which a test can arm."""
    made: list[_Flipper] = []

    def make(*arguments: Any, **options: Any) -> Any:
        made.append(_Flipper(make_backend(*arguments, **options)))
        return made[-1]

    monkeypatch.setattr(context, "make_backend", make)
    return made


def _arm(flippers: list[_Flipper]) -> None:
    """Arm the bad rank, so that its next result is wrong; collective."""
    hvd.barrier()
    if hvd.rank() == 0:
        for flipper in flippers:
            flipper.armed = True
    hvd.barrier()


@pytest.mark.parametrize("fast_lane", [True, False])
@pytest.mark.parametrize("verb", VERBS)
def test_a_flipped_bit_is_found_on_every_rank(verb: str, fast_lane: bool, flippers: list[_Flipper]) -> None:
    def body() -> tuple[str, list[int]]:
        VERBS[verb]("before")
        _arm(flippers)
        with pytest.raises(hvd.CorruptionError) as caught:
            VERBS[verb]("layer 1")
        hvd.barrier()
        VERBS[verb]("layer 1")  # the job continues, and the name is free
        assert BAD in caught.value.per_rank
        assert "layer 1" in caught.value.name
        return str(caught.value), caught.value.ranks

    told = run_ranks(SIZE, body, timeout=30, knobs={**CHECKED, "fast_lane": fast_lane})
    assert told[0] == told[1] == told[2], "every rank hears the same"
    text, ranks = told[0]
    assert ranks == [BAD]
    assert "layer 1" in text
    assert "rank 1" in text
    assert "test their memory" in text


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("check", ["results", "finite", "results,finite"])
def test_no_false_alarm_and_the_same_results(verb: str, check: str, caplog: pytest.LogCaptureFixture) -> None:
    def body() -> list[Any]:
        return [np.asarray(part) for part in _parts(VERBS[verb]("x")) for _ in range(2)]

    with caplog.at_level(logging.WARNING, "pyhvd"):
        checked = run_ranks(SIZE, body, timeout=30, knobs={"check": check})
    plain = run_ranks(SIZE, body, timeout=30)
    for ours, theirs in zip(checked, plain, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.tobytes() == b.tobytes()
    assert caplog.messages == []


def _parts(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def test_the_message_says_where_and_what(flippers: list[_Flipper]) -> None:
    def body() -> str:
        _arm(flippers)
        with pytest.raises(hvd.CorruptionError) as caught:
            hvd.allreduce(np.full(1000, 1.25, np.float32), name="grad/w1", op=hvd.Max)
        return str(caught.value)

    assert run_ranks(SIZE, body, timeout=30, knobs=CHECKED)[2] == (
        "allreduce 'grad/w1': the ranks do not have the same result. They differ first in element 500 of 1000"
        " (float32): ranks 0, 2: 1.25 (0x3fa00000); rank 1: 1.2500001192092896 (0x3fa00001). Most ranks agree"
        " against rank 1: memory has been corrupted there (by a fault of the hardware, or by native code that"
        " writes where it must not), or another build of pyhvd runs there. Compare what python -m pyhvd"
        " doctor says on these ranks' hosts, and test their memory"
    )


@pytest.mark.parametrize("dtype", ["bool", "int64", "float16", "float64", "complex128", "bfloat16"])
def test_two_ranks_have_no_majority(dtype: str, flippers: list[_Flipper]) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))

    def body() -> tuple[list[int], dict[int, str]]:
        _arm(flippers)
        with pytest.raises(hvd.CorruptionError, match="there is no majority") as caught:
            hvd.allreduce(np.ones(1, kind), op=hvd.Product)
        return caught.value.ranks, caught.value.per_rank

    for ranks, values in run_ranks(2, body, timeout=30, knobs=CHECKED):
        assert ranks == [0, 1]
        assert values[0].startswith(("1", "True", "(1+0j)"))
        assert values[0] != values[1]


def test_a_set_names_its_ranks_by_their_global_numbers(flippers: list[_Flipper]) -> None:
    def body() -> None:
        some = hvd.add_process_set([1, 2, 3])
        if hvd.rank() != 0:
            hvd.barrier(some)  # the first batch makes the backend
        _arm(flippers)  # rank 1 of the set is the global rank 2
        if hvd.rank() != 0:
            with pytest.raises(hvd.CorruptionError) as caught:
                hvd.allreduce(np.ones(9), process_set=some)
            assert caught.value.ranks == [2]
            assert caught.value.per_rank.keys() == {1, 2, 3}
        hvd.barrier()

    run_ranks(4, body, timeout=30, knobs=CHECKED)


def test_joined_ranks_and_empty_tensors_take_part() -> None:
    def body() -> None:
        assert hvd.allreduce(np.ones((0, 3), np.float32)).shape == (0, 3)
        assert hvd.reducescatter(np.ones((0, 3), np.float32)).shape == (0, 3)
        assert hvd.allgather(np.ones((0, 3))).shape == (0, 3)
        if hvd.rank() != BAD:
            assert hvd.allreduce(np.ones(3), name="a", op=hvd.Sum).tolist() == [2.0] * 3
            assert hvd.allgather(np.ones(2), name="b").tolist() == [1.0] * 4
            assert hvd.broadcast(np.ones(2), 0, name="c").tolist() == [1.0] * 2
            assert hvd.reducescatter(np.ones(3), name="d", op=hvd.Sum).tolist() == [2.0]
        hvd.join()

    run_ranks(SIZE, body, timeout=30, knobs={"check": "results,finite"})


def test_unchecked_jobs_do_nothing_of_it() -> None:
    def body() -> tuple[bool, bool]:
        checker = context.current().runtime._executor._checker
        return checker.results or checker.finite, context.current().fast_path is None

    assert run_ranks(2, body, timeout=30, knobs={"fast_lane": True}) == [(False, False)] * 2
    assert run_ranks(2, body, timeout=30, knobs={"fast_lane": True, **CHECKED}) == [(True, True)] * 2


# -- finite ---------------------------------------------------------------------------


def _warnings(body: Callable[[], None], caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING, "pyhvd"):
        run_ranks(SIZE, body, timeout=30, knobs={"check": "finite"})
    return caplog.messages


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "bfloat16"])
def test_nan_is_told_once_with_tensor_and_rank(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))

    def body() -> None:
        for _ in range(3):
            x = np.ones(50, kind)
            if hvd.rank() == 2:
                x[[17, 18]] = np.nan, np.inf
            assert np.isnan(hvd.allreduce(x, name="grad/w1")[17])

    assert _warnings(body, caplog) == [
        "allreduce 'grad/w1': what goes in is not finite: rank 2: 1 NaN, 1 infinite, the first in element 17"
    ]


def test_a_sum_that_overflows_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def body() -> None:
        hvd.allreduce(np.full(4, 60000, np.float16), name="big", op=hvd.Sum)
        hvd.reducescatter(np.array([1, 60000, 1], np.float16), name="part", op=hvd.Sum)

    assert _warnings(body, caplog) == [
        "allreduce 'big': the result is not finite, though every rank's input is: it overflows float16:"
        " 0 NaN, 4 infinite, the first in element 0",
        "reducescatter 'part': the result is not finite, though every rank's input is: it overflows float16:"
        " 0 NaN, 1 infinite, the first in element 0",
    ]


def test_what_is_not_reduced_may_hold_anything(caplog: pytest.LogCaptureFixture) -> None:
    def body() -> None:
        hvd.broadcast(np.full(3, np.nan), 0)
        hvd.allgather(np.full(3, np.inf))
        hvd.allreduce(np.ones(3, np.int32))

    assert _warnings(body, caplog) == []

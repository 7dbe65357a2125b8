"""Collectives in graphs of TensorFlow: no deadlock in any order, once per step, memory, dtypes, errors."""
# ruff: noqa: E402

from __future__ import annotations

import importlib
import os
import resource
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: run `make test-frameworks`")

import pyhvd.tensorflow as hvd
from tests.frameworks.doors import NATIVE, ONE_CORE, on_doors, use_one_core

_STEPS = 300


def _late(tensor: Any, turns: int) -> Any:
    """Return the tensor, after work that a graph cannot leave out."""
    grown = tf.ones((64, 64)) * tensor[0]
    for _ in range(turns):
        grown = tf.matmul(grown, tf.ones((64, 64)) / 64)
    return tensor + 0 * grown[0, 0]


def _many(*, reverse: bool) -> Callable[[Any], Any]:
    """Return a traced function with 20 collectives; each rank has other late inputs."""

    @tf.function
    def step(x: Any) -> Any:
        results: dict[int, Any] = {}
        order = reversed(range(20)) if reverse else range(20)
        for number in order:
            given = _late(x + number, 30 if number % hvd.size() == hvd.rank() else 0)
            results[number] = hvd.allreduce(given, op=hvd.Sum, name=f"many.{number}")
        return [results[number] for number in range(20)]

    return step  # type: ignore[no-any-return]


def _run_many(step: Callable[[Any], Any], steps: int = _STEPS) -> None:
    for number in range(steps):
        results = step(tf.fill([5], float(number)))
        assert [each[0].numpy() for each in results] == [hvd.size() * (number + k) for k in range(20)]


@on_doors(timeout=400, sizes=(1, 2, 4))
def test_late_inputs() -> None:
    _started()
    _run_many(_many(reverse=False))


@on_doors(NATIVE, timeout=400, sizes=(1, 2, 4))
def test_ranks_trace_in_another_order() -> None:
    _started()
    _run_many(_many(reverse=hvd.rank() % 2 == 1))


@on_doors(NATIVE, timeout=400, TEST_INTER_OP="1")
def test_one_thread_of_the_executor() -> None:
    tf.config.threading.set_inter_op_parallelism_threads(1)
    _started()
    _run_many(_many(reverse=hvd.rank() == 1))


def _run_two_at_once() -> None:
    """Run two graphs from two threads, which the ranks start in different orders."""
    wrong: list[BaseException] = []

    def train(name: str) -> None:
        @tf.function
        def step(x: Any) -> Any:
            return [hvd.allreduce(x + k, op=hvd.Sum, name=f"{name}.{k}") for k in range(5)]

        try:
            for number in range(_STEPS):
                assert [each.numpy() for each in step(tf.constant(float(number)))] == [
                    hvd.size() * (number + k) for k in range(5)
                ]
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=train, args=(name,)) for name in ("a", "b")]
    for thread in reversed(threads) if hvd.rank() % 2 else threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@on_doors(NATIVE, timeout=400, sizes=(1, 2, 4))
def test_two_graphs_at_once() -> None:
    _started()
    _run_two_at_once()


@on_doors(timeout=400, sizes=(1, 2, 4), **{ONE_CORE: "1"})
def test_the_same_on_one_core() -> None:
    use_one_core()
    _started()
    native = hvd.graph_ops() == NATIVE
    _run_many(_many(reverse=native and hvd.rank() % 2 == 1))
    if native:
        _run_two_at_once()


@on_doors()
def test_once_per_step() -> None:
    """Rank 0 runs a graph, and rank 1 makes the same calls one by one: another number of calls would hang."""
    _started()
    steps = 20

    @tf.function
    def step(x: Any) -> Any:
        constant = hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="constant")
        hvd.allreduce(x, op=hvd.Sum, name="unused")
        equal = [hvd.allreduce(x, op=hvd.Sum, name=f"equal.{k}") for k in range(2)]
        return constant, *equal

    for number in range(steps):
        mine = float(number)
        if hvd.rank() == 0:
            results = [each.numpy() for each in step(tf.constant(mine))]
        else:
            one = hvd.allreduce(tf.constant(mine), op=hvd.Sum, name="constant").numpy()
            hvd.allreduce(tf.constant(mine), op=hvd.Sum, name="unused")
            equal = [
                hvd.allreduce(tf.constant(mine), op=hvd.Sum, name=f"equal.{k}").numpy() for k in range(2)
            ]
            results = [one, *equal]
        assert results == [1 + number, 2 * number, 2 * number]


@on_doors()
def test_branches_loops_and_nested_functions() -> None:
    _started()

    @tf.function
    def inner(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    @tf.function
    def step(x: Any, flag: Any) -> Any:
        chosen = tf.cond(
            flag,
            lambda: hvd.allreduce(x, op=hvd.Sum, name="yes"),
            lambda: hvd.allreduce(-x, op=hvd.Sum, name="no"),
        )
        total = tf.constant(0.0)
        for turn in tf.range(10):
            hvd.allreduce(x, op=hvd.Sum, name="unused in loop")
            total += hvd.allreduce(x + tf.cast(turn, tf.float32), op=hvd.Sum, name="in loop")
        return chosen, total, inner(x), inner(x + 1)

    for number in range(20):
        x, flag = float(number + hvd.rank()), number % 3 == 0
        chosen, total, nested, again = (each.numpy() for each in step(tf.constant(x), tf.constant(flag)))
        both = 2.0 * number + 1
        assert (chosen, total) == (both if flag else -both, 10 * both + 90)
        assert (nested, again) == (both, both + 2)


@on_doors()
def test_results_used_on_one_rank() -> None:
    _started()

    @tf.function
    def step(x: Any) -> Any:
        average = hvd.allreduce(x)
        return average if hvd.rank() == 0 else x

    for number in range(20):
        expected = number + 0.5 if hvd.rank() == 0 else number + 1
        assert step(tf.constant(float(number + hvd.rank()))).numpy() == expected


@on_doors(NATIVE)
def test_memory_is_forwarded_if_free() -> None:
    _started()

    @tf.function
    def step(x: Any) -> Any:
        free, kept = x * 2, x * 3
        total, other = hvd.allreduce(free, op=hvd.Sum), hvd.allreduce(kept, op=hvd.Sum)
        return total, other, kept + 1, hvd.grouped_allreduce([x * 4, x * 5])

    step(tf.ones(1000))
    counts = importlib.import_module("pyhvd.native._tensorflow_ops").counts
    before = counts()
    for _ in range(5):
        total, other, kept, both = step(tf.ones(1000))
        assert [each[0].numpy() for each in (total, other, kept, *both)] == [4, 6, 4, 4, 5]
    forwarded, allocated = (now - then for now, then in zip(counts(), before, strict=True))
    # `kept` may have been used before its reduction begins.
    assert forwarded + allocated == 20
    assert forwarded >= 15


@on_doors()
def test_no_leak() -> None:
    _started()

    @tf.function
    def step(x: Any) -> Any:
        return hvd.allreduce(x * 2) + hvd.allgather(x)[: 1 << 16]

    x = tf.ones(1 << 16)
    for _ in range(50):
        step(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(150):
        step(x)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # in KiB; a tensor a step is 38400
    assert grown < 16000


DTYPES = (
    "float16 bfloat16 float32 float64 int8 uint8 int16 uint16 int32 uint32 int64 uint64 bool complex64"
    " complex128"
)


@on_doors()
def test_dtypes_and_shapes() -> None:
    _started()

    @tf.function
    def step(tensors: Any) -> Any:
        reduced = hvd.grouped_allreduce(tensors, op=hvd.Max if tensors[0].dtype == tf.bool else hvd.Sum)
        gathered = hvd.grouped_allgather([each for each in tensors if each.shape.rank])
        return reduced, gathered, [hvd.broadcast(each, 1) for each in tensors]

    for name in DTYPES.split():
        dtype = tf.as_dtype(name)
        given = [tf.cast(tf.fill(shape, 1 + hvd.rank()), dtype) for shape in [(), (3,), (0, 2), (2, 3)]]
        reduced, gathered, sent = step(given)
        for source, total, root in zip(given, reduced, sent, strict=True):
            assert total.dtype == root.dtype == dtype
            assert total.shape == root.shape == source.shape
            assert (total.numpy().astype(complex) == (1 if name == "bool" else 3)).all()
            assert (root.numpy().astype(complex) == (1 if name == "bool" else 2)).all()
        assert [each.shape[0] for each in gathered] == [6, 0, 4]


@on_doors()
def test_rows_that_differ() -> None:
    _started()

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(x: Any) -> Any:
        gathered = hvd.allgather(x)
        part, received = hvd.alltoall(x, [1, tf.shape(x)[0] - 1])
        assert gathered.shape.as_list() == [None, 2]
        assert received.shape.as_list() == [2]
        return gathered, part, received, hvd.reducescatter(gathered, op=hvd.Sum)

    for rows in range(1, 6):
        mine = np.full((rows + hvd.rank(), 2), hvd.rank(), np.float32)
        gathered, part, received, scattered = step(tf.constant(mine))
        assert gathered[:, 0].numpy().tolist() == [0] * rows + [1] * (rows + 1)
        assert received.numpy().tolist() == ([1, 1] if hvd.rank() == 0 else [rows - 1, rows])
        assert part.shape[0] == int(tf.reduce_sum(received))
        assert scattered.shape[0] == (rows + 1 - hvd.rank())


@on_doors()
def test_many_operands() -> None:
    _started()

    @tf.function
    def step(x: Any) -> Any:
        tensors = [x[: k % 7] + k for k in range(500)]
        return hvd.grouped_allreduce(tensors, op=hvd.Sum)

    for _ in range(3):
        results = step(tf.zeros(10))
        assert all((each.numpy() == 2 * k).all() and each.shape == (k % 7,) for k, each in enumerate(results))


@on_doors()
def test_static_shapes() -> None:
    _started()

    @tf.function
    def step(x: Any) -> Any:
        assert hvd.allreduce(x).shape == hvd.broadcast(x, 0).shape == x.shape
        assert hvd.allgather(x).shape.as_list() == [None, 2]
        assert hvd.alltoall(x).shape.as_list() == [None, 2]
        assert hvd.reducescatter(x).shape.as_list() == [2, 2]
        return x

    step(tf.ones((4, 2)))


# -- errors ------------------------------------------------------------------------------------------------


@on_doors()
def test_a_mismatch_reaches_the_program() -> None:
    _started()

    @tf.function
    def step(x: Any) -> Any:
        return hvd.allreduce(x, name="wrong")

    for shape in (3, 4):
        with pytest.raises(tf.errors.OpError, match="Mismatched") as caught:
            step(tf.ones(shape + hvd.rank()))
        assert "test_tensorflow_graphs.py:" in str(caught.value)
        cause = hvd.cause_of(caught.value)
        assert isinstance(cause, hvd.MismatchError)
        assert cause.name == "wrong"
    assert step(tf.ones(3)).numpy().tolist() == [1, 1, 1]


@on_doors()
def test_xla_is_refused_when_traced() -> None:
    _started()
    step = tf.function(lambda x: hvd.allreduce(x), jit_compile=True)
    with pytest.raises(ValueError, match="jit_compile=False"):
        step(tf.ones(3))


@on_doors()
def test_refusals_when_traced() -> None:
    _started()
    with pytest.raises(hvd.UnsupportedDtypeError, match="broadcast_object"):
        tf.function(hvd.allreduce)(tf.constant("text"))
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]))
    with pytest.raises(NotImplementedError, match="convert_to_tensor"):
        hvd.allreduce(slices, op=hvd.Max)
    with pytest.raises(NotImplementedError, match="factors"):
        hvd.allreduce(slices, prescale_factor=2.0)
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(tf.ones(3), average=True, op=hvd.Sum)


@on_doors()
def test_a_graph_of_before_shutdown() -> None:
    _started()
    step = tf.function(lambda x: hvd.allreduce(x, name="old"))
    step(tf.ones(3))
    hvd.shutdown()
    hvd.init()
    with pytest.raises(tf.errors.OpError, match="trace the function anew"):
        step(tf.ones(3))


@on_doors()
def test_which_door() -> None:
    _started()
    assert hvd.graph_ops() == ("callback" if os.environ["PYHVD_GRAPH_OPS"] == "callback" else "native")


def _started() -> None:
    hvd.init()

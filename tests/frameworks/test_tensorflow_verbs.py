"""The verbs of pyhvd.tensorflow, their gradients, IndexedSlices, names and Horovod's signatures."""
# ruff: noqa: E402

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: run `make test-frameworks`")

import pyhvd.tensorflow as hvd
from tests.frameworks.doors import NATIVE, on_doors

MODES: dict[str, Callable[[Any], Any]] = {"eager": lambda function: function, "graph": tf.function}


def _x(rank: int) -> Any:
    return np.array([[1, 2, 3], [4, 5, 6]], np.float32) + 10 * rank


# The gradient of sum(weights * verb(x)) on rank r, where each rank's weights are w + r.
def _w(shape: Any, rank: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + rank


def _mean_w(shape: Any) -> Any:
    return _w(shape, 0) + 0.5


VERBS: dict[str, tuple[Callable[[Any], Any], Callable[[int], Any], Callable[[int], Any]]] = {
    "average": (lambda x: hvd.allreduce(x), lambda r: _x(0) + 5, lambda r: _mean_w((2, 3))),
    "sum with factors": (
        lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0),
        lambda r: 6 * (2 * _x(0) + 10),
        lambda r: 12 * _mean_w((2, 3)),
    ),
    "max": (
        lambda x: hvd.allreduce(x, op=hvd.Max, postscale_factor=2.0),
        lambda r: 2 * _x(1),
        lambda r: 4 * r * _mean_w((2, 3)),
    ),
    "min": (lambda x: hvd.allreduce(x, op=hvd.Min), lambda r: _x(0), lambda r: (1 - r) * 2 * _mean_w((2, 3))),
    "product": (
        lambda x: hvd.allreduce(x, op=hvd.Product),
        lambda r: _x(0) * _x(1),
        lambda r: 2 * _mean_w((2, 3)) * _x(1 - r),
    ),
    "group": (
        lambda x: tf.add_n(hvd.grouped_allreduce([x, 2 * x])),
        lambda r: 3 * (_x(0) + 5),
        lambda r: 3 * _mean_w((2, 3)),
    ),
    "allgather": (
        lambda x: hvd.allgather(x[: 1 + hvd.rank()]),
        lambda r: np.concatenate([_x(0)[:1], _x(1)]),
        lambda r: np.concatenate([_mean_w((3, 3))[:1], np.zeros((1, 3))]) if r == 0 else _mean_w((3, 3))[1:],
    ),
    "broadcast": (lambda x: hvd.broadcast(x, 1), lambda r: _x(1), lambda r: r * _mean_w((2, 3))),
    "alltoall": (
        lambda x: hvd.alltoall(x),
        lambda r: np.stack([_x(0)[r], _x(1)[r]]),
        lambda r: np.stack([_w((2, 3), 0)[r], _w((2, 3), 1)[r]]),
    ),
    "alltoall with splits": (
        lambda x: hvd.alltoall(x, [1, 0])[0],
        lambda r: np.stack([_x(0)[0], _x(1)[0]]) if r == 0 else np.zeros((0, 3)),
        lambda r: np.stack([_w((2, 3), 0)[r], np.zeros(3)]),
    ),
    "reducescatter": (
        lambda x: hvd.reducescatter(x),
        lambda r: (_x(0) + 5)[r : r + 1],
        lambda r: np.concatenate([_w((1, 3), 0), _w((1, 3), 1)]),
    ),
    "reducescatter with Sum": (
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
        lambda r: (2 * _x(0) + 10)[r : r + 1],
        lambda r: 2 * np.concatenate([_w((1, 3), 0), _w((1, 3), 1)]),
    ),
}


@on_doors()
def test_results_and_gradients() -> None:
    hvd.init()
    for (name, (verb, result, gradient)), (mode, wrap) in itertools.product(VERBS.items(), MODES.items()):

        @wrap
        def step(x: Any, verb: Any = verb) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                made = verb(x)
                size = tf.cast(tf.size(made), tf.float32)
                weights = tf.reshape(tf.range(size), tf.shape(made)) + float(hvd.rank())
                loss = tf.reduce_sum(made * weights)
            return made, tape.gradient(loss, x)

        for _ in range(2):
            made, found = step(tf.constant(_x(hvd.rank())))
            np.testing.assert_allclose(made, result(hvd.rank()), rtol=1e-5, err_msg=f"{name}, {mode}")
            np.testing.assert_allclose(found, gradient(hvd.rank()), rtol=1e-5, err_msg=f"{name}, {mode}")


@on_doors()
def test_gradients_through_functions_branches_and_loops() -> None:
    hvd.init()

    @tf.function
    def inner(x: Any) -> Any:
        return hvd.allreduce(x * x, op=hvd.Sum, name="square")

    @tf.function
    def branch(x: Any) -> Any:
        return tf.cond(x > 0, lambda: inner(x), lambda: x)

    @tf.function
    def loop(x: Any) -> Any:
        for _ in tf.range(3):
            x = hvd.allreduce(2 * x, name="twice")
        return x

    for function, gradient in ((inner, 12), (branch, 12), (loop, 8)):
        x = tf.Variable(3.0)
        with tf.GradientTape() as tape:
            result = function(x)
        assert tape.gradient(result, x).numpy() == gradient


@on_doors()
def test_gradients_of_gradients() -> None:
    hvd.init()
    for wrap in MODES.values():

        @wrap
        def step(x: Any) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = tf.reduce_sum(hvd.allreduce(x * x * x, op=hvd.Sum, name="cube"))
                first = inner.gradient(loss, x)
                total = tf.reduce_sum(hvd.allreduce(first, op=hvd.Sum, name="first"))
            return first, outer.gradient(total, x)

        first, second = step(tf.constant([1.0, 2.0]))
        assert first.numpy().tolist() == [6, 24]
        assert second.numpy().tolist() == [24, 48]


@on_doors()
def test_slices() -> None:
    hvd.init()
    rank = hvd.rank()
    for wrap in MODES.values():

        @wrap
        def step(values: Any, indices: Any) -> Any:
            slices = tf.IndexedSlices(values, indices, tf.constant([5, 2]))
            average = hvd.allreduce(slices)
            total = hvd.allreduce(slices, op=hvd.Sum)
            both = hvd.grouped_allreduce([slices, values[:0]])
            return tf.convert_to_tensor(average), tf.convert_to_tensor(total), tf.convert_to_tensor(both[0])

        # Rank 0 has row 1 twice, rank 1 has no rows.
        values = tf.ones((2 - 2 * rank, 2))
        average, total, both = step(values, tf.constant([1, 1][: 2 - 2 * rank], tf.int64))
        assert average[:, 0].numpy().tolist() == both[:, 0].numpy().tolist() == [0, 1, 0, 0, 0]
        assert total[:, 0].numpy().tolist() == [0, 2, 0, 0, 0]


@on_doors()
def test_compression() -> None:
    hvd.init()
    for wrap, compression in itertools.product(MODES.values(), (hvd.Compression.fp16, hvd.Compression.bf16)):
        step = wrap(lambda x, how=compression: hvd.allreduce(x, compression=how))
        for dtype in (tf.float32, tf.float64, tf.int32):
            result = step(tf.cast(tf.fill([3], 1 + 2 * hvd.rank()), dtype))
            assert result.dtype == dtype
            assert result.numpy().tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="compression is"):
        hvd.allreduce(tf.ones(3), compression=7)  # type: ignore[arg-type]


@on_doors()
def test_inputs_of_all_kinds() -> None:
    import keras

    hvd.init()
    given = [1.5, np.full(2, 1.5), tf.Variable([1.5]), keras.Variable(np.array([1.5])), [1.5, 1.5]]
    for each in given:
        assert (hvd.allreduce(each, op=hvd.Sum).numpy() == 3).all()


@on_doors()
def test_numbers_that_a_graph_reads() -> None:
    hvd.init()
    part = hvd.add_process_set([1])
    assert part.process_set_id is not None
    number = part.process_set_id
    for wrap in MODES.values():
        numbers = wrap(
            lambda: (
                hvd.rank_op(),
                hvd.size_op(),
                hvd.local_rank_op(),
                hvd.local_size_op(),
                hvd.size_op(number),
                hvd.process_set_included_op(number),
                hvd.process_set_included_op(),
            )
        )()
        assert all(each.dtype == tf.int32 and each.shape == () for each in numbers)
        rank = hvd.rank()
        assert [each.numpy() for each in numbers] == [rank, 2, rank, 2, 1, rank, 1]
    with pytest.raises(ValueError, match="no process set has the id 77"):
        hvd.size_op(77)
    hvd.remove_process_set(part)


@on_doors()
def test_process_sets() -> None:
    hvd.init()
    part = hvd.add_process_set([1])
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=part))
    if hvd.rank() == 1:
        assert step(tf.ones(3)).numpy().tolist() == [1, 1, 1]
    else:
        with pytest.raises((ValueError, tf.errors.OpError), match="not a member"):
            step(tf.ones(3))
    hvd.barrier()
    hvd.remove_process_set(part)


@on_doors()
def test_barrier_and_join() -> None:
    hvd.init()

    @tf.function
    def step() -> Any:
        hvd.barrier()
        return tf.constant(1)

    assert step().numpy() == 1
    for wrap in MODES.values():
        if hvd.rank() == 1:
            assert hvd.allreduce(tf.ones(2), op=hvd.Sum, name="while joined").numpy().tolist() == [1, 1]
        last = wrap(hvd.join)()
        assert last.dtype == tf.int32
        assert last.numpy() == 1


@on_doors(NATIVE)
def test_default_names() -> None:
    """Calls pair by scope and function, whatever else a rank has traced before."""
    hvd.init()
    if hvd.rank() == 0:
        tf.function(lambda x: x + tf.add(x, 1))(tf.ones(2))

    @tf.function
    def step(x: Any) -> Any:
        with tf.name_scope("one"):
            first = hvd.allreduce(x, op=hvd.Sum)
        if hvd.rank() == 0:
            x = tf.identity(x)
        with tf.name_scope("two"):
            second = hvd.allreduce(10 * x, op=hvd.Sum)
        with tf.name_scope(f"rank{hvd.rank()}"):
            third = hvd.allreduce(100 * x, op=hvd.Sum, ignore_name_scope=True)
        return first, second, third

    assert [each.numpy() for each in step(tf.constant(1.0))] == [2, 20, 200]


@on_doors()
def test_variables_and_objects() -> None:
    import keras

    hvd.init()
    rank = hvd.rank()

    def make() -> list[Any]:
        return [
            tf.Variable(np.full((3, 2), rank, np.float32)),
            tf.Variable(np.full(1 << 19, rank, np.float32)),
            keras.Variable(np.full(4, rank, np.float32)),
            tf.Variable(rank),
            tf.Variable(np.full((0, 3), rank, np.float32)),
        ]

    for wrap in MODES.values():
        variables = make()
        wrap(partial(hvd.broadcast_variables, variables, root_rank=1))()
        assert all((np.asarray(each) == 1).all() for each in variables)
        variables = make()
        values = hvd.broadcast_(variables, 0, name="all")
        assert all((np.asarray(each) == 0).all() for each in [*variables, *values])
    with pytest.raises(hvd.MismatchError, match="variable 0"):
        hvd.broadcast_variables([tf.Variable(tf.zeros(2 + rank))], 0)
    assert hvd.broadcast_object({"epoch": rank}, root_rank=1) == {"epoch": 1}
    assert hvd.allgather_object(rank) == [0, 1]


@on_doors(NATIVE)
def test_names_of_tensorflow_1_say_what_to_call() -> None:
    hvd.init()
    for call in (
        lambda: hvd.broadcast_global_variables(0),
        hvd.broadcast_object_fn,
        hvd.BroadcastGlobalVariablesHook,
        lambda: hvd.broadcast_object(1, session=object()),
    ):
        with pytest.raises(RuntimeError, match="TensorFlow 1"):
            call()
    with pytest.raises(TypeError, match=r"keras\.optimizers"):
        hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))


@on_doors(NATIVE)
def test_devices_warn_once() -> None:
    hvd.init()
    with pytest.warns(UserWarning, match="device_dense='/gpu:0' has no effect"):
        hvd.allreduce(tf.ones(2), device_dense="/gpu:0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.allreduce(tf.ones(2), device_dense="/gpu:0")
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        assert hvd.allreduce(tf.ones(2), average=False).numpy().tolist() == [2, 2]


SIGNATURES = {
    "allreduce": "tensor average device_dense device_sparse compression op prescale_factor postscale_factor"
    " name process_set ignore_name_scope",
    "grouped_allreduce": "tensors average device_dense device_sparse compression op prescale_factor"
    " postscale_factor process_set ignore_name_scope name",
    "allgather": "tensor name ignore_name_scope process_set",
    "grouped_allgather": "tensors name ignore_name_scope process_set",
    "broadcast": "tensor root_rank name ignore_name_scope process_set",
    "broadcast_": "variables root_rank name process_set",
    "alltoall": "tensor splits name ignore_name_scope process_set",
    "reducescatter": "tensor device_dense compression op name process_set ignore_name_scope prescale_factor"
    " postscale_factor",
    "grouped_reducescatter": "tensors device_dense compression op process_set prescale_factor"
    " postscale_factor",
    "join": "",
    "rank_op": "name",
    "local_rank_op": "name",
    "local_size_op": "name",
    "size_op": "process_set_id name",
    "process_set_included_op": "process_set_id name",
    "broadcast_variables": "variables root_rank process_set inplace",
    "broadcast_object": "obj root_rank session name process_set",
    "allgather_object": "obj session name process_set",
    "DistributedGradientTape": "gradtape device_dense device_sparse compression sparse_as_dense op"
    " gradient_predivide_factor num_groups groups process_set scale_local_gradients",
    "PartialDistributedGradientTape": "gradtape device_dense device_sparse compression sparse_as_dense"
    " op gradient_predivide_factor num_groups groups process_set local_layers scale_local_gradients",
    "DistributedOptimizer": "optimizer name use_locking device_dense device_sparse compression"
    " sparse_as_dense backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients"
    " num_groups groups process_set scale_local_gradients",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_horovods(name: str) -> None:
    assert list(inspect.signature(getattr(hvd, name)).parameters) == SIGNATURES[name].split()

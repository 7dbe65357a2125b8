"""Collectives in programs that JAX compiles, through both doors, on ranks under mpiexec."""
# ruff: noqa: E402

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks installs it")

import jax.numpy as jnp

import pyhvd
import pyhvd.jax as hvd
from tests.frameworks.doors import ONE_CORE, use_one_core
from tests.frameworks.forks import fork_and_go_on
from tests.mpi.harness import on_ranks

DOORS = ("auto", "callback")
STEPS = 300
both_doors = pytest.mark.parametrize("door", DOORS)


def start(door: str) -> tuple[int, int]:
    """Start pyhvd with a door; return rank and size."""
    os.environ["PYHVD_GRAPH_OPS"] = door
    hvd.init()
    assert hvd.graph_ops() == ("native" if door == "auto" else "callback")
    return hvd.rank(), hvd.size()


def reductions() -> int:
    """Return how many allreduces this rank has run."""
    return sum(pyhvd.metrics().tensors.get("allreduce", {}).values())


def runs_once_per_step(step: Callable[..., Any], *arguments: Any, calls: int = 1) -> Any:
    """Call a compiled step three times, and check its number of reductions; return the last result."""
    for _ in range(3):
        before = reductions()
        result = jax.block_until_ready(step(*arguments))
        hvd.barrier()
        assert reductions() - before == calls, reductions() - before
    return result


@both_doors
@on_ranks(1, 2, 4, timeout=120)
def test_every_verb_in_jit_and_out_of_it(door: str) -> None:
    rank, size = start(door)
    total = sum(range(size))
    mine = jnp.full((2 * size, 3), float(rank))
    turned = np.repeat(np.arange(size, dtype=np.float32), 2)

    def verbs(x: Any) -> list[Any]:
        return [
            hvd.allreduce(x, hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
            hvd.allreduce(x, hvd.Max),
            hvd.allgather(x[:2])[:, 0],
            hvd.broadcast(x, size - 1),
            hvd.alltoall(x)[:, 0],
            hvd.reducescatter(x, hvd.Sum),
            hvd.grouped_allreduce({"a": x, "b": jnp.full((), rank, jnp.int32)}, hvd.Sum)["b"],
            hvd.grouped_allgather([x[:1, 0], x[:2, 0]])[1],
        ]

    for function in (verbs, jax.jit(verbs)):
        for _ in range(3):
            results = [np.asarray(each) for each in function(mine)]
            assert (results[0] == total).all()
            assert (results[1] == size - 1).all()
            assert (results[2] == turned).all()
            assert (results[3] == size - 1).all()
            assert (results[4] == turned).all()
            assert results[5].shape == (2, 3)
            assert (results[5] == total).all()
            assert results[6] == total
            assert (results[7] == turned).all()


@both_doors
@on_ranks(2, timeout=120)
def test_a_call_runs_once_per_step(door: str) -> None:
    rank, _ = start(door)
    ones = jnp.ones(3)

    def add(x: Any) -> Any:
        return hvd.allreduce(x, hvd.Sum)

    def scanned(xs: Any) -> Any:
        return jax.lax.scan(lambda carry, x: (carry + add(x) + add(ones), None), jnp.zeros(3), xs)[0]

    def repeated(x: Any) -> Any:
        def body(state: Any) -> Any:
            return state[0] + 1, add(state[1]) / 2

        return jax.lax.while_loop(lambda state: state[0] < 4, body, (0, x))[1]

    def chosen(flag: Any, x: Any) -> Any:
        return jax.lax.cond(flag, lambda: add(x), lambda: x)

    def used_on_one_rank(x: Any) -> Any:
        result = add(x)
        return result if rank == 0 else x

    assert runs_once_per_step(jax.jit(lambda: add(jnp.ones(3))))[0] == 2
    runs_once_per_step(jax.jit(lambda x: (add(x), x)[1]), ones)
    runs_once_per_step(jax.jit(used_on_one_rank), ones)
    assert runs_once_per_step(jax.jit(lambda x: add(x) + add(x)), ones, calls=2)[0] == 4
    assert runs_once_per_step(jax.jit(scanned), jnp.ones((5, 3)), calls=10)[0] == 20
    assert runs_once_per_step(jax.jit(repeated), ones, calls=4)[0] == 1
    assert runs_once_per_step(jax.jit(chosen), True, ones)[0] == 2
    assert runs_once_per_step(jax.jit(chosen), False, ones, calls=0)[0] == 1
    assert runs_once_per_step(jax.jit(lambda x: jax.jit(add)(x)), ones)[0] == 2
    nested = jax.jit(jax.grad(jax.checkpoint(lambda x: jnp.sin(add(jnp.sin(x))).sum())))
    runs_once_per_step(nested, ones, calls=2)


def in_order_of_rank(count: int, reverse: bool) -> Callable[..., Any]:
    """Return a compiled function that reduces arrays, each under a name, in this or the reverse order."""

    def traced(arrays: list[Any]) -> list[Any]:
        order = range(count)[::-1] if reverse else range(count)
        return [hvd.allreduce(arrays[k] + 1, hvd.Sum, name=f"tensor {k}") for k in order]

    compiled = jax.jit(traced)
    return lambda arrays: compiled(arrays)[::-1] if reverse else compiled(arrays)


def run_in_reversed_orders(length: int) -> None:
    """Run steps whose collectives odd ranks have traced in the reverse order."""
    rank, size = hvd.rank(), hvd.size()
    step = in_order_of_rank(20, reverse=rank % 2 == 1)
    arrays = [jnp.full(length, float(k + rank)) for k in range(20)]
    for _ in range(STEPS):
        results = [np.asarray(each) for each in step(arrays)]
        assert [each[0] for each in results] == [size * (k + 1) + sum(range(size)) for k in range(20)]


@pytest.mark.parametrize("length", [1, 1000])
@on_ranks(1, 2, 4, timeout=240)
def test_ranks_may_trace_in_reversed_orders(length: int) -> None:
    start("auto")
    run_in_reversed_orders(length)


def run_with_late_inputs() -> None:
    """Run steps in which each rank has other inputs late."""

    def late(x: Any, turns: Any) -> Any:
        return jax.lax.fori_loop(0, turns, lambda _, y: jnp.sin(y) + x, x)

    def traced(arrays: list[Any], turns: Any) -> list[Any]:
        return [hvd.allreduce(late(x, turns[k]), hvd.Max, name=f"late {k}") for k, x in enumerate(arrays)]

    step = jax.jit(traced)
    arrays = [jnp.full(50, float(k)) for k in range(20)]
    turns = jnp.array([100 if k % hvd.size() == hvd.rank() else 1 for k in range(20)])
    for _ in range(STEPS):
        results = step(arrays, turns)
    assert all(np.isfinite(np.asarray(each)).all() for each in results)


@both_doors
@on_ranks(1, 2, 4, timeout=240)
def test_inputs_may_be_late_for_other_tensors_on_other_ranks(door: str) -> None:
    start(door)
    run_with_late_inputs()


def run_two_at_once() -> None:
    """Run two programs from two threads, which the ranks start in different orders."""
    rank, size = hvd.rank(), hvd.size()
    steps = [jax.jit(lambda x, k=k: hvd.allreduce(x, hvd.Sum, name=f"thread {k}")) for k in range(2)]
    array = jnp.full(100, float(rank))
    wrong: list[Any] = []

    def run(k: int) -> None:
        try:
            for _ in range(STEPS):
                assert (np.asarray(steps[k](array)) == sum(range(size))).all()
        except BaseException as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=run, args=(k,)) for k in (range(2) if rank % 2 else range(2)[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@on_ranks(1, 2, 4, timeout=120)
def test_two_graphs_run_from_two_threads() -> None:
    start("auto")
    run_two_at_once()


@both_doors
@on_ranks(1, 2, 4, timeout=400, env={ONE_CORE: "1"})
def test_the_same_on_one_core(door: str) -> None:
    use_one_core()
    start(door)
    run_with_late_inputs()
    if door == "auto":
        run_in_reversed_orders(1000)
        run_two_at_once()


@both_doors
@on_ranks(2, timeout=120)
def test_every_dtype_and_shape(door: str) -> None:
    start(door)
    ints = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
    for dtype in (*ints, "float16", "bfloat16", "float32", "complex64", "bool"):
        op = hvd.Max if dtype == "bool" else hvd.Sum
        for shape in [(), (3,), (0, 2), (2, 0), (2, 3)]:
            given = jnp.ones(shape, dtype)
            result = jax.jit(lambda x, op=op: hvd.allreduce(x, op))(given)
            assert (result.dtype, result.shape) == (given.dtype, shape)
            assert (np.asarray(result) == (1 if dtype == "bool" else 2)).all()
    many = [jnp.full(k % 7, k, jnp.float32) for k in range(500)]
    results = jax.jit(lambda tree: hvd.grouped_allreduce(tree))(many)
    assert all((np.asarray(result) == k).all() for k, result in enumerate(results))


@on_ranks(2, timeout=120)
def test_inputs_stay_and_donated_memory_is_used_again() -> None:
    start("auto")
    kept = jnp.arange(100_000, dtype=jnp.float32)
    step = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum))
    for _ in range(3):
        assert (np.asarray(step(kept)) == 2 * np.arange(100_000)).all()
        assert (np.asarray(kept) == np.arange(100_000)).all()
    both = jax.jit(lambda x: (hvd.allreduce(x * 2, hvd.Sum), x * 2))(kept)
    assert (np.asarray(both[0]) == 2 * np.asarray(both[1])).all()
    donating = jax.jit(lambda x: hvd.allreduce(x), donate_argnums=0)
    given = jnp.ones(100_000)
    address = given.unsafe_buffer_pointer()
    assert donating(given).unsafe_buffer_pointer() == address


@on_ranks(2, timeout=120)
def test_no_memory_leaks() -> None:
    start("auto")
    step = jax.jit(lambda x: hvd.allreduce(x))
    array = jnp.ones(10_000)

    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for _ in range(500):
        step(array).block_until_ready()
    before = resident()
    for _ in range(2000):
        step(array).block_until_ready()
    assert resident() - before < 8 << 20  # one leaked array a step would be 80 MB


@both_doors
@pytest.mark.parametrize("differs", ["shape", "dtype", "op", "root"])
@on_ranks(2, timeout=60)
def test_a_mismatch_reaches_the_program(door: str, differs: str) -> None:
    rank, _ = start(door)
    shape = 2 + (differs == "shape") * rank
    dtype = jnp.int32 if differs == "dtype" and rank else jnp.float32
    op = hvd.Max if differs == "op" and rank else hvd.Sum
    if differs == "root":
        step = jax.jit(lambda x: hvd.broadcast(x, rank, name="mixed"))
    else:
        step = jax.jit(lambda x: hvd.allreduce(x, op, name="mixed"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="mixed") as caught:
        step(jnp.ones(shape, dtype)).block_until_ready()
    assert "test_jax_programs.py" in str(caught.value)
    assert isinstance(hvd.cause_of(caught.value), hvd.MismatchError)
    again = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, name="afterwards"))
    assert np.asarray(again(jnp.ones(1))) == 2


@both_doors
@on_ranks(2, timeout=60)
def test_a_program_from_before_shutdown_is_refused(door: str) -> None:
    start(door)
    step = jax.jit(lambda x: hvd.allreduce(x))
    step(jnp.ones(2)).block_until_ready()
    hvd.shutdown()
    with pytest.raises(jax.errors.JaxRuntimeError, match="not been initialized"):
        step(jnp.ones(2)).block_until_ready()
    hvd.init()
    with pytest.raises(jax.errors.JaxRuntimeError, match="traced before pyhvd was shut down"):
        step(jnp.ones(2)).block_until_ready()
    jax.clear_caches()
    assert np.asarray(step(jnp.ones(1))) == 1


@both_doors
@on_ranks(2, timeout=60)
def test_a_process_may_fork_after_collectives(door: str) -> None:
    start(door)
    step = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, name="forking"))

    def check() -> None:
        assert np.asarray(step(jnp.ones(3))).tolist() == [2.0, 2.0, 2.0]

    fork_and_go_on(check)


@both_doors
@on_ranks(2, timeout=60)
def test_shutdown_waits_for_a_collective_that_is_under_way(door: str) -> None:
    rank, _ = start(door)
    step = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, name="last"))
    step(jnp.ones(3)).block_until_ready()
    hvd.barrier()
    results: list[Any] = []
    if rank:
        time.sleep(1.0)
        results.append(np.asarray(step(jnp.ones(3))))
    else:
        thread = threading.Thread(target=lambda: results.append(np.asarray(step(jnp.ones(3)))))
        thread.start()
        time.sleep(0.3)
    hvd.shutdown()
    if not rank:
        thread.join()
    assert results[0].tolist() == [2.0, 2.0, 2.0]


@on_ranks(2, timeout=60)
def test_what_cannot_be_compiled_says_so() -> None:
    start("auto")
    for call in (
        lambda x: hvd.barrier(),
        lambda x: hvd.join(),
        lambda x: hvd.broadcast_object(x),
        lambda x: hvd.allgather_object(x),
        lambda x: hvd.alltoall(x, [1, 1]),
    ):
        with pytest.raises(TypeError, match="cannot be compiled: call it outside of jit"):
            jax.jit(call)(jnp.ones(2))
    with pytest.raises(NotImplementedError, match="outside of vmap"):
        jax.jit(jax.vmap(hvd.allgather))(jnp.ones((2, 2)))
    with pytest.raises((NotImplementedError, TypeError), match="forward-mode"):
        jax.jvp(hvd.allreduce, (jnp.ones(2),), (jnp.ones(2),))


@on_ranks(2, timeout=60)
def test_vmap_takes_the_batch_as_a_part_of_the_array() -> None:
    rank, _ = start("auto")
    array = jnp.full((4, 3), float(rank))
    for wrap in (lambda f: f, jax.jit):
        assert (np.asarray(wrap(jax.vmap(lambda x: hvd.allreduce(x, hvd.Sum)))(array)) == 1).all()
        sent = wrap(jax.vmap(lambda x: hvd.broadcast(x, 1), in_axes=1, out_axes=1))(array)
        assert sent.shape == (4, 3)
        assert (np.asarray(sent) == 1).all()

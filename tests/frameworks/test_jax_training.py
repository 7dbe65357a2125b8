"""Gradients, optimizers and elastic states with JAX, on ranks under mpiexec."""
# ruff: noqa: E402

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks installs it")

import jax.numpy as jnp

import pyhvd.jax as hvd
from tests.frameworks.test_jax_programs import both_doors, start
from tests.mpi.harness import on_ranks
from tests.mpi.launch import ROOT
from tests.mpi.test_docs_code import BLOCKS

PAGE = [block.code for block in BLOCKS if block.path.name == "jax.md"][:1]


def gradient_of(function: Any, x: Any, weights: Any) -> list[Any]:
    """Return the gradient of a weighted sum of a function's result, without jit and with it."""

    def loss(x: Any) -> Any:
        return (function(x) * weights).sum()

    return [np.asarray(wrapped(x)) for wrapped in (jax.grad(loss), jax.jit(jax.grad(loss)))]


@both_doors
@on_ranks(2, timeout=120)
def test_gradients_of_each_verb(door: str) -> None:
    rank, _ = start(door)
    x = jnp.array([[1.0 + rank], [4.0 - 2 * rank]])  # the ranks: 1, 4 and 2, 2
    mine = jnp.array([[1.0 + rank], [3.0]])  # their sum: 3, 6
    both = jnp.full((4, 1), 1.0 + rank)
    largest = [[0.0], [6.0]] if rank == 0 else [[3.0], [0.0]]
    smallest = [[3.0], [0.0]] if rank == 0 else [[0.0], [6.0]]
    products = [[6.0], [12.0]] if rank == 0 else [[3.0], [24.0]]
    scattered = jnp.full((1, 1), 1.0 + rank)
    expected = [
        (lambda x: hvd.allreduce(x, hvd.Sum, postscale_factor=2.0), mine, [[6.0], [12.0]]),
        (hvd.allreduce, mine, [[1.5], [3.0]]),
        (lambda x: hvd.allreduce(x, hvd.Max), mine, largest),
        (lambda x: hvd.allreduce(x, hvd.Min), mine, smallest),
        (lambda x: hvd.allreduce(x, hvd.Product), mine, products),
        (hvd.allgather, both, [[1.5], [1.5]]),
        (lambda x: hvd.broadcast(x, 1), mine, [[1.5], [3.0]] if rank else [[0.0], [0.0]]),
        (hvd.alltoall, mine, [[1.0], [2.0]] if rank == 0 else [[3.0], [3.0]]),
        (lambda x: hvd.reducescatter(x, hvd.Sum), scattered, [[2.0], [4.0]]),
        (lambda x: hvd.reducescatter(x, name="named"), scattered, [[1.0], [2.0]]),
    ]
    for k, (function, weights, wanted) in enumerate(expected):
        for found in gradient_of(function, x, weights):
            assert found.tolist() == wanted, k


@on_ranks(2, timeout=60)
def test_gradients_of_groups_and_of_gradients() -> None:
    rank, _ = start("auto")
    tree = {"a": jnp.full(2, 1.0 + rank), "n": jnp.arange(3)}

    def loss(a: Any) -> Any:
        return (hvd.grouped_allreduce({**tree, "a": a}, hvd.Sum)["a"] ** 2).sum()

    assert np.asarray(jax.jit(jax.grad(loss))(tree["a"])).tolist() == [12.0, 12.0]

    def cubed(x: Any) -> Any:
        return (hvd.allreduce(x, hvd.Sum) ** 3).sum()

    twice = jax.jit(jax.grad(lambda x: jax.grad(cubed)(x).sum()))
    assert np.asarray(twice(jnp.ones(1))).tolist() == [48.0]  # 6 * 2, summed over both ranks in each pass
    with pytest.raises(hvd.UnsupportedOpError, match="Adasum is not defined"):
        jax.grad(lambda x: hvd.allreduce(x, hvd.Adasum).sum())(jnp.ones(2))


@both_doors
@on_ranks(2, timeout=60)
def test_averaged_gradients(door: str) -> None:
    rank, _ = start(door)
    data = jnp.array([1.0, 2.0]) + rank

    def loss(weights: Any, data: Any) -> Any:
        return (weights["w"] * data).sum(), rank

    for wrap in (lambda f: f, jax.jit):
        step = wrap(hvd.value_and_grad(loss, has_aux=True))
        (value, own), gradients = step({"w": jnp.ones(2)}, data)
        assert float(value) == 4.0
        assert int(own) == rank
        assert np.asarray(gradients["w"]).tolist() == [1.5, 2.5]
        gradients, own = wrap(hvd.grad(loss, has_aux=True, op=hvd.Sum))({"w": jnp.ones(2)}, data)
        assert int(own) == rank
        assert np.asarray(gradients["w"]).tolist() == [3.0, 5.0]


class Momentum(NamedTuple):
    """An optimizer with optax's interface."""

    rate: float = 0.1

    def init(self, params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        speed = jax.tree.map(lambda old, new: 0.5 * old + new, state, gradients)
        return jax.tree.map(lambda each: -self.rate * each, speed), speed


def train(optimizer: Any, gradients: list[Any]) -> Any:
    """Return the weights after steps with these gradients."""
    weights = jnp.zeros(2)
    state = optimizer.init(weights)

    @jax.jit
    def step(weights: Any, state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, weights)
        return weights + updates, state

    for gradient in gradients:
        weights, state = step(weights, state, gradient)
    return np.asarray(weights)


@both_doors
@on_ranks(2, timeout=90)
def test_a_distributed_optimizer_steps_as_one_process_with_all_gradients(door: str) -> None:
    rank, _ = start(door)
    everyones = [[jnp.array([1.0 + r + k, 2.0 * k]) for r in range(2)] for k in range(6)]
    mine = [gradients[rank] for gradients in everyones]
    averages = [sum(gradients) / 2 for gradients in everyones]
    expected = train(Momentum(), averages)
    assert np.allclose(train(hvd.DistributedOptimizer(Momentum()), mine), expected, atol=1e-6)
    halves = hvd.DistributedOptimizer(Momentum(), compression=hvd.Compression.bf16)
    assert np.allclose(train(halves, mine), expected, atol=0.05)
    sums = [averages[k] + averages[k + 1] for k in range(0, 6, 2)]
    accumulating = hvd.DistributedOptimizer(Momentum(), backward_passes_per_step=2)
    assert np.allclose(train(accumulating, mine), train(Momentum(), sums), atol=1e-6)


@on_ranks(1, timeout=60)
def test_bad_optimizers_are_refused() -> None:
    start("auto")
    with pytest.raises(TypeError, match="optax's init and update"):
        hvd.DistributedOptimizer(object())
    with pytest.raises(ValueError, match="backward_passes_per_step=0"):
        hvd.DistributedOptimizer(Momentum(), backward_passes_per_step=0)


@on_ranks(2, timeout=60)
def test_variables_and_states_of_trees() -> None:
    rank, _ = start("auto")
    tree = {"a": jnp.full((2, 2), float(rank)), "b": [jnp.array(rank)]}
    sent = hvd.broadcast_variables(tree, root_rank=1)
    assert np.asarray(sent["a"]).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert int(sent["b"][0]) == 1
    state = hvd.elastic.JaxState(weights=tree, epoch=rank)
    state.sync()
    assert isinstance(state.weights["a"], jax.Array)
    assert float(state.weights["a"][0, 0]) == 0.0
    assert state.epoch == 0
    state.weights = jax.tree.map(lambda leaf: leaf + 5, state.weights)
    state.restore()
    assert int(state.weights["b"][0]) == 0


@both_doors
@on_ranks(2, timeout=60)
def test_elastic_run_raises_the_error_that_a_program_carries(door: str) -> None:
    rank, _ = start(door)
    step = jax.jit(lambda x: hvd.allreduce(x, name="unlike"))

    @hvd.elastic.run
    def train(state: Any) -> None:
        jax.block_until_ready(step(jnp.ones(1 + rank)))

    with pytest.raises(hvd.HorovodInternalError, match="unlike") as caught:
        train(hvd.elastic.JaxState(epoch=0))
    assert isinstance(caught.value, hvd.MismatchError)
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


# Rank 1 never makes the call, and both ranks end.
UNDER_WAY = """
import threading
import time

import jax
import jax.numpy as jnp

import pyhvd.jax as hvd

hvd.init()
step = jax.jit(lambda x: hvd.allreduce(x, name="never"))
if hvd.rank() == 0:
    compiled = step.lower(jnp.ones(3)).compile()
    threading.Thread(target=lambda: jax.block_until_ready(compiled(jnp.ones(3))), daemon=True).start()
    time.sleep(2)
hvd.barrier()
"""


@pytest.mark.timeout(360)
@both_doors
@pytest.mark.parametrize("code", [PAGE[0], UNDER_WAY], ids=["page", "step under way"])
def test_programs(code: str, door: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(code)
    command = [sys.executable, "-m", "pyhvd.run", "-n", "2", str(program)]
    env = {**os.environ, "PYHVD_GRAPH_OPS": door, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr

"""The steps of JAX: nothing reduced, pyhvd by both of its doors, and JAX's own gloo."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from benchmarks import peers
from benchmarks.framework_steps import (
    FACTOR,
    arrays_of,
    nothing_reduced,
    numpy_contenders,
    step_contender,
)
from benchmarks.harness import OURS, Case, World
from benchmarks.questions.frameworks import CALLBACK, GLOO, JAX, NATIVE, label


def start(world: World) -> None:
    """Connect JAX's processes, which must come before JAX's first computation; then start pyhvd."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = world.comm.bcast(free.getsockname()[1])
    jax.distributed.initialize(f"127.0.0.1:{port}", world.size, world.rank)
    peers.start_pyhvd()


def case(world: World, count: int) -> Case:
    """Return the case of a number of tensors."""
    import jax
    import jax.numpy as jnp

    import pyhvd.jax as hvd

    given = arrays_of(world, count)
    tensors = [jnp.asarray(array) for array in given]

    def multiplied(tensors: Sequence[Any]) -> list[Any]:
        return [FACTOR * tensor for tensor in tensors]

    def compiled(name: str) -> Callable[[], Any]:
        def step(tensors: Sequence[Any]) -> Any:
            return hvd.grouped_allreduce(multiplied(tensors), hvd.Sum, name=f"jax.{count}.{name}")

        made = jax.jit(step).lower(tensors).compile()
        return lambda: jax.block_until_ready(made(tensors))

    alone = jax.jit(multiplied)
    with mock.patch("pyhvd.jax.collective.graph_ops", return_value="callback"):
        by_callback = compiled("callback")
    contenders = [
        nothing_reduced(world, lambda: jax.block_until_ready(alone(tensors))),
        step_contender(world, NATIVE, compiled("native"), kind=OURS),
        step_contender(world, CALLBACK, by_callback),
        step_contender(world, GLOO, _by_gloo(given)),
        *numpy_contenders(world, "jax", count),
    ]
    return Case(label(JAX, count), sum(array.nbytes for array in given), contenders)


def _by_gloo(given: Sequence[Any]) -> Callable[[], Any]:
    """Return the step of JAX's own: a sum over the processes in a shard_map."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(jax.devices(), "ranks")
    split = NamedSharding(mesh, PartitionSpec("ranks"))
    tensors = [jax.make_array_from_process_local_data(split, array[None]) for array in given]

    def sums(tensors: Sequence[Any]) -> list[Any]:
        return [jax.lax.psum(FACTOR * tensor, "ranks") for tensor in tensors]

    step = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=PartitionSpec("ranks"), out_specs=PartitionSpec()))
    return lambda: [each.addressable_data(0) for each in jax.block_until_ready(step(tensors))]

"""One collective in a JAX trace: the primitive, its shapes, its lowering to XLA's FFI, and its batching rule.

JAX has no public interface for effects of primitives. What is needed of its private modules is here alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax._src import effects
from jax._src.core import trace_state_clean
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir.dialects import stablehlo

from pyhvd.api.call import check_rows, check_splits
from pyhvd.dtypes import ReduceOp
from pyhvd.frameworks import callback
from pyhvd.frameworks.calls import TABLE, GraphCall
from pyhvd.frameworks.names import default_name
from pyhvd.jax.door import KEEPER, TARGET, graph_ops, open_door


class CollectiveEffect(effects.Effect):
    """Keeps JAX from dropping, merging or repeating collectives; their order is free."""

    def __str__(self) -> str:
        return "pyhvd"


_EFFECT = CollectiveEffect()
for _allowed in (
    effects.lowerable_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(CollectiveEffect)

collective_p = Primitive("pyhvd_collective")
"""Operands are the collective's tensors; the parameter ``call`` is a GraphCall, whose name may be empty."""
collective_p.multiple_results = True


def run(call: GraphCall, tensors: Sequence[Any]) -> list[Any]:
    """Return the results of a call on arrays or tracers.

    Parameters
    ----------
    call : GraphCall
        If its name is empty, it gets one when it is compiled; outside of traces pyhvd numbers it.
    tensors : sequence of jax.Array
        Its operands.
    """
    if not in_trace():
        return call.run_on(tensors)
    if graph_ops() == "native":
        results: list[Any] = collective_p.bind(*tensors, call=call)
        return results
    _allow_ordered_callbacks()
    named = with_name(call, tensors)
    shapes = [
        jax.ShapeDtypeStruct(each, t.dtype) for each, t in zip(_shapes(call, tensors), tensors, strict=True)
    ]
    run_now = functools.partial(_run_callback, TABLE.add(named), len(tensors))
    return list(io_callback(run_now, tuple(shapes), *tensors, ordered=True))


def in_trace() -> bool:
    """Return whether JAX traces what the program does now, as in jit, grad and vmap."""
    return not trace_state_clean()


def _run_callback(key: int, count: int, *arrays: Any) -> tuple[Any, ...]:
    return callback.run_now(key, *arrays)[:count]


@functools.cache
def _allow_ordered_callbacks() -> None:
    """Let ordered callbacks occur in custom derivatives and in jax.checkpoint, as collectives do."""
    traced = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))()
    for effect in traced.effects:
        effects.custom_derivatives_allowed_effects.add_type(type(effect))
        effects.remat_allowed_effects.add_type(type(effect))


def with_name(call: GraphCall, avals: Sequence[Any]) -> GraphCall:
    """Return a call with a name: its own, or one made of verb, dtype and shape of the first operand."""
    if call.name:
        return call
    first = f"{avals[0].dtype}{list(avals[0].shape)}" if avals else ""
    more = f" and {len(avals) - 1} more" if len(avals) > 1 else ""
    return replace(call, name=default_name(f"{call.verb} {first}{more}"))


# -- shapes --------------------------------------------------------------------------------------------


def _shapes(call: GraphCall, avals: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return the results' shapes; raise for operands whose first dimension does not fit."""
    given = [tuple(each.shape) for each in avals]
    if call.is_in_place:
        return given
    size, rank = call.process_set.size(), call.process_set.rank()
    if size is None or rank is None:
        raise ValueError(f"{call.verb}: this rank is not a member of {call.process_set}")
    shapes = []
    for shape in given:
        rows = check_rows(shape, size)
        if call.kind == "alltoall":
            check_splits(None, shape, size)
            shapes.append(shape)
        else:
            own = rows[rank] if call.kind == "reducescatter" else shape[0] * size
            shapes.append((own, *shape[1:]))
    return shapes


@collective_p.def_effectful_abstract_eval
def _abstract_eval(*avals: Any, call: GraphCall) -> tuple[list[Any], set[CollectiveEffect]]:
    shapes = _shapes(call, avals)
    made = [each.update(shape=shape, weak_type=False) for each, shape in zip(avals, shapes, strict=True)]
    return made, {_EFFECT}


# -- outside of traces ---------------------------------------------------------------------------------


@collective_p.def_impl
def _run_eagerly(*tensors: Any, call: GraphCall) -> list[Any]:
    return call.run_on(tensors)


# -- compilation ---------------------------------------------------------------------------------------


def _device_count(context: Any) -> int:
    """Return for how many local devices a module is compiled."""
    if hasattr(context, "mesh"):
        return int(context.mesh.size)
    if hasattr(context, "axis_env"):
        return int(context.axis_env.nreps)
    return int(context.num_devices)


_NOTHING = jax.core.ShapedArray((0,), np.uint8)
"""The keeper's result, which a custom call must have."""


def _lower(ctx: Any, *operands: Any, call: GraphCall) -> Any:
    """Lower to two custom calls.

    1. The collective has no side effect for XLA, which would run such calls one after the other. Ranks that
       trace them in different orders would then wait for each other. XLA merges no two calls, as keys
       differ, and moves none out of a loop, as its last operand is a token.
    2. The keeper has a side effect. It takes the first one's first result and does nothing, so that XLA
       drops neither.
    """
    devices = _device_count(ctx.module_context.axis_context)
    if devices > 1:
        raise ValueError(
            f"{call.verb} is compiled for {devices} devices of this process (at {call.site}): pyhvd has one"
            " device a rank, so start more ranks in place of pmap and shard_map"
        )
    key = open_door().add(with_name(call, ctx.avals_in))
    aliases = {k: k for k in range(len(operands))} if call.is_in_place else {}
    collective = jax.ffi.ffi_lowering(TARGET, operand_output_aliases=aliases)
    widened = ctx.replace(avals_in=[*ctx.avals_in, jax.core.abstract_token])
    results = collective(widened, *operands, stablehlo.after_all([]), key=np.int64(key))
    keeper = jax.ffi.ffi_lowering(KEEPER, has_side_effect=True)
    keeper(ctx.replace(avals_in=ctx.avals_out[:1], avals_out=[_NOTHING]), results[0])
    return results


# Two equal calls are two collectives: JAX must lower each one by itself.
_each = {"cacheable": False} if "cacheable" in inspect.signature(mlir.register_lowering).parameters else {}
mlir.register_lowering(collective_p, _lower, platform="cpu", **_each)


# -- transformations -----------------------------------------------------------------------------------


def _batch(args: Sequence[Any], dims: Sequence[Any], *, call: GraphCall) -> tuple[list[Any], list[Any]]:
    """Treat the batch as a part of the arrays."""
    if not call.is_in_place or call.op is ReduceOp.ADASUM:
        what = "allreduce with op=Adasum" if call.is_in_place else call.verb
        raise NotImplementedError(
            f"vmap of {what} (at {call.site}): only allreduce and broadcast have batches; call the verb"
            " outside of vmap, on the whole array"
        )
    moved = [
        arg if dim is None else jax.numpy.moveaxis(arg, dim, 0) for arg, dim in zip(args, dims, strict=True)
    ]
    results = collective_p.bind(*moved, call=call)
    return results, [dim if dim is None else 0 for dim in dims]


batching.primitive_batchers[collective_p] = _batch


def _refuse_forward_mode(_: Any, __: Any, *, call: GraphCall) -> Any:
    raise NotImplementedError(
        f"{call.verb} (at {call.site}) has no forward-mode derivative: use jax.grad or jax.vjp"
    )


ad.primitive_jvps[collective_p] = _refuse_forward_mode

"""Compare programs with and without the fast path: they give the same bits and the same errors."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import pyhvd as hvd
from pyhvd.engine.context import current_holder, playing_rank
from pyhvd.testing import run_ranks

VERBS = (
    "allreduce",
    "allreduce_",
    "grouped",
    "grouped_",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
)
DTYPES = ("float32", "float64", "float16", "int32", "uint8", "complex64")
OPS = (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product, hvd.Adasum)


@dataclass(frozen=True)
class Step:
    """One call of a program.

    ``odd`` is the rank that submits another shape or wrong splits. ``shared`` has a bit for each rank that
    uses arrays of ``hvd.empty()``.
    """

    verb: str
    dtype: str
    op: hvd.ReduceOp
    rows: int
    columns: int
    scale: float
    odd: int
    in_half: bool
    name: int
    shared: int


steps = st.builds(
    Step,
    verb=st.sampled_from(VERBS),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(OPS),
    rows=st.sampled_from([0, 1, 2, 5, 64, 300]),
    columns=st.sampled_from([1, 3, 200]),
    scale=st.sampled_from([1.0, 1.0, 0.5]),
    odd=st.sampled_from([-1, -1, -1, -1, 0, 1]),
    in_half=st.booleans(),
    name=st.integers(0, 3),
    shared=st.sampled_from([0, 0, 1, 7, 15, 15]),
)


def _input(step: Step, rank: int, index: int) -> Any:
    rng = np.random.default_rng([rank, index])
    shape = (step.rows + (rank == step.odd), step.columns)
    values = rng.integers(0, 50, shape) if step.dtype[0] in "iu" else rng.normal(size=shape)
    return _placed(values.astype(step.dtype), bool(step.shared >> rank & 1))


def _placed(array: Any, shared: bool) -> Any:
    if not shared:
        return array
    placed = hvd.empty_like(array)
    placed[...] = array
    return placed


def _call(step: Step, tensor: Any, process_set: hvd.ProcessSet) -> Any:
    how: dict[str, Any] = {"name": f"t{step.name}", "process_set": process_set}
    scaled: dict[str, Any] = {
        "op": step.op,
        "prescale_factor": step.scale,
        "postscale_factor": step.scale,
        **how,
    }
    if step.verb == "grouped":
        return hvd.grouped_allreduce([tensor, tensor[:1], tensor * 2], **scaled)
    if step.verb == "grouped_":
        shared = bool(step.shared >> hvd.rank() & 1)
        group = [tensor, *(_placed(part, shared) for part in (tensor[:1].copy(), tensor * 2))]
        return hvd.grouped_allreduce_(group, **scaled)
    if step.verb in ("allreduce", "allreduce_"):
        return getattr(hvd, step.verb)(tensor, **scaled)
    if step.verb == "reducescatter":
        return hvd.reducescatter(tensor, **scaled)
    if step.verb == "broadcast":
        return hvd.broadcast(tensor, min(1, hvd.size() - 1), **how)
    if step.verb == "alltoall":
        size = process_set.size()
        assert size is not None
        return hvd.alltoall(tensor, splits=[len(tensor) // size] * size, **how)
    return hvd.allgather(tensor, **how)


def _bits(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [_bits(each) for each in result]
    return result.dtype.name, result.shape, result.tobytes()


def program(plan: list[Step], leaving: int) -> list[Any]:
    """Run a plan; rank 0 stops ``leaving`` steps before the end, and joins."""
    log: list[Any] = []
    half = hvd.add_process_set(list(range(min(2, hvd.size() - 1))) or [0])
    rank = hvd.rank()
    plan = [*plan, *plan, *plan]  # repeated steps use the fast path
    for index, step in enumerate(plan[: len(plan) - leaving] if rank == 0 else plan):
        chosen = half if step.in_half and index < len(plan) - leaving else hvd.global_process_set
        if not chosen.included():
            continue
        try:
            log.append(_bits(_call(step, _input(step, rank, index), chosen)))
        except (hvd.HorovodInternalError, ValueError) as exc:
            log.append((type(exc).__name__, str(exc)))
    log.append(hvd.join() in range(hvd.size()))
    log.append(hvd.remove_process_set(half))
    return log


@pytest.mark.parametrize("size", [2, 3, 4])
@settings(max_examples=25)
@given(plan=st.lists(steps, min_size=1, max_size=8), leaving=st.integers(0, 3))
def test_the_same_program_through_both_lanes(size: int, plan: list[Step], leaving: int) -> None:
    runs = [
        run_ranks(
            size,
            program,
            plan,
            min(leaving, len(plan)),
            knobs={"fast_lane": fast, "dynamic_process_sets": True},
            timeout=60,
        )
        for fast in (True, False)
    ]
    assert runs[0] == runs[1]


def several_threads(rounds: int) -> list[Any]:
    """Submit tensors and groups from three threads per rank, and wait for them in any order."""
    active = current_holder()
    log: dict[int, list[Any]] = {}

    def work(thread: int) -> None:
        with playing_rank(active):
            rng = np.random.default_rng([hvd.rank(), thread])
            for index in range(rounds):
                sizes = [1, 300, 5000, 70_000][: 1 + (index + thread) % 4]
                arrays = [np.full(n, hvd.rank() + index + thread, np.float32) for n in sizes]
                handles = [
                    hvd.allreduce_async(array, name=f"t{thread}.{len(array)}", op=hvd.Sum) for array in arrays
                ]
                group = hvd.grouped_allreduce_async_(arrays[:2], name=f"g{thread}.{len(arrays[:2])}")
                rng.shuffle(handles)
                results = sorted(_bits(handle.result()) for handle in handles)
                log.setdefault(thread, []).append((results, _bits(group.result())))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [log[thread] for thread in range(3)]


@pytest.mark.parametrize("size", [2, 3])
def test_several_threads_through_both_lanes(size: int) -> None:
    runs = [run_ranks(size, several_threads, 12, knobs={"fast_lane": fast}) for fast in (True, False)]
    assert runs[0] == runs[1]


def _kinds_of_handles() -> list[str]:
    kinds = []
    for _ in range(3):
        handle = hvd.allreduce_async(np.ones(3), name="again")
        handle.wait()
        kinds.append(type(handle).__name__)
        hvd.barrier()  # the tensor is cached after it
    return kinds


@pytest.mark.parametrize(("fast", "then"), [(True, "Handle"), (False, "QueuedHandle")])
def test_what_comes_again_goes_to_the_fast_lane(fast: bool, then: str) -> None:
    for kinds in run_ranks(2, _kinds_of_handles, knobs={"fast_lane": fast}):
        assert kinds == ["QueuedHandle", then, then]

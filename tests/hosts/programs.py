"""Random programs for ranks on several hosts, which every rank derives from a seed.

A program has rounds; a round submits some steps at once, in a different order on each rank, and waits for
them in another one. Each round is run three times with the same input: first by message, then as cached
calls. Its sets are those that are placed differently on the hosts.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import pyhvd as hvd
from tests.conformance.cases import SECONDS
from tests.conformance.determinism import varying
from tests.conformance.oracle import Array, reduced

TIMES = 3
_LENGTHS = (1, 33, 1000, 20_000, 150_000)
_DTYPES = ("float32", "float32", "float64", "float16", "bfloat16", "int32", "complex64")
_VERBS = (
    *("allreduce",) * 4,
    "group",
    "group",
    "in place",
    *("allgather", "broadcast"),
    *("reducescatter", "alltoall"),
)
_OPS = (hvd.Sum, hvd.Sum, hvd.Average, hvd.Max)
_REDUCTIONS = ("allreduce", "group", "in place")
_SHARED = (*_REDUCTIONS, "allgather", "broadcast")


Sets = Mapping[tuple[int, ...], hvd.ProcessSet]
"""The process sets by their ranks."""


@dataclass(frozen=True)
class Step:
    """One call; ``members`` are its set's ranks."""

    name: str
    verb: str
    dtype: str
    op: hvd.ReduceOp
    length: int
    scale: float
    members: tuple[int, ...]
    parts: int


def sets_of(shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the ranks of all hosts, of the fullest host, of each host but one, and one rank of each host."""
    hosts, first = [], 0
    for count in shape:
        hosts.append(tuple(range(first, first + count)))
        first += count
    everyone = tuple(range(first))
    found = [everyone, max(hosts, key=len), sum(hosts[1:], ()), tuple(ranks[-1] for ranks in hosts)]
    return list(dict.fromkeys(ranks for ranks in found if ranks))


def random_round(rng: random.Random, sets: Sequence[tuple[int, ...]], name: str) -> list[Step]:
    """Return the steps of a round, with different names."""
    steps = []
    for index in range(rng.randint(3, 8)):
        dtype, verb = rng.choice(_DTYPES), rng.choice(_VERBS)
        op = hvd.Max if dtype == "int32" else rng.choice(_OPS)
        if verb == "reducescatter" or dtype == "complex64":
            op, dtype = hvd.Sum, "float32" if dtype == "int32" else dtype
        scale = rng.choice((1.0, 1.0, 0.5)) if op is not hvd.Max else 1.0
        length, parts = rng.choice(_LENGTHS), rng.randint(1, 5)
        members = rng.choice([sets[0], *sets])
        steps.append(Step(f"{name}.{index}", verb, dtype, op, length, scale, members, parts))
    return steps


def inputs_of(step: Step, rank: int) -> list[Array]:
    """Return a rank's arrays: one, or several for a group."""
    count = step.parts if step.verb == "group" else 1
    with np.errstate(over="ignore"):
        if step.dtype == "int32":
            return [np.arange(step.length, dtype=np.int32) * (rank + part) for part in range(count)]
        return [varying(step.dtype, step.length, rank, seed=part) for part in range(count)]


def submit(step: Step, arrays: list[Array], process_set: hvd.ProcessSet) -> hvd.Handle:
    """Submit a step."""
    how: dict[str, Any] = {"name": step.name, "process_set": process_set}
    scaled = how | {"op": step.op, "prescale_factor": step.scale}
    if step.verb == "group":
        return hvd.grouped_allreduce_async(arrays, **scaled)
    if step.verb == "in place":
        return hvd.allreduce_async_(arrays[0], **scaled)
    if step.verb == "allreduce":
        return hvd.allreduce_async(arrays[0], **scaled)
    if step.verb == "reducescatter":
        return hvd.reducescatter_async(arrays[0], **scaled)
    if step.verb == "broadcast":
        return hvd.broadcast_async(arrays[0], step.members[-1], **how)
    if step.verb == "alltoall":
        rows, more = divmod(step.length, len(step.members))
        return hvd.alltoall_async(arrays[0], [rows + (r < more) for r in range(len(step.members))], **how)
    return hvd.allgather_async(arrays[0], **how)


def check(step: Step, got: Sequence[Array], leavers: Collection[int]) -> None:
    """Compare an allreduce with numpy, whatever the order of summation."""
    if step.verb not in _REDUCTIONS or step.dtype in ("float16", "bfloat16"):
        return
    every = [inputs_of(step, rank) for rank in step.members if rank not in leavers]
    for part, out in enumerate(got):
        parts = [each[part] for each in every]
        want = reduced(step.op, parts, step.scale, size=len(step.members))
        size = np.sum([np.abs(each) for each in parts], axis=0)
        wrong = ~(np.abs(out - want) <= 1e-6 * size)
        assert not wrong.any(), f"{step}: wrong at {np.flatnonzero(wrong)[:5]}"


def run_round(steps: Sequence[Step], sets: Sets, leavers: Collection[int] = ()) -> dict[str, str]:
    """Run a round :data:`TIMES` times, without the ranks that have left; return a digest of each result.

    A result that this rank alone has gets the rank's number behind its name.

    Raises
    ------
    AssertionError
        A result is wrong, or its bits differ between the times.
    """
    mine = [step for step in steps if hvd.rank() in step.members]
    order = random.Random(f"{steps} {hvd.rank()}")
    first: dict[str, str] = {}
    for turn in range(TIMES):
        submitted = {}
        for step in order.sample(mine, len(mine)):
            submitted[step.name] = submit(step, inputs_of(step, hvd.rank()), sets[step.members])
        for step in order.sample(mine, len(mine)):
            out = submitted[step.name].result(SECONDS)
            got = list(out) if isinstance(out, list | tuple) else [out]
            digest = hashlib.sha256(b"".join(each.tobytes() for each in got)).hexdigest()[:16]
            assert first.setdefault(step.name, digest) == digest, f"time {turn + 1} of {step} differs"
            if turn == 0:
                check(step, got, leavers)
    own = f" {hvd.rank()}"
    return {step.name + own * (step.verb not in _SHARED): first[step.name] for step in mine}


def random_leavers(rng: random.Random, shape: Sequence[int]) -> Collection[int]:
    """Return one rank, or all ranks of a host if there are others."""
    host = rng.randrange(len(shape))
    first = sum(shape[:host])
    ranks = range(first, first + shape[host])
    return [rng.choice(ranks)] if len(shape) == 1 or rng.random() < 0.5 else ranks


def run_program(seed: int, shape: Sequence[int]) -> dict[str, str]:
    """Run a program on this rank; at its end some ranks join, and the others go on without them.

    Returns
    -------
    dict of str to str
        A digest of each of this rank's results.

    Raises
    ------
    AssertionError
        A result is wrong, or its bits differ between the times or between the ranks.
    """
    rng = random.Random(seed)
    members = sets_of(shape)
    sets = {members[0]: hvd.global_process_set} | {each: hvd.add_process_set(each) for each in members[1:]}
    digests: dict[str, str] = {}
    for index in range(2):
        digests |= run_round(random_round(rng, members, f"p{seed}.{index}"), sets)
    last = random_round(rng, members[:1], f"p{seed}.joined")
    leavers = random_leavers(rng, shape)
    if hvd.rank() not in leavers:
        digests |= run_round([step for step in last if step.verb in _REDUCTIONS], sets, leavers)
    assert hvd.join() in members[0]
    for added in list(sets.values())[1:]:
        assert hvd.remove_process_set(added)
    found: dict[str, str] = {}
    for rank, theirs in enumerate(hvd.allgather_object(digests)):
        for name, digest in theirs.items():
            assert found.setdefault(name, digest) == digest, f"rank {rank} has other bits of {name}"
    return digests

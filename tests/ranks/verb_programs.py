"""Random programs of all verbs for the ranks of one host, which every rank derives from a seed.

A program has steps. In each step the ranks submit some calls, each rank in an order of its own, and from two
threads. A name keeps its verb, and mostly its sizes: so calls go by message, are remembered, and meet other
sizes. The results are integers, compared with numpy's.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import pyhvd as hvd
from pyhvd.backends.host import rows_of
from pyhvd.engine.context import current_holder, playing_rank

SECONDS = 30
LENGTHS = (0, 1, 2, 7, 40, 900, 3000, 20_000)
VERBS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
DTYPES = (np.int64, np.int32, np.int16, np.uint8)

Array = np.ndarray[Any, np.dtype[Any]]
Sets = list[tuple[tuple[int, ...], hvd.ProcessSet]]


@dataclass(frozen=True)
class Call:
    """One call, as all ranks know it.

    Attributes
    ----------
    rows : tuple of tuple of int
        By set rank: the rows for each set rank of an alltoall, else the number of rows.
    parts : int
        Tensors of a grouped call; 0: it is not grouped.
    """

    verb: str
    name: str | None
    where: int
    dtype: Any
    rows: tuple[tuple[int, ...], ...]
    width: int
    root: int
    parts: int
    inplace: bool
    turn: int

    def value_of(self, rank: int, part: int) -> Array:
        """Return the tensor of a set rank."""
        count = sum(self.rows[rank]) * self.width
        values = np.arange(count) * (part + 1) + 31 * rank + self.turn
        return (values % 97).astype(self.dtype).reshape(-1, self.width)

    def result_of(self, rank: int, ranks: Sequence[int], part: int) -> Array:
        """Return what a set rank gets, if the set ranks ``ranks`` take part."""
        every = [self.value_of(q, part) for q in ranks]
        if self.verb == "broadcast":
            return self.value_of(self.root, part)
        if self.verb == "allgather":
            return np.concatenate(every)
        if self.verb == "alltoall":
            blocks = [
                np.split(each, np.cumsum(self.rows[q])[:-1]) for q, each in zip(ranks, every, strict=True)
            ]
            return np.concatenate([each[rank] for each in blocks])
        total: Array = np.sum(every, axis=0, dtype=self.dtype)
        if self.verb == "reducescatter":
            rows = rows_of(len(total), len(self.rows))
            return total[sum(rows[:rank]) : sum(rows[: rank + 1])]
        return total


@dataclass
class Program:
    """Draws the calls of the steps; the same on every rank."""

    rng: random.Random
    sets: list[int]  # their sizes
    turn: int = 0
    kept: dict[str, Call] = field(default_factory=dict)

    def draw(self, index: int, where: int | None = None, verbs: Sequence[str] = VERBS) -> Call:
        """Return a call; the last one of this name, or one with other sizes."""
        rng, self.turn = self.rng, self.turn + 1
        old = [
            call
            for name, call in self.kept.items()
            if name.endswith(f".{index}") and call.verb in verbs and where in (None, call.where)
        ]
        if old and rng.random() < 0.7:
            before = rng.choice(old)
            root = rng.randrange(self.sets[before.where]) if rng.random() < 0.2 else before.root
            return Call(**{**vars(before), "turn": self.turn, "root": root})
        verb = rng.choice(verbs)
        where = rng.randrange(len(self.sets)) if where is None else where
        name = f"{verb}.{where}.{index}" if rng.random() < 0.85 else None
        grouped = verb in ("allreduce", "allgather", "reducescatter") and rng.random() < 0.3
        call = Call(
            verb,
            name,
            where,
            rng.choice(DTYPES),
            self._rows(verb, self.sets[where]),
            rng.randint(1, 3),
            rng.randrange(self.sets[where]),
            rng.randint(1, 3) if grouped else 0,
            verb in ("allreduce", "broadcast") and rng.random() < 0.5,
            self.turn,
        )
        self.kept[name or f"{verb}.{where}.{index}"] = call
        return call

    def _rows(self, verb: str, size: int) -> tuple[tuple[int, ...], ...]:
        length = self.rng.choice(LENGTHS)
        if verb == "alltoall":
            even = self.rng.random() < 0.3
            most = length // size
            return tuple(
                tuple(most if even else self.rng.randint(0, most) for _ in range(size)) for _ in range(size)
            )
        if verb == "allgather":
            return tuple((self.rng.randint(0, length),) for _ in range(size))
        return ((length,),) * size


def submit(call: Call, process_set: hvd.ProcessSet, members: Sequence[int]) -> tuple[hvd.Handle, list[Array]]:
    """Submit this rank's part; return the handle and the tensors."""
    rank = members.index(hvd.rank())
    tensors = [call.value_of(rank, part) for part in range(max(call.parts, 1))]
    given: Any = tensors if call.parts else tensors[0]
    how: dict[str, Any] = {"name": call.name, "process_set": process_set}
    begin: Callable[..., hvd.Handle] = getattr(
        hvd, "grouped_" * bool(call.parts) + call.verb + "_async" + "_" * call.inplace
    )
    if call.verb == "broadcast":
        return begin(given, members[call.root], **how), tensors
    if call.verb == "alltoall":
        even = len(set(call.rows[rank])) == 1 and call.turn % 2
        return begin(given, None if even else call.rows[rank], **how), tensors
    if call.verb != "allgather":
        how["op"] = hvd.Sum
    return begin(given, **how), tensors


def check(
    call: Call, handle: hvd.Handle, tensors: list[Array], members: Sequence[int], gone: Sequence[int]
) -> None:
    """Wait for a call, and compare its results; ``gone`` are ranks that have joined."""
    rank = members.index(hvd.rank())
    ranks = [q for q, member in enumerate(members) if member not in gone]
    got = handle.result(SECONDS)
    if call.verb == "alltoall":
        got, received = got
        assert received.tolist() == [rows[rank] for rows in call.rows], call
        received += 1  # it is the caller's own
    outputs = got if call.parts else [got]
    assert len(outputs) == max(call.parts, 1)
    for part, (out, tensor) in enumerate(zip(outputs, tensors, strict=True)):
        want = call.result_of(rank, ranks, part)
        assert out.dtype == want.dtype, call
        assert np.array_equal(out, want), call
        assert (out is tensor) == call.inplace
        assert call.inplace or np.array_equal(tensor, call.value_of(rank, part)), "the input was changed"


def run_calls(calls: Sequence[Call], sets: Sets, own: random.Random, gone: Sequence[int] = ()) -> None:
    """Submit calls, those without names in their order; wait for them in another order."""
    mine = [call for call in calls if hvd.rank() in sets[call.where][0]]
    unnamed = [call for call in mine if call.name is None]
    named = [call for call in mine if call.name is not None]
    handles = []
    for call in unnamed + own.sample(named, len(named)):
        members, process_set = sets[call.where]
        handles.append((call, *submit(call, process_set, members), members, gone))
    for each in own.sample(handles, len(handles)):
        check(*each)


def run_program(seed: int, steps: int, ranks: int) -> None:
    """Run a program on this rank, at the end of which a rank joins while the others go on.

    Raises
    ------
    AssertionError
        A result is wrong.
    """
    rng, own = random.Random(seed), random.Random(f"{seed} {hvd.rank()}")
    everyone = tuple(range(ranks))
    sets: Sets = [(everyone, hvd.global_process_set)]
    for members in (everyone[1:],) if ranks > 2 else ():
        sets.append((members, hvd.add_process_set(members)))
    sizes = [len(members) for members, _ in sets]
    programs = [Program(rng, sizes) for _ in range(2)]
    for _ in range(steps):
        drawn = [
            [program.draw(k + 4 * n) for k in range(rng.randint(1, 3))] for n, program in enumerate(programs)
        ]
        drawn[1] = [call for call in drawn[1] if call.name is not None]  # order is that of one thread
        _in_two_threads(
            partial(run_calls, drawn[0], sets, own),
            partial(run_calls, drawn[1], sets, random.Random(own.random())),
        )
        if rng.random() < 0.3:
            hvd.barrier()
    gone = [rng.randrange(ranks)]
    last = [programs[0].draw(k, 0, ("allreduce", "allgather", "reducescatter")) for k in range(3)]
    if hvd.rank() not in gone:
        run_calls([call for call in last if call.name is not None], sets, own, gone)
    hvd.join()
    run_calls([programs[0].draw(k, 0) for k in range(3)], sets, own)
    for _, added in sets[1:]:
        assert hvd.remove_process_set(added)


def _in_two_threads(here: Callable[[], None], there: Callable[[], None]) -> None:
    failed: list[BaseException] = []
    holder = current_holder()

    def run() -> None:
        try:
            with playing_rank(holder):
                there()
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    here()
    thread.join()
    if failed:
        raise failed[0]

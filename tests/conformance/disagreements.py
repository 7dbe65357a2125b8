"""Cases of ranks that submit different calls under one name.

1. Every rank that took part gets a MismatchError with the tensor's name and every rank's value.
2. No rank hangs.
3. No input changes.
4. The name works in the next correct call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance.cases import SEVERAL, Cases, is_last, last, raised
from tests.conformance.oracle import BF16, Array

CASES = Cases()
T = TypeVar("T")
F4, F8 = np.float32, np.float64


@dataclass(frozen=True)
class Mismatch:
    """The calls of the first ranks and of the last rank, and the words that the error must contain."""

    most: Callable[[str], hvd.Handle]
    odd: Callable[[str], hvd.Handle]
    words: tuple[str, ...]
    tensor: str = "{}"


def _zeros(*shape: int, dtype: np.typing.DTypeLike = F4) -> Array:
    return np.zeros(shape, dtype)


MISMATCHES: dict[str, Mismatch] = {
    "allreduce shape": Mismatch(
        lambda n: hvd.allreduce_async(_zeros(3), name=n),
        lambda n: hvd.allreduce_async(_zeros(4), name=n),
        ("shapes", "allreduce", "(3,)", "(4,)"),
    ),
    "allreduce ndim": Mismatch(
        lambda n: hvd.allreduce_async(_zeros(4), name=n),
        lambda n: hvd.allreduce_async(_zeros(2, 2), name=n),
        ("shapes", "(4,)", "(2, 2)"),
    ),
    "allreduce empty": Mismatch(
        lambda n: hvd.allreduce_async(_zeros(0), name=n),
        lambda n: hvd.allreduce_async(_zeros(), name=n),
        ("shapes", "(0,)", "()"),
    ),
    "broadcast shape": Mismatch(
        lambda n: hvd.broadcast_async(_zeros(3), 0, n),
        lambda n: hvd.broadcast_async(_zeros(4), 0, n),
        ("shapes", "broadcast"),
    ),
    "reducescatter shape": Mismatch(
        lambda n: hvd.reducescatter_async(_zeros(3), n),
        lambda n: hvd.reducescatter_async(_zeros(4), n),
        ("shapes", "reducescatter"),
    ),
    "allreduce dtype": Mismatch(
        lambda n: hvd.allreduce_async(_zeros(3), name=n),
        lambda n: hvd.allreduce_async(_zeros(4, dtype=F8), name=n),
        ("data types", "float32", "float64"),
    ),
    "same size dtype": Mismatch(
        lambda n: hvd.allreduce_async(np.zeros(3, np.float16), name=n),
        lambda n: hvd.allreduce_async(np.zeros(3, BF16), name=n),
        ("data types", "float16", "bfloat16"),
    ),
    "allgather dtype": Mismatch(
        lambda n: hvd.allgather_async(_zeros(3), n),
        lambda n: hvd.allgather_async(_zeros(3, dtype=np.int32), n),
        ("data types", "int32"),
    ),
    "broadcast dtype": Mismatch(
        lambda n: hvd.broadcast_async(_zeros(3), 0, n),
        lambda n: hvd.broadcast_async(_zeros(3, dtype=F8), 0, n),
        ("data types", "float64"),
    ),
    "alltoall dtype": Mismatch(
        lambda n: hvd.alltoall_async(_zeros(12), name=n),
        lambda n: hvd.alltoall_async(_zeros(12, dtype=F8), name=n),
        ("data types", "float64"),
    ),
    "operation": Mismatch(
        lambda n: hvd.allreduce_async(_zeros(3), name=n),
        lambda n: hvd.allgather_async(_zeros(3), n),
        ("operations", "allreduce", "allgather"),
    ),
    "operation after dtype": Mismatch(
        lambda n: hvd.broadcast_async(_zeros(3), 0, n),
        lambda n: hvd.allgather_async(_zeros(3, dtype=F8), n),
        ("data types",),
    ),
    "reduce op": Mismatch(
        lambda n: hvd.allreduce_async(_zeros(3), name=n, op=hvd.Sum),
        lambda n: hvd.allreduce_async(_zeros(3), name=n, op=hvd.Max),
        ("reduce ops", "Sum", "Max"),
    ),
    "average and sum": Mismatch(
        lambda n: hvd.allreduce_async(_zeros(3), name=n),
        lambda n: hvd.allreduce_async(_zeros(3), name=n, op=hvd.Sum),
        ("reduce ops", "Average", "Sum"),
    ),
    "reducescatter op": Mismatch(
        lambda n: hvd.reducescatter_async(_zeros(3), n, op=hvd.Sum),
        lambda n: hvd.reducescatter_async(_zeros(3), n),
        ("reduce ops", "Average", "Sum"),
    ),
    "prescale": Mismatch(
        lambda n: hvd.allreduce_async(_zeros(3), name=n, prescale_factor=2.0),
        lambda n: hvd.allreduce_async(_zeros(3), name=n, prescale_factor=2.5),
        ("prescale", "2.0", "2.5"),
    ),
    "postscale": Mismatch(
        lambda n: hvd.reducescatter_async(_zeros(3), n, postscale_factor=2.0),
        lambda n: hvd.reducescatter_async(_zeros(3), n),
        ("postscale", "2.0", "1.0"),
    ),
    "root": Mismatch(
        lambda n: hvd.broadcast_async(_zeros(3), 0, n),
        lambda n: hvd.broadcast_async(_zeros(3), 1, n),
        ("root ranks",),
    ),
    "allgather trailing": Mismatch(
        lambda n: hvd.allgather_async(_zeros(3, 2), n),
        lambda n: hvd.allgather_async(_zeros(4, 3), n),
        ("dimensions", "(3, 2)", "(4, 3)"),
    ),
    "allgather ndim": Mismatch(
        lambda n: hvd.allgather_async(_zeros(3, 2), n),
        lambda n: hvd.allgather_async(_zeros(3, 2, 1), n),
        ("numbers of dimensions", "2 ", "3 "),
    ),
    "alltoall trailing": Mismatch(
        lambda n: hvd.alltoall_async(_zeros(12, 2), name=n),
        lambda n: hvd.alltoall_async(_zeros(12, 3), name=n),
        ("dimensions",),
    ),
    "alltoall ndim": Mismatch(
        lambda n: hvd.alltoall_async(_zeros(12), name=n),
        lambda n: hvd.alltoall_async(_zeros(12, 3), name=n),
        ("numbers of dimensions",),
    ),
    "grouped or not": Mismatch(
        lambda n: hvd.grouped_allreduce_async([_zeros(3)], name=n),
        lambda n: hvd.allreduce_async(_zeros(3), name=f"{n}_1of1"),
        ("grouping", "not grouped"),
        "{}_1of1",
    ),
    "a member's shape": Mismatch(
        lambda n: hvd.grouped_allreduce_async([_zeros(3), _zeros(2)], name=n),
        lambda n: hvd.grouped_allreduce_async([_zeros(3), _zeros(5)], name=n),
        ("shapes", "(2,)", "(5,)"),
        "{}_2of2",
    ),
    "a gathered member": Mismatch(
        lambda n: hvd.grouped_allgather_async([_zeros(3, 2), _zeros(2)], name=n),
        lambda n: hvd.grouped_allgather_async([_zeros(3, 3), _zeros(2)], name=n),
        ("dimensions",),
        "{}_1of2",
    ),
}


def _check(error: BaseException | None, name: str, how: Mismatch) -> None:
    assert isinstance(error, hvd.MismatchError), repr(error)
    tensor = how.tensor.format(name)
    text = str(error)
    for word in (*how.words, "rank", str(last())):
        assert word in text, (word, text)
    assert error.per_rank.keys() == set(range(hvd.size())), text
    values = [error.per_rank[r].value for r in range(hvd.size())]
    if error.name == tensor:
        assert len(set(values[:-1])) == 1, values
        assert values[-1] != values[0], values
    assert tensor in text


@CASES.add_each(MISMATCHES, *SEVERAL)
def mismatch(kind: str) -> None:
    how = MISMATCHES[kind]
    for again in range(2):
        name = f"mismatch {kind}"
        handle = (how.odd if is_last() else how.most)(name)
        _check(raised(handle), name, how)
        with pytest.raises(hvd.MismatchError):
            handle.result()
        if again == 0:
            # This call is correct, so that the second mismatch meets a cached response.
            for _ in range(3):
                assert raised(how.most(name)) is None


@CASES.add(*SEVERAL)
def bystanders_are_not_harmed() -> None:
    """The mismatching tensor is between matching ones."""
    for step in range(3):
        extent = 4 if is_last() and step == 1 else 3
        good = [hvd.allreduce_async(np.full(3, i), op=hvd.Sum, name=f"good.{i}") for i in range(5)]
        wrong = hvd.allreduce_async(np.ones(extent), name="wrong")
        good += [hvd.allreduce_async(np.full(3, i), op=hvd.Sum, name=f"good.{i}") for i in range(5, 10)]
        assert isinstance(raised(wrong), hvd.MismatchError if step == 1 else type(None))
        assert [handle.result()[0] for handle in good] == [i * hvd.size() for i in range(10)]


@CASES.add(*SEVERAL)
def a_failed_in_place_target_is_unchanged() -> None:
    mine = np.full(4 if is_last() else 3, 7.0)
    assert isinstance(raised(hvd.allreduce_async_(mine, name="in place")), hvd.MismatchError)
    assert mine.tolist() == [7.0] * len(mine)
    assert isinstance(raised(hvd.broadcast_async_(mine, 0, "in place")), hvd.MismatchError)
    assert mine.tolist() == [7.0] * len(mine)


@CASES.add(*SEVERAL)
def a_failing_member_fails_its_group_alone() -> None:
    shapes = [(3,), (2,), (5,)]
    tensors = [np.ones(shape) for shape in shapes]
    wrong = [*tensors[:2], np.ones(6)]
    bystander = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="bystander")
    group = hvd.grouped_allreduce_async(wrong if is_last() else tensors, op=hvd.Sum, name="group")
    other = hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name="other group")
    assert isinstance(raised(group), hvd.MismatchError)
    assert bystander.result().tolist() == [hvd.size()] * 2
    assert [out[0] for out in other.result()] == [hvd.size()] * 3
    again = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="group")
    assert [out[0] for out in again] == [hvd.size()] * 3


def _in_turn(first: bool, submit: Callable[[], T]) -> T:
    """The last rank submits before or after all other ranks, since a rank's messages arrive in order."""
    if first:
        submitted = submit()
        hvd.barrier()
        return submitted
    hvd.barrier()
    return submit()


def _check_pair_works(name: str) -> None:
    """The next call of the group succeeds, first by messages, then by the cache."""
    for _ in range(3):
        outs = hvd.grouped_allreduce([_zeros(2) + 1, _zeros(3) + 1], op=hvd.Sum, name=name)
        assert [out.tolist() for out in outs] == [[hvd.size()] * 2, [hvd.size()] * 3]


@CASES.add_each(["grouped 1", "grouped 2", "alone 1", "alone 2"], *SEVERAL)
def a_member_by_itself(first: str) -> None:
    """Most ranks submit a group; the last rank submits a tensor with a member's name."""
    kind, _, member = first.partition(" ")
    name = f"clash {first}"
    pair = [_zeros(2), _zeros(3)]
    for _ in range(2):
        if is_last():
            alone, tensor = f"{name}_{member}of2", pair[int(member) - 1]
            handle = _in_turn(kind == "alone", lambda: hvd.allreduce_async(tensor, name=alone, op=hvd.Sum))  # noqa: B023
        else:
            handle = _in_turn(
                kind == "grouped", lambda: hvd.grouped_allreduce_async(pair, name=name, op=hvd.Sum)
            )
        error = raised(handle)
        assert isinstance(error, hvd.MismatchError), repr(error)
        assert error.per_rank.keys() == set(range(hvd.size()))
        for word in ("grouping", f"{name}_{member}of2", f"rank {last()}: not grouped", "Every rank must"):
            assert word in str(error), (word, str(error))
        _check_pair_works(name)


@CASES.add(*SEVERAL)
def all_members_by_themselves() -> None:
    name = "clash of all"
    pair = [_zeros(2), _zeros(3)]
    for grouped_first in (True, False):
        if is_last():
            handles = _in_turn(
                not grouped_first,
                lambda: [hvd.allreduce_async(a, name=f"{name}_{i}of2") for i, a in enumerate(pair, 1)],
            )
        else:
            handles = [_in_turn(grouped_first, lambda: hvd.grouped_allreduce_async(pair, name=name))]
        for handle in handles:
            assert isinstance(raised(handle), hvd.MismatchError)
        _check_pair_works(name)


@CASES.add(3, 4)
def a_pair_here_and_a_triple_and_a_member_there() -> None:
    name = "clash of sizes"
    for _ in range(2):
        if hvd.rank() == 0:
            handle = hvd.grouped_allreduce_async([_zeros(2), _zeros(3)], name=name)
        elif is_last():
            handle = hvd.grouped_allreduce_async([_zeros(2), _zeros(3), _zeros(4)], name=name)
        else:
            handle = hvd.allreduce_async(_zeros(2), name=f"{name}_1of2")
        assert isinstance(raised(handle), hvd.MismatchError)
        _check_pair_works(name)


@CASES.add_each(["grouped", "alone"], *SEVERAL)
def a_member_refused_by_itself(first: str) -> None:
    name = f"refused first {first}"

    def refuse() -> None:
        with pytest.raises(hvd.UnsupportedDtypeError):
            hvd.allreduce(np.array(["a"]), name=f"{name}_1of2")

    for _ in range(2):
        if is_last():
            _in_turn(first == "alone", refuse)
        else:
            pair = [_zeros(2), _zeros(3)]
            handle = _in_turn(first == "grouped", lambda: hvd.grouped_allreduce_async(pair, name=name))  # noqa: B023
            error = raised(handle)
            assert isinstance(error, hvd.RankFailedError), repr(error)
            assert error.rank == last()
        _check_pair_works(name)


@CASES.add(*SEVERAL)
def a_name_may_change_its_use() -> None:
    """A changed call under a cached name is no mismatch if all ranks agree."""
    size, rank = hvd.size(), hvd.rank()
    for _ in range(3):
        for _ in range(2):
            assert hvd.allreduce(np.ones(2, F4), op=hvd.Sum, name="use").tolist() == [size] * 2
        assert hvd.allgather(np.full(1, rank), name="use").tolist() == list(range(size))
        assert hvd.broadcast(np.full(3, rank), 1, name="use").tolist() == [1] * 3
        assert hvd.reducescatter(np.ones(size), name="use", op=hvd.Sum).tolist() == [size]
        assert hvd.alltoall(np.full(size, rank), name="use").tolist() == list(range(size))
        assert hvd.allreduce(np.ones(4, F8), name="use").tolist() == [1.0] * 4

"""Cases of a call that one rank refuses: it raises there at once, and on the waiting ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from tests.conformance.cases import SEVERAL, Cases, is_last, last, outcome, raised

CASES = Cases()


def _read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(4)
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class Refusal:
    """The last rank's wrong call, the correct call, and the error of the wrong call on its rank."""

    wrong: Callable[[str | None], Any]
    right: Callable[[str | None], Any]
    kind: type[Exception] = ValueError


def _alltoall(name: str | None) -> Any:
    return hvd.alltoall(np.zeros(12), [1] * hvd.size(), name)


def _allreduce(name: str | None) -> Any:
    return hvd.allreduce(np.zeros(4), name=name)


REFUSALS: dict[str, Refusal] = {
    "too few splits": Refusal(lambda n: hvd.alltoall(np.zeros(12), [1], n), _alltoall),
    "negative splits": Refusal(lambda n: hvd.alltoall(np.zeros(12), [-1] * hvd.size(), n), _alltoall),
    "float splits": Refusal(lambda n: hvd.alltoall(np.zeros(12), np.ones(hvd.size()), n), _alltoall),
    "splits beyond the rows": Refusal(lambda n: hvd.alltoall(np.zeros(12), [13] * hvd.size(), n), _alltoall),
    "uneven rows": Refusal(lambda n: hvd.alltoall(np.zeros(13), None, n), _alltoall),
    "object dtype": Refusal(lambda n: hvd.allreduce(np.array([None]), name=n), _allreduce),
    "byte order": Refusal(lambda n: hvd.allreduce(np.zeros(4, ">f8"), name=n), _allreduce),
    "no array": Refusal(lambda n: hvd.allreduce([1.0], name=n), _allreduce, TypeError),
    "op": Refusal(lambda n: hvd.allreduce(np.zeros(4, bool), name=n), _allreduce, hvd.UnsupportedDtypeError),
    "factor": Refusal(lambda n: hvd.allreduce(np.zeros(4), name=n, prescale_factor=np.nan), _allreduce),
    "adasum": Refusal(
        lambda n: hvd.allreduce(np.zeros(4, int), name=n, op=hvd.Adasum), _allreduce, ValueError
    ),
    "read-only": Refusal(
        lambda n: hvd.allreduce_(_read_only(), name=n), lambda n: hvd.allreduce_(np.zeros(4), name=n)
    ),
    "scatter op": Refusal(
        lambda n: hvd.reducescatter(np.zeros(4), n, op=hvd.Max),
        lambda n: hvd.reducescatter(np.zeros(4), n),
        hvd.UnsupportedOpError,
    ),
    "scattered 0-d": Refusal(
        lambda n: hvd.reducescatter(np.zeros(()), n), lambda n: hvd.reducescatter(np.zeros(4), n)
    ),
    "gathered 0-d": Refusal(
        lambda n: hvd.allgather(np.zeros(()), n), lambda n: hvd.allgather(np.zeros(1), n)
    ),
    "root beyond": Refusal(
        lambda n: hvd.broadcast(np.zeros(3), 99, n), lambda n: hvd.broadcast(np.zeros(3), 0, n)
    ),
    "root no int": Refusal(
        lambda n: hvd.broadcast(np.zeros(3), 0.0, n),  # type: ignore[arg-type]
        lambda n: hvd.broadcast(np.zeros(3), 0, n),
    ),
    "group member": Refusal(
        lambda n: hvd.grouped_allreduce([np.zeros(2), np.array(["a"])], name=n),
        lambda n: hvd.grouped_allreduce([np.zeros(2), np.zeros(3)], name=n),
    ),
    "no list": Refusal(
        lambda n: hvd.grouped_allgather(np.zeros(2), n),  # type: ignore[arg-type]
        lambda n: hvd.grouped_allgather([np.zeros(2), np.zeros(3), np.zeros(1)], n),
        TypeError,
    ),
    "barrier's place": Refusal(
        lambda n: hvd.allreduce(np.array(["a"]), name="place"),
        lambda n: hvd.allreduce(np.zeros(1), name="place"),
    ),
}


@CASES.add_each(REFUSALS, *SEVERAL)
def refusal(kind: str) -> None:
    how = REFUSALS[kind]
    names: tuple[str | None, ...] = (f"refused {kind}", None, f"refused {kind}")
    for name in names:
        error = outcome(lambda name=name: (how.wrong if is_last() else how.right)(name))  # type: ignore[misc]
        if is_last():
            assert isinstance(error, how.kind), repr(error)
            assert not isinstance(error, hvd.RankFailedError)
        else:
            assert isinstance(error, hvd.RankFailedError), repr(error)
            assert error.rank == last()
            assert f"rank {last()} refused" in str(error)
        # The correct call works; it runs twice, so that the next refusal meets a cached name.
        for _ in range(2):
            assert outcome(lambda name=name: how.right(name)) is None  # type: ignore[misc]


@CASES.add(*SEVERAL)
def everybody_refuses() -> None:
    for _ in range(2):
        with pytest.raises(hvd.UnsupportedDtypeError):
            hvd.allreduce(np.array(["a"]), name="all refuse")
    assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="all refuse").tolist() == [hvd.size()]


@CASES.add(*SEVERAL)
def two_ranks_refuse_and_the_first_is_named() -> None:
    wrong = hvd.rank() in (0, last())
    error = outcome(lambda: hvd.allgather(np.array(1.0) if wrong else np.ones(1), name="two refuse"))
    if wrong:
        assert isinstance(error, ValueError)
    else:
        assert isinstance(error, hvd.RankFailedError)
        assert error.rank in (0, last())
    assert outcome(lambda: hvd.allgather(np.ones(1), name="two refuse")) is None


@CASES.add(*SEVERAL)
def a_refusal_behind_a_pending_tensor() -> None:
    """A rank refuses a second tensor while its first tensor of the same name is in flight."""
    if is_last():
        first = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="behind")
        with pytest.raises(hvd.UnsupportedDtypeError):
            hvd.allreduce_async(np.array(["a"]), name="behind")
        assert first.result(30).tolist() == [hvd.size()] * 2
    else:
        assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="behind").tolist() == [hvd.size()] * 2
        assert isinstance(outcome(lambda: hvd.allreduce(np.ones(2), name="behind")), hvd.RankFailedError)


# -- duplicate names -----------------------------------------------------------------------------------


@CASES.add(*SEVERAL)
def duplicate_name_in_flight() -> None:
    """Only the second call fails; the first succeeds, and then the name is free again."""
    if hvd.rank() == 0:
        assert hvd.allgather(np.array([0]), name="ready").sum() == sum(range(hvd.size()))
        first = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="twice")
        second = None
    else:
        first = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="twice")
        with pytest.raises(hvd.DuplicateNameError, match="'twice'") as caught:
            hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="twice")
        assert isinstance(caught.value, ValueError)
        with pytest.raises(hvd.DuplicateNameError):
            hvd.broadcast(np.ones(2), 0, name="twice")
        assert not first.done()
        assert hvd.allgather(np.array([hvd.rank()]), name="ready").sum() == sum(range(hvd.size()))
    assert first.result(30).tolist() == [hvd.size()] * 2
    if hvd.rank() == 0:
        # The calls that the others refused; a name's calls match in order.
        for _ in range(2):
            second = hvd.allreduce_async(np.ones(2), op=hvd.Sum, name="twice")
            error = raised(second)
            assert isinstance(error, hvd.RankFailedError), repr(error)
            assert error.rank in range(1, hvd.size())
    assert hvd.allreduce(np.ones(2), op=hvd.Sum, name="twice").tolist() == [hvd.size()] * 2


@CASES.add()
def duplicate_name_inside_a_group() -> None:
    """A refused group leaves neither names nor members behind."""
    if hvd.rank() == 0 and hvd.size() > 1:
        hvd.allreduce(np.zeros(1), name="group ready")
        hvd.allreduce(np.ones(1), name="unit_2of3")
        assert isinstance(
            outcome(lambda: hvd.grouped_allreduce([np.ones(1)] * 3, name="unit")), hvd.RankFailedError
        )
    elif hvd.size() > 1:
        member = hvd.allreduce_async(np.ones(1), name="unit_2of3")
        with pytest.raises(hvd.DuplicateNameError, match="unit_2of3"):
            hvd.grouped_allreduce_async([np.ones(1)] * 3, name="unit")
        hvd.allreduce(np.zeros(1), name="group ready")
        assert member.result(30).tolist() == [1.0]
    for name in ("unit_1of3", "unit_3of3"):
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, name=name).tolist() == [hvd.size()]
    assert len(hvd.grouped_allreduce([np.ones(1)] * 3, name="unit")) == 3


@CASES.add(*SEVERAL)
def a_member_of_no_set() -> None:
    """A local error leaves no other rank waiting."""
    nowhere = hvd.ProcessSet([0])
    for process_set in (nowhere, 0, "global", None):
        error = outcome(lambda process_set=process_set: hvd.allreduce(np.ones(1), process_set=process_set))  # type: ignore[misc]
        assert isinstance(error, ValueError), repr(error)
    with pytest.raises(ValueError, match="not been registered"):
        hvd.barrier(nowhere)
    assert nowhere.rank() is None
    assert nowhere.size() is None
    for ranks in ([], [0, 0], [-1], ["a"], 5, "01", [0.5]):
        with pytest.raises(ValueError, match=r"rank|process set"):
            hvd.ProcessSet(ranks)

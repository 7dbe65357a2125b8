"""Corner cases that the conformance cases do not reach."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.engine import context
from pyhvd.testing import run_ranks


@pytest.mark.parametrize("size", [3, 7, 23, 49])
def test_an_average_of_ones_is_one(size: int) -> None:
    def average() -> list[int]:
        return [int(hvd.allreduce(np.full(1, value, np.int64))[0]) for value in (1, -1, 1000)]

    assert run_ranks(size, average) == [[1, -1, 1000]] * size


class _FailsOnRank1(hvd.Compressor):
    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        if hvd.rank() == 1:
            raise ZeroDivisionError("no compression here")
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


@pytest.mark.parametrize("verb", ["allreduce", "reducescatter", "grouped_allreduce", "grouped_reducescatter"])
def test_a_compression_that_fails_on_one_rank_is_an_error_on_all(verb: str) -> None:
    def body() -> float:
        tensor: Any = [np.ones(4)] * 2 if verb.startswith("grouped") else np.ones(4)
        expected = ZeroDivisionError if hvd.rank() == 1 else hvd.RankFailedError
        with pytest.raises(expected, match="no compression here"):
            getattr(hvd, verb)(tensor, compression=_FailsOnRank1)
        return float(hvd.allreduce(1.0, op=hvd.Sum))

    assert run_ranks(2, body, timeout=20) == [2.0, 2.0]


def test_factors_that_are_no_numbers_are_named() -> None:
    def body() -> None:
        with pytest.raises(ValueError, match="prescale_factor='two' is not a number"):
            hvd.allreduce(np.ones(2), prescale_factor="two")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="postscale_factor=nan is not a finite number"):
            hvd.allreduce(np.ones(2), postscale_factor=float("nan"))

    run_ranks(2, body, timeout=20)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("before", [(), (2,), (2, 3), (3, 2)], ids=["new", "cached", "both", "both, 2 last"])
@pytest.mark.parametrize("name", ["g", None])
def test_groups_of_different_sizes_are_an_error_on_all(
    size: int, before: tuple[int, ...], name: str | None
) -> None:
    def body() -> float:
        for count in before:
            hvd.grouped_allreduce([np.ones(2)] * count, name=name)
        count = 3 if hvd.rank() == 1 else 2
        with pytest.raises(hvd.MismatchError, match="Mismatched sizes of the group") as caught:
            hvd.grouped_allreduce([np.ones(2)] * count, name=name)
        assert caught.value.per_rank[1].value == "3 tensors"
        assert hvd.grouped_allreduce([np.ones(2)] * 2, name=name, op=hvd.Sum)[1][0] == hvd.size()
        return float(hvd.allreduce(1.0, op=hvd.Sum))

    assert run_ranks(size, body, timeout=20) == [size] * size


def test_a_group_in_flight_keeps_its_name_whatever_the_size_of_another() -> None:
    tried = threading.Event()

    def body() -> float:
        if hvd.rank() == 0:
            first = hvd.grouped_allreduce_async([np.ones(2)] * 2, name="g", op=hvd.Sum)
            with pytest.raises(hvd.DuplicateNameError, match="'g' is still in flight on this rank"):
                hvd.grouped_allreduce_async([np.ones(2)] * 3, name="g", op=hvd.Sum)
            tried.set()
        else:
            assert tried.wait(20)
            first = hvd.grouped_allreduce_async([np.ones(2)] * 2, name="g", op=hvd.Sum)
        return float(first.result()[1][0])

    assert run_ranks(2, body, timeout=30) == [2.0, 2.0]


class _Name(str):
    __slots__ = ()


def test_names_are_any_text() -> None:
    def body() -> list[float]:
        names = ["é" * 5000, _Name("subclass"), str(np.str_("numpy")), np.str_("numpy's"), "a\nb\0c"]
        for bad in ("\ud800", "", 3, b"bytes"):
            with pytest.raises(ValueError, match="name"):
                hvd.allreduce(1.0, name=bad)  # type: ignore[arg-type]
        return [float(hvd.allreduce(1.0, name=name, op=hvd.Sum)) for name in names]

    assert run_ranks(2, body, timeout=20) == [[2.0] * 5] * 2


def test_objects_have_names_like_tensors() -> None:
    def body() -> None:
        for bad in ("", 3, b"bytes"):
            with pytest.raises(
                ValueError, match=f"broadcast: name must be a str that is not empty, not {bad!r}"
            ):
                hvd.broadcast_object({}, name=bad)  # type: ignore[arg-type]
            with pytest.raises(
                ValueError, match=f"allgather: name must be a str that is not empty, not {bad!r}"
            ):
                hvd.allgather_object({}, name=bad)  # type: ignore[arg-type]
        assert hvd.broadcast_object(hvd.rank(), name=_Name("object")) == 0

    run_ranks(2, body, timeout=20)


def test_a_name_in_the_place_of_average_is_an_error_that_says_so() -> None:
    def body() -> float:
        with pytest.raises(
            ValueError, match="average='gradient' is not a bool: was it meant as name='gradient'"
        ):
            hvd.allreduce(np.ones(2), "gradient")  # type: ignore[arg-type]
        with pytest.warns(DeprecationWarning, match="use op=Average or op=Sum"):
            return float(hvd.allreduce(1.0, average=np.bool_(False)))  # type: ignore[arg-type]

    assert run_ranks(1, body, timeout=20) == [1.0]


def test_a_handle_is_not_made_by_hand() -> None:
    class Mine(hvd.Handle):
        pass

    for kind in (hvd.Handle, Mine):
        with pytest.raises(TypeError, match=r"call one of pyhvd's \*_async functions"):
            kind()


def test_masked_arrays_are_refused_on_every_rank() -> None:
    def body() -> float:
        tensor = np.ma.masked_array(np.ones(2), [True, False]) if hvd.rank() else np.ones(2)
        with pytest.raises(TypeError if hvd.rank() else hvd.RankFailedError, match="lose its mask"):
            hvd.allreduce(tensor)
        return float(hvd.allreduce(1.0, op=hvd.Sum))

    assert run_ranks(2, body, timeout=20) == [2.0, 2.0]


def test_a_thread_that_submits_while_its_set_is_removed_gets_an_answer() -> None:
    def body() -> set[str]:
        active = context.current()
        kinds = set()
        for _ in range(20):
            pair = hvd.add_process_set([0, 1])
            set_id = pair.process_set_id
            assert set_id is not None
            hvd.remove_process_set(pair)
            if hvd.rank() < 2:
                active.process_sets[set_id] = (0, 1)  # a thread's view from before the removal
                pair.process_set_id = set_id
                kinds.add(type(hvd.allreduce_async(1.0, process_set=pair).exception(10)).__name__)
                active.process_sets.pop(set_id)
            hvd.barrier()
        return kinds

    knobs = {"dynamic_process_sets": True}
    assert run_ranks(3, body, knobs=knobs, timeout=30) == [{"ShutDownError"}, {"ShutDownError"}, set()]

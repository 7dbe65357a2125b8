"""Corners that the cases shared with MPI do not reach."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
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

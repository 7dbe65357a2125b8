"""The comparison of results alone: an error names the first element that differs."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given, settings, strategies as st

from pyhvd.arrays import Bytes, flat_bytes
from pyhvd.dtypes import Code
from pyhvd.engine.result_checks import Checker
from pyhvd.errors import CorruptionError
from pyhvd.negotiation.messages import Request, RequestType, Response
from pyhvd.transport.inprocess import ThreadFabric, ThreadGroup

MEMBERS = (2, 3, 5)


def compare(results: list[list[np.ndarray | None]], code: Code) -> list[list[CorruptionError | None]]:
    """Compare each rank's results on ranks that are threads; return each rank's errors."""
    counts = [next(r.size for r in of_one if r is not None) for of_one in zip(*results, strict=True)]
    batch = [
        Response(Request(RequestType.ALLREDUCE, f"t{i}", int(code), (count,)), 0)
        for i, count in enumerate(counts)
    ]
    group = ThreadGroup(len(results), timeout=20.0)
    heard: list[list[CorruptionError | None]] = [[] for _ in results]

    def play(rank: int) -> None:
        mine: list[Bytes | None] = [None if r is None else flat_bytes(r) for r in results[rank]]
        heard[rank] = list(Checker.compare(batch, mine, ThreadFabric(group, rank), MEMBERS[: len(results)]))

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return heard


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 5000),
    places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4),
    bad=st.integers(0, 2),
)
def test_the_first_difference_is_found(count: int, places: list[float], bad: int) -> None:
    results = [[np.arange(count, dtype=np.int32)] for _ in MEMBERS]
    elements = {int(place * count) for place in places}
    for element in elements:
        results[bad][0][element] ^= 1 << 20
    heard = compare([list(mine) for mine in results], Code.INT32)
    for errors in heard:
        (error,) = errors
        assert error is not None
        assert f"differ first in element {min(elements)} of {count} (int32)" in str(error)
        assert error.ranks == [MEMBERS[bad]]
        assert error.per_rank.keys() == set(MEMBERS)
        assert str(error) == str(heard[0][0])


def test_only_the_tensors_that_differ_are_errors_and_joined_ranks_hold_nothing() -> None:
    right, wrong = np.ones(7), np.full(7, 2.0)
    heard = compare([[right, right, None], [right, right, right], [right, wrong, right]], Code.FLOAT64)
    for errors in heard:
        assert [error is None for error in errors] == [True, False, True]
    assert heard[0][1] is not None
    assert heard[0][1].name == "t1"
    assert "ranks 2-3: 1.0 (0x3ff0000000000000); rank 5: 2.0 (0x4000000000000000)" in str(heard[0][1])
    two = compare([[right], [wrong]], Code.FLOAT64)
    assert two[1][0] is not None
    assert two[1][0].ranks == [2, 3], "nobody can say which of two is right"

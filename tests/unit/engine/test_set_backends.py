"""When the backends of process sets are made and closed, and which sets share one."""

from __future__ import annotations

from typing import Any

import pytest

from pyhvd.backends.base import Pieces
from pyhvd.engine.set_backends import SetBackends

PIECES = Pieces(1, 2)


class Backend:
    """A backend, and its fabric, that note what happens to them."""

    def __init__(self, events: list[Any], ranks: tuple[int, ...]) -> None:
        self.events, self.ranks, self.size, self.fabric = events, ranks, len(ranks), self
        self.pieces: Pieces | None = None

    def subset(self, ranks: tuple[int, ...], tag: int) -> Backend:
        return Backend(self.events, ranks)

    def resize(self, pieces: Pieces) -> None:
        self.pieces = pieces

    def abort(self, note: bytes) -> None:
        self.events.append(("abort", self.ranks))
        raise KeyError(note)

    def close(self) -> None:
        self.events.append(("close", self.ranks))


def backends() -> tuple[SetBackends, list[Any]]:
    """Return the backends of rank 0 of three, and what happens."""
    events: list[Any] = []

    def make(fabric: Any, ranks: tuple[int, ...]) -> Any:
        events.append(("make", ranks))
        return fabric

    everyone: Any = Backend(events, (0, 1, 2))
    return SetBackends(everyone, make), events


def test_sets_of_the_same_ranks_share_a_backend() -> None:
    made, events = backends()
    for set_id in (4, 2, 9):
        made.add(set_id, (0, 1))
    assert (list(made), events) == ([0], [])
    first = made.open(2)
    assert made.open(9) is first is made[9]
    assert events == [("make", (0, 1))]
    assert 4 not in made
    for set_id in (2, 9):
        made.remove(set_id)
    assert events == [("make", (0, 1))]
    made.remove(4)
    assert events[1:] == [("close", (0, 1))]
    made.add(2, (0, 1))
    assert made.open(2) is not first


def test_sets_of_all_ranks_share_the_one_that_is_there() -> None:
    made, events = backends()
    made.add(1, (0, 1, 2))
    assert made.open(1) is made[0]
    made.remove(1)
    made.remove(7)  # of other ranks
    assert events == []


def test_new_backends_get_the_newest_sizes_of_pieces() -> None:
    made, _ = backends()
    made.add(1, (0, 1))
    made.resize(PIECES)
    assert [made[0].pieces, made.open(1).pieces] == [PIECES, PIECES]


def test_an_abort_reaches_all_even_if_one_fails() -> None:
    made, events = backends()
    for set_id, ranks in enumerate([(0, 1), (0, 2), (0,)], 1):
        made.add(set_id, ranks)
    made.open(2), made.open(1)
    with pytest.raises(KeyError):
        made.abort(b"note")
    assert {event for event in events if event[0] == "abort"} == {
        ("abort", ranks) for ranks in [(0, 1, 2), (0, 1), (0, 2)]
    }


def test_they_are_closed_in_the_order_of_their_lowest_sets() -> None:
    made, events = backends()
    for set_id, ranks in [(5, (0, 1)), (3, (0, 2)), (2, (0, 1)), (7, (0,))]:
        made.add(set_id, ranks)
    for set_id in (5, 3, 2):
        made.open(set_id)
    made.close()
    assert events[2:] == [("close", ranks) for ranks in [(0, 1, 2), (0, 1), (0, 2)]]
    assert not made

"""Hooks: instruments get every call; one that raises is removed; without instruments nothing is created."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from pyhvd.negotiation.messages import Request, Response
from pyhvd.observe.hooks import Instrument, Instruments
from tests.unit.observe.recordings import request


class _Ear(Instrument):
    def __init__(self, due: float | None = None) -> None:
        self.heard: list[object] = []
        self._due = due

    def requested(self, rank: int, tensors: Sequence[tuple[int, Request]]) -> None:
        self.heard.append((rank, [each.name for _, each in tensors]))

    def list_taken(self, number: int, todo: Sequence[Response]) -> None:
        self.heard.append(number)

    def phase(self, name: str, begin: int, end: int) -> None:
        assert begin <= end
        self.heard.append(name)

    def look(self, now: float) -> float | None:
        return self._due


class _Broken(Instrument):
    def list_taken(self, number: int, todo: Sequence[Response]) -> None:
        raise RuntimeError("out of order")


def test_all_that_listen_hear() -> None:
    hooks, ears = Instruments(), [_Ear(), _Ear(3.0), _Ear(2.0)]
    with hooks.phase("unheard"):
        pass
    for ear in ears:
        hooks.add(ear)
    hooks.requested(1, [(0, request("w"))])
    hooks.list_taken(5, [])
    with hooks.phase("MPI_ALLREDUCE"):
        pass
    assert [ear.heard for ear in ears] == [[(1, ["w"]), 5, "MPI_ALLREDUCE"]] * 3
    assert hooks.look(0.0) == 2.0
    for ear in ears:
        hooks.remove(ear)
    assert hooks.active == ()
    assert hooks.look(0.0) is None


def test_a_base_instrument_does_nothing() -> None:
    hooks = Instruments()
    hooks.add(Instrument())
    hooks.queued([])
    hooks.requested(0, [])
    hooks.list_taken(1, [])
    hooks.batch_started([])
    hooks.batch_ended([])
    with hooks.phase("MPI_BCAST"):
        pass
    assert hooks.look(1.0) is None
    assert len(hooks.active) == 1


def test_what_raises_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    hooks, ear = Instruments(), _Ear()
    hooks.add(_Broken())
    hooks.add(ear)
    with caplog.at_level(logging.ERROR, "pyhvd"):
        hooks.list_taken(1, [])
        hooks.list_taken(2, [])
    assert ear.heard == [1, 2]
    assert [record.message for record in caplog.records] == [
        "_Broken is switched off because it raised RuntimeError('out of order')"
    ]

"""Waits for a recording to start or to stop end with a result or an error, however the runtime ends."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from pyhvd.arrays import Bytes
from pyhvd.errors import StallError, TransportError
from pyhvd.negotiation.messages import TimelineOrder
from pyhvd.observe.hooks import Instruments
from pyhvd.observe.timeline import Recorder, new_job
from pyhvd.transport.fabric import Fabric


class Lonely:
    """A fabric of one rank, which raises if it is broken."""

    rank = 0
    size = 1
    broken = False

    def allgather(self, send: Bytes, recv: Bytes) -> None:
        if self.broken:
            raise TransportError("nobody is there")
        recv[:] = send


@pytest.fixture
def lonely() -> Lonely:
    return Lonely()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(0, 1, Instruments())


def test_an_order_that_breaks_the_runtime_is_answered(
    recorder: Recorder, lonely: Lonely, tmp_path: Path
) -> None:
    begins = recorder.ask(TimelineOrder(str(tmp_path / "t.json"), False, new_job()))
    order = recorder.next_order()
    assert order is not None
    lonely.broken = True
    with pytest.raises(TransportError):
        recorder.follow(order, cast(Fabric, lonely))
    recorder.close(TransportError("nobody is there"))
    recorder.finish(None)
    with pytest.raises(TransportError):
        begins.result(timeout=0)


def test_nobody_waits_for_a_thread_that_is_caught(recorder: Recorder, lonely: Lonely, tmp_path: Path) -> None:
    recorder.ask(TimelineOrder(str(tmp_path / "t.json"), False, new_job()))
    order = recorder.next_order()
    assert order is not None
    recorder.follow(order, cast(Fabric, lonely))
    begins = recorder.ask(TimelineOrder(str(tmp_path / "u.json"), False, new_job()))
    ends = recorder.ask(TimelineOrder())
    assert recorder.next_order() is not None
    recorder.abandon(StallError("caught"))
    later = recorder.ask(TimelineOrder())
    for each in (begins, ends, later):
        with pytest.raises(StallError):
            each.result(timeout=0)
    recorder.finish(None)  # the stuck thread returns after all

"""A rank's recording: however the runtime ends, waits for its start and stop end; lost events are told."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest

from pyhvd.arrays import Bytes
from pyhvd.errors import StallError, TransportError
from pyhvd.native.shared_memory import PACKING, REDUCING, Trace
from pyhvd.negotiation.messages import TimelineOrder
from pyhvd.observe import timeline
from pyhvd.observe.hooks import Instruments, read_clock
from pyhvd.observe.timeline import Recorder, Timeline, new_job
from pyhvd.observe.trace.files import END, TraceWriter
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


def test_every_order_is_handed_out_once(recorder: Recorder) -> None:
    assert recorder.next_order() is None
    orders = [TimelineOrder("a.json", False, new_job()), TimelineOrder()]
    for order in orders:
        recorder.ask(order)
    assert [recorder.next_order() for _ in range(3)] == [*orders, None]


# -- what the file holds ---------------------------------------------------------------------------


@pytest.fixture
def hooks() -> Instruments:
    return Instruments()


@pytest.fixture
def recording(hooks: Instruments, lonely: Lonely, tmp_path: Path) -> Recorder:
    """Return the recorder of a rank that records to "t.json"."""
    recorder = Recorder(0, 1, hooks)
    recorder.open(TimelineOrder(str(tmp_path / "t.json"), False, new_job()), cast(Fabric, lonely))
    recorder.begin(cast(Fabric, lonely))
    return recorder


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def phases_of(path: Path) -> list[str]:
    return [event["name"] for event in events_of(path) if event["ph"] == "X"]


def test_events_beyond_the_buffer_are_counted_and_told(
    recording: Recorder,
    hooks: Instruments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(timeline, "MOST_NOTES", 2)
    for name in ("A", "B", "C", "D"):
        with hooks.phase(name):
            pass
    hooks.look(0.0)
    with hooks.phase("E"):
        pass
    recording.finish(None)
    assert phases_of(tmp_path / "t.json") == ["A", "B", "E"]
    assert [e["args"]["dropped"] for e in events_of(tmp_path / "t.json") if e["name"] == END] == [2]
    assert [record.getMessage() for record in caplog.records] == [
        "the timeline of rank 0 drops events: the buffer is full",
        "the timeline of rank 0 lacks 2 events: the buffer was full",
    ]


def test_a_file_that_cannot_be_written_ends_there_and_breaks_nothing(
    recording: Recorder,
    hooks: Instruments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(writer: TraceWriter, events: Iterable[Any]) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(TraceWriter, "write", fail)
        hooks.look(0.0)
    with hooks.phase("later"):
        pass
    recording.finish(None)
    path = tmp_path / "t.json"
    assert [record.getMessage() for record in caplog.records] == [
        f"the timeline of rank 0 ends here: {path}: [Errno 28] No space left on device"
    ]
    assert events_of(path) == [], "a gap in the file would mislead"


class Ring:
    """The ring of the C code, with made-up records."""

    dropped = 0

    def __init__(self) -> None:
        self.records: list[tuple[int, ...]] = []

    def start(self, cells: int) -> None:
        pass

    def stop(self) -> None:
        pass

    def take(self, limit: int) -> list[tuple[int, ...]]:
        taken, self.records = self.records[:limit], self.records[limit:]
        return taken


def test_what_the_c_code_began_before_the_recording_is_left_out(tmp_path: Path) -> None:
    ring, path = Ring(), tmp_path / "t.json"
    before = read_clock()
    recorder = Recorder(0, 1, Instruments())
    recorder.trace = cast(Trace, ring)
    recording = Timeline(TraceWriter(path), TimelineOrder(), recorder)
    after = read_clock()
    ring.records = [(PACKING, before - 1, after, 1, 0, -1, -1), (REDUCING, after, after + 1, 1, 0, -1, -1)]
    recording.close()
    assert phases_of(path) == ["SHM_ALLREDUCE"]

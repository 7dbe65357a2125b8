"""Test the timeline on ranks that are threads: both paths, start and stop, every verb, failures."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.engine.context import current
from pyhvd.observe import timeline
from pyhvd.observe.trace.files import rank_path
from pyhvd.observe.trace.loading import RankTrace, load
from pyhvd.testing import RanksFailed, run_ranks
from tests.chrome_trace import check_events

DYNAMIC = {"timeline": "DYNAMIC"}


def _events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    check_events(events)
    return events


def _rows(events: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the names on each tensor's row: begins, ticks and phases, in order."""
    labels = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows: dict[str, list[str]] = {label: [] for label in labels.values()}
    for event in events:
        if event["ph"] in "BX":
            rows[labels[event["pid"]]].append(event["name"])
    return rows


@pytest.fixture(params=[True, False], ids=["shared memory", "messages"])
def lane(request: pytest.FixtureRequest) -> bool:
    value: bool = request.param
    return value


def _steps(turns: int) -> None:
    small, large = np.ones(1000, np.float32), np.ones(300_000, np.float32)
    for _ in range(turns):
        handles = [hvd.allreduce_async(small, name=f"w{k}") for k in range(3)]
        handles.append(hvd.allreduce_async(large, name="large"))
        for handle in handles:
            handle.result()


def test_a_recording(tmp_path: Path, lane: bool) -> None:
    def train() -> None:
        hvd.start_timeline(tmp_path / "t.json", mark_cycles=True)
        hvd.barrier()  # rank 0's call is in force on every rank
        _steps(5)
        hvd.stop_timeline()

    run_ranks(3, train, knobs={**DYNAMIC, "fast_lane": lane})
    traces = load([str(tmp_path)])
    assert [(trace.rank, trace.size, trace.complete, trace.dropped) for trace in traces] == [
        (rank, 3, True, 0) for rank in range(3)
    ]
    reduction = "SHM_ALLREDUCE" if lane else "MPI_ALLREDUCE"
    for trace in traces:
        events = _events(rank_path(str(tmp_path / "t.json"), trace.rank))
        rows = _rows(events)
        spans = [name for name in rows["allreduce.w1"] if not name.isdigit()]
        assert spans == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE"] * 5
        assert reduction in rows["data path"]
        assert "MEMCPY_IN_FUSION_BUFFER" in rows["data path"]
        assert any(event["name"] == "CYCLE_START" for event in events)
        assert any("start_time_since_epoch_in_micros" in event.get("args", {}) for event in events)
        _check_times(trace)
    ticks = [name for name in _rows(_events(tmp_path / "t.json"))["allreduce.w1"] if name.isdigit()]
    assert set(ticks[:3]) == {"0", "1", "2"}  # the first turn uses messages, even with the fast path
    turns = [{(turn.key, turn.turn) for turn in trace.turns if "w" in turn.key[2]} for trace in traces]
    assert turns[0] == turns[1] == turns[2]
    assert len(turns[0]) == 15


def _check_times(trace: RankTrace) -> None:
    for turn in trace.turns:
        assert turn.submitted is None or turn.submitted <= turn.ready + 0.01
        assert turn.ready <= turn.begun + 0.01
        assert turn.begun <= turn.ended + 0.01


def test_every_verb_has_its_row(tmp_path: Path) -> None:
    def verbs() -> None:
        data = np.ones((4, 2), np.float32)
        hvd.start_timeline(tmp_path / "t.json")
        hvd.barrier()
        hvd.allgather(data, name="gathered")
        hvd.broadcast(data, 0, name="sent")
        hvd.alltoall(data, name="swapped")
        hvd.reducescatter(data, name="scattered")
        hvd.allreduce(data, name="adaptive", op=hvd.Adasum)
        hvd.grouped_allreduce([data, data], name="both")
        with pytest.raises(hvd.MismatchError):
            hvd.allreduce(np.ones(1 + hvd.rank()), name="unequal")
        hvd.join()
        hvd.stop_timeline()

    run_ranks(2, verbs, knobs={**DYNAMIC, "fast_lane": True})  # the fast path names the rows
    rows = _rows(_events(tmp_path / "t.json"))
    for label, phases in {
        "allgather.gathered": {"ALLOCATE_OUTPUT", "SHM_ALLGATHER"},
        "broadcast.sent": {"SHM_BCAST"},
        "alltoall.swapped": {"SHM_ALLTOALL"},
        "reducescatter.scattered": {"SHM_REDUCESCATTER"},
        "adasum.adaptive": {"SHM_ADASUM"},
        "allreduce.both_2of2": {"SHM_ALLREDUCE"},
        "allreduce.unequal": set(),
        "join (unnamed)": set(),
    }.items():
        operation = label.split(".")[0].split(" ")[0].upper()
        assert [name for name in rows[label] if not name.isdigit()][:2] == [
            f"NEGOTIATE_{operation}",
            operation,
        ]
        assert phases <= set(rows["data path"])
    failed = [turn for turn in load([str(tmp_path)])[1].turns if turn.error]
    assert [turn.key[2] for turn in failed] == ["unequal"]


def test_process_sets_have_rows_of_their_own(tmp_path: Path) -> None:
    pair = hvd.ProcessSet([1, 2])

    def train() -> None:
        hvd.start_timeline(tmp_path / "t.json")
        hvd.barrier()
        for _ in range(4):
            hvd.allreduce(np.ones(3), name="w")
            if hvd.rank():
                hvd.allreduce(np.ones(3), name="w", process_set=ids[hvd.rank()])
        hvd.barrier()
        hvd.stop_timeline()

    ids: dict[int, hvd.ProcessSet] = {}

    def whole() -> None:
        ids[hvd.rank()] = hvd.add_process_set([1, 2])
        train()

    assert pair.process_set_id is None
    run_ranks(3, whole, knobs={**DYNAMIC, "dynamic_process_sets": True})
    for trace in load([str(tmp_path)]):
        sets = [turn.key[0] for turn in trace.turns if turn.key[2] == "w"]
        assert sets.count(0) == 4
        assert len(sets) == (8 if trace.rank else 4)
        assert {phase.rank for phase in trace.phases} <= {-1, *range(3)} - {trace.rank}


def test_what_a_set_did_is_there_when_the_set_is_gone(tmp_path: Path) -> None:
    def come_and_go() -> None:
        hvd.start_timeline(tmp_path / "t.json")
        for turn in range(2):  # the second set reuses the first set's id
            pair = hvd.add_process_set([0, 1])
            for _ in range(5 if hvd.rank() < 2 else 0):
                hvd.allreduce(np.ones(4), name=f"x{turn}", process_set=pair)
            hvd.remove_process_set(pair)
        hvd.stop_timeline()

    run_ranks(3, come_and_go, knobs={**DYNAMIC, "dynamic_process_sets": True})
    for trace in load([str(tmp_path)]):
        names = [turn.key[2] for turn in trace.turns]
        assert {names.count("x0"), names.count("x1")} == {5 if trace.rank < 2 else 0}


def test_from_the_start_to_the_end(tmp_path: Path) -> None:
    run_ranks(2, _steps, 3, knobs={"timeline": f"{tmp_path}/new/", "timeline_mark_cycles": True})
    traces = load([str(tmp_path / "new")])
    assert [trace.path.name for trace in traces] == ["timeline.json", "timeline.rank1.json"]
    assert all(trace.complete and trace.clock.end is not None for trace in traces)
    assert all(len(trace.turns) == 12 for trace in traces)


def test_a_second_file_and_stopping_twice(tmp_path: Path) -> None:
    def train() -> None:
        hvd.stop_timeline()
        for name in ("one.json", "two.json", "three.json"):
            hvd.start_timeline(tmp_path / name)
            hvd.barrier()
            _steps(2)
            hvd.barrier()
            if name != "two.json":  # the third start ends the second timeline
                hvd.stop_timeline()
                hvd.stop_timeline()

    run_ranks(2, train, knobs=DYNAMIC)
    for name in ("one", "two", "three"):
        traces = load([str(tmp_path / f"{name}.json")])
        assert [trace.complete for trace in traces] == [True, True]
        assert all(sum(turn.key[2] == "large" for turn in trace.turns) == 2 for trace in traces)


def test_tensors_on_the_way_while_it_starts_and_stops(tmp_path: Path) -> None:
    def train() -> None:
        data = np.ones(10)
        for turn in range(30):
            handles = [hvd.allreduce_async(data, name=f"w{k}") for k in range(4)]
            if turn % 10 == 3:
                hvd.start_timeline(tmp_path / "t.json")
            if turn % 10 == 8:
                hvd.stop_timeline()
            for handle in handles:
                handle.result()

    run_ranks(2, train, knobs=DYNAMIC)
    for rank in range(2):
        _events(rank_path(str(tmp_path / "t.json"), rank))


def test_without_leave_there_is_none(tmp_path: Path) -> None:
    def try_it() -> None:
        with pytest.raises(ValueError, match="start_timeline needs PYHVD_TIMELINE in the environment"):
            hvd.start_timeline(tmp_path / "t.json")
        with pytest.raises(ValueError, match="stop_timeline needs PYHVD_TIMELINE"):
            hvd.stop_timeline()

    run_ranks(2, try_it)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(hvd.NotInitializedError):
        hvd.start_timeline(tmp_path / "t.json")


def test_bad_paths(tmp_path: Path) -> None:
    def try_it() -> None:
        for bad in ("", b"bytes"):
            with pytest.raises(ValueError, match="takes a path"):
                hvd.start_timeline(bad)  # type: ignore[arg-type]
        for no_text in ("bad\udcff.json", "bad\0.json"):
            with pytest.raises(hvd.TimelineError, match="takes a path that is text"):
                hvd.start_timeline(no_text)
        path = tmp_path / "none" / "t.json"
        if hvd.rank() == 0:
            with pytest.raises(hvd.TimelineError) as caught:
                hvd.start_timeline(path)
            assert "rank 0 on " in str(caught.value)
            assert f"cannot write its timeline to {str(path)!r}: No such file or directory" in str(
                caught.value
            )
            assert "(and 1 more ranks): give a path in a directory that every rank can write to" in str(
                caught.value
            )
        assert hvd.allreduce(1, op=hvd.Sum, name="goes on") == 2

    run_ranks(2, try_it, knobs=DYNAMIC)


def test_a_path_that_cannot_even_be_looked_at(tmp_path: Path) -> None:
    def try_it() -> None:
        if hvd.rank() == 0:
            with pytest.raises(hvd.TimelineError, match=r"File name too long \(and 1 more ranks\): give"):
                hvd.start_timeline(tmp_path / ("x" * 300))
        assert hvd.allreduce(1, op=hvd.Sum, name="goes on") == 2

    run_ranks(2, try_it, knobs=DYNAMIC)


def test_one_rank_that_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "t.rank1.json").mkdir()

    def try_it() -> None:
        if hvd.rank() == 0:
            with pytest.raises(hvd.TimelineError, match=r"rank 1 on .*t\.rank1\.json': Is a directory: give"):
                hvd.start_timeline(tmp_path / "t.json")
        hvd.barrier()

    run_ranks(2, try_it, knobs=DYNAMIC)
    assert [path.name for path in tmp_path.iterdir()] == ["t.rank1.json"], "nothing is left behind"


def test_an_unwritable_path_fails_init_everywhere(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, lambda: None, knobs={"timeline": str(tmp_path / "none" / "t.json")})
    # The first rank to raise breaks the threads' barrier, while another rank may still wake up from it.
    assert isinstance(caught.value.__cause__, hvd.TimelineError)
    assert len(caught.value.errors) == 3


def test_stopping_after_another_rank_has_shut_down(tmp_path: Path) -> None:
    def train() -> None:
        hvd.start_timeline(tmp_path / "t.json")
        hvd.barrier()
        if hvd.rank() == 1:
            hvd.shutdown()
            return
        while current().runtime.ended is None:
            current().runtime.join()
        hvd.stop_timeline()
        json.loads((tmp_path / "t.json").read_text())
        with pytest.raises(hvd.ShutDownError):
            hvd.start_timeline(tmp_path / "u.json")

    run_ranks(2, train, knobs=DYNAMIC)
    assert all(trace.complete for trace in load([str(tmp_path)]))


def test_a_rank_that_fails_leaves_whole_files(tmp_path: Path) -> None:
    submitted = threading.Event()

    def train() -> None:
        if hvd.rank() == 1:
            assert submitted.wait(20)
            raise KeyError("lost")
        handle = hvd.allreduce_async(1.0, name="never")
        submitted.set()
        handle.result()

    with pytest.raises(RanksFailed, match="lost"):
        run_ranks(2, train, knobs={"timeline": str(tmp_path)})
    traces = load([str(tmp_path)])
    assert [trace.complete for trace in traces] == [True, True]
    assert [trace.clock.end for trace in traces] == [None, None]
    assert [label for label, _, _ in traces[0].unfinished] == ["allreduce.never"]


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "CELLS", 16)
    monkeypatch.setattr(timeline, "PERIOD", 3600.0)


@pytest.mark.usefixtures("little_room")
def test_what_has_no_room_is_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pyhvd"):
        run_ranks(2, _steps, 50, knobs={"timeline": str(tmp_path), "fast_lane": True})
    for trace in load([str(tmp_path)]):
        assert trace.dropped > 0
        assert (
            f"the timeline of rank {trace.rank} lacks {trace.dropped} events: the buffer was full"
            in caplog.text
        )
        _events(trace.path)


def test_callbacks_must_not_wait_for_it(tmp_path: Path) -> None:
    waits = threading.Event()

    def train() -> None:
        raised: list[BaseException] = []

        def start(_: object) -> None:
            try:
                hvd.start_timeline(tmp_path / "t.json")
            except RuntimeError as exc:
                raised.append(exc)

        if hvd.rank() == 0:
            handle = hvd.allgather_async(np.ones(3), name="g")
            handle.add_done_callback(start)  # before the end: otherwise this thread would run it
            waits.set()
            handle.result()
        else:
            assert waits.wait(20)
            hvd.allgather(np.ones(3), name="g")
        hvd.barrier()
        assert hvd.rank() or "a callback of a handle must not start or stop the timeline" in str(raised[0])

    run_ranks(2, train, knobs=DYNAMIC)

"""Conversion of records to events: Horovod's names, spans that nest, and late or repeated records."""

from __future__ import annotations

from hypothesis import given, strategies as st

from pyhvd.negotiation.messages import UNNAMED, RequestType
from pyhvd.observe.trace.rows import DATA_PATH, FIRST_TENSOR, Rows, Tensor
from tests.chrome_trace import check_events
from tests.unit.observe.recordings import request

US = 1000
W: Tensor = (0, request("w"))
V: Tensor = (0, request("v"))


def test_one_tensor_as_horovod_tells_it() -> None:
    rows = Rows(0, mark_cycles=True)
    rows.queued(1 * US, [W])
    rows.requested(2 * US, 0, [W])
    rows.requested(3 * US, 1, [W])
    rows.listed(4 * US, 17, [(W, "")])
    rows.started(5 * US, [W])
    rows.phase("MEMCPY_IN_FUSION_BUFFER", 6 * US, 7 * US)
    rows.ended(8 * US, [W])
    events = rows.take()
    check_events(events)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["allreduce.w"]
    told = [(e["name"], e["ph"], e["ts"], e["pid"]) for e in events if e["ph"] != "M"]
    assert told == [
        ("NEGOTIATE_ALLREDUCE", "B", 1.0, FIRST_TENSOR),
        ("0", "X", 2.0, FIRST_TENSOR),
        ("1", "X", 3.0, FIRST_TENSOR),
        ("CYCLE_START", "i", 4.0, 0),
        ("NEGOTIATE_ALLREDUCE", "E", 4.0, FIRST_TENSOR),
        ("ALLREDUCE", "B", 4.0, FIRST_TENSOR),
        ("QUEUE", "B", 4.0, FIRST_TENSOR),
        ("QUEUE", "E", 5.0, FIRST_TENSOR),
        ("ALLREDUCE", "B", 5.0, DATA_PATH),
        ("MEMCPY_IN_FUSION_BUFFER", "X", 6.0, DATA_PATH),
        ("ALLREDUCE", "E", 8.0, FIRST_TENSOR),
        ("ALLREDUCE", "E", 8.0, DATA_PATH),
    ]
    assert events[-2]["args"] == {
        "id": "17",
        "submitted": 1.0,
        "batch": 0,
        "tensor": "w",
        "process_set": 0,
        "dtype": "float32",
        "shape": [256],
        "bytes": 1024,
    }


def test_the_fast_lane_tells_the_same() -> None:
    rows = Rows(0, mark_cycles=True)
    rows.queued(1 * US, [W, V])
    rows.posted(2 * US, 0, [W, V])
    rows.matched(3 * US, 4 * US, 99, 1, W)
    rows.matched(3 * US, 4 * US, 99, 1, V)
    rows.phase("SHM_ALLREDUCE", 5 * US, 6 * US)
    rows.carried(7 * US)
    events = rows.take()
    check_events(events)
    of_v = [(e["name"], e["ph"], e["ts"]) for e in events if e["pid"] == FIRST_TENSOR + 1 and e["ph"] != "M"]
    assert of_v == [
        ("NEGOTIATE_ALLREDUCE", "B", 1.0),
        ("0", "X", 2.0),
        ("1", "X", 3.0),
        ("NEGOTIATE_ALLREDUCE", "E", 3.0),
        ("ALLREDUCE", "B", 3.0),
        ("QUEUE", "B", 3.0),
        ("QUEUE", "E", 4.0),
        ("ALLREDUCE", "E", 7.0),
    ]
    assert [e["args"] for e in events if e["pid"] == DATA_PATH and e["ph"] == "E"] == [
        {"batch": 0, "tensors": 2, "bytes": 2048}
    ]
    assert sum(e["name"] == "CYCLE_START" for e in events) == 1


def test_rank_0_sees_the_others_first() -> None:
    rows = Rows(0, mark_cycles=False)
    rows.requested(1 * US, 2, [W])
    rows.queued(5 * US, [W])
    rows.listed(6 * US, 1, [(W, "")])
    rows.requested(7 * US, 1, [W])  # a faster rank's next turn, while this one is still busy
    rows.started(8 * US, [W])
    rows.ended(9 * US, [W])
    rows.queued(10 * US, [W])
    events = rows.take()
    check_events(events, complete=False)
    ends = [event["args"] for event in events if event["ph"] == "E" and "id" in event.get("args", {})]
    assert ends[0]["submitted"] == 5.0
    assert [(e["name"], e["ts"]) for e in events if e["ph"] != "M"][-2:] == [
        ("NEGOTIATE_ALLREDUCE", 10.0),
        ("1", 10.0),
    ]


def test_errors_and_what_was_left_open() -> None:
    rows = Rows(0, mark_cycles=False)
    rows.queued(1 * US, [W, V])
    rows.listed(2 * US, 1, [(W, "shapes differ")])
    rows.close(3 * US)
    events = rows.take()
    check_events(events)
    assert [e["args"].get("error") for e in events if e["ph"] == "E" and "id" in e.get("args", {})] == [
        "shapes differ"
    ]
    assert [e["ts"] for e in events if e.get("args", {}).get("unfinished")] == [3.0]


def test_a_handle_that_completes_early_and_is_used_again() -> None:
    rows = Rows(0, mark_cycles=False)
    rows.queued(1 * US, [W])
    rows.listed(2 * US, 1, [(W, "")])
    rows.started(3 * US, [W])
    rows.queued(4 * US, [W])  # the next turn: the submitting thread got the result before the batch ended
    rows.ended(5 * US, [W])
    check_events(events := rows.take(), complete=False)
    assert [e["name"] for e in events if e["ph"] == "B"][-1] == "NEGOTIATE_ALLREDUCE"
    told = [e["args"] for e in events if e["name"] == "ALLREDUCE" and "id" in e.get("args", {})]
    assert [(each["id"], each["submitted"], each["batch"], each["bytes"]) for each in told] == [
        ("1", 1.0, 0, 1024)
    ]


def test_unnamed_tensors_share_rows() -> None:
    rows = Rows(0, mark_cycles=False)
    for k in range(100):
        tensor = (0, request(f"{UNNAMED}.{k}"))
        rows.queued(k * US, [tensor])
        rows.listed(k * US, k, [(tensor, "")])
        rows.started(k * US, [tensor])
        rows.ended(k * US, [tensor])
    events = rows.take()
    check_events(events)
    assert {event["pid"] for event in events} == {DATA_PATH, FIRST_TENSOR}


OPERATIONS = ("queued", "requested", "listed", "failed", "batch", "posted", "matched")


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2), st.integers(-2000, 5000)), max_size=40
    )
)
def test_whatever_comes_in_whatever_order_is_a_trace(steps: list[tuple[str, int, int]]) -> None:
    rows = Rows(0, mark_cycles=True)
    tensors: list[Tensor] = [
        (0, request("a")),
        (1, request("a")),
        (0, request("b", kind=RequestType.ALLGATHER)),
    ]
    now = 10_000
    for number, (what, which, passed) in enumerate(steps):
        now += passed
        at, tensor = max(now, 0), tensors[which]
        if what == "queued":
            rows.queued(at, [tensor])
        elif what == "requested":
            rows.requested(at, which, [tensor])
        elif what in ("listed", "failed"):
            rows.listed(at, number, [(tensor, "error" if what == "failed" else "")])
        elif what == "batch":
            rows.started(at, [tensor])
            rows.phase("SHM_ALLREDUCE", at, at + 5, rank=1)
            rows.ended(at + 9, [tensor])
        elif what == "posted":
            rows.posted(at, 0, [tensor])
        else:
            rows.matched(at, at + 3, number, which, tensor)
            rows.carried(at + 7)
    rows.close(max(now, 0))
    check_events(rows.take())

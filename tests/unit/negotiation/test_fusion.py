"""The planner of batches: which responses it fuses, and that every rank gets the same plan."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from pyhvd.dtypes import Code
from pyhvd.negotiation.fusion import plan, response_bytes
from pyhvd.negotiation.messages import ErrorInfo, ErrorKind, Request, RequestType, Response
from tests.thinning import examples
from tests.unit.negotiation.simulation import allreduce, tensor


def reduce_(name: str, count: int = 10, **options: Any) -> Response:
    """Return the response of an allreduce of float32 elements."""
    return Response(allreduce(name, (count,), **options))


def names(batches: list[list[Response]]) -> list[str]:
    """Return the names of each batch, joined to one word."""
    return ["".join(r.request.name for r in batch) for batch in batches]


def of(kind: RequestType, name: str) -> Response:
    return Response(tensor(kind, name, (10,)), dims=(5, 5))


def error(name: str) -> Response:
    return Response(allreduce(name), error=ErrorInfo(ErrorKind.MISMATCH, "no"), only=(0,))


def test_equal_ones_ride_together_in_order() -> None:
    assert names(plan([reduce_(n) for n in "abcd"], 1000)) == ["abcd"]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0, ["a", "b", "c"]), (39, ["a", "b", "c"]), (79, ["a", "b", "c"]), (80, ["ab", "c"]), (120, ["abc"])],
)
def test_threshold(threshold: int, expected: list[str]) -> None:
    assert names(plan([reduce_(n) for n in "abc"], threshold)) == expected


def test_one_larger_than_the_threshold_rides_alone() -> None:
    assert names(plan([reduce_("a", 100), reduce_("b"), reduce_("c")], 80)) == ["a", "bc"]
    assert names(plan([reduce_("a"), reduce_("b", 20), reduce_("c")], 120)) == ["ab", "c"]
    assert names(plan([reduce_("a"), reduce_("b", 25), reduce_("c")], 120)) == ["a", "b", "c"]


def test_look_ahead_over_others_ends_at_the_threshold() -> None:
    def f64(name: str) -> Response:
        return reduce_(name, dtype=Code.FLOAT64)

    mixed = [reduce_("a"), f64("x"), reduce_("b"), f64("y"), reduce_("c")]
    assert names(plan(mixed, 1000)) == ["abc", "xy"]
    # 40 + 80 skipped bytes are 120, which is allowed; another 40 beside the skipped ones do not fit.
    assert names(plan(mixed, 120)) == ["ab", "x", "y", "c"]
    assert names(plan(mixed, 119)) == ["a", "x", "b", "y", "c"]


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": Code.FLOAT64}, {"op": 3}, {"prescale": 2.0}, {"postscale": 0.5}, {"device": "cuda:0"},
    ],
    ids=str,
)  # fmt: skip
def test_what_differs_does_not_ride_along(other: dict[str, Any]) -> None:
    assert names(plan([reduce_("a"), reduce_("b", **other), reduce_("c")], 1000)) == ["ac", "b"]


def test_other_joined_ranks_do_not_ride_along() -> None:
    joined = Response(allreduce("b", (10,)), joined=(1,))
    assert names(plan([reduce_("a"), joined, reduce_("c")], 1000)) == ["ac", "b"]


@pytest.mark.parametrize(
    "kind", [RequestType.ALLREDUCE, RequestType.ADASUM, RequestType.ALLGATHER, RequestType.REDUCESCATTER]
)
def test_kinds_that_fuse(kind: RequestType) -> None:
    assert names(plan([of(kind, "a"), of(RequestType.BROADCAST, "x"), of(kind, "b")], 1000)) == ["ab", "x"]


@pytest.mark.parametrize("kind", [RequestType.BROADCAST, RequestType.ALLTOALL])
def test_kinds_that_do_not_fuse(kind: RequestType) -> None:
    assert names(plan([of(kind, "a"), of(kind, "b")], 1000)) == ["a", "b"]


@pytest.mark.parametrize(
    "kind",
    [RequestType.JOIN, RequestType.BARRIER, RequestType.ADD_PROCESS_SET, RequestType.REMOVE_PROCESS_SET],
)
def test_nothing_moves_across(kind: RequestType) -> None:
    stop = Response(Request(kind, "|"))
    assert names(plan([reduce_("a"), reduce_("b"), stop, reduce_("c"), reduce_("d")], 1000)) == [
        "ab",
        "|",
        "cd",
    ]


def test_an_error_keeps_its_place_and_holds_up_nothing() -> None:
    """Only some ranks get an error: if it split the batch around it, the ranks' plans would differ."""
    mine = plan([reduce_("a"), error("!"), reduce_("b")], 1000)
    assert names(mine) == ["ab", "!"]
    assert names(plan([reduce_("a"), reduce_("b")], 1000)) == [n for n in names(mine) if n != "!"]


def test_another_set_makes_no_difference() -> None:
    """A rank outside set 1 does not get "S", which is larger than the look-ahead."""
    in_both = [reduce_("a"), Response(allreduce("S", (1000,)), 1), reduce_("b")]
    assert names(plan(in_both, 100)) == ["ab", "S"]
    barrier = [reduce_("a"), Response(Request(RequestType.BARRIER, "|"), 1), reduce_("b")]
    assert names(plan(barrier, 100)) == ["ab", "|"]


def test_groups_alone() -> None:
    def member(name: str, group: str) -> Response:
        return reduce_(name, group=group, group_size=2)

    responses = [reduce_("a"), member("g", "1"), member("h", "2"), reduce_("b"), member("i", "1")]
    assert names(plan(responses, 1000)) == ["aghbi"]
    assert names(plan(responses, 1000, groups_alone=True)) == ["ab", "gi", "h"]


def test_on_devices_a_groups_batch_does_not_depend_on_what_else_is_ready() -> None:
    def on_device(name: str, group: str = "") -> Response:
        return reduce_(name, device="cuda:0", group=group, group_size=2 * bool(group))

    responses = [
        on_device("a"),
        on_device("g", "1"),
        on_device("h", "2"),
        on_device("b"),
        on_device("i", "1"),
    ]
    assert names(plan(responses, 1000)) == ["ab", "gi", "h"]
    assert names(plan(responses, 1000, device_calls_alone=True)) == ["a", "gi", "h", "b"]
    assert names(plan([reduce_("a"), reduce_("b")], 1000, device_calls_alone=True)) == ["ab"]


@pytest.mark.parametrize(
    ("response", "size"),
    [
        (Response(allreduce("x", (3, 4))), 48),
        (Response(allreduce("x", (), dtype=Code.FLOAT64)), 8),
        (Response(allreduce("x", (0, 4))), 0),
        (Response(tensor(RequestType.ALLGATHER, "x", (3, 2)), dims=(3, 0, 5)), 64),
        (Response(tensor(RequestType.REDUCESCATTER, "x", (5, 2))), 40),
        (Response(tensor(RequestType.BROADCAST, "x", (5,), dtype=Code.BFLOAT16)), 10),
        (Response(Request(RequestType.BARRIER, "x")), 0),
    ],
    ids=lambda v: str(v.request.type) if isinstance(v, Response) else "",
)
def test_bytes(response: Response, size: int) -> None:
    assert response_bytes(response) == size


any_response = st.builds(
    lambda kind, set_id, count, code, op, group, fails, joined: Response(
        Request(kind, "", code, (count,), op, group=group, group_size=2 if group else 0),
        0 if kind in (RequestType.JOIN, RequestType.ADD_PROCESS_SET) else set_id,
        dims=(count, 1),
        error=ErrorInfo(ErrorKind.MISMATCH, "no") if fails else None,
        joined=joined,
    ),
    kind=st.sampled_from([*[RequestType.ALLREDUCE] * 4, *RequestType]),
    set_id=st.sampled_from([0, 0, 1, 2]),
    count=st.integers(0, 30),
    code=st.sampled_from([Code.FLOAT32, Code.FLOAT32, Code.FLOAT64]),
    op=st.sampled_from([1, 1, 3]),
    group=st.sampled_from(["", "", "g"]),
    fails=st.sampled_from([False] * 5 + [True]),
    joined=st.sampled_from([(), (), (1,)]),
)


def numbered(responses: list[Response]) -> list[Response]:
    """Return the responses, each named by its place."""
    return [
        replace(response, request=replace(response.request, name=f"{place:03}"))
        for place, response in enumerate(responses)
    ]


@given(responses=st.lists(any_response, max_size=25), threshold=st.integers(0, 300), alone=st.booleans())
def test_any_plan(responses: list[Response], threshold: int, alone: bool) -> None:
    given_ = numbered(responses)
    batches = plan(given_, threshold, groups_alone=alone)
    flat = [r for batch in batches for r in batch]
    assert sorted(flat, key=lambda r: r.request.name) == given_, "every response exactly once"
    order = [r.request.name for r in flat]
    assert [batch[0].request.name for batch in batches] == sorted(batch[0].request.name for batch in batches)
    for batch in batches:
        assert [r.request.name for r in batch] == sorted(r.request.name for r in batch)
        if len(batch) > 1:
            assert sum(response_bytes(r) for r in batch) <= threshold
            assert (
                len({(r.request.type, r.process_set, r.request.dtype, r.joined, r.request.op) for r in batch})
                == 1
            )
            assert not alone or len({r.request.group for r in batch}) == 1
            assert all(r.error is None for r in batch)
    for stop in given_:
        if stop.error is None and stop.request.type in (RequestType.JOIN, RequestType.BARRIER):
            mine = [r.request.name for r in flat if r.process_set == stop.process_set and r.error is None]
            before = mine[: mine.index(stop.request.name)]
            assert all(name < stop.request.name for name in before)
            assert all(name > stop.request.name for name in mine[len(before) + 1 :])
    assert len(order) == len(given_)


fusable_or_not = st.builds(
    lambda kind, set_id, count, fails: Response(
        Request(kind, "", Code.FLOAT32, (count,)),
        set_id,
        error=ErrorInfo(ErrorKind.MISMATCH, "no") if fails else None,
    ),
    kind=st.sampled_from([*[RequestType.ALLREDUCE] * 5, RequestType.BROADCAST, RequestType.BARRIER]),
    set_id=st.sampled_from([0, 0, 1, 2]),
    count=st.integers(0, 20),
    fails=st.sampled_from([False] * 3 + [True]),
)


@settings(max_examples=examples(500))
@given(
    responses=st.lists(any_response, max_size=25) | st.lists(fusable_or_not, max_size=12),
    threshold=st.integers(0, 300),
    alone=st.booleans(),
    sets=st.tuples(st.sets(st.integers(1, 2)), st.sets(st.integers(1, 2))),
    told=st.integers(0),
)
def test_two_ranks_plan_alike(
    responses: list[Response], threshold: int, alone: bool, sets: tuple[set[int], set[int]], told: int
) -> None:
    """Ranks of different sets, with different errors, have the same plan for their common responses."""
    everything = numbered(responses)
    seen = []
    for rank, mine in enumerate(sets):
        own = [
            r
            for i, r in enumerate(everything)
            if r.process_set in mine | {0} and (r.error is None or (told >> i & 1) == rank)
        ]
        common = (sets[0] & sets[1]) | {0}
        batches = plan(own, threshold, groups_alone=alone)
        seen.append([b for b in batches if b[0].process_set in common and b[0].error is None])
    assert seen[0] == seen[1]

"""Every error of the negotiation: the ranks that get it, its text, and the order of the checks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pyhvd.dtypes import Code
from pyhvd.negotiation.messages import ErrorInfo, ErrorKind, Request, RequestType
from tests.unit.negotiation.simulation import Network, allreduce, grouped, tensor

TAIL = " Every rank must submit the same under one name."
GATHER, BCAST = RequestType.ALLGATHER, RequestType.BROADCAST
SCATTER, ALLTOALL = RequestType.REDUCESCATTER, RequestType.ALLTOALL


def error_of(requests: Sequence[Request]) -> ErrorInfo:
    """Submit one request per rank under one name; return the error, which all ranks must get.

    The process set must stay usable.
    """
    network = Network(len(requests))
    ends = network.each(requests)
    errors = [end.response.error for (end,) in ends]
    assert errors[0] is not None
    assert all(error == errors[0] for error in errors)
    again = network.everywhere([requests[0]])
    assert again[0][0].response.error is None
    network.check_all()
    return errors[0]


MISMATCHES: list[tuple[str, list[Request], str]] = [
    (
        "dtype",
        [allreduce("x"), allreduce("x", dtype=Code.FLOAT64), allreduce("x")],
        "Mismatched data types of allreduce 'x': ranks 0, 2: float32; rank 1: float64.",
    ),
    (
        "type",
        [allreduce("x", op=-1), tensor(GATHER, "x")],
        "Mismatched operations of tensor 'x': rank 0: allreduce; rank 1: allgather.",
    ),
    (
        "shape",
        [allreduce("x", (3,)), allreduce("x", (3,)), allreduce("x", (3,)), allreduce("x", (3, 1))],
        "Mismatched shapes of allreduce 'x': ranks 0-2: (3,); rank 3: (3, 1).",
    ),
    (
        "broadcast shape",
        [tensor(BCAST, "x", (2,), root=0), tensor(BCAST, "x", (), root=0)],
        "Mismatched shapes of broadcast 'x': rank 0: (2,); rank 1: ().",
    ),
    (
        "reducescatter shape",
        [tensor(SCATTER, "x", (2,)), tensor(SCATTER, "x", (4,))],
        "Mismatched shapes of reducescatter 'x': rank 0: (2,); rank 1: (4,).",
    ),
    (
        "prescale",
        [allreduce("x"), allreduce("x", prescale=0.1)],
        "Mismatched prescale factors of allreduce 'x': rank 0: 1.0; rank 1: 0.1.",
    ),
    (
        "postscale",
        [allreduce("x", postscale=2.0), allreduce("x")],
        "Mismatched postscale factors of allreduce 'x': rank 0: 2.0; rank 1: 1.0.",
    ),
    (
        "op",
        [allreduce("x"), allreduce("x", op=3)],
        "Mismatched reduce ops of allreduce 'x': rank 0: Sum; rank 1: Min.",
    ),
    (
        "reducescatter op",
        [tensor(SCATTER, "x", op=0), tensor(SCATTER, "x", op=1)],
        "Mismatched reduce ops of reducescatter 'x': rank 0: Average; rank 1: Sum.",
    ),
    (
        "ndim",
        [tensor(GATHER, "x", (3, 1)), tensor(GATHER, "x", (3,))],
        "Mismatched numbers of dimensions of allgather 'x': rank 0: 2 (3, 1); rank 1: 1 (3,).",
    ),
    (
        "trailing dims",
        [tensor(ALLTOALL, "x", (3, 1)), tensor(ALLTOALL, "x", (4, 2))],
        "Mismatched dimensions after the first of alltoall 'x': rank 0: (3, 1); rank 1: (4, 2).",
    ),
    (
        "root",
        [tensor(BCAST, "x", root=0), tensor(BCAST, "x", root=1)],
        "Mismatched root ranks of broadcast 'x': rank 0: 0; rank 1: 1.",
    ),
    (
        "device",
        [allreduce("x"), allreduce("x", device="cuda:0")],
        "Mismatched devices of allreduce 'x': rank 0: cpu; rank 1: cuda:0.",
    ),
    (
        "set members",
        [
            Request(RequestType.ADD_PROCESS_SET, "s", ranks=(0,)),
            Request(RequestType.ADD_PROCESS_SET, "s", ranks=(1,)),
        ],
        "Mismatched process sets of add_process_set 's': rank 0: [0]; rank 1: [1].",
    ),
]


@pytest.mark.parametrize(("what", "requests", "text"), MISMATCHES, ids=[m[0] for m in MISMATCHES])
def test_what_ranks_disagree_about(what: str, requests: list[Request], text: str) -> None:
    error = error_of(requests)
    assert (error.kind, error.message) == (ErrorKind.MISMATCH, text + TAIL)
    assert sorted(error.per_rank) == list(range(len(requests)))


def test_errors_of_a_set_name_global_ranks() -> None:
    network = Network(4, sets=[(1, 3)])
    network.submit(1, [allreduce("x")], 1)
    ends = network.submit(3, [allreduce("x", (9,))], 1)
    network.settle()
    assert ends is not None
    error = ends[0].response.error
    assert error is not None
    assert error.message == "Mismatched shapes of allreduce 'x': rank 1: (2,); rank 3: (9,)." + TAIL
    assert error.per_rank == {1: "(2,)", 3: "(9,)"}
    assert not network.ranks[0].history


FAULTS: list[tuple[str, dict[str, object]]] = [
    ("data types", {"dtype": Code.FLOAT64}),
    ("operations", {"type": SCATTER}),
    ("shapes", {"shape": (9,)}),
    ("prescale factors", {"prescale": 2.0}),
    ("postscale factors", {"postscale": 2.0}),
    ("reduce ops", {"op": 5}),
    ("root ranks", {"root": 1}),
    ("devices", {"device": "cuda:0"}),
    ("grouping", {"group": "g", "group_size": 1}),
]


@pytest.mark.parametrize("first", range(len(FAULTS)), ids=lambda i: FAULTS[i][0])
def test_only_the_first_fault_is_reported(first: int) -> None:
    """The checks run in Horovod's order: dtype, operation, shape, factors, op, joined ranks, root, device."""
    fields: dict[str, object] = {"type": RequestType.ALLREDUCE, "dtype": Code.FLOAT32, "shape": (2,), "op": 1}
    wrong = dict(fields)
    for _, fault in FAULTS[first:]:
        wrong.update(fault)
    sane, odd = (Request(name="x", **f) for f in (fields, wrong))  # type: ignore[arg-type]
    error = error_of([sane, odd])
    assert error.message.startswith(f"Mismatched {FAULTS[first][0]} of ")


def test_a_joined_rank_is_reported_after_the_shapes_and_before_the_root() -> None:
    for root, shape, text in (
        (2, (3,), "Mismatched shapes"),
        (2, (2,), "broadcast 'x' has its root on rank 0"),
    ):
        network = Network(3)
        network.submit(0, [Request(RequestType.JOIN, "join.noname")])
        network.submit(1, [tensor(BCAST, "x", (2,), root=0)])
        ends = network.submit(2, [tensor(BCAST, "x", shape, root=root)])
        network.settle()
        assert ends is not None
        error = ends[0].response.error
        assert error is not None
        assert error.message.startswith(text)


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_refusal_reaches_everybody_else_at_once(refused_first: bool) -> None:
    network = Network(3)
    if refused_first:
        network.refuse(1, allreduce("x"), text="ValueError: bad splits")
        network.settle()
    ends = [network.submit(rank, [allreduce("x")]) for rank in (0, 2)]
    network.settle()
    if not refused_first:
        network.refuse(1, allreduce("x"), text="ValueError: bad splits")
        network.settle()
    for each in ends:
        assert each is not None
        text = "allreduce 'x' cannot run: rank 1 refused it: ValueError: bad splits"
        assert each[0].response.error == ErrorInfo(ErrorKind.RANK_FAILED, text, 1)
    assert not network.ranks[1].history, "who refused has been told by an exception"
    assert network.everywhere([allreduce("x")])[0][0].response.error is None
    network.check_all()


def test_a_refusal_reaches_ranks_one_by_one() -> None:
    network = Network(3)
    network.refuse(0, allreduce("x"))
    for rank in (2, 1):
        ends = network.submit(rank, [allreduce("x")])
        network.settle()
        assert ends is not None
        assert ends[0].response.only == (rank,)
    network.check_all()


def test_no_error_is_sent_if_all_ranks_refuse() -> None:
    network = Network(3)
    for rank in range(3):
        network.refuse(rank, allreduce("x"))
    network.settle()
    assert network.answered == []
    network.check_all()


def test_a_refusal_of_a_cached_tensor() -> None:
    network = Network(3)
    for _ in range(2):
        network.everywhere([allreduce("x")])
    ends = network.submit(0, [allreduce("x")])
    network.settle()
    network.refuse(1, allreduce("x"))
    network.settle()
    late = network.submit(2, [allreduce("x")])
    network.settle()
    for each in (ends, late):
        assert each is not None
        assert each[0].response.error is not None
    network.check_all()


def test_a_duplicate_fails_the_second_call_of_the_other_ranks() -> None:
    network = Network(2)
    for _ in range(2):
        first = network.submit(0, [allreduce("x")])
        assert network.submit(0, [allreduce("x")]) is None
        network.settle()
        assert network.answered == [] or network.answered[-1].responses[-1].error is not None
        other = [network.submit(1, [allreduce("x")])]
        network.settle()
        other.append(network.submit(1, [allreduce("x")]))
        network.settle()
        assert first is not None
        assert first[0].response.error is None
        assert other[1] is not None
        error = other[1][0].response.error
        assert error is not None
        assert error.message == "allreduce 'x' cannot run: rank 0 refused it: DuplicateNameError: in flight"
    network.check_all()


def test_the_same_duplicate_on_every_rank_fails_no_first_call() -> None:
    network = Network(2)
    for _ in range(3):
        ends = [network.submit(rank, [allreduce("x")]) for rank in (0, 1)]
        assert [network.submit(rank, [allreduce("x")]) for rank in (0, 1)] == [None, None]
        network.settle()
        assert [e[0].response.error for e in ends if e is not None] == [None, None]
    network.check_all()


def test_each_refusal_fails_one_call_of_the_others() -> None:
    network = Network(2)
    for _ in range(3):
        network.refuse(0, allreduce("x"))
    network.settle()
    ends = [network.submit(0, [allreduce("x")])]
    errors = []
    for _ in range(4):
        other = network.submit(1, [allreduce("x")])
        network.settle()
        assert other is not None
        errors.append(other[0].response.error is not None)
    assert errors == [True, True, True, False]
    assert ends[0] is not None
    assert ends[0][0].response.error is None
    network.check_all()


def test_a_refused_group_fails_once_for_each_of_the_others() -> None:
    network = Network(3)
    group = grouped("g", [(1,), (2,)])
    before = network.submit(0, group)
    network.refuse(1, group[0], text="TypeError: no list")
    network.settle()
    after = network.submit(2, group)
    network.settle()
    for ends in (before, after):
        assert ends is not None
        assert [e.response.request.name for e in ends] == ["g_1of2", "g_2of2"]
        assert {e.response.error.rank for e in ends if e.response.error is not None} == {1}
    assert all(e.response.error is None for e in network.everywhere(group)[0])
    network.check_all()

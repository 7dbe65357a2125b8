"""The text of ranks and values in an error, and which requests agree."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, strategies as st

from pyhvd.common.text import describe_ranks, describe_values
from pyhvd.negotiation import validation
from pyhvd.negotiation.messages import ErrorInfo, ErrorKind, Request, RequestType, bits_of, verb
from tests.unit.negotiation.simulation import allreduce, by_request, tensor


def check(requests: dict[int, Request], joined: list[int]) -> ErrorInfo | None:
    """Compare requests that are given by rank."""
    return validation.check(by_request(requests), bits_of(joined))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"), ([0, 1], "ranks 0-1"), ([0, 2], "ranks 0, 2"), ([5, 0, 2, 1], "ranks 0-2, 5"),
        ([0, 1, 3, 4, 5, 9], "ranks 0-1, 3-5, 9"),
    ],
)  # fmt: skip
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert describe_ranks(ranks) == text


@given(ranks=st.sets(st.integers(0, 60), min_size=1))
def test_ranks_in_words_say_all_of_them(ranks: set[int]) -> None:
    said: set[int] = set()
    for part in describe_ranks(list(ranks)).split(" ", 1)[1].split(", "):
        first, _, last = part.partition("-")
        said |= set(range(int(first), int(last or first) + 1))
    assert said == ranks


def test_values_in_words() -> None:
    assert describe_values({0: "a", 2: "a", 1: "b", 3: "a"}) == "ranks 0, 2-3: a; rank 1: b"


def test_verbs_have_horovods_codes() -> None:
    names = "allreduce allgather broadcast join adasum alltoall barrier reducescatter".split()  # noqa: SIM905
    assert [verb(i) for i in range(8)] == names


def test_equal_requests_agree() -> None:
    for request in (allreduce("x"), Request(RequestType.BARRIER, "b"), tensor(RequestType.ALLTOALL, "t")):
        assert check({0: request, 5: request}, []) is None
        assert check({2: request}, []) is None


@pytest.mark.parametrize("kind", [RequestType.ALLGATHER, RequestType.ALLTOALL])
def test_rows_may_differ_where_they_are_gathered(kind: RequestType) -> None:
    requests = {rank: tensor(kind, "x", (rank, 3, 2)) for rank in range(3)}
    assert check(requests, []) is None
    requests[3] = tensor(kind, "x", (1, 2, 3))
    assert check(requests, []) is not None


def test_signed_zeros_and_whole_numbers_are_equal_scales() -> None:
    assert check({0: allreduce("x", prescale=1.0), 1: allreduce("x", prescale=1)}, []) is None


@pytest.mark.parametrize("odd", range(4))
def test_the_odd_one_out_is_found_wherever_it_is(odd: int) -> None:
    requests = {rank: allreduce("x", (9,) if rank == odd else (1,)) for rank in range(4)}
    for order in permutations(requests):
        error = check({rank: requests[rank] for rank in order}, [])
        assert error is not None
        assert f"rank {odd}: (9,)" in error.message
        assert error.kind == ErrorKind.MISMATCH
        assert error.per_rank[odd] == "(9,)"


def test_a_rank_that_has_nothing_to_reduce() -> None:
    error = check({0: allreduce("x"), 1: Request(RequestType.BARRIER, "x")}, [])
    assert error is not None
    assert "rank 0: float32; rank 1: no tensor" in error.message


def test_joined_ranks_do_not_matter_where_zeros_do() -> None:
    assert check({0: allreduce("x")}, [1, 2]) is None
    assert check({0: tensor(RequestType.BROADCAST, "x", root=0)}, [1, 2]) is None
    assert check({0: tensor(RequestType.BROADCAST, "x", root=2)}, [1, 2]) is not None

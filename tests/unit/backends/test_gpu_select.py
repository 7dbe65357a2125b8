"""Which way arrays on devices take, from what the ranks offer; and the words for it."""

from __future__ import annotations

import pytest

from pyhvd.backends.gpu.select import Offer, obstacle

NCCL = {"NCCL": "2.27"}


def offer(
    device: str = "a", carriers: dict[str, str] = NCCL, refusals: dict[str, str] | None = None
) -> Offer:
    return Offer(device, "cuda:0", carriers, refusals or {})


@pytest.mark.parametrize(
    ("offers", "text"),
    [
        ([offer()], ""),
        ([offer("a"), offer("b")], ""),
        ([offer("a"), offer("b"), offer("a")], "ranks 4, 9 share a device, cuda:0"),
        ([offer("a"), offer(""), offer("b")], "there is no device on rank 6"),
        ([offer(""), offer("")], "there is no device on ranks 4, 6"),
        (
            [offer("a"), offer("b", {}, {"NCCL": "No module named 'nccl'"})],
            "NCCL cannot be used: rank 6: No module named 'nccl'",
        ),
        (
            [offer("a"), offer("b", {"NCCL": "2.19"})],
            "the ranks have different versions of NCCL: rank 4: 2.27; rank 6: 2.19",
        ),
    ],
)
def test_what_keeps_the_ranks_from_a_carrier(offers: list[Offer], text: str) -> None:
    assert obstacle(offers, "NCCL", False, [4, 6, 9]) == text


def test_a_carrier_that_lets_ranks_share_a_device() -> None:
    assert obstacle([offer("a"), offer("a")], "NCCL", True, [0, 1]) == ""
    assert obstacle([offer("a"), offer("")], "NCCL", True, [0, 1]) == "there is no device on rank 1"


def test_what_is_said_of_another_carrier_does_not_count() -> None:
    both = Offer("a", "cuda:0", {"MPI": "5.0"}, {"NCCL": "no"})
    assert obstacle([both], "MPI", False, [0]) == ""
    assert obstacle([both], "NCCL", False, [0]) == "NCCL cannot be used: rank 0: no"

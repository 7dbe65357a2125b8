"""Which way arrays on devices take, from what the ranks offer; and the words for it."""

from __future__ import annotations

import pytest

from pyhvd.devices.paths import Choice, Offer, choose

NCCL = {"NCCL": "2.27"}


def offer(
    device: str = "a", carriers: dict[str, str] = NCCL, refusals: dict[str, str] | None = None
) -> Offer:
    return Offer(device, "cuda:0", carriers, refusals or {})


@pytest.mark.parametrize(
    ("offers", "choice"),
    [
        ([offer()], Choice("NCCL", "version 2.27")),
        ([offer("a"), offer("b")], Choice("NCCL", "version 2.27")),
        ([offer("a"), offer("b"), offer("a")], Choice("", "ranks 4, 9 share a device, cuda:0")),
        ([offer("a"), offer(""), offer("b")], Choice("", "there is no device on rank 6")),
        ([offer(""), offer("")], Choice("", "there is no device on ranks 4, 6")),
        (
            [offer("a"), offer("b", {}, {"NCCL": "No module named 'nccl'"})],
            Choice("", "NCCL cannot be used: rank 6: No module named 'nccl'"),
        ),
        (
            [offer("a"), offer("b", {"NCCL": "2.19"})],
            Choice("", "the ranks have different versions of NCCL: rank 4: 2.27; rank 6: 2.19"),
        ),
    ],
)
def test_choice(offers: list[Offer], choice: Choice) -> None:
    assert choose(offers, ["NCCL"], [4, 6, 9]) == choice


def test_without_carriers() -> None:
    want = Choice("", "no library that moves device memory between ranks is known")
    assert choose([offer()], [], [0]) == want


def test_the_second_best() -> None:
    both = Offer("a", "cuda:0", {"RCCL": "1"}, {"NCCL": "no"})
    assert choose([both], ["NCCL", "RCCL"], [0]) == Choice("RCCL", "version 1")

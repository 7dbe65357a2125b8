"""Whether the ranks of a process set can use NCCL, and the text that says why they cannot."""

from __future__ import annotations

import pytest

from pyhvd.backends.gpu.select import RankDevice, why_not_nccl


def rank(device: str = "a", nccl: str = "2.27", error: str = "") -> RankDevice:
    return RankDevice(device, "cuda:0", nccl, error)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([rank()], ""),
        ([rank("a"), rank("b")], ""),
        ([rank("a"), rank("b"), rank("a")], "ranks 4, 9 share a device, cuda:0"),
        ([rank("a"), rank(""), rank("b")], "there is no device on rank 6"),
        ([rank(""), rank("")], "there is no device on ranks 4, 6"),
        (
            [rank("a"), rank("b", "", "No module named 'nccl'")],
            "NCCL cannot be used: rank 6: No module named 'nccl'",
        ),
        (
            [rank("a"), rank("b", "2.19")],
            "the ranks have different versions of NCCL: rank 4: 2.27; rank 6: 2.19",
        ),
    ],
)
def test_why_ranks_cannot_use_nccl(ranks: list[RankDevice], text: str) -> None:
    assert why_not_nccl(ranks, [4, 6, 9]) == text

"""Lists of tensors as one: without a copy if they are the pieces of one memory."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")


def _flat_parts(tensors: list[Any]) -> tuple[Any, list[int]]:
    from pyhvd.torch.distributed.tensors import flat_parts

    found: tuple[Any, list[int]] = flat_parts(tensors)
    return found


def test_pieces_of_one_tensor_are_not_copied() -> None:
    whole = torch.arange(24.0).view(6, 4)
    joined, sizes = _flat_parts(list(whole.chunk(3)))
    assert joined.data_ptr() == whole.data_ptr()
    assert joined.tolist() == list(range(24))
    assert sizes == [8, 8, 8]
    rest, _ = _flat_parts(list(whole.chunk(3))[1:])
    assert rest.tolist() == list(range(8, 24))


def test_other_tensors_are_copied_in_their_order() -> None:
    whole = torch.arange(24.0).view(6, 4)
    for parts in (
        list(whole.chunk(3))[::-1],
        list(whole.t().chunk(2)),
        [whole[:2], whole[:2]],
        [torch.zeros(0), torch.ones(2), torch.zeros(0)],
        [torch.ones(3), torch.zeros(3)],
    ):
        joined, sizes = _flat_parts(parts)
        assert torch.equal(joined, torch.cat([each.reshape(-1) for each in parts]))
        assert sizes == [each.numel() for each in parts]


def test_pieces_of_a_parameter_are_sent_without_its_gradient() -> None:
    joined, _ = _flat_parts(list(torch.nn.Parameter(torch.ones(4)).chunk(2)))
    assert joined.tolist() == [1.0] * 4
    assert not joined.requires_grad

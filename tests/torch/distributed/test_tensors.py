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


def _outputs() -> list[list[Any]]:
    """Return lists of tensors of 24 elements in all: contiguous ones and others, alike and not."""
    return [
        [torch.zeros(4, 3), torch.zeros(12)],
        list(torch.zeros(24).chunk(4)),
        [torch.zeros(3, 4).t(), torch.zeros(6, 2)[::2], torch.zeros(6)],
        [torch.zeros(()), torch.zeros(0), torch.zeros(23)],
        [torch.zeros(1, dtype=torch.complex64).conj().imag, torch.zeros(23)],
        [torch.nn.Parameter(torch.zeros(24))],
        [torch.zeros(24, requires_grad=True) * 1.0],
    ]


@pytest.mark.parametrize("which", range(7))
def test_a_result_is_stored_in_a_list(which: int) -> None:
    from pyhvd.torch.distributed.tensors import store_parts

    outputs = _outputs()[which]
    versions = [each._version for each in outputs]
    store_parts(outputs, torch.arange(24.0))
    stored = torch.cat([each.detach().resolve_neg().reshape(-1) for each in outputs])
    assert stored.tolist() == list(range(24))
    assert [each._version for each in outputs] == versions


def test_a_result_of_another_size_is_refused() -> None:
    from pyhvd.torch.distributed.tensors import store_parts

    with pytest.raises(ValueError, match=r"room for \[2, 3\] elements, but the ranks have sent 6"):
        store_parts([torch.zeros(2), torch.zeros(3)], torch.zeros(6))


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_bytes_become_tensors_of_another_dtype() -> None:
    from pyhvd.torch.distributed.tensors import store_parts

    sent = torch.tensor([1, 2, 3]).to(torch.complex32)
    outputs = [torch.zeros(2, dtype=torch.complex32), torch.zeros(1, dtype=torch.complex32)]
    parts, sizes = _flat_parts([sent, outputs[0]])
    assert sizes == [12, 8]
    store_parts(outputs, parts[:12])
    assert [each.to(torch.complex64).tolist() for each in outputs] == [[1, 2], [3]]


def test_large_tensors_are_joined_in_kept_memory() -> None:
    parts = [torch.arange(30_000.0), torch.arange(30_000.0) * 2]
    for _ in range(3):
        joined, _ = _flat_parts(parts)
        assert torch.equal(joined, torch.cat(parts))
        del joined


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.zeros(3), torch.zeros(3, dtype=torch.int32)],
        [torch.zeros(2, dtype=torch.complex64).conj()],
        [torch.zeros(1, dtype=torch.complex64).conj().imag],
        [torch.zeros(4)[::2]],
        [torch.empty(2, device="meta")],
        [],
    ],
    ids=["dtypes", "conjugated", "negated", "strided", "meta", "none"],
)
def test_other_tensors_are_left_to_torch(tensors: list[Any]) -> None:
    from pyhvd.native.shared_memory import are_neighbours, pack, unpack

    assert pack(tensors) is None
    assert not are_neighbours(tensors)
    assert not unpack(torch.zeros(2), tensors)

"""broadcast_parameters, broadcast_buffers, broadcast_optimizer_state and sparse_allreduce_async."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import pyhvd.torch as hvd
from pyhvd.testing import run_ranks


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.LazyLinear(5)
    )


def is_equal_everywhere(tensors: Any) -> bool:
    return all(
        torch.equal(*hvd.allgather(each.detach().reshape(1, -1).double())) for each in tensors if each.numel()
    )


@pytest.mark.parametrize("form", ["state_dict", "named", "parameters", "list", "pairs"])
def test_broadcast_parameters(form: str) -> None:
    def body() -> None:
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(600, 500, dtype=torch.float64)
        )
        model[0].weight.requires_grad_(False)
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
        given: Any = {
            "state_dict": model.state_dict,
            "named": model.named_parameters,
            "parameters": model.parameters,
            "list": lambda: list(model.parameters()),
            "pairs": lambda: [(name, each) for name, each in model.named_parameters()],
        }[form]()
        before = [each.detach().clone() for each in model.parameters()]
        hvd.broadcast_parameters(given, root_rank=1)
        assert is_equal_everywhere(model.parameters())
        if hvd.rank() == 1:
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))

    run_ranks(2, body)


def test_values_that_are_no_tensors_and_tied_weights() -> None:
    def body() -> None:
        weight = torch.full((3,), float(hvd.rank()))
        state = {"a": weight, "b": weight, "epoch": hvd.rank(), "none": None, "empty": torch.empty(0)}
        hvd.broadcast_parameters(state, root_rank=1)
        assert weight.tolist() == [1.0] * 3
        assert (state["epoch"], state["none"]) == (1, None)

    run_ranks(2, body)


def test_different_models_are_one_error() -> None:
    def body() -> None:
        state = {
            "same": torch.ones(2),
            "shape": torch.ones(2 + hvd.rank()),
            f"only{hvd.rank()}": torch.ones(1),
        }
        with pytest.raises(hvd.MismatchError) as error:
            hvd.broadcast_parameters(state)
        text = str(error.value)
        assert "'shape': rank 0: torch.float32 [2] on cpu; rank 1: torch.float32 [3] on cpu" in text
        assert "'only0': rank 0: torch.float32 [1] on cpu; rank 1: none" in text
        assert "same" not in text

    run_ranks(2, body)


@pytest.mark.parametrize("given", ["model", 3, [1, 2], torch.ones(2)], ids=str)
def test_other_kinds_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="takes a state_dict"):
        hvd.broadcast_parameters(given)


def test_broadcast_buffers() -> None:
    def body() -> None:
        model = torch.nn.BatchNorm1d(2)
        model(torch.full((3, 2), float(hvd.rank())) + torch.arange(3.0).reshape(3, 1))
        assert not is_equal_everywhere(model.buffers())
        hvd.broadcast_buffers(model)
        assert is_equal_everywhere(model.buffers())

    run_ranks(2, body)


def _names_of_state(optimizer: Any) -> dict[int, list[str]]:
    return {key: sorted(map(str, value)) for key, value in optimizer.state_dict()["state"].items()}


def optimizers() -> list[Any]:
    base = torch.optim.Optimizer
    classes = [each for each in vars(torch.optim).values() if inspect.isclass(each)]
    found = [each for each in classes if issubclass(each, base) and each is not base]
    return [each for each in found if each.__name__ != "Muon"]  # which takes matrices alone


@pytest.mark.parametrize("kind", optimizers(), ids=lambda each: each.__name__)
@pytest.mark.parametrize("states", ["none", "root", "other", "both"])
@pytest.mark.parametrize("distributed", [False, True], ids=["own", "distributed"])
def test_broadcast_optimizer_state(kind: Any, states: str, distributed: bool) -> None:
    """Whichever rank has state before: all have the root's after, and the same step moves them alike."""
    sparse = kind.__name__ == "SparseAdam"

    def loss(model: Any) -> Any:
        return (model(torch.tensor([[0, 1]])) ** 2).sum() if sparse else (model(torch.ones(1, 3)) ** 2).sum()

    def body() -> None:
        rank = hvd.rank()
        torch.manual_seed(0)
        model: Any = torch.nn.Embedding(3, 2, sparse=True) if sparse else torch.nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.01 * (rank + 1))
        if states == "both" or (states == "root" and rank == 0) or (states == "other" and rank == 1):

            def closure() -> Any:
                optimizer.zero_grad()
                value = loss(model) * (1 + rank)
                torch.autograd.backward(value)
                return value

            for _ in range(2 + rank):
                optimizer.step(closure)
            optimizer.zero_grad()
        if distributed:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), 0)
        weights = [each.detach().clone() for each in model.parameters()]
        before = hvd.allgather_object(_names_of_state(optimizer))
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), weights, strict=True)), "no step"
        assert optimizer.param_groups[0]["lr"] == 0.01
        states_now = hvd.allgather_object(_names_of_state(optimizer))
        assert states_now == [before[0]] * 2

        def again() -> Any:
            optimizer.zero_grad()
            value = loss(model)
            torch.autograd.backward(value)
            return value

        optimizer.step(again)
        assert is_equal_everywhere(model.parameters())

    run_ranks(2, body)


def test_options_keep_their_types() -> None:
    def body() -> None:
        weight = torch.nn.Parameter(torch.ones(2))
        options: dict[str, Any] = {"lr": 0.1, "betas": (0.5, 0.6), "amsgrad": True, "eps": 1e-3}
        if hvd.rank():
            options = {"lr": torch.tensor(0.2), "betas": (0.1, 0.1), "amsgrad": False}
        optimizer = torch.optim.Adam([weight], foreach=False, **options)
        hvd.broadcast_optimizer_state(optimizer, 0)
        (group,) = optimizer.param_groups
        assert (group["lr"], group["betas"], group["amsgrad"], group["eps"]) == (0.1, (0.5, 0.6), True, 1e-3)
        assert weight.grad is not None

    run_ranks(2, body)


def test_optimizers_of_other_sizes_are_one_error() -> None:
    def body() -> None:
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(1 + hvd.rank())]
        with pytest.raises(hvd.MismatchError, match=r"rank 0: \[1\]; rank 1: \[2\]"):
            hvd.broadcast_optimizer_state(torch.optim.SGD(weights, lr=0.1))

    run_ranks(2, body)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_sparse_allreduce(op: Any, dtype: torch.dtype) -> None:
    def make(rank: int) -> torch.Tensor:
        rows = [[0, 2, 2], [1, 2], []][rank]
        values = torch.arange(1, 1 + 2 * len(rows)).reshape(-1, 2).to(dtype) * 6
        return torch.sparse_coo_tensor([rows], values, (4, 2), check_invariants=True)

    def body() -> None:
        dense = sum(make(rank).to_dense().double() for rank in range(3))
        for _ in range(3):
            handle = hvd.sparse_allreduce_async(make(hvd.rank()), "x", op)
            result = handle()
            assert result.is_sparse
            assert result.is_coalesced()
            assert result.dtype is dtype
            expected = dense / 3 if op is hvd.Average else dense
            torch.testing.assert_close(result.to_dense().double(), expected, rtol=0.02, atol=0.0)
            assert hvd.synchronize(handle) is result

    run_ranks(3, body)


def test_sparse_allreduce_refusals() -> None:
    def body() -> None:
        tensor = torch.eye(2 + hvd.rank()).to_sparse()
        with pytest.raises(TypeError, match="sparse_coo"):
            hvd.sparse_allreduce_async(torch.ones(3), "x", hvd.Sum)
        with pytest.raises(hvd.UnsupportedOpError, match="Average and op=Sum"):
            hvd.sparse_allreduce_async(tensor, "x", hvd.Max)
        rows = torch.sparse_coo_tensor([[0]], torch.ones(1, 3), (2 + hvd.rank(), 3), check_invariants=True)
        with pytest.raises(hvd.MismatchError, match=r"rank 0: \[2\]; rank 1: \[3\]"):
            hvd.sparse_allreduce_async(rows, "x", hvd.Sum).result()

    run_ranks(2, body)


def test_objects_with_tensors_of_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(file: Any, map_location: Any, weights_only: bool) -> Any:
        asked.append(map_location(torch.UntypedStorage(4), "cuda:7").device.type)
        return plain(file, map_location=map_location, weights_only=weights_only)

    plain = torch.load
    monkeypatch.setattr(torch, "load", load)

    def body() -> None:
        given = {"a": torch.arange(3.0) + hvd.rank(), "b": [torch.nn.Linear(1, 1)]}
        assert hvd.broadcast_object(given, 1)["a"].tolist() == [1.0, 2.0, 3.0]
        assert [each["a"][0].item() for each in hvd.allgather_object(given)] == [0.0, 1.0]

    run_ranks(2, body)
    assert set(asked) == {"cpu"}  # as there is no GPU here

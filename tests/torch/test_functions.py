"""broadcast_parameters, broadcast_buffers, broadcast_optimizer_state and sparse_allreduce_async."""

from __future__ import annotations

import collections
import copy
import inspect
import threading
from pathlib import Path
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


class Image(torch.Tensor):
    """A class of the program, whose tensors have plain memory."""


def test_parameters_of_a_derived_class_and_those_without_memory() -> None:
    def body() -> None:
        rank = hvd.rank()
        given = torch.nn.Parameter(torch.full((2,), float(rank)).as_subclass(Image))
        large = torch.full((1 << 18,), float(rank)).as_subclass(Image)
        hvd.broadcast_parameters([given, large], root_rank=1)
        assert type(given) is type(large) is Image
        assert given.tolist() == [1.0] * 2
        assert large.eq(1.0).all()
        # Two tensors without an address are not the same memory.
        hollow = {name: torch.ones(2, device="meta" if rank == 0 else "cpu") for name in ("a", "b")}
        if rank == 0:
            with pytest.raises(TypeError, match=r"'a': .* make it on a device with memory"):
                hvd.broadcast_parameters(hollow)
        else:
            with pytest.raises(hvd.RankFailedError, match=r"rank 0 refused it: .*device with memory"):
                hvd.broadcast_parameters(hollow)
        hvd.barrier()  # the first rank to end would end the other's calls

    run_ranks(2, body)


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


def _state_of(optimizer: Any) -> list[Any]:
    """Return the state and the options, which must be equal on all ranks: of tensors kinds and bytes."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.nn.Parameter):
            return "parameter"
        if isinstance(value, torch.Tensor):
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
            return str(value.dtype), value.device.type, tuple(value.shape), raw
        if isinstance(value, dict):
            return {str(key): plain(each) for key, each in value.items()}
        if isinstance(value, (list, tuple, collections.deque)):
            return [type(value).__name__, *map(plain, value)]
        return repr(value)

    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return [
        [plain(optimizer.state[each]) if each in optimizer.state else None for each in parameters],
        [
            plain({name: group[name] for name in group if name != "params"})
            for group in optimizer.param_groups
        ],
    ]


def assert_equal_states(optimizer: Any) -> None:
    first, *others = hvd.allgather_object(_state_of(optimizer))
    assert all(each == first for each in others)


class Masters(torch.optim.Optimizer):
    """Keeps a float32 master of each bfloat16 weight, and state of every form that programs use."""

    def __init__(self, params: Any, lr: Any = 0.1) -> None:
        super().__init__(params, {"lr": lr, "scales": (torch.tensor(2.0, dtype=torch.float64), 3)})
        self.loads = 0

    def load_state_dict(self, state_dict: Any) -> None:
        self.loads += 1
        super().load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["master"] = weight.detach().float().t()
                    state["count"] = torch.zeros((), dtype=torch.int64)
                    state["nested"] = {"list": [torch.ones(2, dtype=torch.float64), None], "pair": (1, "a")}
                    state["recent"] = collections.deque([torch.rand(1)], maxlen=2)
                    state["images"] = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
                    state["gaps"] = torch.rand(6)[::2]
                    state["same"] = torch.ones(1, dtype=torch.float64).expand(3)
                    state["large"] = torch.rand(1 << 18)
                    state["mask"] = torch.tensor([True, False])
                    state["of"] = weight
                state["master"].sub_(weight.grad.float().t(), alpha=float(group["lr"]))
                state["count"] += 1
                weight.data.copy_(state["master"].t())


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
@pytest.mark.parametrize("states", ["root", "other", "both"])
def test_state_of_another_dtype_than_its_weight(states: str, lr: Any) -> None:
    """All ranks get the root's tensors in their own, and call load_state_dict all the same."""

    def body() -> None:
        rank = hvd.rank()
        torch.manual_seed(rank)
        weights = [torch.nn.Parameter(torch.randn(3, 2).bfloat16()) for _ in range(2)]
        optimizer = Masters(weights, copy.deepcopy(lr) if rank else lr)
        if states == "both" or (states == "root") == (rank == 1):
            for _ in range(2 + rank):
                weights[0].grad = torch.randn_like(weights[0])
                if rank == 0:  # has state of which the root has none
                    weights[1].grad = torch.randn_like(weights[1])
                optimizer.step()
        before = dict(optimizer.state.get(weights[0], {}))
        rate = optimizer.param_groups[0]["lr"]
        mine = _state_of(optimizer)
        hvd.broadcast_optimizer_state(optimizer, 1)
        assert_equal_states(optimizer)
        state = optimizer.state.get(weights[0], {})
        if rank == 1:
            assert _state_of(optimizer) == mine, "the root's stays"
        else:
            assert optimizer.loads == 1
            assert optimizer.param_groups[0]["lr"] is rate or not isinstance(rate, torch.Tensor)
        if states != "other":
            assert state["master"].dtype is torch.float32
            assert state["of"] is weights[0]
            assert state["recent"].maxlen == 2
            assert state["images"].is_contiguous(memory_format=torch.channels_last)
        if states == "both":
            for name in ("master", "count", "images", "gaps", "large", "mask"):
                assert state[name] is before[name], "in place"
        assert weights[1] not in optimizer.state

    run_ranks(2, body)


def test_products_of_bfloat16_weights_go_on_alike() -> None:
    def body() -> None:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.ones(8).bfloat16())
        optimizer = torch.optim.NAdam([weight], lr=0.01)

        def train(steps: int) -> None:
            for step in range(steps):
                weight.grad = torch.full_like(weight, 1 + step % 3)
                optimizer.step()

        train(3)
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.state[weight]["mu_product"].dtype is torch.float32
        train(40)
        assert_equal_states(optimizer)
        assert len({str(each) for each in hvd.allgather_object(weight.tolist())}) == 1

    run_ranks(3, body)


def test_hooks_of_loading_run_and_the_root_has_the_last_word() -> None:
    """Hooks may keep another form in a state_dict; the state that the optimizer works with is the root's."""

    def body() -> None:
        weight = torch.nn.Parameter(torch.ones(3).bfloat16())
        optimizer = Masters([weight])
        weight.grad = torch.full_like(weight, 0.3 + hvd.rank())
        optimizer.step()
        called: list[str] = []

        def shorten(_: Any, state_dict: Any) -> Any:
            called.append("shorten")
            state = {key: {"short": each["master"].bfloat16()} for key, each in state_dict["state"].items()}
            return {**state_dict, "state": state}

        def lengthen(_: Any, state_dict: Any) -> Any:
            called.append("lengthen")
            state = {key: {"master": each["short"].float()} for key, each in state_dict["state"].items()}
            return {**state_dict, "state": state}

        optimizer.register_state_dict_post_hook(shorten)
        optimizer.register_load_state_dict_pre_hook(lengthen)
        optimizer.register_load_state_dict_post_hook(lambda _: called.append("after"))
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert called == (["lengthen", "after"] if hvd.rank() else ["shorten"])
        assert_equal_states(optimizer)

    run_ranks(2, body)


def test_a_root_that_resumes_from_a_file(tmp_path: Path) -> None:
    """torch casts the root's own state as it loads; the other ranks get what the root has then."""

    def body() -> None:
        weight = torch.nn.Parameter(torch.ones(3).bfloat16())
        optimizer = torch.optim.NAdam([weight], lr=0.01)
        weight.grad = torch.full_like(weight, 1.0 + hvd.rank())
        for _ in range(3):
            optimizer.step()
        if hvd.rank() == 0:
            torch.save(optimizer.state_dict(), tmp_path / "checkpoint")
            optimizer.load_state_dict(torch.load(tmp_path / "checkpoint", weights_only=True))
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.state[weight]["mu_product"].dtype is torch.bfloat16
        assert_equal_states(optimizer)

    run_ranks(2, body)


def test_state_that_cannot_be_sent_is_an_error_on_every_rank() -> None:
    def body() -> None:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        if hvd.rank() == 0:
            optimizer.state[weight]["lock"] = threading.Lock()
            with pytest.raises(TypeError, match="lock"):
                hvd.broadcast_optimizer_state(optimizer, 0)
        else:
            with pytest.raises(
                hvd.RankFailedError, match=r"broadcast_optimizer_state.*rank 0 refused it: .*lock"
            ):
                hvd.broadcast_optimizer_state(optimizer, 0)
        hvd.barrier()

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

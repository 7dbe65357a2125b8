"""State of models and optimizers, objects, compression."""

from __future__ import annotations

import inspect
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from tests.torch.names.given import need_gpus, own_half, several, tensor

# Those that take any parameters and need no closure: Muon refuses biases.
_SPECIAL = ("LBFGS", "SparseAdam", "Muon")
OPTIMIZERS = [
    each
    for each in torch.optim.Optimizer.__subclasses__()
    if each.__module__.startswith("torch.optim.") and each.__name__ not in _SPECIAL
]


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(tensor((6, 5)) / 20).square().mean().backward()
    optimizer.step()


def options_of(kind: Any, rank: int) -> dict[str, Any]:
    """Return options that differ between ranks."""
    known = inspect.signature(kind).parameters
    options = {"lr": 0.01 * (rank + 1), "momentum": 0.9, "weight_decay": 0.1 * rank}
    return {name: value for name, value in options.items() if name in known}


def _plain(tree: Any) -> Any:
    """Return nested dicts and lists with arrays in place of tensors, which have no plain ``==``."""
    if isinstance(tree, torch.Tensor):
        return str(tree.dtype), tree.tolist()
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return [_plain(each) for each in tree] if isinstance(tree, (list, tuple)) else tree


def _check_alike(*things: Any) -> None:
    everyone = hvd.allgather_object([_plain(each) for each in things])
    assert all(each == everyone[0] for each in everyone)


def broadcast_state() -> None:
    """The root has trained, before or after the optimizer was wrapped; the others are fresh."""
    for kind in OPTIMIZERS:
        for is_wrapped in (False, True):
            model = make_model(hvd.rank())
            optimizer = kind(model.parameters(), **options_of(kind, hvd.rank()))
            if hvd.rank() == 0:
                step(model, optimizer)
            if is_wrapped:
                optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            state = optimizer.state_dict()
            _check_alike(model.state_dict(), state)
            assert state["param_groups"][0]["lr"] == options_of(kind, 0).get(
                "lr", state["param_groups"][0]["lr"]
            )
            hvd.DistributedOptimizer(optimizer, model.named_parameters())
            step(model, optimizer)
            _check_alike(model.state_dict(), optimizer.state_dict())


def broadcast_state_options() -> None:
    """Values keep their types; each group has its own."""
    root = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.5, "amsgrad": True}
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        model = make_model(0)
        options = root if hvd.rank() == 0 else {"lr": 1, "amsgrad": False}
        groups = [{"params": model[0].parameters(), "lr": 0.125}, {"params": model[2].parameters()}]
        optimizer = kind(groups, **options)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        first, second = optimizer.param_groups
        assert (first["lr"], second["lr"]) == (0.125, 0.25)
        for name in ("betas", "eps", "weight_decay", "amsgrad"):
            assert first[name] == second[name] == root[name]
            assert type(first[name]) is type(root[name])


def broadcast_state_no_grad() -> None:
    """Gradients of parameters that do not require them stay None; the others are zeros."""
    model = make_model(hvd.rank())
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert model[0].weight.grad is None
    assert not model[0].bias.grad.any()
    _check_alike(model.state_dict())


def broadcast_state_gpu() -> None:
    """Horovod skips its test always."""
    need_gpus()
    model = make_model(hvd.rank()).cuda(hvd.local_rank())
    optimizer = torch.optim.Adam(model.parameters())
    if hvd.rank() == 0:
        model(torch.ones(2, 5, device=model[0].weight.device)).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    _check_alike(model.state_dict(), optimizer.state_dict())


_OBJECT = {"number": 123, "list": [1, 2, {3: (4, 5)}], "none": None, "array": b"\0" * 3000}


def broadcast_object() -> None:
    """The other ranks may give an object of another type."""
    for root in range(hvd.size()):
        received = hvd.broadcast_object(_OBJECT if hvd.rank() == root else None, root_rank=root)
        assert received == _OBJECT


def broadcast_object_process_sets() -> None:
    with own_half() as (half, members):
        given = _OBJECT | {"root": hvd.rank()}
        received = hvd.broadcast_object(given, root_rank=members[0], process_set=half)
        assert received == _OBJECT | {"root": members[0]}


def allgather_object() -> None:
    """Objects of different sizes and types."""
    mine = {"rank": hvd.rank(), "more": list(range(hvd.rank() * 50))} if hvd.rank() else "rank 0"
    everyone = hvd.allgather_object(mine)
    assert len(everyone) == hvd.size()
    assert everyone[0] == "rank 0"
    for rank in range(1, hvd.size()):
        assert everyone[rank] == {"rank": rank, "more": list(range(rank * 50))}


def compression_fp16() -> None:
    """Floats wider than 16 bits travel as halves and come back as they were; others are left alone."""
    for dtype, shape in several((torch.float32, torch.float64)):
        given = tensor(shape, dtype)
        sent, ctx = hvd.Compression.fp16.compress(given)
        assert sent.dtype is torch.float16
        assert torch.equal(hvd.Compression.fp16.decompress(sent, ctx), given)
        result = hvd.allreduce(given, op=hvd.Sum, compression=hvd.Compression.fp16)
        assert result.dtype is dtype
        assert torch.equal(result, given * hvd.size())
    for dtype in (torch.uint8, torch.int32, torch.float16, torch.bfloat16):
        sent, ctx = hvd.Compression.fp16.compress(torch.ones(3, dtype=dtype))
        assert sent.dtype is hvd.Compression.fp16.decompress(sent, ctx).dtype is dtype
    assert np.float32(hvd.allreduce(torch.tensor(0.1), compression=hvd.Compression.fp16)) == np.float16(0.1)

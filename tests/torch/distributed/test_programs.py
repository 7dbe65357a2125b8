"""What else stands on a backend: compiled models, checkpoints, pipelines; and how processes end."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.torch.distributed.world import (
    FEATURES,
    ROWS,
    TORCH,
    batch,
    check,
    expected,
    in_group,
    make_model,
    needs_fully_shard,
    sgd,
    train,
)


@pytest.mark.parametrize("options", [{}, {"optimize_ddp": False}], ids=["graphs", "one graph"])
@in_group(2, timeout=120)
def test_compiled_ddp(options: dict[str, Any]) -> None:
    """The collectives of DDP's hooks run inside of the compiled region, where dynamo would trace Python."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(options):
        model: Any = torch.nn.parallel.DistributedDataParallel(make_model())
        train(torch.compile(model, backend="aot_eager"), sgd(model))
    check(model, expected())


@in_group(2, timeout=120)
def test_compiled_collectives() -> None:
    torch._dynamo.reset()

    def with_one(tensor: torch.Tensor) -> Any:
        dist.all_reduce(tensor)
        return tensor * 2

    compiled = torch.compile(with_one, backend="aot_eager")
    for _ in range(3):
        assert compiled(torch.ones(4)).tolist() == [4.0] * 4


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a folder that all ranks see; rank 0 removes it."""
    with tempfile.TemporaryDirectory() as own:
        found: list[Any] = [own]
        dist.broadcast_object_list(found, 0)
        yield Path(found[0])
        dist.barrier()


@needs_fully_shard
@pytest.mark.parametrize("how", ["save", "async_save"])
@in_group(2, timeout=120)
def test_checkpoint_of_shards(how: str) -> None:
    """Training goes on from a checkpoint as if nothing had been."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    def adam(model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def make() -> tuple[Any, Any]:
        model: Any = make_model()
        fully_shard(model)
        return model, adam(model)

    model, optimizer = make()
    train(model, optimizer)
    with shared_folder() as folder:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "step": 4}
        if how == "save":
            checkpoint.save(saved, checkpoint_id=folder / "one")
        else:
            found: Any = checkpoint.async_save(saved, checkpoint_id=folder / "one")
            found.result()
        train(model, optimizer)
        other, its_own = make()
        weights, state = get_state_dict(other, its_own)
        loaded: dict[str, Any] = {"model": weights, "optimizer": state, "step": 0}
        checkpoint.load(loaded, checkpoint_id=folder / "one")
        set_state_dict(other, its_own, model_state_dict=weights, optim_state_dict=state)
        assert loaded["step"] == 4
        train(other, its_own)
    for found, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), wanted.full_tensor())


@in_group(2, timeout=120)
def test_checkpoint_of_a_whole_model() -> None:
    import torch.distributed.checkpoint as checkpoint

    model = make_model(seed=1)
    with shared_folder() as folder:
        checkpoint.save(model.state_dict(), checkpoint_id=folder / "one")
        other = make_model(seed=2).state_dict()
        checkpoint.load(other, checkpoint_id=folder / "one")
    for name, wanted in model.state_dict().items():
        assert torch.equal(other[name], wanted)


@pytest.mark.parametrize("name", ["ScheduleGPipe", "Schedule1F1B"])
@in_group(2, timeout=120)
def test_pipeline(name: str) -> None:
    from torch.distributed import pipelining

    rank = dist.get_rank()
    whole = make_model()
    layers = list(whole.children())
    part = torch.nn.Sequential(*(layers[:2] if rank == 0 else layers[2:]))
    # Before 2.5 torch does not find out the shapes itself.
    options: Any = {} if TORCH >= (2, 5) else {"input_args": torch.zeros(ROWS // 4, (FEATURES, 16)[rank])}
    stage = pipelining.PipelineStage(part, rank, 2, torch.device("cpu"), **options)
    loss = torch.nn.functional.cross_entropy
    schedule: Any = getattr(pipelining, name)(stage, 4, loss_fn=loss)
    optimizer = sgd(part)
    for step in range(4):
        inputs, wanted = batch(step)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=wanted)
        if "scale_grads" not in inspect.signature(type(schedule)).parameters:  # old torch adds the gradients
            for parameter in part.parameters():
                parameter.grad /= 4
        optimizer.step()
    alone = list(expected().children())
    check(part, torch.nn.Sequential(*(alone[:2] if rank == 0 else alone[2:])), 1e-4)


@in_group(2)
def test_sync_batch_norm_of_pyhvd() -> None:
    """torch's own refuses CPUs."""
    import pyhvd.torch as hvd

    model: Any = torch.nn.Sequential(torch.nn.Linear(FEATURES, 4), torch.nn.BatchNorm1d(4))
    model = hvd.convert_sync_batchnorm(model)
    model = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(3):
        model(batch(step, dist.get_rank(), 2)[0]).sum().backward()
    means: list[Any] = [None, None]
    dist.all_gather_object(means, model.module[1].running_mean.tolist())
    assert means[0] == means[1]

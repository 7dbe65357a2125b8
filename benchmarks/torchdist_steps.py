"""The steps of models that the question about torch.distributed's backends times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks import torch_contenders as ways
from benchmarks.harness import FLOOR, OURS, Case, Contender, World
from benchmarks.mpi import MPI
from benchmarks.questions.torch import DDP, DDP_VIEWS, PYHVD as OPTIMIZER
from benchmarks.questions.torchdist import (
    DDP_ALONE,
    FSDP,
    GLOO,
    GRADIENTS,
    LAYERS,
    OURS_DDP,
    OURS_DDP_VIEWS,
    OURS_FSDP,
    PYHVD,
)
from benchmarks.tensors import WrongResultError, resnet50
from benchmarks.torch_models import Handed, Layers
from benchmarks.torchdist_calls import Groups


def gradients(world: World, groups: Groups) -> Case:
    """Compare steps of DistributedDataParallel, and pyhvd's own optimizer."""

    def make() -> Any:
        return Handed(resnet50()[::-1])

    def parallel(name: str, group: str, as_views: bool) -> list[Contender]:
        return ways.ddp_step(world, name, make, as_views, groups[group])

    ours = [*parallel(OURS_DDP, PYHVD, False), *parallel(OURS_DDP_VIEWS, PYHVD, True)]
    contenders = [
        *(replace(each, kind=OURS) for each in ours),
        ways.pyhvd_step(OPTIMIZER, make),
        *parallel(DDP, GLOO, False),
        *parallel(DDP_VIEWS, GLOO, True),
        _without_communication(make, groups[PYHVD]),
        ways.alone_step(make),
    ]
    return Case(GRADIENTS, sum(each.nbytes for each in make().parameters()), contenders)


def _without_communication(make: ways.Make, group: Any) -> Contender:
    """Return the contender of DistributedDataParallel whose hook hands each bucket back."""

    # torch reads the annotations, and knows none that is a string.
    def hand_back(_, bucket):  # type: ignore[no-untyped-def]
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = make()
    parallel = DistributedDataParallel(model, process_group=group)
    parallel.register_comm_hook(None, hand_back)
    made = ways.step_of(model, parallel, ways.optimizer_of(model))
    return replace(made, name=DDP_ALONE, kind=FLOOR, check=lambda _: None)


def layers(world: World, groups: Groups) -> Case:
    """Compare steps of a model whose layers are sharded by fully_shard; each rank has its own batch."""

    def make() -> Layers:
        model = Layers()
        model.batch += world.rank
        return model

    contenders = [
        replace(_sharded_step(OURS_FSDP, make(), groups[PYHVD]), kind=OURS),
        _sharded_step(FSDP, make(), groups[GLOO]),
        ways.alone_step(make),
    ]
    return Case(LAYERS, sum(each.nbytes for each in make().parameters()), contenders)


def _sharded_step(name: str, model: Layers, group: Any) -> Contender:
    """Return the contender for a step of a model, which is sharded here."""
    wanted = _shards_of_gradients(model)
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model())
        optimizer.step()

    def check(thorough: bool) -> None:
        found = [each.grad.to_local() for each in model.parameters()]
        for each, shard in list(zip(found, wanted, strict=True))[: None if thorough else 1]:
            if not torch.allclose(each, shard, rtol=1e-4, atol=1e-7):
                raise WrongResultError(f"{name}: a gradient is not the average")

    return Contender(name, run, check=check)


def _shards_of_gradients(model: Layers) -> list[Any]:
    """Return this rank's shard of each gradient's average over the ranks, by MPI."""
    comm = MPI.COMM_WORLD
    torch.autograd.backward(model())
    shards = []
    for each in model.parameters():
        comm.Allreduce(MPI.IN_PLACE, each.grad.numpy())
        shards.append((each.grad / comm.size).chunk(comm.size)[comm.rank].clone())
        each.grad = None
    return shards

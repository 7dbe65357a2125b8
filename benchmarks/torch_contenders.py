"""The contenders of the question about torch: ways to step with the gradients of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import pyhvd
import pyhvd.torch as hvd
from benchmarks import peers
from benchmarks.harness import FLOOR, OURS, Contender, World
from benchmarks.mpi import MPI
from benchmarks.questions.torch import AFTER, ALONE, COPIES, VIEWS
from benchmarks.tensors import WrongResultError
from benchmarks.torch_models import Handed, Still

IN_STEP = 'pyhvd.torch, reduce_at="step"'
ONE_GROUP = "pyhvd.torch, one group"
SINGLY = "pyhvd.torch, a group for each"
SEPARATE = "MPI, an Allreduce per tensor"
PACKED = "MPI, pack + Allreduce + unpack"
HOROVOD = "Horovod"

Make = Callable[[], Any]
"""Makes a model whose forward() takes nothing and returns the loss."""
_numbers = itertools.count()


def parameters_of(model: Any) -> list[Any]:
    """Return a model's parameters in the order in which their gradients become ready."""
    return list(model.parameters())[::-1]


def step_of(model: Any, module: Any, optimizer: Any, reduce: Callable[[], None] | None = None) -> Contender:
    """Return a contender for a step of a model, which ``module`` calls, without a name."""
    handed = isinstance(model, Handed)

    def run() -> None:
        if not handed or model.computed:
            optimizer.zero_grad()
        torch.autograd.backward(module())
        if reduce is not None:
            reduce()
        optimizer.step()

    made = Contender("", run, check=check(model))
    return replace(made, prepare=model.make_gradients) if handed else made


def optimizer_of(model: Any) -> Any:
    """Return an optimizer that leaves the weights as they are; it does nothing if gradients are handed."""
    handed = isinstance(model, Handed)
    return Still(model.parameters()) if handed else torch.optim.SGD(model.parameters(), lr=0.0)


def check(model: Any) -> Callable[[bool], None]:
    """Return a function that raises an error if the ranks' gradients differ, or are not the average."""
    comm = MPI.COMM_WORLD

    def compare(thorough: bool) -> None:
        gradients = [each.grad for each in model.parameters()]
        chosen = gradients if thorough else [gradients[0], gradients[-1]]
        dense = [each.coalesce().values() if each.is_sparse else each for each in chosen]
        mine = [float(each.double().sum()) for each in dense]
        if any(each != mine for each in comm.allgather(mine)):
            raise WrongResultError("the ranks have different gradients")
        if isinstance(model, Handed) and any((each != (comm.size + 1) / 2).any() for each in dense):
            raise WrongResultError("a gradient is not the average")

    return compare


def pyhvd_step(name: str, make: Make, **options: Any) -> Contender:
    """Return pyhvd's contender."""
    model = make()
    optimizer = hvd.DistributedOptimizer(optimizer_of(model), model.named_parameters(), **options)
    return replace(step_of(model, model, optimizer), name=name, kind=OURS)


def after_step(make: Make) -> Contender:
    """Return the contender without hooks, which reduces all gradients by one call after the backward pass."""
    model = make()
    name = f"after {next(_numbers)}"

    def reduce() -> None:
        hvd.grouped_allreduce_([each.grad for each in parameters_of(model)], name=name)

    return replace(step_of(model, model, optimizer_of(model), reduce), name=AFTER, kind=OURS)


def views_step(make: Make) -> Contender:
    """Return the contender whose gradients stay in shared memory; each backward pass adds to zeros."""
    model = make()
    name = f"views {next(_numbers)}"
    memory, views = _in_shared_memory(parameters_of(model))

    def zero() -> None:
        memory.zero_()
        for parameter, view in zip(parameters_of(model), views, strict=True):
            parameter.grad = view

    def reduce() -> None:
        hvd.grouped_allreduce_(views, name=name)

    made = step_of(model, model, optimizer_of(model), reduce)

    def run() -> None:
        zero()
        torch.autograd.backward(model())
        reduce()

    return replace(made, name=VIEWS, run=run, kind=OURS)


def copies_step(make: Make) -> Contender:
    """Return the contender whose hooks copy each gradient to shared memory."""
    model = make()
    name = f"copies {next(_numbers)}"
    _, views = _in_shared_memory(parameters_of(model))
    for parameter, view in zip(parameters_of(model), views, strict=True):

        def copy(parameter: Any, view: Any = view) -> None:
            view.copy_(parameter.grad)
            parameter.grad = view

        parameter.register_post_accumulate_grad_hook(copy)

    def reduce() -> None:
        hvd.grouped_allreduce_(views, name=name)

    return replace(step_of(model, model, optimizer_of(model), reduce), name=COPIES, kind=OURS)


def _in_shared_memory(parameters: list[Any]) -> tuple[Any, list[Any]]:
    """Return memory of ``pyhvd.empty()``, and views of it like the parameters."""
    memory = torch.from_numpy(pyhvd.empty(sum(each.numel() for each in parameters), np.float32))
    parts = memory.split([each.numel() for each in parameters])
    return memory, [part.view(each.shape) for part, each in zip(parts, parameters, strict=True)]


def ddp_step(world: World, name: str, make: Make, as_views: bool, group: Any = None) -> list[Contender]:
    """Return the contender of DistributedDataParallel, whose backward pass reduces, over gloo or a group."""
    if peers.start_gloo(world) is None:
        return []
    model = make()
    parallel = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=as_views)
    return [replace(step_of(model, parallel, optimizer_of(model)), name=name)]


def mpi_separate(world: World, make: Make) -> Contender:
    """Return the contender that calls MPI_Allreduce for each gradient after the backward pass."""
    model = make()

    def reduce() -> None:
        for each in parameters_of(model):
            peers.reduce_in_place(world.comm, each.grad.numpy())
            each.grad.mul_(1.0 / world.size)

    return replace(step_of(model, model, optimizer_of(model), reduce), name=SEPARATE)


def mpi_packed(world: World, make: Make) -> Contender:
    """Return the contender that packs all gradients, and calls MPI_Allreduce once."""
    model = make()
    memory = torch.zeros(sum(each.numel() for each in model.parameters()))

    def reduce() -> None:
        gradients = [each.grad.view(-1) for each in parameters_of(model)]
        torch.cat(gradients, out=memory)
        peers.reduce_in_place(world.comm, memory.numpy())
        memory.mul_(1.0 / world.size)
        torch._foreach_copy_(gradients, memory.split([each.numel() for each in gradients]))

    return replace(step_of(model, model, optimizer_of(model), reduce), name=PACKED)


def horovod_step(world: World, make: Make) -> list[Contender]:
    """Return Horovod's contender, if it is installed."""
    module = peers.load_horovod(world)
    if module is None:
        return []
    model = make()
    made: list[Contender] = []

    def prepare() -> None:
        if not made:
            module.init()
            optimizer = module.DistributedOptimizer(optimizer_of(model), model.named_parameters())
            made.append(step_of(model, model, optimizer))
        made[0].prepare()

    return [Contender(HOROVOD, lambda: made[0].run(), prepare, check=check(model), noisy=True)]


def alone_step(make: Make) -> Contender:
    """Return the same step without communication, as the floor."""
    model = make()
    made = step_of(model, model, optimizer_of(model))
    return replace(made, name=ALONE, kind=FLOOR, check=lambda _: None)

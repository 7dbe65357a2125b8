"""The cases of the question about torch: each function returns the bytes of a case, and its contenders."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import pyhvd
import pyhvd.torch as hvd
from benchmarks import peers, torch_contenders as ways
from benchmarks.harness import FLOOR, OURS, Contender, World
from benchmarks.questions.torch import (
    ALONE,
    ARRAY,
    COUNTED,
    DDP,
    DDP_VIEWS,
    EMPTY_HOOK,
    FLAT,
    HOOKS,
    NEW_ARRAY,
    NEW_TENSOR,
    NO_HOOK,
    NO_SYNC,
    PYHVD,
    TENSOR,
)
from benchmarks.tensors import WrongResultError, resnet50
from benchmarks.torch_models import Embedding, Handed, Layers, ResNet50, Still, transformer

Found = tuple[int, list[Contender]]
_LOOPS = 500


def _bytes(model: Any) -> int:
    return sum(each.nbytes for each in model.parameters())


def _steps(world: World, make: ways.Make) -> list[Contender]:
    """Return the contenders of every step."""
    return [
        ways.pyhvd_step(PYHVD, make),
        *ways.ddp_step(world, DDP, make, as_views=False),
        *ways.ddp_step(world, DDP_VIEWS, make, as_views=True),
        *ways.horovod_step(world, make),
        ways.alone_step(make),
    ]


def resnet_gradients(world: World) -> Found:
    """Compare all ways to start a reduction."""

    def make() -> Any:
        return Handed(resnet50()[::-1])

    more = [
        ways.pyhvd_step(ways.IN_STEP, make, reduce_at="step"),
        ways.pyhvd_step(ways.ONE_GROUP, make, groups=1),
        ways.pyhvd_step(ways.SINGLY, make, groups=161),
        ways.after_step(make),
        ways.mpi_separate(world, make),
        ways.mpi_packed(world, make),
    ]
    return _bytes(make()), [*_steps(world, make), *more]


def transformer_gradients(world: World) -> Found:
    """Compare steps in bfloat16."""

    def make() -> Any:
        return Handed(transformer(), torch.bfloat16)

    return _bytes(make()), _steps(world, make)


def small_gradients(world: World) -> Found:
    """Compare steps with more gradients than Horovod remembers."""

    def make() -> Any:
        return Handed([256] * 1500)

    return _bytes(make()), [*_steps(world, make), ways.after_step(make), ways.mpi_packed(world, make)]


def places(world: World) -> Found:
    """Compare where the gradients lie."""

    def make() -> Any:
        return Handed(resnet50()[::-1], computed=True)

    contenders = [
        ways.pyhvd_step(PYHVD, make),
        ways.after_step(make),
        ways.views_step(make),
        ways.copies_step(make),
        *ways.ddp_step(world, DDP, make, as_views=False),
        *ways.ddp_step(world, DDP_VIEWS, make, as_views=True),
        ways.alone_step(make),
    ]
    return _bytes(make()), contenders


def layers(world: World) -> Found:
    """Compare whole steps of a small model."""
    return _bytes(Layers()), [*_steps(world, Layers), ways.after_step(Layers)]


def resnet(world: World) -> Found:
    """Compare whole steps of a model that computes for long."""
    return _bytes(ResNet50()), [*_steps(world, ResNet50), ways.after_step(ResNet50)]


def embedding(_: World) -> Found:
    """Compare steps with a sparse gradient."""
    return 4096 * 64 * 4, [ways.pyhvd_step(PYHVD, Embedding), ways.alone_step(Embedding)]


def batch_norm(_: World) -> Found:
    """Compare BatchNorm with the statistics of all ranks and of one."""
    batch = torch.rand(64, 256, 28, 28, requires_grad=True)
    gradient = torch.ones_like(batch)

    def contender(name: str, norm: Any, kind: str) -> Contender:
        def run() -> None:
            batch.grad = None
            torch.autograd.backward(norm(batch), gradient)

        return Contender(name, run, kind=kind)

    norms = hvd.SyncBatchNorm(256), torch.nn.BatchNorm2d(256)
    return batch.nbytes, [contender(PYHVD, norms[0], OURS), contender(ALONE, norms[1], FLOOR)]


def four_bytes(world: World) -> Found:
    """Compare what a call costs for tensors and for arrays."""

    def contender(name: str, given: Any, verb: Callable[..., Any]) -> Contender:
        def run() -> None:
            for _ in range(_LOOPS):
                verb(given, name=name, op=pyhvd.Sum)

        def check(_: bool) -> None:
            given[0] = world.rank + 1
            found = float(verb(given, name=name, op=pyhvd.Sum)[0])
            given[0] = 0
            if found != world.size * (world.size + 1) // 2:
                raise WrongResultError(f"{name}: {found}")

        return Contender(name, run, rehearse=run, check=check, kind=OURS, loops=_LOOPS)

    array, tensor = np.zeros(1, np.float32), torch.zeros(1)
    return 4, [
        contender(ARRAY, array, pyhvd.allreduce_),
        contender(TENSOR, tensor, hvd.allreduce_),
        contender(NEW_ARRAY, array, pyhvd.allreduce),
        contender(NEW_TENSOR, tensor, hvd.allreduce),
    ]


def hooks(world: World) -> Found:
    """Compare backward passes, which hand gradients of one element out, without and with a reduction."""

    def contender(name: str, module: Any, model: Any, finish: Callable[[], None], kind: str) -> Contender:
        losses: list[Any] = []

        def prepare() -> None:
            model.make_gradients()
            losses[:] = [module()]

        return Contender(name, lambda: torch.autograd.backward(losses), prepare, finish=finish, kind=kind)

    plain, empty, counted, ours = (Handed([1] * 161) for _ in range(4))
    for each in empty.parameters():
        each.register_post_accumulate_grad_hook(lambda _: None)
    optimizer = hvd.DistributedOptimizer(Still(ours.parameters()), ours.named_parameters())
    waits = hvd.DistributedOptimizer(
        Still(counted.parameters()), counted.named_parameters(), backward_passes_per_step=2
    )
    found = [
        contender(HOOKS, counted, counted, waits.zero_grad, FLOOR),
        contender(PYHVD, ours, ours, optimizer.synchronize, OURS),
        contender(EMPTY_HOOK, empty, empty, lambda: None, FLOOR),
        contender(NO_HOOK, plain, plain, lambda: None, FLOOR),
    ]
    if peers.start_gloo(world) is not None:
        model = Handed([1] * 161)
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        found.append(contender(f"{DDP}, with the reduction", parallel, model, lambda: None, "peer"))
    return 161 * 4, found


def broadcast_resnet(world: World) -> Found:
    """Compare broadcasts of a model's parameters."""
    return _broadcasts(world, resnet50())


def broadcast_small(world: World) -> Found:
    """Compare broadcasts of many parameters."""
    return _broadcasts(world, [256] * 1500)


def _broadcasts(world: World, counts: Sequence[int]) -> Found:
    tensors = [torch.zeros(n) for n in counts]
    named = [(f"{number}", each) for number, each in enumerate(tensors)]
    flat = torch.zeros(sum(counts))
    name = f"flat {sum(counts)}"

    def contender(title: str, given: Sequence[Any], run: Callable[[], None], kind: str) -> Contender:
        def prepare() -> None:
            for each in given:
                each.fill_(world.rank + 1)

        def check(thorough: bool) -> None:
            chosen = given if thorough else (given[0], given[-1])
            if any((each != 1.0).any() for each in chosen):
                raise WrongResultError(f"{title}: a tensor is not the root's")

        return Contender(title, run, prepare, check=check, kind=kind)

    def broadcast_flat() -> None:
        hvd.broadcast_(flat, 0, name)

    found = [
        contender(PYHVD, tensors, lambda: hvd.broadcast_parameters(named), OURS),
        contender(FLAT, [flat], broadcast_flat, FLOOR),
    ]
    gloo = peers.start_gloo(world)
    if gloo is not None:
        group = gloo.group.WORLD

        def coalesced() -> None:
            gloo._broadcast_coalesced(group, tensors, 250 << 20, 0)

        found.append(contender("gloo, coalesced as in DDP", tensors, coalesced, "peer"))
    return flat.nbytes, found


def first_step(_: World) -> Found:
    """Time the construction of an optimizer, and its first step with agreement."""
    model = Handed([1] * 161)
    made: list[Any] = []
    numbers = itertools.count()

    def run() -> None:
        number = next(numbers)
        named = [(f"{number}.{name}", each) for name, each in model.named_parameters()]
        made.append(hvd.DistributedOptimizer(Still(model.parameters()), named))
        torch.autograd.backward(model())
        made[0].step()

    def finish() -> None:
        made.pop().remove()

    return 161 * 4, [
        Contender(PYHVD, run, model.make_gradients, finish=finish, check=ways.check(model), kind=OURS)
    ]


def accumulation(_: World) -> Found:
    """Compare backward passes between reductions."""

    def contender(name: str, kind: str, **options: Any) -> Contender:
        model = Layers()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
        if kind == OURS:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)

        def run() -> None:
            with optimizer.no_sync() if name == NO_SYNC else contextlib.nullcontext():
                for _ in range(7):
                    torch.autograd.backward(model())

        return Contender(name, run, optimizer.zero_grad, kind=kind)

    return _bytes(Layers()), [
        contender(NO_SYNC, OURS),
        contender(COUNTED, OURS, backward_passes_per_step=8),
        contender(ALONE, FLOOR),
    ]

"""A program for elastic jobs: training loops of all kinds in one state, with ranks that fail in the middle.

Each step makes a step of each kind of loop, and commits. :func:`train_alone` does the same in one process.

An argument is ``GENERATION:KIND:POINT:RANK``. In the second step of that generation the rank kills itself, in
the loop of that kind: ``before``, ``inside`` or ``after`` its first backward pass, or when it ``joins``. A
point that ends with ``-host`` kills the agent of the rank's host, and so all ranks of that host.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

import pyhvd.torch as hvd
from tests.elastic.work import agent_of

RESULT = "result"
# All ranks of a job that has two left.
PAIR = hvd.global_process_set if os.environ.get("HOROVOD_SIZE") == "2" else hvd.ProcessSet([0, 1])
PASSES = 10


class Loop:
    """A kind of loop. It trains with the batches of some ranks: one, or in one process all of them."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, is_alone: bool) -> None:
        self.is_alone = is_alone
        self.model = self.make_model().double()
        self.optimizer = self.distribute(self.make_optimizer(), self.model, **self.options)

    def make_model(self) -> Any:
        layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh()
        return torch.nn.Sequential(*layers, torch.nn.Linear(8, 2))

    def make_optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def distribute(self, optimizer: Any, model: Any, **options: Any) -> Any:
        if self.is_alone:
            return optimizer
        return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)

    def parts(self) -> dict[str, Any]:
        """Return what the state must have, the models first."""
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, number: int, ranks: Sequence[int], size: int) -> None:
        self.optimizer.zero_grad()
        self.backward(self.loss(PASSES * number, ranks))
        self.optimizer.step()

    def loss(self, number: int, ranks: Iterable[int]) -> Any:
        losses = [self.loss_of(number, rank) for rank in ranks]
        return sum(losses[1:], losses[0]) / len(losses)

    def loss_of(self, number: int, rank: int) -> Any:
        given, wanted = batch(number, rank)
        return (self.model(given) - wanted).square().mean()

    def backward(self, loss: Any) -> None:
        pass_point(self, "before")
        if Fault.is_due(self, "inside"):
            # The gradient of the first parameter is the last: others are being reduced.
            next(iter(self.model.parameters())).register_hook(lambda _: pass_point(self, "inside"))
        torch.autograd.backward(loss)
        pass_point(self, "after")


class Scaled(Loop):
    """With a gradient scaler, without synchronize(); rank 1 alone finds an infinity in the second step."""

    def __init__(self, is_alone: bool) -> None:
        super().__init__(is_alone)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "scaler": self.scaler}

    def step(self, number: int, ranks: Sequence[int], size: int) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(PASSES * number, ranks)
        if number == 1 and 1 in ranks:
            loss = loss * float("inf")
        self.backward(self.scaler.scale(loss))
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Clipped(Loop):
    def backward(self, loss: Any) -> None:
        super().backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)


class Passes(Loop):
    options: ClassVar = {"backward_passes_per_step": 2}

    def step(self, number: int, ranks: Sequence[int], size: int) -> None:
        self.optimizer.zero_grad()
        for each in range(2):
            self.backward(self.loss(PASSES * number + each, ranks) / 2)
        self.optimizer.step()


class Unused(Loop):
    """Ranks use different layers; no rank uses the last layer at first."""

    def make_model(self) -> Any:
        return torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(4)] + [torch.nn.Linear(4, 2)])

    def make_optimizer(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def loss_of(self, number: int, rank: int) -> Any:
        given, wanted = batch(number, rank)
        step = number // PASSES
        used = [self.model[0], self.model[1 + (step + rank) % 2], *self.model[3 if step > 2 else 4 :]]
        for layer in used:
            given = torch.tanh(layer(given))
        return (given - wanted).square().mean()


class InSet(Loop):
    """A model that two ranks train, and a model that all ranks train on top of it."""

    def __init__(self, is_alone: bool) -> None:
        super().__init__(is_alone)
        self.lower = torch.nn.Linear(4, 4).double()
        optimizer = torch.optim.SGD(self.lower.parameters(), lr=0.1, momentum=0.9)
        self.lower_optimizer = self.distribute(optimizer, self.lower, process_set=PAIR)

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "lower": self.lower, "lower_optimizer": self.lower_optimizer}

    def step(self, number: int, ranks: Sequence[int], size: int) -> None:
        if members := [rank for rank in ranks if rank < 2]:
            self.lower_optimizer.zero_grad()
            batches = [batch(PASSES * number + 1, rank)[0] for rank in members]
            losses = [(self.lower(given) - given).square().mean() for given in batches]
            torch.autograd.backward(sum(losses[1:], losses[0]) / len(losses))
            self.lower_optimizer.step()
        if not self.is_alone:
            hvd.broadcast_parameters(self.lower.state_dict(), 0)
        super().step(number, ranks, size)

    def loss_of(self, number: int, rank: int) -> Any:
        given, wanted = batch(number, rank)
        return (self.model(self.lower(given).detach()) - wanted).square().mean()


class Sparse(Loop):
    """The gradient of the second embedding comes late."""

    def make_model(self) -> Any:
        return torch.nn.ModuleList([torch.nn.Embedding(9, 2, sparse=True) for _ in range(2)])

    def make_optimizer(self) -> Any:
        return torch.optim.SparseAdam(list(self.model.parameters()), lr=0.1)

    def loss_of(self, number: int, rank: int) -> Any:
        loss = self.model[0](torch.tensor([1, 2 + rank])).pow(2).sum()
        if number >= 3 * PASSES:
            loss = loss + self.model[1](torch.tensor([3, 4 + rank])).pow(2).sum()
        return loss


class BatchNorm(Loop):
    def make_model(self) -> Any:
        layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
        model = torch.nn.Sequential(*layers)
        return model if self.is_alone else hvd.convert_sync_batchnorm(model)

    def loss(self, number: int, ranks: Iterable[int]) -> Any:
        batches = [batch(number, rank) for rank in ranks]
        given, wanted = (torch.cat(each) for each in zip(*batches, strict=True))
        return (self.model(given) - wanted).square().mean()


class Groups(Loop):
    options: ClassVar = {"groups": 2}

    def make_optimizer(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)


class Compressed(Loop):
    options: ClassVar = {"compression": hvd.Compression.fp16}


class Uneven(Loop):
    """Each step is an epoch, of which ranks have 0 to 2 batches."""

    def step(self, number: int, ranks: Sequence[int], size: int) -> None:
        counts = [(number + rank) % 3 for rank in range(size)]
        for each in range(max(counts[rank] for rank in ranks)):
            self.optimizer.zero_grad()
            losses = [
                self.loss_of(PASSES * number + each, rank) / (size if self.is_alone else 1)
                for rank in ranks
                if each < counts[rank]
            ]
            self.backward(sum(losses[1:], losses[0]))
            self.optimizer.step()
        pass_point(self, "joins")
        if not self.is_alone:
            last = hvd.join()
            hvd.broadcast_parameters(self.model.state_dict(), root_rank=last)
            hvd.broadcast_optimizer_state(self.optimizer, root_rank=last)


KINDS = (Scaled, Clipped, Passes, Unused, InSet, Sparse, BatchNorm, Groups, Compressed, Uneven)


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    given, wanted = (torch.rand((3, width), generator=generator, dtype=torch.float64) for width in (4, 2))
    return given, wanted


def make_loops(seed: int, is_alone: bool) -> list[Loop]:
    torch.manual_seed(seed)
    return [kind(is_alone=is_alone) for kind in KINDS]


def found(loop: Loop) -> dict[str, Any]:
    """Return what of a loop is equal on all ranks: all but the state of an optimizer in a set."""
    parts = {name: part.state_dict() for name, part in loop.parts().items() if name != "lower_optimizer"}
    parts["optimizer"] = [
        {name: torch.as_tensor(value) for name, value in state.items()}
        for _, state in sorted(parts["optimizer"]["state"].items())
    ]
    return parts


def train_alone(sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Train in one process, in each step with the batches of so many ranks; return what is found then."""
    loops = make_loops(0, is_alone=True)
    for number, size in enumerate(sizes):
        for loop in loops:
            loop.step(number, range(size), size)
    return [found(loop) for loop in loops]


# -- the ranks -----------------------------------------------------------------------------------------


class Fault:
    """Where this rank fails in this generation, and in which step."""

    kind = point = ""
    step = now = -1

    @classmethod
    def is_due(cls, loop: Loop, point: str) -> bool:
        here = type(loop).__name__, point
        return here == (cls.kind, cls.point.removesuffix("-host")) and cls.step == cls.now


def pass_point(loop: Loop, point: str) -> None:
    """Fail here if the arguments say so."""
    if Fault.is_due(loop, point):
        victim = agent_of(os.getpid()) if Fault.point.endswith("-host") else os.getpid()
        os.kill(victim, signal.SIGKILL)
        signal.pause()  # the agent's ranks end with it


def read_fault(arguments: Sequence[str]) -> None:
    for argument in arguments:
        generation, kind, point, rank = argument.split(":")
        if (int(generation), int(rank)) == (hvd.elastic.generation(), hvd.rank()):
            Fault.kind, Fault.point = kind, point


def check_alike(loops: Sequence[Loop]) -> None:
    """Check that all ranks have the same bits."""
    mine = {type(loop).__name__: hashlib.sha256(repr(bits(found(loop))).encode()).digest() for loop in loops}
    everyone = hvd.allgather_object(mine, name="bits")
    assert not [kind for kind in mine if len({each[kind] for each in everyone}) > 1]


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return [(name, bits(each)) for name, each in value.items()]
    return [bits(each) for each in value] if isinstance(value, list) else value


@hvd.elastic.run
def train(state: Any, loops: Sequence[Loop], steps: int) -> None:
    Fault.step = state.step + 1
    check_alike(loops)
    while state.step < steps:
        Fault.now = state.step
        for loop in loops:
            loop.step(state.step, [hvd.rank()], hvd.size())
        check_alike(loops)
        state.sizes.append(hvd.size())
        state.step += 1
        state.commit()


def main() -> None:
    steps, *faults = sys.argv[1:]
    hvd.init(process_sets=[] if PAIR is hvd.global_process_set else [PAIR])
    read_fault(faults)
    loops = make_loops(hvd.rank(), is_alone=False)
    parts = {f"{type(loop).__name__}_{name}": part for loop in loops for name, part in loop.parts().items()}
    state: Any = hvd.elastic.TorchState(step=0, sizes=[], **parts)
    train(state, loops, int(steps))
    if hvd.rank() == 0:
        kinds = [found(loop) for loop in loops]
        torch.save({"generation": hvd.elastic.generation(), "sizes": state.sizes, "kinds": kinds}, RESULT)


if __name__ == "__main__":
    main()

"""Random training programs, against one process that has all ranks' batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import pyhvd.torch as hvd
from pyhvd.testing import RanksFailed, run_ranks
from pyhvd.torch import reducer
from tests.thinning import examples

WIDTH = 3
EPOCHS = 2
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
}


class Negated(hvd.Compressor):
    """A compression without loss."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return -tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return -tensor


@dataclass(frozen=True)
class Program:
    """A model, and how it is trained.

    Attributes
    ----------
    batches : list of (int, int)
        How many steps each rank makes in each epoch; an epoch in which they differ ends with ``join()``.
    layers : list of int
        Which layer each part of the forward pass uses, after layer 0; one that occurs twice is shared.
    branches : list of int
        Which layer a rank uses besides in a step, in turns.
    frozen : set of (epoch, int)
        When a layer's freezing changes.
    accumulate : str
        How several backward passes are made before a step.
    skipped : int or None
        A batch that all ranks agree to leave out.
    left_out : int or None
        A batch that the last rank leaves out alone, which is an error.
    infinite : int or None
        A batch in which the last rank's loss is infinite; there is a scaler.
    """

    batches: list[tuple[int, int]]
    layers: list[int]
    branches: list[int]
    frozen: frozenset[tuple[int, int]]
    optimizer: str
    passes: int
    accumulate: str
    groups: int | None
    reduce_at: str
    unused: str
    negated: bool
    in_set: bool
    clips: bool
    skipped: int | None
    left_out: int | None
    infinite: int | None
    seed: int

    @property
    def size(self) -> int:
        return len(self.batches)

    @property
    def is_even(self) -> bool:
        return len(set(self.batches)) == 1

    @property
    def accumulates_by(self) -> str:
        """How several passes are made: beside joined ranks, a step must reduce its gradients once."""
        return self.accumulate if self.is_even or self.accumulate != "again" else "no_sync"

    @property
    def is_wrong(self) -> bool:
        """Whether the last rank leaves out a batch alone, and has another one in that epoch."""
        if self.left_out is None or not self.is_even or self.left_out == self.skipped:
            return False
        return not {self.skipped}.issuperset(range(self.left_out + 1, self.batches[0][0]))


some = st.integers(1, 5)
maybe = st.none() | st.integers(0, 2)
programs = st.builds(
    Program,
    batches=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=4)
    | st.builds(lambda size, steps: [steps] * size, st.integers(2, 4), st.tuples(some, st.integers(0, 3))),
    layers=st.lists(some, max_size=4),
    branches=st.lists(some, min_size=1, max_size=4),
    frozen=st.frozensets(st.tuples(st.integers(0, EPOCHS - 1), some), max_size=3),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    passes=st.integers(1, 3),
    accumulate=st.sampled_from(["backward_passes_per_step", "no_sync", "again"]),
    groups=st.sampled_from([None, 1, 3]),
    reduce_at=st.sampled_from(["backward", "backward", "step"]),
    unused=st.sampled_from(["none", "zeros"]),
    negated=st.booleans(),
    in_set=st.booleans(),
    clips=st.booleans(),
    skipped=maybe,
    left_out=st.none() | st.none() | st.integers(0, 2),
    infinite=maybe,
    seed=st.integers(0, 100),
)


def make_layers(program: Program) -> torch.nn.ModuleList:
    layers = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH).double() for _ in range(6)])
    generator = torch.Generator().manual_seed(program.seed)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64) - 0.5)
    return layers


def freeze(program: Program, layers: torch.nn.ModuleList, epoch: int) -> None:
    for when, number in sorted(program.frozen):
        if when == epoch:
            layers[number].requires_grad_(not layers[number].weight.requires_grad)


def loss_of(program: Program, layers: torch.nn.ModuleList, number: int, rank: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    values = torch.rand((2, WIDTH), generator=generator, dtype=torch.float64)
    branch = program.branches[(number + rank) % len(program.branches)]
    for each in [0, *program.layers, branch]:
        values = torch.tanh(layers[each](values))
    loss = values.pow(2).mean()
    is_infinite = program.infinite == number % 10 and rank == program.size - 1
    return loss * float("inf") if is_infinite else loss


class Trainer:
    """Trains with the batches of some ranks: one, or in one process all of them."""

    def __init__(self, program: Program, ranks: Sequence[int], **options: Any) -> None:
        self.program, self.ranks = program, ranks
        self.layers = make_layers(program)
        self.optimizer = OPTIMIZERS[program.optimizer](self.layers.parameters())
        self.is_alone = not options
        self.process_set = options.get("process_set", hvd.global_process_set)
        if options:
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, self.layers.named_parameters(), **options
            )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=program.infinite is not None)

    def step(self, epoch: int, batch: int) -> None:
        """Make one step with the ranks that have such a batch."""
        program, optimizer = self.program, self.optimizer
        optimizer.zero_grad()
        if program.skipped == batch:
            return
        if program.is_wrong and program.left_out == batch and self.ranks == [program.size - 1]:
            return
        for number in range(program.passes):
            is_last = number + 1 == program.passes
            losses = [
                loss_of(program, self.layers, 100 * number + 10 * epoch + batch, rank) / len(self.ranks)
                for rank in self.ranks
                if batch < program.batches[rank][epoch]
            ]
            loss = self.scaler.scale(sum(losses[1:], losses[0]))
            if program.accumulates_by == "no_sync" and not is_last and not self.is_alone:
                with optimizer.no_sync():
                    torch.autograd.backward(loss)
            else:
                torch.autograd.backward(loss)
        self.end_step()

    def end_step(self) -> None:
        program, optimizer = self.program, self.optimizer
        if program.reduce_at == "step" and not self.is_alone:
            optimizer.synchronize()
            optimizer = Skipping(optimizer)
        if self.is_alone and program.unused == "zeros":
            for parameter in self.layers.parameters():
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        if program.clips:
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.layers.parameters(), 0.05)
        self.scaler.step(optimizer)
        self.scaler.update()

    def meet(self, epoch: int, process_set: Any) -> None:
        """End an epoch whose ranks have made different numbers of steps."""
        hvd.join()
        batches = [each[epoch] for each in self.program.batches]
        root = batches.index(max(batches))
        hvd.broadcast_parameters(self.layers.state_dict(), root, process_set)
        hvd.broadcast_optimizer_state(self.optimizer, root, process_set=process_set)
        state = hvd.broadcast_object(self.scaler.state_dict(), root, "scaler", process_set)
        self.scaler.load_state_dict(state)

    def train(self) -> list[torch.Tensor]:
        for epoch in range(EPOCHS):
            freeze(self.program, self.layers, epoch)
            for batch in range(max(self.program.batches[rank][epoch] for rank in self.ranks)):
                self.step(epoch, batch)
            if not self.is_alone and not self.program.is_even:
                self.meet(epoch, self.process_set)
        return [each.detach() for each in self.layers.parameters()]


class Skipping:
    """An optimizer whose gradients are reduced, as a scaler sees it."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        with self._optimizer.skip_synchronize():
            self._optimizer.step()


def options_of(program: Program) -> dict[str, Any]:
    by_option = program.accumulate == "backward_passes_per_step"
    return {
        "backward_passes_per_step": program.passes if by_option else 1,
        "groups": program.groups,
        "reduce_at": program.reduce_at,
        "unused": program.unused,
        "compression": Negated if program.negated else hvd.Compression.none,
    }


EMPTY: dict[str, Any] = {
    "layers": [], "branches": [1], "frozen": frozenset(), "optimizer": "sgd", "passes": 1,
    "accumulate": "again", "groups": None, "reduce_at": "backward", "unused": "none", "negated": False,
    "in_set": False,
    "clips": False, "skipped": None, "left_out": None, "infinite": None, "seed": 0,
}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:no parameter of this optimizer has a gradient")
@settings(max_examples=examples(1000, longest=True))
@given(programs)
@example(Program([(3, 1)] * 2, **{**EMPTY, "left_out": 1}))
def test_the_weights_are_those_of_one_process(program: Program) -> None:
    """Or, if one rank alone leaves out a batch, all ranks get an error."""
    expected = Trainer(program, range(program.size)).train()

    def body() -> None:
        options = options_of(program)
        if program.in_set:
            options["process_set"] = hvd.add_process_set(range(program.size))
        if hvd.rank() < program.size:
            weights = Trainer(program, [hvd.rank()], **options).train()
            for own, wanted in zip(weights, expected, strict=True):
                torch.testing.assert_close(own, wanted, rtol=1e-6, atol=1e-9)
        elif not program.is_even:
            for _ in range(EPOCHS):
                hvd.join()
        hvd.barrier()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducer, "_BUCKET_BYTES", 200)
        size, knobs = program.size + program.in_set, {"dynamic_process_sets": True}
        if not program.is_wrong:
            run_ranks(size, body, timeout=30.0, knobs=knobs)
            return
        with pytest.raises(RanksFailed) as failed:
            run_ranks(size, body, timeout=30.0, knobs=knobs)
    for rank in range(program.size):
        assert isinstance(failed.value.errors[rank], hvd.MismatchError)
        assert f"rank {program.size - 1}" in str(failed.value.errors[rank])

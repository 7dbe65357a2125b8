"""What a simulated rank does: it computes, submits tensors, and waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from pyhvd.dtypes import Code, ReduceOp
from pyhvd.negotiation.messages import Request, RequestType


@dataclass(frozen=True)
class Tensor:
    """A tensor of float32 values, and what is done with it.

    Attributes
    ----------
    name : str
        Its name.
    nbytes : int
        Its size on each rank: a multiple of 4.
    kind : RequestType
        The collective; by default an allreduce.
    """

    name: str
    nbytes: int = 4
    kind: RequestType = RequestType.ALLREDUCE


@dataclass(frozen=True)
class Compute:
    """Compute for so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Submit:
    """Submit tensors, which are then in flight, to a process set."""

    tensors: Sequence[Tensor]
    process_set: int = 0


@dataclass(frozen=True)
class Wait:
    """Wait until none of the rank's tensors is in flight."""


@dataclass(frozen=True)
class AddSet:
    """Add a process set of these ranks, and wait until it exists; all ranks do so."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Hang:
    """Do nothing more: the rank submits nothing, and does not end."""


@dataclass(frozen=True)
class StepEnd:
    """The end of a training step; its time is noted."""


Action = Compute | Submit | Wait | AddSet | Hang | StepEnd
Program = Callable[[int, int], Iterator[Action]]
"""Called with the rank and the number of ranks; yields what the rank does."""


@dataclass(frozen=True)
class Part:
    """A part of a training step.

    Attributes
    ----------
    compute : float
        Seconds that a rank computes first.
    tensors : sequence of Tensor
        The gradients that it then submits.
    """

    compute: float
    tensors: Sequence[Tensor]


def training(
    tensors: Sequence[Tensor],
    compute: float,
    steps: int,
    parts: int = 1,
    late: Mapping[int, float] | None = None,
) -> Program:
    """Return a program that trains: it computes gradients, submits them, and waits, for some steps.

    Parameters
    ----------
    tensors : sequence of Tensor
        The gradients, in the order in which they are ready.
    compute : float
        Seconds that a step computes.
    steps : int
        Number of steps.
    parts : int
        How often during a step gradients are submitted; 1: all after all computing.
    late : mapping of int to float, optional
        By rank, seconds that it computes longer in each step.
    """
    size = -(-len(tensors) // parts)
    pieces = [tuple(tensors[at : at + size]) for at in range(0, len(tensors), size)]
    return training_in_parts([Part(compute / len(pieces), piece) for piece in pieces], steps, late)


def training_in_parts(parts: Sequence[Part], steps: int, late: Mapping[int, float] | None = None) -> Program:
    """Return a program that trains as :func:`training`, in parts that need not be equal.

    Parameters
    ----------
    parts : sequence of Part
        What a rank does in each step, before it waits.
    steps : int
        Number of steps.
    late : mapping of int to float, optional
        By rank, seconds that it computes longer in each step, spread evenly over the parts.
    """

    def program(rank: int, _: int) -> Iterator[Action]:
        longer = (late or {}).get(rank, 0.0) / len(parts)
        for _ in range(steps):
            for part in parts:
                if seconds := part.compute + longer:
                    yield Compute(seconds)
                yield Submit(part.tensors)
            yield Wait()
            yield StepEnd()

    return program


@lru_cache(maxsize=100_000)
def request_of(tensor: Tensor) -> Request:
    """Return a rank's request for a tensor; all ranks share one object."""
    op = ReduceOp.AVERAGE if tensor.kind == RequestType.ALLREDUCE else -1
    root = 0 if tensor.kind == RequestType.BROADCAST else -1
    if tensor.kind == RequestType.BARRIER:
        return Request(tensor.kind, tensor.name)
    return Request(tensor.kind, tensor.name, Code.FLOAT32, (tensor.nbytes // 4,), op, root=root)

"""A default group of torch.distributed for tests, and one process's training to compare with.

    @in_group(2)
    def test_sum():
        tensor = torch.ones(3)
        dist.all_reduce(tensor)

The tests of a session share jobs, as those of :func:`tests.mpi.harness.on_ranks` do: torch starts slowly.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.mpi.harness import on_ranks
from tests.mpi.launch import JOB_MARKER

STEPS = 4
ROWS = 8  # of each batch, over all ranks
FEATURES, CLASSES = 6, 3
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
_made = itertools.count()

needs_fully_shard = pytest.mark.skipif(
    TORCH < (2, 6), reason="before torch 2.6 fully_shard needs CUDA streams"
)


def place_of() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as the launcher gives them."""
    for rank, size in (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


@contextlib.contextmanager
def default_group(seconds: float = 40.0, backend: str = "pyhvd") -> Iterator[None]:
    """Make the default group for a block of the program; collectives time out after some seconds."""
    import pyhvd.torch.distributed  # noqa: F401 - registers the backend

    rank, size = place_of()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    store = f"file://{os.environ[JOB_MARKER]}/store{next(_made)}"
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    try:
        yield
    except pytest.skip.Exception:  # on all ranks
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()  # not after an error: it could wait for ranks that have failed


def in_group(*counts: int, timeout: float = 60.0, **options: Any) -> Callable[[Any], Callable[..., None]]:
    """Run the decorated test on each of `counts` ranks, inside a default group; see ``on_ranks``."""

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(function)
        def inside(**arguments: Any) -> None:
            with default_group():
                function(**arguments)

        return on_ranks(*counts, timeout=timeout, **options)(inside)

    return decorate


def make_model(seed: int = 0, width: int = 16) -> torch.nn.Module:
    """Return a small network whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(FEATURES, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, width),
        torch.nn.Tanh(),
        torch.nn.Linear(width, CLASSES),
    )


def batch(step: int, rank: int = 0, size: int = 1, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's share of a step's batch; all shares have the same size."""
    made = torch.Generator().manual_seed(100 + step)
    inputs = torch.randn(rows, FEATURES, generator=made)
    wanted = torch.randint(CLASSES, (rows,), generator=made)
    return inputs[rank::size], wanted[rank::size]


def loss_of(model: Any, inputs: torch.Tensor, wanted: torch.Tensor) -> Any:
    """Return the mean loss of a batch."""
    return torch.nn.functional.cross_entropy(model(inputs), wanted)


def sgd(model: Any) -> Any:
    """Return the optimizer of most tests."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: Any, optimizer: Any, *, whole: bool = False, steps: int = STEPS) -> None:
    """Train on this rank's shares, or on whole batches as one process does."""
    rank, size = (0, 1) if whole else (dist.get_rank(), dist.get_world_size())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(step, rank, size)).backward()
        optimizer.step()


def expected(make_optimizer: Callable[[Any], Any] = sgd, steps: int = STEPS) -> torch.nn.Module:
    """Return the model that one process trains on whole batches."""
    model = make_model()
    train(model, make_optimizer(model), whole=True, steps=steps)
    return model


def check(model: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Compare the weights of two models; those of the first may be shards."""
    pairs = zip(model.named_parameters(), wanted.parameters(), strict=True)
    for (name, found), parameter in pairs:
        whole = found.full_tensor() if hasattr(found, "full_tensor") else found
        difference = (whole - parameter).abs().max().item()
        assert difference <= tolerance * (1 + parameter.abs().max().item()), name

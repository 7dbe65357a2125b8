"""Tensors and process sets for the situations. Values are small ints: sums are exact in all dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import pytest
import torch

FLOATS = (torch.float16, torch.float32, torch.float64)
REDUCED = (torch.int32, torch.int64, *FLOATS)
MOVED = (torch.uint8, torch.int8, torch.int16, *REDUCED, torch.bool)
DIMS = (1, 2, 3)
ERRORS = (torch.FatalError, RuntimeError)
"""What programs catch after a collective that failed."""


def tensor(shape: Any, dtype: Any = torch.float32, rank: int = 0, low: int = -20, high: int = 20) -> Any:
    """Return the tensor of a rank: random, and the same wherever it is asked for."""
    generator = torch.Generator().manual_seed(1234 + rank)
    return torch.randint(low, high, tuple(shape), generator=generator).to(dtype)


def tensors_of_all(shape: Any, dtype: Any = torch.float32, low: int = -20, high: int = 20) -> Any:
    """Return all ranks' tensors, stacked."""
    return torch.stack([tensor(shape, dtype, rank, low, high) for rank in range(hvd.size())])


def several(dtypes: Any, dims: Any = DIMS, extent: int = 7) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """Yield each dtype with the shape of each number of dimensions."""
    for dtype in dtypes:
        for dim in dims:
            yield dtype, (extent,) * dim


def check_close(given: Any, expected: Any, rtol: float = 1e-3, atol: float = 1e-5) -> None:
    """Check dtype, shape and values; ``torch.testing`` would take half a second of each rank to import."""
    assert given.dtype is expected.dtype
    assert given.shape == expected.shape
    assert torch.allclose(given, expected, rtol, atol), (given, expected)


def need_ranks(number: int = 2) -> None:
    """Skip a situation that one rank alone cannot have."""
    if hvd.size() < number:
        pytest.skip(f"needs {number} ranks")


def need_gpus(number: int = 1) -> None:
    """Skip a situation without so many CUDA devices for each rank."""
    if torch.cuda.device_count() < number * hvd.local_size():
        pytest.skip(f"needs {number} CUDA devices for each rank")


@contextlib.contextmanager
def own_half() -> Iterator[tuple[Any, list[int]]]:
    """Yield the process set of the even ranks, or of the odd ones, where this rank is in; and its ranks."""
    need_ranks()
    halves = [list(range(start, hvd.size(), 2)) for start in (0, 1)]
    sets = [hvd.add_process_set(ranks) for ranks in halves]
    own = hvd.rank() % 2
    yield sets[own], halves[own]
    for each in sets:
        assert hvd.remove_process_set(each)


def in_turn() -> Iterator[bool]:
    """Yield once for each rank, True on that rank; the others have passed the turn before."""
    for turn in range(hvd.size()):
        hvd.barrier()
        yield turn == hvd.rank()


def check_duplicate_name(submit: Callable[[str], Any]) -> None:
    """Let each rank in turn submit a name twice; ``submit(name)`` returns a handle.

    Only the second call fails. It is a call that the other ranks make too: they get an error.
    """
    need_ranks()
    for here in in_turn():
        if here:
            handle = submit("duplicate")
            with pytest.raises(ValueError, match="still in flight"):
                submit("duplicate")
        hvd.barrier()
        if not here:
            handle = submit("duplicate")
        hvd.synchronize(handle)
        if not here:
            with pytest.raises(ERRORS):
                hvd.synchronize(submit("duplicate"))

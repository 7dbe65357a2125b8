"""Ranks, sizes, init and shutdown, barriers, the timeline."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from tests.torch.names.given import need_ranks, own_half


def _of_launcher(*names: str) -> int:
    return next(int(os.environ[name]) for name in names if name in os.environ)


def rank() -> None:
    assert hvd.rank() == _of_launcher("PMI_RANK", "OMPI_COMM_WORLD_RANK")


def size() -> None:
    assert hvd.size() == _of_launcher("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def is_initialized() -> None:
    """Horovod's test shuts down under Gloo only."""
    assert hvd.is_initialized()
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()


def reinit() -> None:
    """Horovod cannot, under MPI."""
    before = hvd.rank(), hvd.size()
    hvd.shutdown()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == before


def _check_order(process_set: object, members: list[int]) -> None:
    """Check that no rank leaves a barrier before the last one has entered; one host has one clock."""
    entered = time.monotonic()
    hvd.barrier(process_set=process_set)
    left = time.monotonic()
    times = dict(enumerate(hvd.allgather_object((entered, left))))
    assert max(times[each][0] for each in members) <= min(times[each][1] for each in members)


def global_barrier_op() -> None:
    _check_order(hvd.global_process_set, list(range(hvd.size())))


def process_set_barrier_op() -> None:
    with own_half() as (half, members):
        _check_order(half, members)


def barrier_with_multiple_collectives() -> None:
    need_ranks()
    given = torch.full((5,), float(hvd.rank()))
    for _ in range(3):
        summed = hvd.allreduce_async(given, name="summed", op=hvd.Sum)
        hvd.barrier()
        gathered = hvd.allgather_async(given, name="gathered")
        hvd.barrier()
        sent = hvd.broadcast_async(given, 1, name="sent")
        assert hvd.synchronize(summed).tolist() == [sum(range(hvd.size()))] * 5
        assert hvd.synchronize(gathered).shape == (5 * hvd.size(),)
        assert hvd.synchronize(sent).tolist() == [1.0] * 5


def timeline_api() -> None:
    """Horovod skips its test always."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(hvd.broadcast_object(folder, 0), "timeline.json")
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(torch.ones(3), name="in the timeline")
        hvd.stop_timeline()
        hvd.barrier()
        if hvd.rank() == 0:
            events = json.loads(path.read_text())
            assert any("in the timeline" in json.dumps(event) for event in events)
        hvd.barrier()

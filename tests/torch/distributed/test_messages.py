"""Sends and receives that the program leaves to themselves, and the barrier that is made of them."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from pyhvd.torch.distributed import CollectiveTimeoutError
from tests.torch.distributed.world import in_group

LONG = 2_000_000  # elements: more than MPI sends before the receiver asks for them


@in_group(2)
def test_a_long_send_ends_while_its_sender_is_in_a_collective() -> None:
    tensor = torch.full((LONG,), 3.0)
    if dist.get_rank() == 0:
        work = dist.isend(tensor, 1)
        dist.barrier()
        work.wait()
    else:
        received = torch.zeros(LONG)
        dist.recv(received, 0)
        assert torch.equal(received, tensor)
        dist.barrier()


@in_group(2)
def test_a_long_receive_ends_while_its_receiver_is_in_a_collective() -> None:
    tensor = torch.full((LONG,), 3.0)
    if dist.get_rank() == 0:
        dist.send(tensor, 1)
        dist.barrier()
    else:
        received = torch.zeros(LONG)
        work = dist.irecv(received, 0)
        dist.barrier()
        work.wait()
        assert torch.equal(received, tensor)


@pytest.mark.parametrize("layout", ["dropped", "every second element"])
@in_group(2)
def test_what_is_sent_outlives_the_programs_tensor(layout: str) -> None:
    expected = torch.arange(float(LONG))
    if dist.get_rank() == 0:
        sent = expected.clone() if layout == "dropped" else expected.repeat_interleave(2)[::2]
        dist.isend(sent, 1)
        del sent
        others = [torch.full((LONG,), -1.0) for _ in range(4)]
        time.sleep(0.3)
        del others
    else:
        time.sleep(0.2)
        received = torch.zeros(LONG)
        dist.recv(received, 0)
        assert torch.equal(received, expected)
    dist.barrier()


@in_group(1, 3)
def test_a_monitored_barrier_names_the_ranks_that_are_late() -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    for _ in range(100):
        group.monitored_barrier(timedelta(seconds=20))
    if dist.get_world_size() == 1:
        return
    if rank == 0:
        with pytest.raises(
            CollectiveTimeoutError, match="Ranks 1, 2 failed to pass monitoredBarrier in 100 ms"
        ):
            group.monitored_barrier(timedelta(seconds=0.1), wait_all_ranks=True)
    dist.barrier()
    alone = dist.new_group()
    if rank != 1:
        expected = "Rank 1 failed to pass" if rank == 0 else "Rank 2 successfully reached monitoredBarrier"
        with pytest.raises(CollectiveTimeoutError, match=expected):
            alone.monitored_barrier(timedelta(seconds=0.5))
    dist.barrier()

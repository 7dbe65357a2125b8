"""torch.distributed over pyhvd in ranks of pyhvd.spark.run, where torch is installed."""

from __future__ import annotations

import os
from typing import Any

import pytest

import pyhvd.spark

pytest.importorskip("torch", reason="make test-spark-torch installs it")

# Four ranks import torch, and the first test starts the cluster.
pytestmark = pytest.mark.timeout(280)

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def average() -> tuple[list[int], str, list[float]]:
    """Make groups twice, without an argument but the backend's name, and average a gradient by DDP."""
    import torch
    import torch.distributed as dist

    import pyhvd.torch.distributed  # noqa: F401 - registers the backend

    for _ in range(2):
        dist.init_process_group("pyhvd")
        torch.manual_seed(dist.get_rank())  # DDP takes rank 0's weights
        model: Any = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
        gradient = model.module.weight.grad[0].tolist()
        dist.destroy_process_group()
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return [int(os.environ[name]) for name in NAMES], address, gradient


def test_a_group_needs_no_argument(spark: Any, mark: dict[str, str]) -> None:
    results = pyhvd.spark.run(average, num_proc=4, env=mark)
    assert [numbers for numbers, _, _ in results] == [
        [0, 4, 0, 2, 0],
        [1, 4, 1, 2, 0],
        [2, 4, 0, 2, 1],
        [3, 4, 1, 2, 1],
    ]
    assert all(gradient == [1.5, 1.5] for *_, gradient in results)
    assert len({address.rpartition(":")[2] for _, address, _ in results}) == 1


def tell() -> list[str]:
    """Return what the ranks tell each other; leave the group to the interpreter's exit."""
    import torch.distributed as dist

    import pyhvd.torch.distributed  # noqa: F401

    dist.init_process_group("pyhvd")
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, os.environ["RANK"])
    return told


def test_a_rank_may_end_without_the_end_of_its_group(spark: Any, mark: dict[str, str]) -> None:
    assert pyhvd.spark.run(tell, num_proc=2, env=mark) == [["0", "1"]] * 2

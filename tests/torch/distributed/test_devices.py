"""A group with pyhvd for CPU tensors and another backend for those of another device, from torch 2.14 on."""

from __future__ import annotations

import inspect
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyhvd.torch.distributed import CollectiveTimeoutError
from pyhvd.torch.distributed.process_group import CpuBackend
from tests.mpi.harness import on_ranks
from tests.torch.distributed.test_collectives import MOVES
from tests.torch.distributed.world import TORCH, default_group, in_group

BOTH = "cpu:pyhvd,cuda:gloo"
takes_both = pytest.mark.skipif(TORCH < (2, 14), reason="torch takes a backend in Python from 2.14 on")

# Tests of groups that are pyhvd's alone, each with a number of ranks and its parameters.
TESTS: list[tuple[str, int, dict[str, Any]]] = [
    ("collectives.test_all_reduce", 2, {"dtype": torch.float32}),
    ("collectives.test_all_reduce", 2, {"dtype": torch.bool}),
    *(("collectives.test_moves", 3, {"name": name}) for name in MOVES),
    ("collectives.test_reduce_and_reduce_scatter", 3, {"dtype": torch.float32}),
    ("collectives.test_sizes_may_differ", 3, {}),
    ("collectives.test_parts_of_one_tensor", 2, {}),
    ("collectives.test_tensors_that_autograd_knows", 2, {}),
    ("collectives.test_sparse_tensors", 2, {}),
    ("collectives.test_callbacks_may_wait_for_other_collectives", 2, {}),
    ("collectives.test_functional_collectives", 3, {}),
    ("collectives.test_coalesced_calls", 2, {}),
    ("collectives.test_objects", 3, {}),
    ("collectives.test_groups_of_some_ranks", 3, {}),
    ("collectives.test_a_received_tensor_has_a_future", 2, {}),
    ("collectives.test_ranks_that_call_something_else_get_both_call_sites", 2, {}),
    ("collectives.test_a_timeout_says_who_is_missing_and_where_it_is", 2, {}),
    ("messages.test_a_long_send_ends_while_its_sender_is_in_a_collective", 2, {}),
    ("ddp.test_power_sgd", 2, {}),
    ("programs.test_compiled_ddp", 2, {"options": {}}),
    ("programs.test_compiled_collectives", 2, {}),
    ("programs.test_checkpoint_of_shards", 2, {"how": "async_save"}),
    ("sharding.test_fully_shard", 2, {"reshards": True, "width": 16}),
    ("sharding.test_redistribute", 2, {}),
]


def name_of(test: str, n: int, arguments: dict[str, Any]) -> str:
    return "-".join([test.replace("test_", ""), *map(str, arguments.values()), f"n{n}"])


@takes_both
@pytest.mark.parametrize(
    ("test", "nranks", "arguments"), [pytest.param(*each, id=name_of(*each)) for each in TESTS]
)
@on_ranks(timeout=120)
def test_like_a_group_of_pyhvd_alone(test: str, arguments: dict[str, Any]) -> None:
    module, _, name = test.partition(".")
    function = inspect.unwrap(getattr(import_module(f"tests.torch.distributed.test_{module}"), name))
    with default_group(backend=BOTH):
        assert dist.get_backend_config() == BOTH
        function(**arguments)


@takes_both
@pytest.mark.parametrize("devices", [BOTH, "cuda:gloo,cpu:pyhvd"])
@on_ranks(2)
def test_torch_keeps_the_backend(devices: str) -> None:
    for _ in range(2):
        with default_group(backend=devices):
            ours: Any = dist.group.WORLD._get_backend(torch.device("cpu"))
            assert isinstance(ours, CpuBackend)
            assert ours.options.backend == ours.name() == "pyhvd"
            assert not ours.supports_splitting
            work = dist.all_reduce(torch.ones(4), async_op=True)
            assert work.wait()
            assert work.get_future().done()
            dist.barrier()


@takes_both
@on_ranks(2)
def test_messages_and_monitored_barrier() -> None:
    with default_group(backend=BOTH):
        rank = dist.get_rank()
        sent, received = torch.full((3,), float(rank)), torch.zeros(3)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        )
        for work in works:
            work.wait()
        assert received.tolist() == [1.0 - rank] * 3
        if rank == 0:
            from_any: Any = dist.irecv(received)
            from_any.wait()
            assert received.tolist() == [5.0] * 3
            with pytest.raises(RuntimeError, match="sourceRank"):  # of torch's work around ours
                dist.recv(received)
        else:
            dist.send(torch.full((3,), 5.0), 0)
            dist.send(sent, 0)
        dist.monitored_barrier()
        dist.group.WORLD.monitored_barrier()
        dist.set_timeout(timedelta(seconds=0.5))
        if rank == 0:
            with pytest.raises(CollectiveTimeoutError, match=r"(?s)timeout of 0\.5 s.*rank 1 on "):
                dist.all_reduce(torch.ones(1))
            with pytest.raises(
                CollectiveTimeoutError, match="Rank 1 failed to pass monitoredBarrier in 200 ms"
            ):
                dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        dist.set_timeout(timedelta(seconds=40))
        dist.barrier(dist.new_group())


@pytest.mark.skipif(TORCH >= (2, 14), reason="torch takes a backend in Python from 2.14 on")
@in_group(2)
def test_before_torch_2_14_another_backend_is_refused_and_a_group_of_its_own_works() -> None:
    expected = r'call init_process_group\("pyhvd"\), and new_group\(backend="gloo"\).*torch 2\.14 or newer'
    with pytest.raises(ValueError, match=expected):
        dist.new_group(backend=BOTH)
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=dist.new_group(backend="gloo"))
    dist.all_reduce(tensor)
    assert tensor.item() == 4.0


@takes_both
@in_group(2)
def test_device_maps_that_torch_would_change() -> None:
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the backend "fake"

    with pytest.raises(ValueError, match="pyhvd is a backend for cpu; choose another one for cuda"):
        dist.new_group(backend="cpu:gloo,cuda:pyhvd")
    with pytest.raises(
        ValueError, match=r"one backend for the devices of fake.*new_group\(backend=\"fake\"\)"
    ):
        dist.new_group(backend="cpu:pyhvd,meta:fake")
    dist.barrier()

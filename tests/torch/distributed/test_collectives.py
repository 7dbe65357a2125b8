"""Each collective of torch.distributed over pyhvd does what it does over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from pyhvd.errors import UnsupportedDtypeError, UnsupportedOpError
from pyhvd.torch.distributed import CollectiveError, CollectiveTimeoutError
from tests.torch.distributed.world import TORCH, in_group

OP = dist.ReduceOp
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool)
ARITHMETIC = (OP.SUM, OP.MIN, OP.MAX, OP.PRODUCT)
BITWISE = (OP.BAND, OP.BOR, OP.BXOR)
OPS = {
    **dict.fromkeys(FLOATS, (*ARITHMETIC, OP.AVG)),
    **dict.fromkeys(INTEGERS, (*ARITHMETIC, *BITWISE)),
    torch.complex64: (OP.SUM, OP.AVG),
}
ROUGHLY = {torch.float16: 0.01, torch.bfloat16: 0.06}  # pyhvd adds in float32

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def made(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor of this rank: other ranks have other values."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(-3 if dtype.is_signed else 0, 4, shape, generator=generator).to(dtype)


def layouts(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Return tensors of several layouts."""
    yield "row-major", made(dtype, 3, 4)
    yield "transposed", made(dtype, 3, 4).t()
    yield "every second row", made(dtype, 6, 4)[::2]
    yield "channels last", made(dtype, 2, 3, 4, 5).to(memory_format=torch.channels_last)
    yield "no dimension", made(dtype)
    yield "empty", made(dtype, 0, 4)
    yield "long", made(dtype, 70_001)


def like_gloo(call: Callable[[Any, Any], Any], what: str, tensor: torch.Tensor, gloo: Any) -> None:
    """Let both backends call the same, three times: the first time by message, then by the fast path."""
    wide = ROUGHLY.get(tensor.dtype)
    for turn in range(3):
        ours = call(tensor.detach().clone(memory_format=torch.preserve_format), dist.group.WORLD)
        try:
            theirs = call(tensor.detach().clone(memory_format=torch.preserve_format), gloo)
        except RuntimeError as exc:
            if "Invalid scalar type" not in str(exc):
                raise
            continue  # gloo does not have it
        text = f"{what}, turn {turn}: "
        torch.testing.assert_close(ours, theirs, rtol=wide, atol=wide, msg=text.__add__)


@pytest.mark.parametrize("dtype", OPS, ids=str)
@in_group(2, 3)
def test_all_reduce(dtype: torch.dtype) -> None:
    gloo = dist.new_group(backend="gloo")
    for op in OPS[dtype]:

        def call(tensor: Any, group: Any, op: Any = op) -> Any:
            if op == OP.AVG and group is gloo and TORCH < (2, 13):  # old versions of gloo refuse it
                dist.all_reduce(tensor, group=group)
                return tensor.div_(dist.get_world_size())
            dist.all_reduce(tensor, op, group=group)
            return tensor

        for layout, tensor in layouts(dtype):
            like_gloo(call, f"{op}, {layout}", tensor, gloo)


MOVES: dict[str, Callable[[Any, Any], Any]] = {}


def move(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    MOVES[function.__name__] = function
    return function


@move
def broadcast(tensor: Any, group: Any) -> Any:
    dist.broadcast(tensor, 1, group=group)
    return tensor


@move
def all_gather(tensor: Any, group: Any) -> Any:
    outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, tensor, group=group)
    return outputs


@move
def all_gather_into_tensor(tensor: Any, group: Any) -> Any:
    output = torch.empty(dist.get_world_size() * tensor.numel(), dtype=tensor.dtype)
    dist.all_gather_into_tensor(output, tensor.reshape(-1), group=group)
    return output


@move
def gather(tensor: Any, group: Any) -> Any:
    mine = dist.get_rank() == 1
    outputs = [torch.empty_like(tensor) for _ in range(dist.get_world_size())] if mine else None
    if group is not dist.group.WORLD:  # gloo of torch 2.4 stores what is not contiguous in another order
        tensor = tensor.contiguous()
        outputs = outputs and [each.contiguous() for each in outputs]
    dist.gather(tensor, outputs, dst=1, group=group)
    return outputs


@move
def scatter(tensor: Any, group: Any) -> Any:
    output = torch.zeros_like(tensor)
    inputs = [tensor.clone() for _ in range(dist.get_world_size())] if dist.get_rank() == 1 else None
    dist.scatter(output, inputs, src=1, group=group)
    return output


@move
def all_to_all_single(tensor: Any, group: Any) -> Any:
    sent = torch.stack([tensor.contiguous()] * dist.get_world_size()).contiguous()
    output = torch.empty_like(sent)
    dist.all_to_all_single(output, sent, group=group)
    return output


@pytest.mark.parametrize("name", MOVES)
@in_group(2, 3)
def test_moves(name: str) -> None:
    gloo = dist.new_group(backend="gloo")
    for dtype in OPS:
        for layout, tensor in layouts(dtype):
            like_gloo(MOVES[name], f"{dtype}, {layout}", tensor, gloo)


@in_group(2, 3)
def test_moves_of_dtypes_that_gloo_does_not_have() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32):
        tensor = torch.full((3,), rank).to(dtype)
        outputs = [torch.empty_like(tensor) for _ in range(size)]
        dist.all_gather(outputs, tensor)
        assert [each[0].to(torch.float32).real.item() for each in outputs] == list(range(size))
        dist.broadcast(tensor, 1)
        assert tensor[2].to(torch.float32).real.item() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@in_group(2, 3)
def test_reduce_and_reduce_scatter(dtype: torch.dtype) -> None:
    """gloo has no reduce_scatter of lists before torch 2.5, so the sums are made here."""
    rank, size = dist.get_rank(), dist.get_world_size()
    everyones = [torch.empty(size, 5, dtype=dtype) for _ in range(size)]
    mine = made(dtype, size, 5)
    dist.all_gather(everyones, mine)
    wanted = {
        OP.SUM: torch.stack(everyones).float().sum(0).to(dtype),
        OP.MAX: torch.stack(everyones).amax(0),
        OP.MIN: torch.stack(everyones).amin(0),
    }
    for op, total in wanted.items():
        for _ in range(3):
            tensor = mine.clone()
            dist.reduce(tensor, 1, op)
            torch.testing.assert_close(tensor, total if rank == 1 else mine)
            output = torch.empty(5, dtype=dtype)
            dist.reduce_scatter_tensor(output, mine, op)
            torch.testing.assert_close(output, total[rank])
            output.zero_()
            dist.reduce_scatter(output, list(mine), op)
            torch.testing.assert_close(output, total[rank])


@in_group(2, 3)
def test_sizes_may_differ() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        outputs = [torch.empty(each + 1) for each in range(size)]
        dist.all_gather(outputs, torch.full((rank + 1,), float(rank)))
        assert [each.tolist() for each in outputs] == [[float(each)] * (each + 1) for each in range(size)]
        # To rank r go r + 1 rows from each rank.
        sent = torch.full((size * (size + 1) // 2, 2), float(rank))
        output = torch.empty((rank + 1) * size, 2)
        dist.all_to_all_single(output, sent, [rank + 1] * size, [each + 1 for each in range(size)])
        assert output[:, 1].tolist() == [float(each) for each in range(size) for _ in range(rank + 1)]
        received = [torch.empty(each + 1) for each in range(size)]
        dist.all_to_all(received, [torch.full((rank + 1,), float(rank)) for _ in range(size)])
        assert [each.tolist() for each in received] == [[float(each)] * (each + 1) for each in range(size)]
        parts = torch.empty(rank + 1)
        dist.reduce_scatter(parts, [torch.ones(each + 1) for each in range(size)])
        assert parts.tolist() == [float(size)] * (rank + 1)


@in_group(2)
def test_parts_of_one_tensor() -> None:
    """Input and output share memory, as in FSDP, at the right place and at another one."""
    rank = dist.get_rank()
    for _ in range(3):
        whole = torch.zeros(2, 5)
        whole[rank] = rank + 1
        dist.all_gather_into_tensor(whole, whole[rank])
        assert whole.tolist() == [[1.0] * 5, [2.0] * 5]
        moved = torch.full((2, 5), rank + 1.0)
        dist.all_gather_into_tensor(moved, moved[1 - rank])
        assert moved.tolist() == [[1.0] * 5, [2.0] * 5]
        parts = torch.arange(10.0).reshape(2, 5)
        dist.reduce_scatter_tensor(parts[rank], parts)
        assert parts[rank].tolist() == [2.0 * (5 * rank + each) for each in range(5)]


@in_group(2, 3)
def test_outputs_that_are_the_pieces_of_one_tensor() -> None:
    """The result goes there without a copy; also where the input is one of the pieces."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        mine, gathered = torch.full((2, 2), rank + 1.0), torch.zeros(2 * size, 2)
        wanted = [each + 1.0 for each in range(size) for _ in range(4)]
        dist.all_gather(list(gathered.chunk(size)), mine)
        assert gathered.flatten().tolist() == wanted
        gathered.zero_()
        gathered.chunk(size)[rank].fill_(rank + 1.0)
        dist.all_gather(list(gathered.chunk(size)), gathered.chunk(size)[rank])
        assert gathered.flatten().tolist() == wanted
        gathered.zero_()
        dist.gather(mine, list(gathered.chunk(size)) if rank == 1 else None, 1)
        assert gathered.flatten().tolist() == (wanted if rank == 1 else [0.0] * len(wanted))
        exchanged = torch.arange(size * 3.0) + 10 * rank
        dist.all_to_all(list(exchanged.chunk(size)), list(exchanged.chunk(size)))
        assert exchanged.tolist() == [10.0 * each + 3 * rank + k for each in range(size) for k in range(3)]


@in_group(2)
def test_tensors_that_autograd_knows() -> None:
    leaf = torch.ones(3, requires_grad=True)
    squared = leaf * leaf
    for tensor in (leaf, squared):
        dist.all_reduce(tensor)
        assert tensor.detach().tolist() == [2.0] * 3
    outputs = [torch.zeros(3, requires_grad=True) for _ in range(2)]
    dist.all_gather(outputs, squared)
    assert outputs[1].detach().tolist() == [2.0] * 3
    squared.sum().backward()  # no write counts as a change, as over gloo
    with torch.inference_mode():
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        assert tensor.tolist() == [2.0, 2.0]


@in_group(2, 3)
def test_sparse_tensors() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for rows in (1, 3):
        indices = [[rank + each for each in range(rows)]]
        tensor = torch.sparse_coo_tensor(indices, torch.ones(rows, 2), (8, 2), check_invariants=True)
        total = tensor.to_dense()
        dist.all_reduce(tensor)
        dist.all_reduce(total)
        assert tensor.to_dense().tolist() == total.tolist()
    with pytest.raises(UnsupportedOpError, match="sparse_allreduce_async supports op=Average and op=Sum"):
        dist.all_reduce(tensor, OP.MAX)
    dist.barrier()
    assert size == dist.get_world_size()


@in_group(2)
def test_async_works_and_their_futures() -> None:
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(20)]
    assert all(work.wait() for work in works)
    assert all(work.wait() and work.is_completed() and work.is_success() for work in works)
    assert works[3].result()[0].tolist() == [2.0] * 4
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert work.get_future() is not None
    chained = work.get_future().then(lambda future: future.value()[0] * 10)
    assert chained.wait().tolist() == [20.0] * 4
    outputs = torch.empty(2, 3)
    later = dist.all_gather_into_tensor(outputs, torch.full((3,), float(dist.get_rank())), async_op=True)
    assert later.get_future().wait()[0].tolist() == [[0.0] * 3, [1.0] * 3]
    assert outputs.tolist() == [[0.0] * 3, [1.0] * 3]


@in_group(2)
def test_callbacks_may_wait_for_other_collectives() -> None:
    """Each callback waits for a collective whose own callback waits for another one, and so on."""

    def nest(depth: int) -> Any:
        def go_on(future: Any) -> Any:
            tensor = future.value()[0]
            return tensor if not depth else nest(depth - 1).wait() + tensor

        return dist.all_reduce(torch.ones(2), async_op=True).get_future().then(go_on)

    assert nest(8).wait().tolist() == [18.0, 18.0]


@in_group(2, 3)
def test_functional_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    for _ in range(3):
        tensor = torch.arange(2.0 * size) + rank
        wanted = sum(torch.arange(2.0 * size) + each for each in range(size))
        assert torch.equal(functional.all_reduce(tensor, "sum", group) + 0, wanted)
        gathered = functional.all_gather_tensor(tensor, 0, group)
        assert gathered.shape == (2 * size * size,)
        assert gathered[2 * size].item() == 1.0
        part = functional.reduce_scatter_tensor(tensor, "sum", 0, group)
        assert torch.equal(part + 0, wanted[2 * rank : 2 * rank + 2])
        swapped = functional.all_to_all_single(tensor, None, None, group)
        assert (swapped + 0).tolist() == [2.0 * rank + each + k for each in range(size) for k in range(2)]
        assert torch.equal(functional.broadcast(tensor, 1, group) + 0, torch.arange(2.0 * size) + 1)
        several = functional.all_reduce_coalesced([tensor, tensor + 1], "sum", group)
        assert torch.equal(several[1] + 0, wanted + size)
        both = functional.all_gather_into_tensor_coalesced([tensor, tensor + 1], group)
        assert both[1].shape == (2 * size * size,)
        parts = functional.reduce_scatter_tensor_coalesced([tensor, tensor], "sum", [0, 0], group)
        assert torch.equal(parts[1] + 0, wanted[2 * rank : 2 * rank + 2])


@in_group(2)
def test_coalesced_calls() -> None:
    tensors = [torch.ones(3), torch.ones(2, 2)]
    dist.all_reduce_coalesced(tensors)
    assert tensors[1].tolist() == [[2.0, 2.0]] * 2
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert tensors[0].tolist() == [4.0] * 3
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.broadcast(tensor, 0)
    manager.wait()
    outputs = [[torch.empty(3), torch.empty(2, 2)] for _ in range(2)]
    dist.all_gather_coalesced(outputs, tensors)
    assert outputs[1][1].tolist() == [[4.0, 4.0]] * 2


@in_group(2, 3)
def test_objects() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    everyones: list[Any] = [None] * size
    dist.all_gather_object(everyones, {"rank": rank, "long": "x" * 1000 * rank})
    assert [each["rank"] for each in everyones] == list(range(size))
    told = [{"a": 1}, "b"] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, src=0)
    assert told == [{"a": 1}, "b"]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {each}" for each in range(size)] if rank == 0 else None, src=0)
    assert mine == [f"for {rank}"]
    heard: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, heard, dst=0)
    assert heard == (list(range(size)) if rank == 0 else None)


@in_group(3)
def test_groups_of_some_ranks() -> None:
    rank = dist.get_rank()
    # All ranks make one such group, as torch names groups by how many a rank has made.
    dist.barrier(dist.new_group([1] if rank == 1 else [0, 2], use_local_synchronization=True))
    members = {
        name: dist.new_group(ranks) for name, ranks in (("ends", [0, 2]), ("last", [2]), ("all", None))
    }
    again = dist.new_group([0, 2])
    for _ in range(3):
        if rank != 1:
            for group in (members["ends"], again):
                tensor = torch.tensor([1.0 + rank])
                dist.all_reduce(tensor, group=group)
                assert tensor.item() == 4.0
            tensor = torch.tensor([1.0 + rank])
            dist.broadcast(tensor, 2, group=again)
            assert tensor.item() == 3.0
        if rank == 2:
            tensor = torch.tensor([5.0])
            dist.all_reduce(tensor, group=members["last"])
            assert tensor.item() == 5.0
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=members["all"])
        assert tensor.item() == 3.0
    if rank != 1:
        dist.destroy_process_group(again)
    dist.barrier()


@in_group(2, 3)
def test_sends_and_receives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.bool, torch.complex64, torch.float8_e5m2):
        sent = torch.full((3, 2), rank).to(dtype).t()
        received = torch.zeros(2, 3).to(dtype).t()
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent.t(), following, tag=3),
                dist.P2POp(dist.irecv, received, before, tag=3),
            ]
        )
        for work in works:
            work.wait()
        assert torch.equal(received.to(torch.float32), torch.full((3, 2), before).to(dtype).to(torch.float32))
    if rank == 0:
        senders = set()
        for _ in range(size - 1):
            tensor = torch.zeros(1)
            source = dist.recv(tensor, tag=9)
            assert tensor.item() == source
            senders.add(source)
        assert senders == {*range(1, size)}
    else:
        dist.send(torch.tensor([float(rank)]), 0, tag=9)
    # Messages with other tags may overtake; objects are sent by two messages each.
    if rank == 0:
        first, second = torch.zeros(1), torch.zeros(1)
        dist.recv(second, 1, tag=2)
        dist.recv(first, 1, tag=1)
        assert (first.item(), second.item()) == (1.0, 2.0)
        objects: list[Any] = [None]
        dist.recv_object_list(objects, src=1)
        assert objects == ["hello"]
    elif rank == 1:
        works = [dist.isend(torch.tensor([float(tag)]), 0, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
        dist.send_object_list(["hello"], dst=0)


@in_group(2)
def test_a_received_tensor_has_a_future() -> None:
    if dist.get_rank():
        dist.send(torch.ones(3), 0)
    else:
        tensor = torch.zeros(3)
        work = dist.irecv(tensor, 1)
        assert work is not None
        assert work.get_future().wait()[0].tolist() == [1.0] * 3


@in_group(2)
def test_ranks_that_call_something_else_get_both_call_sites() -> None:
    tensor = torch.ones(3)
    for _ in range(3):
        dist.all_reduce(tensor)
    call: Any = dist.broadcast if dist.get_rank() else dist.all_reduce
    sites = r"allreduce; rank 1: broadcast.* at: ranks 0-1: \S*test_collectives\.py:\d+"
    with pytest.raises(CollectiveError, match=sites):
        call(tensor, *([0] if dist.get_rank() else []))
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0] * 3


@in_group(2)
def test_a_timeout_says_who_is_missing_and_where_it_is() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if dist.get_rank():
        dist.barrier()  # rank 0 has got its errors
        return
    started = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    with pytest.raises(
        CollectiveTimeoutError, match=r"(?s)timeout of 1 s.*rank 1 on .*test_collectives\.py:\d+"
    ):
        started.wait()
    with pytest.raises(CollectiveTimeoutError, match=r"timeout of 0\.5 s"):
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait(timedelta(seconds=0.5))
    future = dist.all_reduce(torch.ones(1), group=group, async_op=True).get_future()
    with pytest.raises(RuntimeError, match=r"(?s)CollectiveTimeoutError.*not submitted by rank 1"):
        future.wait()
    received = dist.irecv(torch.ones(1), 1, group=group, tag=4)
    assert received is not None
    with pytest.raises(CollectiveTimeoutError, match=r"(?s)receive from rank 1 with tag 4.*rank 1 on "):
        received.wait()
    dist.barrier()


@in_group(2)
def test_what_pyhvd_does_not_have_is_an_error_on_all_ranks_and_the_next_call_works() -> None:
    with pytest.raises(UnsupportedDtypeError, match="Average is not defined for bool"):
        dist.all_reduce(torch.ones(2).bool(), OP.AVG)
    with pytest.raises(ValueError, match="the input has 3 elements, and the output 2"):
        dist.reduce_scatter_tensor(torch.ones(2), torch.ones(3))
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]


@in_group(2)
def test_init_again_after_destroy() -> None:
    world = dist.group.WORLD
    dist.new_group([0, 1])
    dist.destroy_process_group()
    for _ in range(3):
        dist.init_process_group(
            "pyhvd",
            store=dist.HashStore(),
            rank=world.rank(),
            world_size=2,
        )
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0, 2.0]
        dist.destroy_process_group()
    dist.init_process_group("pyhvd", store=dist.HashStore(), rank=world.rank(), world_size=2)

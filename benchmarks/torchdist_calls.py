"""The calls of torch.distributed that the question about its backends times: what they get, and must return.

All contenders of a case share its tensors, and differ in the group alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import pyhvd.torch.distributed  # noqa: F401 - registers the backend
from benchmarks import peers
from benchmarks.harness import FLOOR, OURS, PEER, Case, Contender, World
from benchmarks.questions.torchdist import ALL_REDUCE, EMPTY, EMPTY_SAME, FOUR, GLOO, PYHVD, label
from benchmarks.tensors import WrongResultError

ROOT = 0
Groups = dict[str, Any]
"""A group of torch.distributed for each contender's name."""


# -- groups --------------------------------------------------------------------------------------------


class DoneWork(dist.Work):
    """A work that has ended."""

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002
        """Return at once."""
        return True


class EmptyGroup(dist.ProcessGroup):
    """A group whose all_reduce does nothing; ``same`` says that it always returns the same work."""

    def __init__(self, rank: int, size: int, name: str, *, same: bool) -> None:
        super().__init__(rank, size)
        self._name = name
        self._work = DoneWork() if same else None

    def allreduce(self, tensors: Any, opts: Any = None) -> DoneWork:  # noqa: ARG002
        """Return a work."""
        return self._work or DoneWork()

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return torch's name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Change it."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return nothing."""
        return ""

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Do nothing."""


def make_groups(world: World) -> Groups:
    """Return a group of all ranks for each backend; the first is the default one."""
    peers.start_torch_distributed(world, "pyhvd")
    for name, same in (("empty", False), ("empty_same", True)):

        def make(options: Any, _: Any, same: bool = same) -> EmptyGroup:
            return EmptyGroup(options.group_rank, options.group_size, options.group_id, same=same)

        dist.Backend.register_backend(name, make, extended_api=True, devices=["cpu"])
    return {
        PYHVD: dist.group.WORLD,
        GLOO: dist.new_group(backend="gloo"),
        EMPTY: dist.new_group(backend="empty"),
        EMPTY_SAME: dist.new_group(backend="empty_same"),
    }


# -- calls ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call on this rank.

    Attributes
    ----------
    run : callable
        ``run(group)`` makes the call.
    before, after : list of pairs
        Each has a tensor or a list of objects, and what it must hold before or after the call.
    """

    run: Callable[[Any], Any]
    before: Sequence[tuple[Any, Any]] = ()
    after: Sequence[tuple[Any, Any]] = ()

    def reset(self) -> None:
        """Fill the tensors and lists as they must be before the call, and clear the others."""
        for place, _ in self.after:
            place.zero_() if isinstance(place, torch.Tensor) else place.clear()
        for place, values in self.before:
            if isinstance(place, torch.Tensor):
                place.copy_(values)
            else:
                place[:] = values

    def zero(self) -> None:
        """Fill the tensors with zeros, which remain zeros if they are summed many times."""
        self.reset()
        for place, _ in self.before:
            if isinstance(place, torch.Tensor):
                place.zero_()

    def check(self, name: str) -> None:
        """Raise an error if something is not as it must be after the call."""
        for place, wanted in self.after:
            same = torch.equal(place, wanted) if isinstance(place, torch.Tensor) else place == wanted
            if not same:
                raise WrongResultError(f"{name}: {str(place)[:200]} instead of {str(wanted)[:200]}")


class Numbers:
    """What each rank gives: integers that say whose they are, in one part for each rank."""

    def __init__(self, world: World, nbytes: int) -> None:
        self.rank, self.size = world.rank, world.size
        self.is_root = self.rank == ROOT
        self._part = max(nbytes // 4 // self.size, 1)
        self._count = max(nbytes // 4, 1)

    def whole(self, rank: int) -> Any:
        """Return all that a rank gives if it has as many bytes as the case."""
        return torch.arange(self._count, dtype=torch.float32) % 31 + rank

    def parts(self, rank: int) -> list[Any]:
        """Return what a rank gives to each rank."""
        return list((torch.arange(self._part * self.size, dtype=torch.float32) % 31 + rank).split(self._part))

    def part(self, rank: int) -> Any:
        """Return what a rank gives to all."""
        return self.parts(rank)[0].clone()

    def sums(self) -> list[Any]:
        """Return the sum of what the ranks give to each."""
        every = [self.parts(rank) for rank in range(self.size)]
        return [torch.stack(same).sum(0) for same in zip(*every, strict=True)]

    def to_each(self) -> list[Any]:
        """Return a tensor for each rank."""
        return [torch.zeros(self._part) for _ in range(self.size)]

    def to_one(self) -> Any:
        """Return a tensor of one part."""
        return torch.zeros(self._part)

    def object(self, rank: int, parts: int = 1) -> bytes:
        """Return an object with the bytes of some parts."""
        return bytes([rank + 1]) * (4 * self._part * parts)


def _all_reduce(numbers: Numbers) -> Call:
    tensor = numbers.whole(numbers.rank)
    total = torch.stack([numbers.whole(rank) for rank in range(numbers.size)]).sum(0)
    return Call(
        lambda group: dist.all_reduce(tensor, group=group), [(tensor, tensor.clone())], [(tensor, total)]
    )


def _broadcast(numbers: Numbers) -> Call:
    own, wanted = numbers.whole(numbers.rank), numbers.whole(ROOT)
    return Call(lambda group: dist.broadcast(own, ROOT, group=group), [(own, own.clone())], [(own, wanted)])


def _reduce(numbers: Numbers) -> Call:
    tensor = numbers.whole(numbers.rank)
    total = torch.stack([numbers.whole(rank) for rank in range(numbers.size)]).sum(0)
    # torch leaves open what the others' tensors hold.
    return Call(
        lambda group: dist.reduce(tensor, ROOT, group=group),
        [(tensor, tensor.clone())],
        [(tensor, total)] if numbers.is_root else [],
    )


def _all_gather(numbers: Numbers) -> Call:
    own, outputs = numbers.part(numbers.rank), numbers.to_each()
    after = [(out, numbers.part(rank)) for rank, out in enumerate(outputs)]
    return Call(lambda group: dist.all_gather(outputs, own, group=group), [(own, own.clone())], after)


def _all_gather_into_tensor(numbers: Numbers) -> Call:
    own, output = numbers.part(numbers.rank), torch.cat(numbers.to_each())
    wanted = torch.cat([numbers.part(rank) for rank in range(numbers.size)])
    return Call(
        lambda group: dist.all_gather_into_tensor(output, own, group=group),
        [(own, own.clone())],
        [(output, wanted)],
    )


def _gather(numbers: Numbers) -> Call:
    own, outputs = numbers.part(numbers.rank), numbers.to_each() if numbers.is_root else None
    after = [(out, numbers.part(rank)) for rank, out in enumerate(outputs or [])]
    return Call(lambda group: dist.gather(own, outputs, ROOT, group=group), [(own, own.clone())], after)


def _scatter(numbers: Numbers) -> Call:
    own, inputs = numbers.to_one(), numbers.parts(ROOT) if numbers.is_root else None
    before = [(each, each.clone()) for each in inputs or []]
    return Call(
        lambda group: dist.scatter(own, inputs, ROOT, group=group),
        before,
        [(own, numbers.parts(ROOT)[numbers.rank])],
    )


def _reduce_scatter(numbers: Numbers) -> Call:
    inputs, output = [each.clone() for each in numbers.parts(numbers.rank)], numbers.to_one()
    return Call(
        lambda group: dist.reduce_scatter(output, inputs, group=group),
        [(each, each.clone()) for each in inputs],
        [(output, numbers.sums()[numbers.rank])],
    )


def _reduce_scatter_tensor(numbers: Numbers) -> Call:
    own, output = torch.cat(numbers.parts(numbers.rank)), numbers.to_one()
    return Call(
        lambda group: dist.reduce_scatter_tensor(output, own, group=group),
        [(own, own.clone())],
        [(output, numbers.sums()[numbers.rank])],
    )


def _all_to_all_single(numbers: Numbers) -> Call:
    own, output = torch.cat(numbers.parts(numbers.rank)), torch.cat(numbers.to_each())
    wanted = torch.cat([numbers.parts(rank)[numbers.rank] for rank in range(numbers.size)])
    return Call(
        lambda group: dist.all_to_all_single(output, own, group=group),
        [(own, own.clone())],
        [(output, wanted)],
    )


def _all_to_all(numbers: Numbers) -> Call:
    inputs, outputs = [each.clone() for each in numbers.parts(numbers.rank)], numbers.to_each()
    after = [(out, numbers.parts(rank)[numbers.rank]) for rank, out in enumerate(outputs)]
    return Call(
        lambda group: dist.all_to_all(outputs, inputs, group=group),
        [(each, each.clone()) for each in inputs],
        after,
    )


def _all_gather_object(numbers: Numbers) -> Call:
    own, found = numbers.object(numbers.rank), [None] * numbers.size
    wanted = [numbers.object(rank) for rank in range(numbers.size)]

    def run(group: Any) -> None:
        dist.all_gather_object(found, own, group=group)

    return Call(run, [(found, [None] * numbers.size)], [(found, wanted)])


def _broadcast_object_list(numbers: Numbers) -> Call:
    sent = [numbers.object(ROOT, numbers.size)]
    found: list[Any] = list(sent) if numbers.is_root else [None]
    return Call(
        lambda group: dist.broadcast_object_list(found, ROOT, group=group),
        [(found, list(found))],
        [(found, sent)],
    )


def _gather_object(numbers: Numbers) -> Call:
    own = numbers.object(numbers.rank)
    found = [None] * numbers.size if numbers.is_root else None
    wanted = [numbers.object(rank) for rank in range(numbers.size)]
    return Call(
        lambda group: dist.gather_object(own, found, ROOT, group=group),
        [(found, [None] * numbers.size)] if numbers.is_root else [],
        [(found, wanted)] if numbers.is_root else [],
    )


def _scatter_object_list(numbers: Numbers) -> Call:
    sent = [numbers.object(rank) for rank in range(numbers.size)]
    found: list[Any] = [None]

    def run(group: Any) -> None:
        dist.scatter_object_list(found, sent if numbers.is_root else None, ROOT, group=group)

    return Call(run, [(found, [None])], [(found, [sent[numbers.rank]])])


def _send_and_recv(numbers: Numbers) -> Call:
    """Send a tensor to rank 1, which sends it back; other ranks have no part."""
    own = numbers.whole(numbers.rank)
    back = torch.zeros_like(own)

    def run(group: Any) -> None:
        if numbers.rank == ROOT:
            dist.send(own, 1, group=group)
            dist.recv(back, 1, group=group)
        elif numbers.rank == 1:
            dist.recv(back, ROOT, group=group)
            dist.send(back, ROOT, group=group)

    return Call(run, [(own, own.clone())], [(back, numbers.whole(ROOT))] if numbers.rank < 2 else [])


def _barrier(_: Numbers) -> Call:
    return Call(lambda group: dist.barrier(group=group))


_MAKERS: dict[str, Callable[[Numbers], Call]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all_single": _all_to_all_single,
    "all_to_all": _all_to_all,
    "all_gather_object": _all_gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "send and recv": _send_and_recv,
    "barrier": _barrier,
}


# -- contenders ----------------------------------------------------------------------------------------


def case(world: World, groups: Groups, name: str, nbytes: int) -> Case:
    """Return the case of a call at a size; that of 4 bytes has the empty backends too."""
    call = _MAKERS[name](Numbers(world, nbytes))
    loops = 100 if nbytes <= 4096 else 10 if nbytes <= 1 << 20 else 1
    contenders = [
        _contender(PYHVD, groups[PYHVD], call, loops, OURS),
        _contender(GLOO, groups[GLOO], call, loops, PEER),
    ]
    if (name, nbytes) == (ALL_REDUCE, FOUR):
        contenders += [_contender(each, groups[each], call, loops, FLOOR) for each in (EMPTY, EMPTY_SAME)]
    return Case(label(name, nbytes), nbytes, contenders)


def _contender(name: str, group: Any, call: Call, loops: int, kind: str) -> Contender:
    """Return a contender whose result is checked, after one more call if it makes several in a row."""

    def run() -> None:
        for _ in range(loops):
            call.run(group)

    def finish() -> None:
        call.reset()
        call.run(group)

    def check(_: bool) -> None:
        if kind != FLOOR:
            call.check(name)

    if loops == 1:
        return Contender(name, run, prepare=call.reset, check=check, kind=kind)
    return Contender(
        name, run, prepare=call.zero, rehearse=run, finish=finish, check=check, kind=kind, loops=loops
    )

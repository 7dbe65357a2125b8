"""From tasks to ranks: who has registered, and which rank each becomes. Pure.

Ranks are numbered host by host, as MPI wants those who share memory to be neighbours; the host of task 0
comes first, so that rank 0 is on it; on each host they follow the tasks' indices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """A task as it has registered.

    Attributes
    ----------
    index : int
        Its partition.
    attempt : int
        Spark's id of this attempt at it; Spark may try again, and the newest, the one with the largest,
        counts.
    host_hash : str
        See :func:`pyhvd.job.host_id.host_hash`.
    host : str
        Name of its host, for messages.
    pid : int
        The Python worker that runs it.
    """

    index: int
    attempt: int
    host_hash: str
    host: str
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one rank stands."""

    rank: int
    index: int
    host: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


class Registry:
    """The tasks that have come.

    Parameters
    ----------
    size : int
        How many there will be.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._tasks: dict[int, Task] = {}

    def add(self, task: Task) -> bool:
        """Enter a task; return False if a newer attempt of it is here, or its index is out of range."""
        known = self._tasks.get(task.index)
        if not 0 <= task.index < self.size or (known is not None and known.attempt > task.attempt):
            return False
        self._tasks[task.index] = task
        return True

    def remove(self, task: Task) -> None:
        """Forget a task that is gone before the ranks have started, unless a newer attempt has come."""
        if self._tasks.get(task.index) == task:
            del self._tasks[task.index]

    @property
    def missing(self) -> list[int]:
        """The indices that have not come."""
        return [index for index in range(self.size) if index not in self._tasks]

    def groups(self) -> list[list[Task]]:
        """Return the tasks of each host by index; the host of the lowest index first, and so on."""
        groups: dict[str, list[Task]] = {}
        for index in sorted(self._tasks):
            task = self._tasks[index]
            groups.setdefault(task.host_hash, []).append(task)
        return list(groups.values())


def assign(groups: Iterable[Iterable[Task]]) -> list[Seat]:
    """Return the seats of all ranks, in rank order."""
    return seats_of(task for group in groups for task in group)


def seats_of(tasks: Iterable[Task]) -> list[Seat]:
    """Return the seats of ranks whose tasks are given in rank order; hosts are numbered as they come."""
    ranks = list(tasks)
    sizes = Counter(task.host_hash for task in ranks)
    there: Counter[str] = Counter()
    seats: list[Seat] = []
    for rank, task in enumerate(ranks):
        local_rank = there[task.host_hash]
        there[task.host_hash] += 1
        peers = [host for host, count in sizes.items() if count > local_rank]
        seats.append(
            Seat(
                rank=rank,
                index=task.index,
                host=task.host,
                local_rank=local_rank,
                local_size=sizes[task.host_hash],
                cross_rank=peers.index(task.host_hash),
                cross_size=len(peers),
            )
        )
    return seats

"""Which rank each task becomes. Pure.

Ranks are numbered host by host, so that ranks that share memory have consecutive numbers. The host of task 0
comes first, so that rank 0 runs there. Ranks of one host follow the indices of their tasks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from pyhvd.job.messages import Task


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The task that runs a rank, and the rank's numbers."""

    rank: int
    index: int
    host: str
    local_rank: int
    local_size: int


class Registry:
    """The tasks that have registered, of `size` that will."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._tasks: dict[int, Task] = {}

    def add(self, task: Task) -> bool:
        """Add a task; return False if a newer attempt has registered, or its index is out of range."""
        known = self._tasks.get(task.index)
        if not 0 <= task.index < self.size or (known is not None and known.attempt > task.attempt):
            return False
        self._tasks[task.index] = task
        return True

    def remove(self, task: Task) -> None:
        """Remove a task that was lost before the ranks started, unless a newer attempt has registered."""
        if self._tasks.get(task.index) == task:
            del self._tasks[task.index]

    @property
    def missing(self) -> list[int]:
        """The indices that have not registered."""
        return [index for index in range(self.size) if index not in self._tasks]

    def groups(self) -> list[list[Task]]:
        """Return the tasks of each host, by index; hosts are ordered by their lowest index."""
        groups: dict[str, list[Task]] = {}
        for index in sorted(self._tasks):
            task = self._tasks[index]
            groups.setdefault(task.host_hash, []).append(task)
        return list(groups.values())


def assign(tasks: Iterable[Task]) -> list[RankPlacement]:
    """Return the placements of ranks whose tasks are given in rank order."""
    ranks = list(tasks)
    sizes = Counter(task.host_hash for task in ranks)
    placed: Counter[str] = Counter()
    placements: list[RankPlacement] = []
    for rank, task in enumerate(ranks):
        local_rank = placed[task.host_hash]
        placed[task.host_hash] += 1
        placements.append(RankPlacement(rank, task.index, task.host, local_rank, sizes[task.host_hash]))
    return placements

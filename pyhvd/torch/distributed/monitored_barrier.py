"""The barrier of torch.distributed whose errors name the ranks that have not called it.

1. Each rank sends an empty message to rank 0 of the group, and waits for one from it.
2. Rank 0 waits for these messages. If one is late, it raises an error, and answers none.
3. Rank 0 answers all.

The first lines of the errors are those of gloo.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from pyhvd.engine import context
from pyhvd.torch.distributed.errors import CollectiveTimeoutError
from pyhvd.torch.distributed.point_to_point import PointToPoint, Transfer

_FOREVER = 1e9


class MonitoredBarrier:
    """The barriers of one group.

    Parameters
    ----------
    messages : PointToPoint
        Sends and receives.
    ranks : sequence of int
        The group's, as ranks of the job.
    set_id : int
        Of the group's process set.
    own : int
        This rank's number in the group.
    """

    def __init__(self, messages: PointToPoint, ranks: Sequence[int], set_id: int, own: int) -> None:
        self._messages, self._ranks, self._set_id, self._own = messages, ranks, set_id, own
        self._empty = torch.empty(0)
        self._number = 0

    def wait(self, seconds: float | None, *, names_all: bool) -> None:
        """Wait for all ranks; ``names_all``: rank 0 waits for each before it raises an error.

        Raises
        ------
        CollectiveTimeoutError
            Not all ranks have called it.
        """
        self._number += 1
        if self._own == 0:
            self._gather(_FOREVER if seconds is None else seconds, names_all=names_all)
            return
        self._send(0)
        answer = self._receive(0)
        if not answer.wait(seconds) or answer.exception() is not None:
            answer.cancel()
            raise self._late(
                seconds,
                [0],
                f"Rank {self._own} successfully reached monitoredBarrier, but received errors while waiting"
                " for send/recv from rank 0. Please check rank 0 logs for faulty rank.",
            )

    def _gather(self, seconds: float, *, names_all: bool) -> None:
        until = time.monotonic() + seconds
        transfers = [self._receive(rank) for rank in range(1, len(self._ranks))]
        late = []
        for rank, transfer in enumerate(transfers, 1):
            if not transfer.wait(max(until - time.monotonic(), 0.0)) or transfer.exception() is not None:
                late.append(rank)
                if not names_all:
                    break
        if not late:
            for rank in range(1, len(self._ranks)):
                self._send(rank)
            return
        for transfer in transfers:
            transfer.cancel()
        who = f"Rank {late[0]}" if len(late) == 1 else f"Ranks {', '.join(map(str, late))}"
        text = f"{who} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms"
        if seconds <= 0:
            text = "Rank 0 timed out in monitoredBarrier after 0 ms."
        raise self._late(seconds, late, text)

    def _send(self, rank: int) -> None:
        self._messages.send(self._empty, self._ranks[rank], self._set_id, self._number, own=True).wait()

    def _receive(self, rank: int) -> Transfer:
        return self._messages.receive(
            self._empty, self._ranks[rank], [], self._set_id, self._number, own=True
        )

    def _late(self, seconds: float | None, late: Sequence[int], text: str) -> CollectiveTimeoutError:
        runtime = context.current().runtime
        if runtime.ended is not None:
            return CollectiveTimeoutError(text)
        missing = [self._ranks[rank] for rank in late]
        report = runtime.explain_wait(seconds or 0.0, "monitored_barrier", missing)
        return CollectiveTimeoutError(f"{text}\n{report}")

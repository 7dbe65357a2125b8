"""The values that rank 0 logs during a call: the thread that waits for the call gives them to callbacks."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from pyhvd.job.driver.generation_driver import CallListener

Callbacks = Sequence[Callable[[Any], object]] | None
"""Functions that get each value that rank 0 logs by :func:`pyhvd.job.rank.rank.log` during a call."""
_OVER = object()


class LoggedValues(CallListener):
    """Hears what ranks log, in the thread that serves them; of elastic ranks it is the listener."""

    _values: queue.SimpleQueue[Any] | None = None  # of the running call

    def take_answer(self, rank: int, result: bytearray) -> None:
        """Do nothing: elastic ranks do not answer."""

    def take_logged(self, rank: int, data: bytes) -> None:
        """See :meth:`CallListener.take_logged`."""
        self.note(rank, pickle.loads(data))

    def note(self, rank: int, value: Any) -> None:
        """Keep a value for the callbacks."""
        values = self._values
        if rank == 0 and values is not None:
            values.put(value)

    def wait(self, answers: Sequence[Future[Any]], callbacks: Callbacks) -> None:
        """Wait until all answers are there, or have failed; meanwhile call the callbacks in this thread."""
        values = self._values = queue.SimpleQueue()
        for answer in answers:
            answer.add_done_callback(lambda _: values.put(_OVER))
        try:
            for _ in answers:
                while (value := values.get()) is not _OVER:
                    for callback in callbacks or ():
                        callback(value)
        finally:
            self._values = None

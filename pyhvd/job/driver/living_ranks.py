"""Ranks that live from one call to the next: a thread serves their job, and any thread may call.

Invariants
----------
1. Only the serving thread touches the driver. Other threads post functions to it, and wake it.
2. Each rank answers its calls in their order. So the oldest future of a rank gets its next answer.
3. Every future gets a result or an exception. When the job is over, those that are left get its error.
4. The first failure ends all ranks, as others may wait for the failed one in a collective.
"""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from pyhvd.job.driver.agent_source import CommandSource
from pyhvd.job.driver.generation_driver import STOP_S, GenerationDriver, ending
from pyhvd.job.driver.logged_values import Callbacks, LoggedValues
from pyhvd.job.errors import LaunchError
from pyhvd.job.rank.call import as_function_errors, load_result
from pyhvd.job.rank.pickles import dump_functions

Answer = Future[bytearray]
"""Gets the pickled result of one rank's call."""


class _EndRanks(Exception):
    """The ranks shall end at once."""


class LivingRanks:
    """The ranks of one job, which live until :meth:`end`, a failure, or the end of this process.

    Parameters
    ----------
    driver : GenerationDriver
        Of a job whose code is a first call; see :data:`pyhvd.job.agent.rank_process.RANK_OF_CALLS`.
    source : CommandSource
        The driver's. Its agents stay for the next job after a good end, if it has where to keep them.
    on_end : callable
        Called in the serving thread when the job is over, with its error or None.
    take_lost : callable
        Returns the hosts that are lost, and why, which their agents may not have told yet; each once.
    """

    def __init__(
        self,
        driver: GenerationDriver,
        source: CommandSource,
        on_end: Callable[[BaseException | None], object] = lambda _: None,
        take_lost: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.size = source.size
        self._driver = driver
        self._source = source
        self._logged = LoggedValues()
        self._on_end = on_end
        self._take_lost = take_lost
        self._lock = threading.Lock()
        self._posted: deque[Callable[[], object]] = deque()
        self._waiting: list[deque[Answer]] = [deque() for _ in range(self.size)]
        self._error: BaseException | None = None
        self._over = False
        self._end_by: float | None = None
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        driver.listener = self
        driver.each_step = self._check
        driver.selector.register(self._wake, selectors.EVENT_READ, self._take_posted)
        self._thread = threading.Thread(target=self._serve, name="pyhvd.job.living", daemon=True)

    def begin(self) -> list[bytearray]:
        """Start the ranks, and return the answers to their first call."""
        answers = self._expect(range(self.size))
        self._thread.start()
        return self.results(answers)

    def call(self, code: bytes, ranks: Iterable[int] | None = None) -> list[Answer]:
        """Let some ranks, or all, make another call; return a future for each.

        Raises
        ------
        LaunchError
            The ranks have ended; the cause is their failure, if there was one.
        """
        chosen = list(range(self.size) if ranks is None else ranks)
        with self._lock:
            if self._over:
                why = "" if self._error is None else f", as an earlier call has failed: {self._error}"
                raise LaunchError(f"the ranks have ended{why}; start new ones") from self._error
            answers = self._expect(chosen)
            self._post(lambda: self._driver.call(code, chosen))
        return answers

    def run(self, call: Any, ranks: Iterable[int] | None = None, callbacks: Callbacks = None) -> list[Any]:
        """Let some ranks, or all, call a function; return its results in the order of the ranks.

        Parameters
        ----------
        call : tuple
            The function, its args and its kwargs.
        ranks : iterable of int, optional
            The ranks.
        callbacks : sequence of callable, optional
            They get what rank 0 logs; an exception of one ends all ranks.
        """
        answers = self.call(dump_functions(call), ranks)
        if callbacks:
            try:
                self._logged.wait(answers, callbacks)
            except BaseException:
                self.end(now=True)
                raise
        results = self.results(answers)
        return [load_result(rank, answer) for rank, answer in enumerate(results)]

    def results(self, answers: Sequence[Answer]) -> list[bytearray]:
        """Wait for answers, and return them; end all ranks if this thread is interrupted."""
        try:
            wait(answers, return_when=FIRST_EXCEPTION)
        except BaseException:  # Ctrl-C: what the ranks run cannot be cancelled
            self.end(now=True)
            raise
        failed = next((each for each in answers if each.done() and each.exception() is not None), None)
        if failed is not None:
            failed.result()
        return [answer.result() for answer in answers]

    def end(self, *, now: bool = False) -> None:
        """End the ranks after their calls, which have 5 s for that, or `now`; wait until they are gone."""

        def end() -> None:
            if now:
                raise _EndRanks
            self._end_by = time.monotonic() + STOP_S
            self._driver.call(b"", range(self.size))

        with self._lock:
            self._post(end)
        if self._thread.ident is not None:
            self._thread.join()

    # ---- in the serving thread

    def take_answer(self, rank: int, result: bytearray) -> None:
        """See :meth:`CallListener.take_answer`."""
        self._waiting[rank].popleft().set_result(result)

    def take_logged(self, rank: int, data: bytes) -> None:
        """See :meth:`CallListener.take_logged`."""
        self._logged.take_logged(rank, data)

    def _serve(self) -> None:
        error: BaseException | None = None
        try:
            with as_function_errors(), ending(self._driver):
                self._driver.serve()
                if self._source.kept is not None:
                    self._source.keep_agents()
        except _EndRanks:
            pass
        except BaseException as exc:
            error = exc
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        with self._lock:
            self._over, self._error = True, error
            os.close(self._waker)
            os.close(self._wake)
        left = error or LaunchError("the ranks have ended before they answered this call")
        for waiting in self._waiting:
            while waiting:
                waiting.popleft().set_exception(left)
        self._on_end(error)

    def _expect(self, ranks: Iterable[int]) -> list[Answer]:
        """Return futures for the next calls of ranks."""
        answers: list[Answer] = []
        for rank in ranks:
            answers.append(Future())
            self._waiting[rank].append(answers[-1])
        return answers

    def _post(self, function: Callable[[], object]) -> None:
        """Let the serving thread call a function, unless the job is over; the lock is held."""
        if not self._over:
            self._posted.append(function)
            if len(self._posted) == 1:
                os.write(self._waker, b"x")

    def _take_posted(self) -> None:
        os.read(self._wake, 4096)
        with self._lock:
            posted, self._posted = self._posted, deque()
        for function in posted:
            function()

    def _check(self, now: float) -> None:
        for host, why in self._take_lost().items():
            self._driver.lose_host(host, why)
        if self._end_by is not None and now > self._end_by:
            raise _EndRanks

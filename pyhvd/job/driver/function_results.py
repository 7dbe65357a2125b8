"""What the ranks' functions have returned, or how they failed."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any

from pyhvd.errors import RankFailedError, RemoteError
from pyhvd.job.driver.generation_driver import GenerationDriver
from pyhvd.job.errors import LaunchError, RankError
from pyhvd.job.rank.call import load_result


def take_results(driver: GenerationDriver) -> list[Any]:
    """Return the results in rank order, after the job; only once."""
    return [load_result(rank, driver.take_result(rank)) for rank in range(len(driver.placements))]


@contextlib.contextmanager
def as_function_errors() -> Iterator[None]:
    """Raise the failure of a job as the error of its functions, with its cause."""
    try:
        yield
    except RankError as exc:
        error = _error_of(exc)
        raise error from error.__cause__


def _error_of(failure: RankError) -> Exception:
    text = str(failure).removeprefix("pyhvd: ")
    if failure.rank < 0:
        return LaunchError(text)
    error = RankFailedError(text, failure.rank, failure.host)
    error.__cause__ = RemoteError(failure.rank, failure.traceback) if failure.traceback else None
    if failure.exception:
        with contextlib.suppress(Exception):  # what is imported here may be another than there
            cause = pickle.loads(failure.exception)
            cause.__cause__ = error.__cause__
            error.__cause__ = cause
    return error

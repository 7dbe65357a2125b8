"""What pyhvd.spark.run raises beside :class:`pyhvd.errors.RankFailedError`."""

from __future__ import annotations

from collections.abc import Sequence

from pyhvd.errors import HorovodInternalError, exception_text, shorten


class SparkError(HorovodInternalError):
    """The job could not be run in Spark; the text says why and what to do."""


class StartTimeoutError(SparkError):
    """Not all tasks have started in time.

    Attributes
    ----------
    missing : list of int
        The indices of the tasks that never came.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = list(missing)


class JavaNotFoundError(SparkError):
    """There is no Java that Spark runs on."""


class DataError(ValueError):
    """Data cannot be used so; the text names the column, file or folder, and the remedy."""


class UnsupportedLauncherError(ValueError):
    """pyhvd.spark.run has no such way to start ranks; the text says which to use."""


def reason_of(exc: BaseException) -> str:
    """Return the line of an error of Spark's that says most: the end of a Python traceback, if it has one."""
    return shorten(_most_telling(exception_text(exc).strip().splitlines()), between=" ")


def _most_telling(said: Sequence[str]) -> str:
    begins = [
        number for number, line in enumerate(said) if line.endswith("Traceback (most recent call last):")
    ]
    if begins:
        for line in said[begins[-1] + 1 :]:
            if line.strip() and not line[0].isspace():
                return line
    reasons = [line.strip() for line in said if "Error: " in line or "Exception: " in line]
    return (reasons or said)[-1]

"""What pyhvd.spark.run raises beside :class:`pyhvd.errors.RankFailedError`."""

from __future__ import annotations

from collections.abc import Sequence

from pyhvd.errors import HorovodInternalError


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

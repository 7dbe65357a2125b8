"""What pyhvd.spark.run raises beside :class:`pyhvd.errors.RankFailedError`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyhvd.common.text import exception_text, shorten
from pyhvd.job import errors
from pyhvd.job.errors import LaunchError


class SparkError(LaunchError):
    """The job could not be run in Spark; the text says why and what to do."""


class StartTimeoutError(SparkError, errors.StartTimeoutError):
    """Not all tasks have started in time.

    Attributes
    ----------
    missing : list of int
        The indices of the tasks that never came.
    """


@contextmanager
def as_spark_errors() -> Iterator[None]:
    """Raise the errors of the job, which knows no Spark, as those that users of Spark catch."""
    try:
        yield
    except SparkError:
        raise
    except errors.StartTimeoutError as exc:
        raise StartTimeoutError(str(exc), exc.missing) from exc.__cause__
    except LaunchError as exc:
        raise SparkError(str(exc)) from exc.__cause__


class JavaNotFoundError(SparkError):
    """There is no Java that Spark runs on."""


class DataError(ValueError):
    """Data cannot be used so; the text names the column, file or folder, and the remedy."""


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

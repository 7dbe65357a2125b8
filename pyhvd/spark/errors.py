"""The errors of pyhvd.spark, beside :class:`pyhvd.errors.RankFailedError`; imports that may raise one."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from typing import Any

from pyhvd.common.text import describe_import_error, exception_text, shorten
from pyhvd.job import errors
from pyhvd.job.errors import LaunchError


class SparkError(LaunchError):
    """Spark could not run the job; the text says why and what to do."""


class StartTimeoutError(SparkError, errors.StartTimeoutError):
    """Some tasks did not start in time.

    Attributes
    ----------
    missing : list of int
        The indices of the tasks that did not start.
    """


class JavaNotFoundError(SparkError):
    """No Java was found that Spark runs on."""


class DataError(ValueError):
    """Data cannot be used; the text names the column, file or folder, and the remedy."""


def require_columns(names: Collection[str], known: Collection[str]) -> None:
    """Raise DataError if one of these columns does not exist, or if there are none of them."""
    if not names:
        raise DataError(f"no column is chosen: name at least one; there are {', '.join(known)}")
    missing = [name for name in names if name not in known]
    if missing:
        listed = ", ".join(map(repr, missing))
        raise DataError(f"there is no column {listed}; there are {', '.join(known)}")


def needed(module: str) -> Any:
    """Import and return a module of a package that the extra `spark` installs.

    Raises
    ------
    SparkError
        The package cannot be imported here.
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        why = describe_import_error(exc, module.partition(".")[0], "spark")
        raise SparkError(f"pyhvd.spark needs {why}") from None


def reason_of(exc: BaseException) -> str:
    """Return the best line of one of Spark's errors: the end of a Python traceback, if it has one."""
    return shorten(_best_line(exception_text(exc).strip().splitlines()), between=" ")


def _best_line(lines: Sequence[str]) -> str:
    begins = [
        number for number, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")
    ]
    if begins:
        for line in lines[begins[-1] + 1 :]:
            if line.strip() and not line[0].isspace():
                return line
    reasons = [line.strip() for line in lines if "Error: " in line or "Exception: " in line]
    return (reasons or lines)[-1]

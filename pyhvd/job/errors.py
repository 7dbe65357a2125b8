"""Errors of starting and running a job. A launcher that users call derives its own errors from them."""

from __future__ import annotations

from collections.abc import Sequence

from pyhvd.errors import HorovodInternalError


class LaunchError(HorovodInternalError):
    """The job cannot start, or failed through no fault of one rank; the text names the remedy."""


class StartTimeoutError(LaunchError):
    """Some processes of the job did not start in time.

    Attributes
    ----------
    missing : list of int
        Indices of the processes that did not start.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = list(missing)


class UnsupportedLauncherError(ValueError):
    """The chosen launcher cannot start the ranks; the text names one that can."""

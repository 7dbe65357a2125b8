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


class RankError(Exception):
    """A rank or a host failed, and ended the job; `code` is the exit code, 1 to 255.

    `exception` is the pickled exception of the rank's function, as far as it could be sent. `parted`: ranks
    have returned while others went on, and would do so again.
    """

    def __init__(self, text: str, code: int, rank: int = -1, host: str = "", traceback: str = "") -> None:
        super().__init__(text)
        self.code = code
        self.rank = rank
        self.host = host
        self.traceback = traceback
        self.exception = b""
        self.parted = False


class Interrupted(Exception):
    """A signal ended the job; the text says where the ranks were, if one of them did."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text)
        self.number = number


class Suspended(Exception):
    """All ranks have left an elastic job, and a later run of the job can go on; the text says from where."""


class MadeRoom(SystemExit):
    """This rank has committed, and ends, so that another generation can begin."""


class UnsupportedLauncherError(ValueError):
    """The chosen launcher cannot start the ranks; the text names one that can."""

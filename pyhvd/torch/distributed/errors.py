"""The errors of collectives by torch.distributed: pyhvd's own, as torch's programs expect them."""

from __future__ import annotations

from typing import Any

from torch.distributed import DistBackendError

from pyhvd.errors import HorovodInternalError


class CollectiveError(DistBackendError):
    """A collective failed; the cause is pyhvd's error, and the text is its text."""

    @classmethod
    def of(cls, cause: HorovodInternalError) -> CollectiveError:
        """Return the error for an error of pyhvd's."""
        error = cls(str(cause))
        error.__cause__ = cause
        return error


class CollectiveTimeoutError(CollectiveError):
    """A collective did not end within its timeout."""

    @classmethod
    def late(cls, handle: Any, seconds: float, report: str) -> CollectiveTimeoutError:
        """Return the error for a handle that has not ended; ``report`` says who is missing."""
        return cls(f"{handle.name!r} has not ended within its timeout of {seconds:g} s{report}")

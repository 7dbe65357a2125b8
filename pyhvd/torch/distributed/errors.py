"""The errors of collectives by torch.distributed: pyhvd's own, as torch's programs expect them."""

from __future__ import annotations

from typing import Any

from torch.distributed import DistBackendError

from pyhvd.engine import context
from pyhvd.errors import HorovodInternalError


class CollectiveError(DistBackendError):
    """A collective failed; the cause is pyhvd's error, and the text is its text."""

    @classmethod
    def of(cls, cause: HorovodInternalError) -> CollectiveError:
        """Return the error for an error of pyhvd's."""
        error = cls(str(cause))
        error.__cause__ = cause
        return error

    @classmethod
    def at_submission(cls, cause: HorovodInternalError) -> Exception:
        """Return what a call raises that was not submitted: pyhvd's own error if the arguments are wrong."""
        return cause if isinstance(cause, ValueError) else cls.of(cause)


class CollectiveTimeoutError(CollectiveError):
    """A collective did not end within its timeout."""

    @classmethod
    def late(cls, handle: Any, seconds: float | None) -> CollectiveTimeoutError:
        """Return the error for a handle that has not ended, with the report of who is missing.

        The collective may still end; then nobody wants its error.
        """
        text = f"{handle.name!r} has not ended within its timeout of {seconds:g} s"
        runtime = context.current().runtime
        waits_for = getattr(handle, "waits_for", [])  # of a send or receive, of which no other rank knows
        if runtime.ended is None:
            report = runtime.explain_wait(seconds or 0.0, handle.name if waits_for else "", waits_for)
            text = f"{text}\n{report}"
        if not waits_for:
            handle.add_done_callback(lambda ended: ended.exception())
        return cls(text)

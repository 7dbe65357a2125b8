"""The error taxonomy.

Four kinds, told apart by type: you misused the API (``ValueError`` family), the ranks disagree
(:class:`MismatchError`), the world broke (:class:`RankFailedError`, :class:`ShutDownError`,
:class:`TransportError`, :class:`StallError`), or pyhvd itself is wrong (:class:`InternalError`).
Everything that ends a collective derives from :class:`HorovodInternalError`, which is what Horovod's
users catch.
"""

from __future__ import annotations

from collections.abc import Mapping


class HorovodInternalError(RuntimeError):
    """Base of the errors that end a collective; the name is Horovod's."""


class NotInitializedError(ValueError, HorovodInternalError):
    """pyhvd was used before ``init()``, after ``shutdown()``, or in a forked child."""


class UnsupportedDtypeError(ValueError):
    """The array's dtype cannot travel, or does not support the requested reduce op."""


class UnsupportedOpError(ValueError, HorovodInternalError):
    """The operation does not have this reduce op (Horovod raises HorovodInternalError here)."""


class DuplicateNameError(ValueError):
    """A tensor of this name is still in flight on this rank."""


class MismatchError(HorovodInternalError):
    """The ranks submitted different things under one name.

    Attributes
    ----------
    name : str
        The tensor.
    per_rank : dict of int to str
        What each rank submitted, as text, by global rank.
    """

    def __init__(self, message: str, name: str = "", per_rank: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.per_rank: dict[int, str] = dict(per_rank or {})


class RankFailedError(HorovodInternalError):
    """Another rank failed, or refused this tensor; ``rank`` says which.

    Where the other rank's traceback is known, it is chained as ``__cause__``.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class ShutDownError(HorovodInternalError):
    """pyhvd was shut down while, or before, this tensor was submitted; ``rank`` asked for it."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class StallError(HorovodInternalError):
    """A tensor waited longer than the stall shutdown time.

    Attributes
    ----------
    missing : dict of str to list of int
        For each stalled tensor, the global ranks that have not submitted it.
    stacks : dict of int to str
        Python stacks of missing ranks, where known.
    """

    def __init__(
        self,
        message: str,
        missing: Mapping[str, list[int]] | None = None,
        stacks: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.missing = dict(missing or {})
        self.stacks = dict(stacks or {})


class TransportError(HorovodInternalError):
    """MPI, or another carrier of bytes, reported an error."""


class InternalError(HorovodInternalError):
    """An invariant of pyhvd's own was broken; please report it."""


class ConfigError(ValueError):
    """A configuration value cannot be parsed or is out of range; the text names the variable."""


class TimelineError(ValueError):
    """A timeline cannot be written; the text names the rank, its path and the cause."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed (elastic training)."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A library differs in version from the one that pyhvd was built for."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"built with {name} {version}, but {installed_version} is installed")
        self.name = name
        self.version = version
        self.installed_version = installed_version


def describe_exception(exc: BaseException) -> str:
    """Return an exception's kind and text in one line."""
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__

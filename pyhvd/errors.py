"""The public exceptions.

There are four kinds:

1. The program misuses the API: subclasses of ``ValueError``.
2. The ranks disagree: :class:`MismatchError`.
3. A rank, a process or a transport fails: :class:`RankFailedError`, :class:`ShutDownError`,
   :class:`TransportError`, :class:`StallError`, :class:`CorruptionError`.
4. pyhvd has a bug: :class:`InternalError`.

Every error that ends a collective derives from :class:`HorovodInternalError`, as Horovod's users expect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def copy_error(error: E) -> E:
    """Return an equal error without a traceback.

    What keeps an error and raises it many times raises copies: a raised error refers to the frames that it
    has passed, hence to their variables.
    """
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    made.__cause__ = error.__cause__
    made.__suppress_context__ = error.__suppress_context__
    return made


class HorovodInternalError(RuntimeError):
    """Base of the errors that end a collective; the name is Horovod's."""


class NotInitializedError(ValueError, HorovodInternalError):
    """pyhvd was used before ``init()``, after ``shutdown()``, or in a child of a rank."""


class UnsupportedDtypeError(ValueError):
    """The array's dtype cannot be sent, or does not support the reduce op."""


class UnsupportedOpError(ValueError, HorovodInternalError, NotImplementedError):
    """The operation does not support this reduce op, or not for this number of ranks.

    Horovod raises HorovodInternalError in the first case and NotImplementedError in the second.
    """


class UnsupportedShapeError(ValueError, HorovodInternalError):
    """The operation divides or joins dimension 0, and the array is 0-d.

    Horovod raises HorovodInternalError.
    """


class DuplicateNameError(ValueError):
    """A tensor of this name is still in flight on this rank."""


@dataclass(frozen=True, slots=True)
class RankValue:
    """One rank's part in a mismatch.

    Attributes
    ----------
    rank : int
        The global rank.
    host : str
        The rank's host.
    value : str
        The differing part of its submission: a shape, a dtype, ...
    site : str
        The line of the program that submitted it, as ``"train.py:41 in step"``; empty if unknown. For a
        cached tensor it is the line of the submission that put it into the cache.
    """

    rank: int
    host: str
    value: str
    site: str = ""

    def __str__(self) -> str:
        return self.value


class MismatchError(HorovodInternalError):
    """The ranks submitted different things under one name.

    Attributes
    ----------
    name : str
        The tensor.
    per_rank : dict of int to RankValue
        Each rank's submission, by global rank.
    """

    def __init__(self, message: str, name: str = "", per_rank: Mapping[int, RankValue] | None = None) -> None:
        super().__init__(message)
        self.name = name
        self.per_rank: dict[int, RankValue] = dict(per_rank or {})


class CorruptionError(HorovodInternalError):
    """The ranks have different results of one collective (found with PYHVD_CHECK=1).

    Attributes
    ----------
    name : str
        The tensor.
    ranks : list of int
        The global ranks that differ from the majority; all ranks if there is no majority.
    per_rank : dict of int to str
        Each rank's value of the first element that differs, by global rank.
    """

    def __init__(
        self,
        message: str,
        name: str = "",
        ranks: Sequence[int] = (),
        per_rank: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.name = name
        self.ranks = list(ranks)
        self.per_rank: dict[int, str] = dict(per_rank or {})


class RankFailedError(HorovodInternalError):
    """Another rank failed, or refused this tensor; ``rank`` says which, and ``host`` where if that is known.

    If the other rank's traceback is known, ``__cause__`` is a :class:`RemoteError` with it.
    :func:`pyhvd.launch` sets ``__cause__`` to the rank's own exception, if that can be sent.
    """

    def __init__(self, message: str, rank: int = -1, host: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.host = host


class RemoteError(Exception):
    """The exception of another rank, as text; the ``__cause__`` of a :class:`RankFailedError`.

    Attributes
    ----------
    rank : int
        The other rank.
    traceback : str
        Its traceback; the middle of a long one is cut out.
    """

    def __init__(self, rank: int, traceback: str) -> None:
        super().__init__(rank, traceback)
        self.rank = rank
        self.traceback = traceback

    def __str__(self) -> str:
        lines = self.traceback.rstrip().splitlines()
        return "\n".join([f"on rank {self.rank}:", *(f"  | {line}" for line in lines)])


class ShutDownError(HorovodInternalError):
    """pyhvd was shut down before this tensor was done; ``rank`` asked for the shutdown."""

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
        For each missing rank (the first few of many) the stacks of its threads, or why they are unknown.
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


class WithdrawnError(HorovodInternalError):
    """The ranks that have submitted this tensor have it back as it was, and submit it again later.

    It ends only what pyhvd itself submits, and reaches no program.
    """


class TransportError(HorovodInternalError):
    """MPI, or another transport, reported an error."""


class InternalError(HorovodInternalError):
    """An invariant of pyhvd does not hold; please report it."""

    @classmethod
    def unreadable(cls, rank: int, what: str, nbytes: int, why: Exception) -> InternalError:
        """Return the error for a message of another rank that cannot be decoded."""
        return cls(
            f"rank {rank} sent {what} of {nbytes} bytes that cannot be read ({why}): install the same pyhvd"
            " on every rank"
        )


class ConfigError(ValueError):
    """A configuration value cannot be parsed or is out of range; the text names the variable."""


class TimelineError(ValueError):
    """A timeline cannot be written; the text names the rank, its path and the cause."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed (elastic training)."""

    def __init__(self, skip_sync: bool = False) -> None:  # noqa: FBT001, FBT002 - Horovod's
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """The installed version of a library is not the one that pyhvd was built for."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"built with {name} {version}, but {installed_version} is installed")
        self.name = name
        self.version = version
        self.installed_version = installed_version

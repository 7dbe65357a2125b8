"""What a rank says when it fails, and which of many such records is the cause."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

# Kinds, in the order in which they explain a failed job: a rank's own error, or its death, explains all; an
# interrupt explains what follows from it; a secondary error only says that another rank failed; a rank that
# vanished without a word may just have been ended along with the job.
EXCEPTION = "exception"
EXIT = "exit"
SIGNAL = "signal"
INTERRUPT = "interrupt"
SECONDARY = "secondary"
LOST = "lost"
# Not a failure: what to say should the rank end without another word; an empty one takes it back.
TENTATIVE = "doubt"
# Nor this: pyhvd is up in the rank (code 1), or is no more (code 0).
UP = "up"
_EXPLAINS = {EXCEPTION: 0, EXIT: 0, SIGNAL: 0, INTERRUPT: 1, SECONDARY: 2, LOST: 3}

# Raised on a rank because another rank failed or left (pyhvd.errors); known by name, to import nothing.
_SECONDARY_NAMES = {"RankFailedError", "ShutDownError"}


@dataclass(frozen=True)
class ExitReport:
    """How one rank ended, when it did not end well.

    Attributes
    ----------
    rank : int
        The rank.
    kind : str
        One of the kinds above.
    code : int
        The exit code the job should have if this is the cause.
    text : str
        What to print, ready.
    when : float
        Wall-clock time of the failure (the only clock that hosts share).
    """

    rank: int
    kind: str
    code: int
    text: str
    when: float = field(default_factory=time.time)

    def dump(self) -> bytes:
        """One line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def load(cls, line: bytes) -> ExitReport:
        """The record that :meth:`dump` wrote."""
        return cls(**json.loads(line))


def root_cause(records: Iterable[ExitReport]) -> ExitReport | None:
    """The record that explains the others: the most telling kind, then the earliest."""
    return min(records, key=lambda record: (_EXPLAINS[record.kind], record.when), default=None)


def is_secondary(exc: BaseException) -> bool:
    """Whether `exc` was raised only because another rank failed or shut down."""
    seen: set[int] = set()
    link: BaseException | None = exc
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if any(
            base.__name__ in _SECONDARY_NAMES and base.__module__.startswith("pyhvd")
            for base in type(link).__mro__
        ):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False

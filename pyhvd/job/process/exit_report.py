"""How a rank reports its end, and which of several reports is the cause."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

# The kinds of failures, by how well they explain a failed job:
# 1. a rank's own error, exit or death explains all others;
# 2. an interrupt explains what follows from it;
# 3. a secondary error only says that another rank failed;
# 4. a lost rank reported nothing, and may have been ended together with the job.
EXCEPTION = "exception"
EXIT = "exit"
SIGNAL = "signal"
INTERRUPT = "interrupt"
SECONDARY = "secondary"
LOST = "lost"
_ORDER = {EXCEPTION: 1, EXIT: 1, SIGNAL: 1, INTERRUPT: 2, SECONDARY: 3, LOST: 4}
# No failure yet: the text to show if the rank ends without a further report. An empty text withdraws it.
TENTATIVE = "tentative"
# No failure: pyhvd has started in the rank (code 1), or shut down (code 0).
UP = "up"

# Errors of pyhvd.errors that a rank raises because another rank failed or left; named, to import nothing.
_SECONDARY_NAMES = {"RankFailedError", "ShutDownError"}


@dataclass(frozen=True)
class ExitReport:
    """How one rank ended, unless it ended without error.

    Attributes
    ----------
    kind : str
        One of the kinds above.
    code : int
        The job's exit code if this report is the cause.
    text : str
        The text to print; inside Spark as it follows "rank 1 ".
    when : float
        Wall-clock time of the failure, as hosts share no other clock.
    traceback : str
        The rank's own, if the text does not contain it.
    """

    rank: int
    kind: str
    code: int
    text: str
    when: float = field(default_factory=time.time)
    traceback: str = ""

    def dump(self) -> bytes:
        """Return the report as a line of JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def load(cls, line: bytes) -> ExitReport:
        """Return the report that :meth:`dump` wrote."""
        return cls(**json.loads(line))


def root_cause(reports: Iterable[ExitReport]) -> ExitReport | None:
    """Return the report that explains the others: the best kind, then the earliest."""
    return min(reports, key=lambda report: (_ORDER[report.kind], report.when), default=None)


def is_secondary(exc: BaseException) -> bool:
    """Return whether `exc` was raised only because another rank failed or shut down."""
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

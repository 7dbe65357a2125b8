"""How a rank reports its end, and which of several reports is the cause."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from pyhvd.job.process.signals import describe_exit, shell_code

# The kinds of failures, by how well they explain a failed job:
# 1. a rank's own error, exit or death explains all others;
# 2. an interrupt explains what follows from it;
# 3. a secondary error only says that another rank failed; or, in an elastic job, that one has returned while
#    this one went on (parted): the ranks of the next generation would do the same;
# 4. a lost rank reported nothing, and may have been ended together with the job;
# 5. Open MPI ended the rank, or mpiexec ended, as it does when any rank or host fails.
EXCEPTION = "exception"
EXIT = "exit"
SIGNAL = "signal"
INTERRUPT = "interrupt"
SECONDARY = "secondary"
PARTED = "parted"
LOST = "lost"
ENDED = "ended"
_ORDER = {EXCEPTION: 1, EXIT: 1, SIGNAL: 1, INTERRUPT: 2, SECONDARY: 3, PARTED: 3, LOST: 4, ENDED: 5}

# Errors of pyhvd.errors that a rank raises because another rank failed or left; named, to import nothing.
_SHUT_DOWN = "ShutDownError"
_SECONDARY_NAMES = {"RankFailedError", _SHUT_DOWN}


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
    titled : bool
        Whether the text names the rank and its host.
    """

    rank: int
    kind: str
    code: int
    text: str
    when: float = field(default_factory=time.time)
    traceback: str = ""
    titled: bool = False

    @property
    def follows_another(self) -> bool:
        """Whether the rank failed only because another one had failed or left."""
        return self.kind in (SECONDARY, PARTED)


def root_cause(reports: Iterable[ExitReport]) -> ExitReport | None:
    """Return the report that explains the others: the best kind, then the earliest."""
    return min(reports, key=lambda report: (_ORDER[report.kind], report.when), default=None)


def describe_unreported(code: int, tentative: str, crash: tuple[str, str] = ("", "")) -> tuple[str, int, str]:
    """Return kind, exit code and text for a rank that ended, and failed, without a report of its own.

    Parameters
    ----------
    code : int
        How the rank's process ended; the negative number of a signal.
    tentative : str
        The last text that it told in case it ends without a report.
    crash : tuple of str
        What :func:`pyhvd.job.process.crash.describe_crash` found.
    """
    where, quoted = crash
    text = describe_exit(code, where)
    if code < 0:
        return SIGNAL, shell_code(code), f"{text}; {quoted}" if quoted else text
    if tentative:
        return EXIT, 1, f"{text}: {tentative}"
    if code:
        return EXIT, code, f"{text}, without a Python exception"
    return (
        EXIT,
        1,
        f"{text} while pyhvd was up, without its exit handlers (as os._exit does):"
        " the other ranks still counted on it; call pyhvd.shutdown() first",
    )


def kind_of(exc: BaseException, rank: int) -> str:
    """Return the kind of a rank's uncaught exception that is no request to end."""
    if type(exc).__name__ == _SHUT_DOWN and getattr(exc, "rank", rank) not in (-1, rank):
        return PARTED
    return SECONDARY if is_secondary(exc) else EXCEPTION


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

"""The user's side of a job: the launcher's own lines, and a terminal's status line, stdin and signals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from selectors import BaseSelector

from pyhvd.job.connections import Peer
from pyhvd.job.driver.input import InputReader
from pyhvd.job.driver.status_line import StatusLine
from pyhvd.job.messages import FromDriver, Input

_log = logging.getLogger("pyhvd")


@dataclass(frozen=True)
class Console:
    """The user's side of a job.

    Attributes
    ----------
    say : callable
        Shows a line about how the job goes.
    warn : callable
        Shows a line that the user must see.
    terminal : Terminal or None
        That of pyhvdrun; None if a program has started the job, whose signals and stdin are its own.
    """

    say: Callable[[str], None]
    warn: Callable[[str], None]
    terminal: Terminal | None = None


def log_warning(text: str) -> None:
    """Log a line of a job that a program has started."""
    _log.warning("%s", text.removeprefix("pyhvd: "))


@dataclass
class Terminal:
    """Stdin, signals and the status line of pyhvdrun, for one set of ranks.

    Attributes
    ----------
    status : StatusLine
        Shows how far the start has come.
    reads : bool
        Whether rank 0 gets what comes from stdin, descriptor 0.
    signals : list of int
        Signals for the ranks that nobody has passed on yet; a signal handler may append.
    """

    status: StatusLine
    reads: bool = True
    signals: list[int] = field(default_factory=list)
    _input: InputReader | None = None

    def step(self, describe_start: Callable[[float], str], now: float) -> None:
        """Do what is due: show how far the start has come, and look for input."""
        if self._input is not None:
            self._input.check()
        if self.status.over:
            return
        if text := describe_start(now):
            self.status.show(text)
        else:
            self.status.end()

    def input_for(self, peer: Peer, selector: BaseSelector) -> Iterator[FromDriver]:
        """Begin to read stdin for rank 0; the feed of its agent does so after the rank has been started."""
        if self.reads:
            self._input = InputReader(0, selector, lambda data: peer.send(Input(data)))
        else:
            yield Input(b"")

    def acknowledge_input(self, count: int) -> None:
        """Note that rank 0 has taken bytes."""
        if self._input is not None:
            self._input.acknowledge(count)

    def close(self) -> None:
        """Read no more input."""
        if self._input is not None:
            self._input.close()

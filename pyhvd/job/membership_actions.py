"""What the driver of an elastic job is told to do, by :mod:`pyhvd.job.membership`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from pyhvd.job.roster import Place


@dataclass(frozen=True)
class StartAgent:
    """Start the agent of a host; the answer is agent_up or agent_failed."""

    host: str


@dataclass(frozen=True)
class EndAgent:
    """End the agent of a host, or its start."""

    host: str


@dataclass(frozen=True)
class StartGeneration:
    """Start ranks in these places, in the order of ranks."""

    number: int
    places: tuple[Place, ...]


@dataclass(frozen=True)
class AskToLeave:
    """Ask all ranks to make room for the generation of this number."""

    number: int


@dataclass(frozen=True)
class EndGeneration:
    """Kill all ranks; the answer is that the generation has left, or has failed."""


@dataclass(frozen=True)
class GiveUp:
    """The job has failed: end all agents."""

    error: Exception


@dataclass(frozen=True)
class Finish:
    """All ranks have returned: end all agents."""


@dataclass(frozen=True)
class Say:
    """Show a line of the driver's own."""

    text: str


Action = StartAgent | EndAgent | StartGeneration | AskToLeave | EndGeneration | GiveUp | Finish | Say

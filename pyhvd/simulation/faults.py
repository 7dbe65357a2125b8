"""Faults of a simulated cluster, and who hears of them: hosts with links to a lost one, and the launcher.

Between hosts, silence is seen and notes are passed on as ``agreement.h`` says.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pyhvd.job.process.exit_report import SECONDARY, SIGNAL, ExitReport

if TYPE_CHECKING:
    from pyhvd.simulation.launcher import Launcher
    from pyhvd.simulation.world import SimulatedWorld

_NOTE_BYTES = 600
_BEAT_S, _SILENT_S, _LOOK_S = 1.0, 5.0, 0.25
"""Between hosts: PYHVD_BEAT_NS, PYHVD_SILENT_NS and PYHVD_BEAT_LOOK_NS."""
_ITSELF = -1
LOST, KILLED = "lost", "killed"
"""The errors of ranks that are lost with their host, or killed."""


@dataclass(frozen=True)
class HostLost:
    """A host is lost at a time (s).

    Attributes
    ----------
    host : int
        The host.
    at : float
        When.
    silent : bool
        Whether it is frozen, cut off or without power, so that others see nothing but silence. Otherwise its
        connections close, as when its processes are killed or it starts again.
    """

    host: int
    at: float
    silent: bool = False


@dataclass(frozen=True)
class RankKilled:
    """A rank is killed at a time (s)."""

    rank: int
    at: float


Fault = HostLost | RankKilled


class Faults:
    """Carries out faults, and lets the survivors notice.

    Parameters
    ----------
    world : SimulatedWorld
        The cluster.
    launcher : Launcher
        The job's launcher.
    faults : sequence of Fault
        What happens.
    seed : int
        Of the beats' phases.

    Attributes
    ----------
    noticed : list of float
        When a host, an agent or the launcher noticed a fault by itself, in the order of time.
    """

    def __init__(self, world: SimulatedWorld, launcher: Launcher, faults: Sequence[Fault], seed: int) -> None:
        self.noticed: list[float] = []
        self._world = world
        self.launcher, self.faults = launcher, faults
        self._random = random.Random(seed)
        self._notes: dict[int, int] = {}  # by host, the host that its first note was about
        for fault in faults:
            if isinstance(fault, HostLost):
                name, number, count = "host", fault.host, world.hosts
            else:
                name, number, count = "rank", fault.rank, world.size
            if not 0 <= number < count:
                raise ValueError(f"{fault}: there are {name}s 0 to {count - 1}")
            happen = self._lose if isinstance(fault, HostLost) else self._kill
            world.clock.at(fault.at, happen, fault)

    # -- faults

    def _lose(self, fault: HostLost) -> None:
        world, clock = self._world, self._world.clock
        if fault.host in world.wires.lost:
            return
        world.wires.lose(fault.host)
        for rank in world.ranks_of(fault.host):
            world.end(world.ranks[rank], LOST)
        for other in world.neighbours_of(fault.host):
            clock.at(self._seen_at(fault, _BEAT_S, _SILENT_S), self._note, other, fault.host, _ITSELF)
        beat_s, silent_s = self.launcher.beat_s, self.launcher.silent_s
        clock.at(self._seen_at(fault, beat_s, silent_s), self._tell_launcher, fault)

    def _seen_at(self, fault: HostLost, beat_s: float, silent_s: float) -> float:
        """Return when another host sees the loss, which counts silence from the last beat's arrival."""
        if not fault.silent:
            return fault.at + self._world.network.latency
        last = fault.at - self._random.uniform(0.0, beat_s) + self._world.network.latency
        return last + silent_s + self._random.uniform(0.0, _LOOK_S)

    def _tell_launcher(self, fault: HostLost) -> None:
        self.noticed.append(self._world.clock.now)
        self.launcher.process.call(partial(self.launcher.lose_agent, fault.host, waited=fault.silent))

    def _kill(self, fault: RankKilled) -> None:
        if self._end(fault.rank, KILLED, SIGNAL, 137, "was killed by SIGKILL"):
            self.noticed.append(self._world.clock.now)

    def _end(self, rank: int, error: str, kind: str, code: int, text: str) -> bool:
        """End a rank with an error, and let its agent report it; return False if the rank is gone already."""
        world, host = self._world, self._world.host_of(rank)
        if host in world.wires.lost or world.ranks[rank].error:
            return False
        world.end(world.ranks[rank], error)
        self.launcher.report(host, ExitReport(rank, kind, code, text, world.clock.now))
        return True

    # -- between hosts with links

    def _note(self, host: int, lost: int, source: int) -> None:
        """Let a host hear that another one is lost; it tells its neighbours once."""
        world = self._world
        if host in world.wires.lost or host in self._notes:
            return
        self._notes[host] = lost
        if source == _ITSELF:
            self.noticed.append(world.clock.now)
        for other in world.neighbours_of(host):
            if other != source:
                world.wires.send(
                    ("note", host, other), (host, other), _NOTE_BYTES, world.clock.now,
                    self._note, other, lost, host,
                )  # fmt: skip
        first = lost * world.local_ranks
        ranks = f"ranks {first}-{first + world.local_ranks - 1}"
        text = f"the connection to host {world.name_of(lost)} ({ranks}) has failed"
        raised = SECONDARY, 1, f"RankFailedError: {text}"
        for rank in world.ranks_of(host):
            world.clock.after(world.network.wake, self._end, rank, text, *raised)

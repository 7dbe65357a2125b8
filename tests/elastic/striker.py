"""Faults of an elastic job from outside, at random moments.

1. A host is struck only while the other one holds the state too. No host is struck at once after a rank: that
   rank's host may be left out, as three of its ranks have failed.
2. After a fault that ends a generation, or two that follow each other at once, the next one waits for a step.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.elastic.plans import BRIEF, MILD, OF_HOSTS, Plan
from tests.elastic.running import HangError, RunningJob, kill
from tests.hosts.sshd import Site

_PROGRESS_S = 60.0
_STOPPED_S = 1.0
_PAUSE_S = 0.4  # before a fault, at most
_BETWEEN_S = 0.6  # between two that follow each other at once


@dataclass
class Strike:
    """A fault that was made.

    Attributes
    ----------
    kind : str
        Of the fault.
    time : float
        When.
    generation : int
        In which generation.
    mild : bool
        Whether the ranks may go on in this generation.
    """

    kind: str
    time: float
    generation: int
    mild: bool = False


def strike_host(site: Site, kind: str, name: str) -> Callable[[], None]:
    """Let a host fail; return a function that makes it whole again."""
    host = site.bed.hosts[name]
    if kind == "crash":
        host.crash()
        return lambda: site.restart(host)
    if kind == "freeze":
        host.freeze()
        return host.thaw
    if kind == "no power":
        site.bed.power_off(host)
        return lambda: site.restart(host)
    site.bed.cut_off(host)
    return lambda: site.bed.rejoin(host)


class Striker:
    """Makes the faults of a plan from outside.

    Parameters
    ----------
    job : RunningJob
        The job.
    plan : Plan
        The faults.
    draw : random.Random
        Chooses victims and moments.

    Attributes
    ----------
    made : list of Strike
        The faults that found a victim.
    """

    def __init__(self, job: RunningJob, plan: Plan, draw: random.Random) -> None:
        self._job = job
        self._plan = plan
        self._draw = draw
        self._mend: Callable[[], None] | None = None
        self._lost: Strike | None = None  # the fault of a host that is not whole
        self.made: list[Strike] = []

    def run(self) -> None:
        """Make all faults that find a victim; all hosts are whole afterwards."""
        try:
            after = 0.0
            for group in self._plan.outer:
                if not self._wait_until_allowed(after, len(group)):
                    return
                after = self._strike_group(group)
        finally:
            self._mend_host()

    def _wait_until_allowed(self, after: float, count: int) -> bool:
        """Wait until so many faults may be made, after a step; return whether they still can."""
        while self._wait_for_step(after):
            time.sleep(self._draw.random() * _PAUSE_S)
            generation = self._job.generation
            if self._job.steps(generation=generation) and self._plan.may_strike(generation, count):
                return True
            after = time.time()
        return False

    def _wait_for_step(self, after: float) -> bool:
        """Wait until a step is committed after a time; return whether faults can still be made."""
        job = self._job
        if not job.wait(lambda: job.steps(after), _PROGRESS_S) and not job.has_ended():
            raise HangError(f"no step was committed within {_PROGRESS_S:g} s")
        return not job.has_ended()

    def _strike_group(self, group: Sequence[str]) -> float:
        """Make faults that follow each other at once; return the time of the last."""
        job = self._job
        hosts = self._strikable_hosts()
        generation, host = job.generation, self._draw.choice(hosts) if hosts else ""
        fails = False
        for kind in group:
            strike = Strike(kind, time.time(), job.generation, kind in MILD)
            if self._strike(strike, "" if fails else host):
                self.made.append(strike)
                fails = fails or not strike.mild
            time.sleep(self._draw.random() ** 2 * _BETWEEN_S)
        self._mend_host()
        if fails:  # a step of the generation that the fault has ended may be logged after it
            job.wait(lambda: job.steps(generation=generation + 1), _PROGRESS_S / 4)
        return time.time()

    def _strikable_hosts(self) -> list[str]:
        """Return the hosts of which one may be lost: all of them have ranks, and have committed."""
        lines = self._job.lines
        newest = [line for line in lines if line.kind == "begin"][-1]
        steps = [line for line in lines if line.kind == "step" and line.generation == newest.generation]
        return list(self._job.ground.hosts) if newest.words[3] == "4" and len(steps) > 1 else []

    def _strike(self, strike: Strike, host: str) -> bool:
        """Make one fault; return whether it found a victim."""
        job, kind = self._job, strike.kind
        if kind in OF_HOSTS:
            if host and self._mend is None:
                assert job.ground.site is not None
                self._mend, self._lost = strike_host(job.ground.site, kind, host), strike
                return True
            return False
        victims = self._victims(kind, host)
        if kind == "stop":
            kill(victims, signal.SIGSTOP)
            time.sleep(_STOPPED_S)
            kill(victims, signal.SIGCONT)
        else:
            kill(victims)
        return bool(victims)

    def _victims(self, kind: str, host: str) -> list[int]:
        job = self._job
        if kind == "agent":
            return job.agents(host) if host and self._mend is None else []
        candidates = job.zygotes() if kind == "zygote" else job.ranks()
        if kind == "kill all":
            return candidates
        count = 2 if kind == "kill two" else 1
        return self._draw.sample(candidates, count) if len(candidates) >= count else []

    def _mend_host(self) -> None:
        """Let a host come back, now or after its loss was noticed."""
        job, mend, lost = self._job, self._mend, self._lost
        self._mend = None
        if mend is None or lost is None:
            return
        if not job.has_ended():
            known = job.wait(
                lambda: job.steps(generation=lost.generation + 1), self._draw.choice((1.0, 4.0, 12.0))
            )
            if not known and lost.kind in BRIEF:
                lost.kind, lost.mild = f"{lost.kind} briefly", True
        mend()

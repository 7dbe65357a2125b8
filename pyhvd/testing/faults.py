"""Faults, drawn by a seed: ranks that are late, stopped, killed, or that raise.

For tests of programs that use pyhvd, and of pyhvd itself. A plan is the same on every rank that makes it from
the same seed, so that a test knows whom it will hit. What is hit notices nothing beforehand.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pyhvd.engine import context

Kind = Literal["delay", "stop", "kill", "raise"]


class InjectedFault(RuntimeError):
    """Raised by a fault of the kind ``"raise"``."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes
    ----------
    rank : int
        Whom it hits.
    kind : str
        ``"delay"``: the rank is late; from :meth:`FaultPlan.inject` all of its Python is, because the GIL is
        held. ``"stop"``: SIGSTOP. ``"kill"``: SIGKILL. ``"raise"``: :class:`InjectedFault`.
    when : float
        Seconds after the start of :meth:`FaultPlan.inject`, or the step of :meth:`FaultPlan.strike`.
    seconds : float
        How long a delay or a stop lasts; infinite for a stop that nobody ends.
    """

    rank: int
    kind: Kind
    when: float
    seconds: float = 0.0


class FaultPlan:
    """Faults for some ranks.

    Parameters
    ----------
    seed : int
        The same seed and arguments make the same plan.
    size : int
        Number of ranks.
    kinds : sequence of str
        What may happen; see :class:`Fault`.
    count : int
        How many faults.
    within : float
        Latest time (s), or step.
    seconds : float
        Longest delay or stop; ``math.inf`` lets a stop last for ever.
    spare : collection of int
        Ranks that are not hit.

    Attributes
    ----------
    faults : list of Fault
        In the order of their times.

    Raises
    ------
    ValueError
        A kind is not known, or all ranks are spared.

    Examples
    --------
    >>> from pyhvd.testing import FaultPlan
    >>> plan = FaultPlan(seed=7, size=4, kinds=["kill"], within=1.0, spare=[0])
    >>> [(fault.rank, fault.kind) for fault in plan.faults] == [(plan.faults[0].rank, "kill")]
    True
    """

    def __init__(
        self,
        seed: int,
        size: int,
        *,
        kinds: Sequence[Kind] = ("delay", "stop", "kill"),
        count: int = 1,
        within: float = 1.0,
        seconds: float = 0.05,
        spare: Collection[int] = (),
    ) -> None:
        if unknown := set(kinds) - set(get_args(Kind)):
            raise ValueError(f"faults are {', '.join(get_args(Kind))}, not {', '.join(sorted(unknown))}")
        ranks = [rank for rank in range(size) if rank not in spare]
        if not ranks or not kinds:
            raise ValueError("there is nobody to be hit, or nothing to be hit with")
        draw = random.Random(seed)
        self.faults = sorted(
            (self._draw(draw, ranks, kinds, within, seconds) for _ in range(count)), key=lambda f: f.when
        )

    @staticmethod
    def _draw(
        draw: random.Random, ranks: Sequence[int], kinds: Sequence[Kind], within: float, seconds: float
    ) -> Fault:
        rank, kind, when = draw.choice(ranks), draw.choice(kinds), draw.random() * within
        share = draw.random()
        return Fault(rank, kind, when, seconds if math.isinf(seconds) else share * seconds)

    def of(self, rank: int) -> list[Fault]:
        """Return the faults of one rank."""
        return [fault for fault in self.faults if fault.rank == rank]

    @contextlib.contextmanager
    def inject(self) -> Iterator[None]:
        """Hit this rank, which is a process, at its times, wherever it is then, until the block ends.

        Raises
        ------
        ValueError
            The rank is a thread, which cannot be stopped or killed: use :meth:`strike`; or the plan has a
            ``"raise"``, which needs a place where to raise.
        """
        rank = _rank()
        mine = self.of(rank)
        if context.current_slot() is not context.process_slot:
            raise ValueError("a rank that is a thread cannot be hit from outside: let it call strike()")
        if any(fault.kind == "raise" for fault in mine):
            raise ValueError('a fault of the kind "raise" needs a place: call strike() there')
        over = threading.Event()
        thread = threading.Thread(target=_hit, args=(mine, over), name="faults", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def strike(self, step: int) -> None:
        """Let happen here and now what is planned for this rank between the last step and this one.

        Parameters
        ----------
        step : int
            0, 1, 2, ...

        Raises
        ------
        InjectedFault
            That is what is planned.
        ValueError
            A stop, or a kill, is planned for a rank that is a thread.
        """
        rank = _rank()
        for fault in self.of(rank):
            if step - 1 < fault.when <= step:
                if fault.kind in ("stop", "kill") and context.current_slot() is not context.process_slot:
                    raise ValueError(f"a rank that is a thread cannot be hit by {fault.kind!r}")
                if fault.kind == "delay":
                    time.sleep(fault.seconds)
                elif fault.kind == "raise":
                    raise InjectedFault(f"rank {rank} was to fail at step {step}")
                else:
                    _signal(fault)


def _rank() -> int:
    return context.current().topology.rank


def _hit(faults: Sequence[Fault], over: threading.Event) -> None:
    started = time.monotonic()
    for fault in faults:
        if over.wait(max(fault.when - (time.monotonic() - started), 0.0)):
            return
        if fault.kind == "delay":
            # A function of C that is called with the GIL held.
            ctypes.PyDLL(None).usleep(int(fault.seconds * 1e6))
        else:
            _signal(fault)


def _signal(fault: Fault) -> None:
    """Stop or kill this process."""
    pid = os.getpid()
    if fault.kind == "kill":
        os.kill(pid, signal.SIGKILL)
    helper = None
    if not math.isinf(fault.seconds):
        # Somebody else has to wake it.
        command = f"sleep {fault.seconds:f}; kill -CONT {pid}"
        helper = subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True)
    os.kill(pid, signal.SIGSTOP)
    if helper is not None:
        helper.wait()

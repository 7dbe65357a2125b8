"""Injected faults from a seed: ranks that are delayed, stopped, killed, or that raise.

For tests of pyhvd and of programs that use it. Every rank makes the same plan from the same seed, so that a
test knows which ranks fail. A rank gets no notice before its fault.
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
    """The exception of a fault of kind ``"raise"``."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes
    ----------
    rank : int
        The rank that fails.
    kind : str
        ``"delay"``: the rank is late; with :meth:`FaultPlan.inject` all its Python threads are, because the
        fault holds the GIL. ``"stop"``: SIGSTOP. ``"kill"``: SIGKILL. ``"raise"``: :class:`InjectedFault`.
    when : float
        Seconds after the start of :meth:`FaultPlan.inject`, or the step of :meth:`FaultPlan.strike`.
    seconds : float
        Duration of a delay or a stop; infinite for a stop without an end.
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
        Kinds of faults to draw from; see :class:`Fault`.
    count : int
        Number of faults.
    within : float
        Latest time (s) or step of a fault.
    seconds : float
        Longest delay or stop; with ``math.inf`` a stop has no end.
    spare : collection of int
        Ranks without faults.

    Attributes
    ----------
    faults : list of Fault
        The faults, ordered by time.

    Raises
    ------
    ValueError
        A kind is unknown, or every rank is spared.

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
            raise ValueError("FaultPlan needs at least one kind of fault, and one rank that is not spared")
        draw = random.Random(seed)
        faults = []
        for _ in range(count):
            rank, kind, when = draw.choice(ranks), draw.choice(kinds), draw.random() * within
            share = draw.random()
            faults.append(Fault(rank, kind, when, seconds if math.isinf(seconds) else share * seconds))
        self.faults = sorted(faults, key=lambda fault: fault.when)

    def of(self, rank: int) -> list[Fault]:
        """Return the faults of one rank."""
        return [fault for fault in self.faults if fault.rank == rank]

    @contextlib.contextmanager
    def inject(self) -> Iterator[None]:
        """Inject this rank's faults at their times, until the block ends. The rank must be a process.

        Raises
        ------
        ValueError
            The rank is a thread, which cannot be stopped or killed: use :meth:`strike`. Or the plan has a
            ``"raise"``, which needs a call at which to raise.
        """
        rank = _rank()
        mine = self.of(rank)
        if context.current_holder() is not context.process_holder:
            raise ValueError("inject() cannot stop or kill a rank that is a thread: let it call strike()")
        if any(fault.kind == "raise" for fault in mine):
            raise ValueError(
                'inject() cannot raise in the rank: for a fault of the kind "raise" call strike()'
            )
        over = threading.Event()
        thread = threading.Thread(target=_hit, args=(mine, over), name="faults", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def strike(self, step: int) -> None:
        """Inject this rank's faults between the last step and this one, in the calling thread.

        Parameters
        ----------
        step : int
            0, 1, 2, ...

        Raises
        ------
        InjectedFault
            The plan has a ``"raise"`` here.
        ValueError
            The plan has a stop or kill, and the rank is a thread.
        """
        rank = _rank()
        for fault in self.of(rank):
            if step - 1 < fault.when <= step:
                if fault.kind in ("stop", "kill") and context.current_holder() is not context.process_holder:
                    raise ValueError(
                        f"strike() cannot {fault.kind} a rank that is a thread: run it as a process"
                    )
                if fault.kind == "delay":
                    time.sleep(fault.seconds)
                elif fault.kind == "raise":
                    raise InjectedFault(f"injected fault: rank {rank} fails at step {step}")
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
            # This C function runs with the GIL held.
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
        # Another process has to wake it.
        command = f"sleep {fault.seconds:f}; kill -CONT {pid}"
        helper = subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True)
    os.kill(pid, signal.SIGSTOP)
    if helper is not None:
        helper.wait()

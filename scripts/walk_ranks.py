"""``walk_ranks.py KIND LIBRARY FILE``: one rank of a walk; rank 0 writes its rounds into FILE.

KIND is one of walk.py's, with a call that was made before (``remembered``, ``torch_later``), or is new in
each round. LIBRARY is the preloaded walk_hooks.c. Each round is one call, recorded from just before it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import walk_recorder

ROUNDS = 9
SETTLE_S = 0.1
"""Seconds between rounds: the background thread ends what it does for a call, and rests."""
LATE_S = 0.02
"""Seconds by which the other rank makes a first call later: rank 0's thread is woken by rank 0's caller."""


class _Call(ctypes.Structure):
    _fields_ = (
        ("ns", ctypes.c_int64),
        ("function", ctypes.c_void_p),
        ("thread", ctypes.c_int32),
        ("enters", ctypes.c_int32),
    )


class Recording:
    """What Python and C do on this rank between :meth:`begin` and :meth:`end`."""

    def __init__(self, library: str, package: str) -> None:
        self._python: list[walk_recorder.Event] = []
        self._on = False
        self._recordings = 0
        self._hooks = ctypes.CDLL(library)
        self._switch = ctypes.c_int.in_dll(self._hooks, "walk_on")
        self._count = ctypes.c_int.in_dll(self._hooks, "walk_count")
        walk_recorder.install(package, self._write)

    def _write(self, event: walk_recorder.Event) -> None:
        if self._on:
            self._python.append(event)

    def begin(self) -> None:
        """Forget what was recorded, and record."""
        self._python.clear()
        self._count.value = 0
        self._on = True
        self._recordings += 1
        self._switch.value = self._recordings

    def end(self) -> list[list[Any]]:
        """Stop; return the events in order: ns, thread, enters, file or library, function or offset."""
        self._switch.value = 0
        self._on = False
        calls = (_Call * (1 << 20)).in_dll(self._hooks, "walk_calls")
        if self._count.value > len(calls):
            raise RuntimeError("more calls of C functions than walk_hooks.c keeps")
        found: list[list[Any]] = [list(event) for event in self._python]
        found += [
            [call.ns, call.thread, call.enters, *self._locate(call.function)]
            for call in calls[: self._count.value]
        ]
        return sorted(found, key=lambda event: event[0])

    def _locate(self, function: int) -> tuple[str, int]:
        library, offset = ctypes.c_char_p(), ctypes.c_size_t()
        self._hooks.walk_locate(ctypes.c_void_p(function), ctypes.byref(library), ctypes.byref(offset))
        return os.fsdecode(library.value or b""), offset.value


Prepare = Callable[[int], Callable[[], object]]
"""Prepares a round, outside of the walk; returns the call that is walked through."""


def _allreduce(again: bool) -> Prepare:
    import pyhvd as hvd

    allreduce, op = hvd.allreduce, hvd.Sum  # the package looks its names up when they are first used
    tensor = np.ones(1024, np.float32)
    for _ in range(20 if again else 0):
        allreduce(tensor, name="again", op=op)
    return lambda number: lambda: allreduce(tensor, name="again" if again else f"new.{number}", op=op)


def _step(again: bool) -> Prepare:
    """Return what computes gradients, and then takes a step; each first step is that of a new optimizer."""
    import torch

    import pyhvd.torch as hvd

    def make(number: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        named = [(f"{number}.{name}", parameter) for name, parameter in model.named_parameters()]
        return model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), named)

    def prepare(number: int) -> Callable[[], object]:
        model, optimizer = kept if again else make(number)
        optimizer.zero_grad()
        loss = model(torch.ones(4, 64)).sum()
        return lambda: (loss.backward(), optimizer.step())

    kept = make(0)
    for _ in range(20 if again else 0):
        prepare(0)()
    return prepare


def main(kind: str, library: str, file: str) -> None:
    """Play one rank."""
    package = os.environ[walk_recorder.PACKAGE]
    recording = Recording(library, package)
    import pyhvd as hvd

    hvd.init()
    if os.path.dirname(hvd.__file__) != package:
        raise RuntimeError(f"pyhvd comes from {hvd.__file__}, and not from {package}")
    threads = {thread.native_id: thread.name for thread in threading.enumerate()}
    again = kind in ("remembered", "torch_later")
    prepare = (_step if kind.startswith("torch") else _allreduce)(again)
    rounds = []
    for number in range(ROUNDS):
        call = prepare(number)
        time.sleep(SETTLE_S + (0 if again else LATE_S * hvd.rank()))
        if hvd.rank() == 0:
            recording.begin()
        call()
        if not again:
            time.sleep(SETTLE_S)
        rounds.append(recording.end())
    if hvd.rank() == 0:
        Path(file).write_text(json.dumps({"threads": threads, "rounds": rounds}))
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

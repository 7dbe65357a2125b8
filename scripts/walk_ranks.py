"""``walk_ranks.py KIND LIBRARY FILE``: one rank of a walk; rank 0 writes its rounds into FILE.

KIND is ``remembered``, or anything else for a name never seen; LIBRARY is the preloaded walk_hooks.c. Each
round is one allreduce, recorded from just before the call.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
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


def main(kind: str, library: str, file: str) -> None:
    """Play one rank."""
    package = os.environ[walk_recorder.PACKAGE]
    recording = Recording(library, package)
    import pyhvd as hvd

    hvd.init()
    if os.path.dirname(hvd.__file__) != package:
        raise RuntimeError(f"pyhvd comes from {hvd.__file__}, and not from {package}")
    threads = {thread.native_id: thread.name for thread in threading.enumerate()}
    allreduce, op = hvd.allreduce, hvd.Sum  # the package looks its names up when they are first used
    tensor = np.ones(1024, np.float32)
    remembered = kind == "remembered"
    for _ in range(20 if remembered else 0):
        allreduce(tensor, name="again", op=op)
    rounds = []
    for number in range(ROUNDS):
        name = "again" if remembered else f"new.{number}"
        time.sleep(SETTLE_S + (0 if remembered else LATE_S * hvd.rank()))
        if hvd.rank() == 0:
            recording.begin()
        allreduce(tensor, name=name, op=op)
        if not remembered:
            time.sleep(SETTLE_S)
        rounds.append(recording.end())
    if hvd.rank() == 0:
        Path(file).write_text(json.dumps({"threads": threads, "rounds": rounds}))
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

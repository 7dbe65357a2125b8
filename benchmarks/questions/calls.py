"""calls: what a call costs that is not remembered, and how soon a callback runs.

The first call of a name goes by message. A callback is timed from the submission of a grouped call to the
callback's first line, while the thread that has submitted sleeps.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

import pyhvd as hvd
from benchmarks import peers
from benchmarks.harness import OURS, Case, Contender, World
from benchmarks.question import Question, main
from benchmarks.report import Target

FIRST, AGAIN = "pyhvd, new names", "pyhvd, one name"
CALLBACK, WAIT = "pyhvd, callback", "pyhvd, result"
NAMES = 10
MEMBERS = 20
BURN = "import time\nend = time.monotonic() + 5\nwhile time.monotonic() < end: pass"


def cases(world: World, sizes: Sequence[int]) -> Iterator[Case]:
    """Yield the first calls of a name, then the callbacks of groups."""
    peers.start_pyhvd()
    one = np.ones(1, np.float32)
    number = count()

    def first() -> None:
        for _ in range(NAMES):
            hvd.allreduce(one, op=hvd.Sum, name=f"calls.first.{next(number)}")

    def again() -> None:
        for _ in range(NAMES):
            hvd.allreduce(one, op=hvd.Sum, name="calls.again")

    yield Case(
        "first call of a name",
        one.nbytes,
        [
            Contender(FIRST, first, kind=OURS, loops=NAMES),
            Contender(AGAIN, again, rehearse=again, loops=NAMES),
        ],
    )
    for members in sizes:
        arrays = [np.ones(256, np.float32) for _ in range(members)]
        for beside in (False, True):
            yield Case(
                label(members, beside=beside),
                1024 * members,
                [
                    _watched(CALLBACK, _by_callback(arrays), beside and not world.rank),
                    _watched(WAIT, _by_result(arrays), beside and not world.rank),
                ],
            )


def label(members: int, *, beside: bool) -> str:
    """Return a case's label."""
    return f"a group of {members}" + (", beside a busy core" if beside else "")


def _by_callback(arrays: list[Any]) -> Callable[[], None]:
    ended = threading.Lock()

    def run() -> None:
        ended.acquire()
        handle = hvd.grouped_allreduce_async_(arrays, op=hvd.Max, name=f"calls.{len(arrays)}")
        handle.add_done_callback(lambda _: ended.release())
        with ended:
            pass

    return run


def _by_result(arrays: list[Any]) -> Callable[[], None]:
    return lambda: hvd.grouped_allreduce_(arrays, op=hvd.Max, name=f"calls.{len(arrays)}")


def _watched(name: str, run: Callable[[], None], burns: bool) -> Contender:
    """Return a contender; if it burns, a process keeps a core busy during each repetition."""
    burners: list[subprocess.Popen[bytes]] = []

    def prepare() -> None:
        for _ in range(3):
            run()
        if burns:
            burners.append(subprocess.Popen([sys.executable, "-c", BURN]))

    def finish() -> None:
        while burners:
            burner = burners.pop()
            burner.kill()
            burner.wait()

    return Contender(name, run, prepare=prepare, finish=finish, kind=OURS)


QUESTION = Question(
    name="calls",
    title="calls: the first call of a name, and callbacks of groups of small arrays",
    sizes_are="how many arrays in a group",
    sizes=(MEMBERS,),
    tiny=(3,),
    repeats=60,
    cases=cases,
    targets=(
        Target(
            "the first call of a name (half of 290 us)", "first call of a name", FIRST, (), 145e-6, 73e-6,
            fewer=True,
        ),
        Target("callback, quiet", label(MEMBERS, beside=False), CALLBACK, (), 80e-6, 40e-6, fewer=True),
        Target(
            "callback, beside a busy core", label(MEMBERS, beside=True), CALLBACK, (), 3e-4, 1e-4, fewer=True
        ),
    ),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(QUESTION))

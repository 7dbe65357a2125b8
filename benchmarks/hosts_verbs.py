"""The verbs across hosts: ``python -m benchmarks hosts verbs``; their cases on a rank, and their targets.

The floor of a verb is raw TCP that moves what any of its algorithms must move between two hosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from benchmarks.harness import FLOOR, Case, Contender, World
from benchmarks.questions import verbs
from benchmarks.raw_tcp import LINK, Rails
from benchmarks.report import Target

QUESTIONS = {"verbs": [""], "verbs-1gbit": ["1gbit"]}
_BOUNDS = {verbs.SMALL: (1.5, 1.0), 64 << 10: (1.3, 1.0), 4 << 20: (1.1, 0.8), verbs.LARGE: (1.0, 0.7)}
_VERBS = verbs.VERBS[:-1]


def cases(world: World, rails: Rails, *, tiny: bool, slow: bool) -> Iterator[Case]:
    """Yield a case per verb and size; with ``slow`` links only the largest size."""
    sizes = (verbs.SMALL, 256 << 10) if tiny else (verbs.LARGE,) if slow else verbs.SIZES
    for case in verbs.array_cases(world, sizes, _VERBS):
        floor = (
            [] if case.nbytes == verbs.SMALL else [_floor(rails, case.label.partition(",")[0], case.nbytes)]
        )
        yield dataclasses.replace(case, contenders=[*case.contenders, *floor])


def _floor(rails: Rails, verb: str, nbytes: int) -> Contender:
    """Return what each connection must carry in each direction, if all of a host's share the work."""
    of_host = {
        "allgather": nbytes / rails.hosts,
        "alltoall": nbytes * rails.local_size / rails.hosts,
        "broadcast": nbytes / (rails.hosts - 1),
        verbs.IN_TURN: nbytes / (rails.hosts - 1),
        "reducescatter": nbytes / rails.hosts,
    }
    each = int(of_host[verb] / rails.local_size)
    return Contender(LINK, lambda: rails.exchange(each), kind=FLOOR)


def targets(shapes: tuple[str, ...]) -> Iterator[Target]:
    """Yield the bounds to meet, and the goals."""
    ours, against = verbs.SYNCHRONOUS, (verbs.MPI_CALL, verbs.XHC)
    for shape in shapes:
        for verb in _VERBS:
            for nbytes, bounds in _BOUNDS.items():
                case = f"{shape}, {verbs.label(verb, nbytes)}"
                yield Target(f"{case}, times MPI", case, ours, against, *bounds, fewer=True, ranks=())
            case = f"{shape}, {verbs.label(verb, verbs.LARGE)}, 1 Gbit/s"
            text = f"{case}: times the link's limit"
            yield Target(text, case, ours, (LINK,), 1.05, 1.01, fewer=True, ranks=())

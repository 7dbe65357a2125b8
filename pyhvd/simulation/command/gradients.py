"""The gradients of a step, and when they are ready: of a model, of given sizes, or of a recording. Pure."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pyhvd.common.units import parse_size
from pyhvd.observe.trace.loading import RankTrace, Turn
from pyhvd.simulation import Part, Tensor
from pyhvd.simulation.models import MODELS

FORWARD = 1 / 3
"""The part of a step's computing that comes before the backward pass, which takes twice as long."""
_FLOAT = 4


@dataclass(frozen=True)
class ReadyGradient:
    """A gradient, and after how many seconds of a step's computing it is ready."""

    tensor: Tensor
    after: float


@dataclass(frozen=True)
class Gradients:
    """The gradients of one step.

    Attributes
    ----------
    source : str
        Where they come from, for the output.
    ready : tuple of ReadyGradient
        In the order in which they are ready.
    compute : float
        Seconds of computing in a step.
    begin : float
        Seconds of computing before the first gradients can be ready.
    """

    source: str
    ready: tuple[ReadyGradient, ...]
    compute: float
    begin: float

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(each.tensor.nbytes for each in self.ready)

    def halved(self) -> Gradients:
        """Return the same gradients with half the bytes."""
        return replace(self, ready=tuple(replace(each, tensor=_halved(each.tensor)) for each in self.ready))

    def scaled(self, compute: float) -> Gradients:
        """Return the same gradients with another computing time, over which they are ready alike."""
        factor = compute / self.compute if self.compute else 0.0
        ready = tuple(replace(each, after=each.after * factor) for each in self.ready)
        return replace(self, ready=ready, compute=compute, begin=self.begin * factor)

    def in_parts(self, parts: int) -> list[Part]:
        """Return a step whose gradients are submitted at most so often.

        The time in which gradients are ready is divided evenly. Gradients that are ready in the same division
        are submitted with its last one.
        """
        spread = self.compute - self.begin
        divisions: defaultdict[int, list[ReadyGradient]] = defaultdict(list)
        for each in self.ready:
            at = (each.after - self.begin) / spread if spread > 0 else 1.0
            divisions[min(max(math.ceil(at * parts - 1e-9), 1), parts)].append(each)
        done, found = 0.0, []
        for _, members in sorted(divisions.items()):
            submitted = members[-1].after
            found.append(Part(submitted - done, tuple(each.tensor for each in members)))
            done = submitted
        return found


def _halved(tensor: Tensor) -> Tensor:
    return replace(tensor, nbytes=max(_FLOAT * math.ceil(tensor.nbytes / (2 * _FLOAT)), _FLOAT))


def from_sizes(source: str, sizes: Sequence[int], compute: float) -> Gradients:
    """Return gradients of these bytes, which are ready one after the other in the backward pass."""
    begin = FORWARD * compute
    each = (compute - begin) / len(sizes)
    tensors = [Tensor(f"gradient.{i}", nbytes) for i, nbytes in enumerate(sizes)]
    ready = [ReadyGradient(tensor, begin + i * each) for i, tensor in enumerate(tensors, 1)]
    return Gradients(source, tuple(ready), compute, begin)


def parse_sizes(text: str) -> list[int]:
    """Return the bytes of float32 gradients: of a model, or of sizes such as ``1000x1KiB`` with commas.

    Raises
    ------
    ValueError
        The text says what is expected.
    """
    if text in MODELS:
        return [_FLOAT * count for count in MODELS[text]()]
    if re.fullmatch(r"[a-z][\w.-]*", text):
        raise ValueError(
            f"no model {text!r} is known: expected one of {', '.join(MODELS)}, or sizes as 1000x1KiB"
        )
    sizes: list[int] = []
    for part in text.split(","):
        times, x, each = part.strip().rpartition("x")
        if x and not (times.isdecimal() and int(times)):
            raise ValueError(f"{part!r}: expected how many gradients, x, and their size, as 1000x1KiB")
        nbytes = parse_size(each)
        if not nbytes or nbytes % _FLOAT:
            raise ValueError(
                f"{each!r}: a gradient of float32 has a multiple of {_FLOAT} bytes, and is not empty"
            )
        sizes += [nbytes] * int(times or 1)
    return sizes


# -- of a recording ------------------------------------------------------------------------------------


class RecordingError(ValueError):
    """A recording does not show what a simulation needs; the text says what is missing."""


def from_recording(source: str, traces: Sequence[RankTrace]) -> tuple[Gradients, list[str]]:
    """Return the gradients of a recording, and notes on what of it is left out.

    They are those of a step of the rank whose computing time is the median. A step ends where a name comes
    again. Gradients are the allreduces of all ranks whose names are in at least half of the steps. Between
    two submissions a rank computes; but if nothing is in flight any more at the second one, it computes only
    from the end of the last call on.

    Raises
    ------
    RecordingError
        The recording has no such steps, or does not say how large the gradients are.
    """
    steps_of = {trace.rank: _steps(_allreduces(trace)) for trace in traces}
    whole = {rank: steps for rank, steps in steps_of.items() if len(steps) > 1}
    if not whole:
        raise RecordingError(_no_steps(source, traces))
    # The first step begins with the recording: how long the rank computed before it is not known.
    found = {rank: _typical(steps[1:], steps[0]) for rank, steps in whole.items()}
    by_compute = sorted(found, key=lambda rank: (found[rank][-1].after, rank))
    rank = by_compute[(len(by_compute) - 1) // 2]
    ready = found[rank]
    if empty := [each.tensor.name for each in ready if not each.tensor.nbytes]:
        raise RecordingError(
            f"{source}: the bytes of {len(empty)} gradients are not recorded, as of {empty[0]!r}: record the"
            " job again with this version of pyhvd"
        )
    gradients = Gradients(source, tuple(ready), ready[-1].after, ready[0].after)
    return gradients, _notes(traces, ready, whole[rank])


def _allreduces(trace: RankTrace) -> list[Turn]:
    """Return the allreduces that a rank submitted, in order."""
    turns = [turn for turn in trace.turns if _is_gradient(turn) and turn.submitted is not None]
    return sorted(turns, key=_submitted)


def _is_gradient(turn: Turn) -> bool:
    set_id, operation, _ = turn.key
    return set_id == 0 and operation == "ALLREDUCE" and not turn.error


def _submitted(turn: Turn) -> float:
    assert turn.submitted is not None
    return turn.submitted


def _steps(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Return the turns of each step, which ends where a name comes again."""
    steps: list[list[Turn]] = []
    names: set[str] = set()
    for turn in turns:
        name = turn.key[2]
        if not steps or name in names:
            steps.append([])
            names = set()
        steps[-1].append(turn)
        names.add(name)
    return steps


def _typical(steps: Sequence[Sequence[Turn]], before: Sequence[Turn]) -> list[ReadyGradient]:
    """Return a rank's gradients with the medians, over its steps, of when they were ready."""
    after: defaultdict[str, list[float]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for step in steps:
        computed = 0.0
        for turn, waited in _since(step, before):
            computed += waited
            after[turn.key[2]].append(computed)
            sizes[turn.key[2]] = turn.nbytes
        before = step
    usual = {name: statistics.median(times) for name, times in after.items() if 2 * len(times) >= len(steps)}
    ready = [ReadyGradient(Tensor(name, _padded(sizes[name])), us / 1e6) for name, us in usual.items()]
    return sorted(ready, key=lambda each: each.after)


def _since(step: Sequence[Turn], before: Sequence[Turn]) -> list[tuple[Turn, float]]:
    """Return a step's turns, each with the us that the rank computed before its submission."""
    reached = max(_submitted(turn) for turn in before)
    ended = max(turn.ended for turn in before)
    found = []
    for turn in step:
        now = _submitted(turn)
        # If all earlier ones have ended, the rank may have waited for them.
        since = ended if reached <= ended <= now else reached
        found.append((turn, max(now - since, 0.0)))
        reached, ended = now, max(ended, turn.ended)
    return found


def _padded(nbytes: int) -> int:
    return _FLOAT * math.ceil(nbytes / _FLOAT)


def _no_steps(source: str, traces: Sequence[RankTrace]) -> str:
    names = {turn.key[2] for trace in traces for turn in trace.turns if _is_gradient(turn)}
    if not names:
        return f"{source}: no allreduce of all ranks is recorded: record some training steps"
    return (
        f"{source}: no steps are seen, as none of {len(names)} names, such as {min(names)!r}, comes twice"
        " on a rank: record at least 2 steps, and name each gradient alike in all of them"
    )


def _notes(
    traces: Sequence[RankTrace], ready: Sequence[ReadyGradient], steps: Sequence[Sequence[Turn]]
) -> list[str]:
    used = {each.tensor.name for each in ready}
    others = Counter(
        turn.key[1].lower()
        for trace in traces[:1]
        for turn in trace.turns
        if not _is_gradient(turn) or turn.key[2] not in used
    )
    notes = []
    if others:
        kinds = ", ".join(f"{count} of {kind}" for kind, count in sorted(others.items()))
        notes.append(f"calls of rank {traces[0].rank} that are not in each step are left out: {kinds}")
    if any(_waits_inside(step) for step in steps[1:]):
        notes.append(
            "some gradients were submitted after all earlier ones of their step had ended: the simulation"
            " does not wait between them"
        )
    return notes


def _waits_inside(step: Sequence[Turn]) -> bool:
    """Return whether a gradient of a step was submitted after all earlier ones had ended."""
    ends = itertools.accumulate((turn.ended for turn in step), max)
    return any(ended <= _submitted(turn) for ended, turn in zip(ends, step[1:], strict=False))

"""The text of a hang report: which ranks have not submitted which tensors, and where each of them is.

Pure functions over a :class:`~pyhvd.observe.stall_inspector.Finding` and the answers of the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pyhvd.common.processes import Place, State
from pyhvd.common.text import describe_ranks
from pyhvd.controller import Stalled
from pyhvd.errors import StallError
from pyhvd.negotiation.messages import GLOBAL_SET, JOIN_NAME, ErrorInfo, ErrorKind
from pyhvd.observe.stall_inspector import ANSWER_SECONDS, MOST_ASKED, Answer, Finding

_NAMES = 6
_LINES = 12


def warning_of(finding: Finding, answers: Mapping[int, Answer], places: Sequence[Place], now: float) -> str:
    """Return the report of tensors that have waited for too long.

    ``answers`` has, by missing rank that was asked, its stacks or the state of its process. ``places`` has
    every rank's place. ``now`` is a time (s) of the finding's clock.
    """
    lines = [_headline(finding), *_tensor_lines(finding.stalled, now)]
    for rank in answers:
        lines += _rank_lines(rank, finding, answers, places)
    return "\n".join([*lines, *_not_asked(finding, answers), *_circles(finding)])


def error_of(
    finding: Finding, answers: Mapping[int, Answer], places: Sequence[Place], now: float
) -> ErrorInfo:
    """Return the error that ends the job: the facts of :func:`warning_of`, with the stacks in a field."""
    of_ranks = {rank: _rank_lines(rank, finding, answers, places) for rank in answers}
    lines = [
        f"the job was ended: {_headline(finding)}",
        *_tensor_lines(finding.stalled, now),
        *(first for first, *_ in of_ranks.values()),
        *_not_asked(finding, answers),
        *_circles(finding),
        f"({finding.limit:g} s is PYHVD_STALL_SHUTDOWN_TIME_SECONDS)",
    ]
    missing = {_shown(each.name): list(each.missing) for each in finding.stalled}
    stacks = {rank: "\n".join(of_rank) for rank, of_rank in of_ranks.items()}
    return ErrorInfo(ErrorKind.STALL, "\n".join(lines), missing=missing, stacks=stacks)


@dataclass(frozen=True, slots=True)
class StallSnapshot:
    """What rank ``rank`` knows when nothing has ended for ``passed`` seconds, and rank 0 reports no cause.

    Attributes
    ----------
    names : sequence of str
        Names of the tensors in flight on the rank.
    under_way : bool
        Whether these tensors are being carried out; if so, all ranks have submitted them.
    states : mapping of int to State
        States of the other ranks' processes.
    """

    rank: int
    names: Sequence[str]
    under_way: bool
    states: Mapping[int, State]
    passed: float

    @property
    def suspects(self) -> list[int]:
        """The ranks that may be the cause, by the first rule that gives any.

        1. The ranks whose processes are lost.
        2. Rank 0, if no tensor is being carried out here and this is not rank 0.
        3. All other ranks.
        """
        lost = [rank for rank, state in self.states.items() if state.is_lost]
        return lost or ([0] if not self.under_way and self.rank else list(self.states))


def describe_stall(snapshot: StallSnapshot, places: Sequence[Place]) -> str:
    """Return the report of a rank on which no call ends any more."""
    tensors = [Stalled(GLOBAL_SET, name, 0.0, (), ()) for name in snapshot.names] or None
    what = names_of(tensors) if tensors else "the other ranks to join"
    them = "it" if len(snapshot.names) == 1 else "them"
    why = (
        f"all ranks have submitted {them}, but some do not carry {them} out"
        if snapshot.under_way
        else "rank 0, which decides what runs, has not said why"
    )
    first = f"rank {snapshot.rank} has waited for {what} for {snapshot.passed:.0f} s: {why}"
    return "\n".join([first, *_suspect_lines(snapshot, places)])


def describe_late_end(snapshot: StallSnapshot, places: Sequence[Place]) -> str:
    """Return the report of a shutdown that takes too long."""
    first = f"shutting down: not all ranks have shut down within {snapshot.passed:.0f} s"
    return "\n".join([first, *_suspect_lines(snapshot, places)])


def _suspect_lines(snapshot: StallSnapshot, places: Sequence[Place]) -> list[str]:
    return [
        f"rank {rank} on {places[rank]}: {_describe_process(snapshot.states[rank], places[rank])}"
        for rank in snapshot.suspects[:MOST_ASKED]
    ]


def error_of_stall(snapshot: StallSnapshot, places: Sequence[Place]) -> StallError:
    """Return the error of a rank that ends without an order from rank 0."""
    text = describe_stall(snapshot, places)
    missing = {name: list(snapshot.suspects) for name in snapshot.names}
    stacks = dict(zip(snapshot.suspects, text.splitlines()[1:], strict=False))
    limit = "more than PYHVD_STALL_SHUTDOWN_TIME_SECONDS have passed"
    return StallError(f"rank {snapshot.rank} has given up: {text}\n({limit})", missing, stacks)


def _name_of(tensor: Stalled) -> str:
    if tensor.name == JOIN_NAME:
        return _shown(tensor.name)
    if tensor.process_set == GLOBAL_SET:
        return repr(tensor.name)
    return f"{tensor.name!r} of process set {tensor.process_set}"


def _shown(name: str) -> str:
    return "join()" if name == JOIN_NAME else name


def names_of(tensors: Sequence[Stalled]) -> str:
    """Return the names of tensors; of many, the first ``_NAMES`` and the number of the others."""
    shown = ", ".join(_name_of(each) for each in tensors[:_NAMES])
    more = len(tensors) - _NAMES
    return f"{shown} and {more} more" if more > 0 else shown


def describe_state(state: State, place: Place) -> str:
    """Return why a process does not answer, as far as its state tells."""
    if state.is_lost:
        return _describe_process(state, place)
    silent = f"its background thread does not answer within {ANSWER_SECONDS:g} s"
    if state is State.RUNNING:
        return f"{silent}, and a thread of its process computes: probably C code that holds the GIL"
    if state is State.UNKNOWN:
        return f"{silent}, and its process {state.value}"
    return f"{silent}, and its process {state.value}: it is blocked, perhaps while it holds the GIL"


def _describe_process(state: State, place: Place) -> str:
    hint = f": kill -CONT {place.pid} lets it go on" if state is State.STOPPED else ""
    return f"its process {state.value}{hint}"


def _headline(finding: Finding) -> str:
    count = len(finding.stalled)
    if finding.stalled[0].name == JOIN_NAME:
        return f"join() has waited for more than {finding.limit:g} s, because some ranks have not called it"
    what, them = ("a tensor has", "it") if count == 1 else (f"{count} tensors have", "them")
    return f"{what} waited for more than {finding.limit:g} s, because some ranks have not submitted {them}"


def _tensor_lines(stalled: Sequence[Stalled], now: float) -> list[str]:
    together: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Stalled]] = {}
    for each in stalled:
        together.setdefault((each.missing, each.submitted), []).append(each)
    lines = []
    for (missing, submitted), tensors in together.items():
        oldest = now - min(each.since for each in tensors)
        by = describe_ranks(submitted) if submitted else "no rank"
        lines.append(
            f"  {names_of(tensors)}: not {_done(tensors)} by {describe_ranks(missing)},"
            f" {_done(tensors)} by {by} (waiting for {oldest:.0f} s)"
        )
    return _cut(lines, "of such tensors")


def _rank_lines(
    rank: int, finding: Finding, answers: Mapping[int, Answer], places: Sequence[Place]
) -> list[str]:
    """Return a line on where a missing rank is, then lines with its stacks and with what it waits for."""
    lacking = [each for each in finding.stalled if rank in each.missing]
    answer = answers[rank]
    threads = answer if not isinstance(answer, State) else ()
    if isinstance(answer, State):
        where = describe_state(answer, places[rank])
    elif not answer:
        where = "none of its threads runs Python code of the program"
    else:
        inside = f", inside {answer[0].inside}" if answer[0].inside else ""
        where = f"it is at {answer[0].frames[0]}{inside}"
    lines = [f"rank {rank} on {places[rank]} has not {_done(lacking)} {names_of(lacking)}: {where}"]
    for thread in threads:
        lines.append(f"    {thread.name}:")
        lines += [
            f"      {frame}: {frame.text}" if frame.text else f"      {frame}" for frame in thread.frames
        ]
        if thread.left_out:
            lines.append(f"      ... and {thread.left_out} calls further out")
    waits = [each for each in finding.pending if rank in each.submitted]
    for each in waits[:_NAMES]:
        lines.append(
            f"    rank {rank} has submitted {_name_of(each)}, which waits for {describe_ranks(each.missing)}"
        )
    if len(waits) > _NAMES:
        lines.append(f"    ... and {len(waits) - _NAMES} more")
    return lines


def _done(tensors: Sequence[Stalled]) -> str:
    """Return "called" for join(), and "submitted" for tensors; a report never has both."""
    return "called" if tensors[0].name == JOIN_NAME else "submitted"


def _not_asked(finding: Finding, answers: Mapping[int, Answer]) -> list[str]:
    left = [rank for rank in finding.missing if rank not in answers]
    return [f"{describe_ranks(left)}: not asked, as they are too many for one report"] if left else []


def _circles(finding: Finding) -> list[str]:
    """Return a line for each pair of ranks that wait for each other."""
    first: dict[tuple[int, int], Stalled] = {}
    for each in finding.pending:
        for waiting in each.submitted:
            for missing in each.missing:
                first.setdefault((waiting, missing), each)
    lines = []
    for (a, b), mine in first.items():
        theirs = first.get((b, a))
        if a < b and theirs is not None:
            lines.append(
                f"deadlock: rank {a} waits for {_name_of(mine)}, which rank {b} has not"
                f" submitted, and rank {b} for {_name_of(theirs)}, which rank {a} has"
                " not: let all ranks submit both before they wait, or in the same order"
            )
    return _cut(lines, "of such pairs")


def _cut(lines: list[str], what: str) -> list[str]:
    left = len(lines) - _LINES
    return [*lines[:_LINES], f"  ... and {left} more lines {what}"] if left > 0 else lines

"""The text of a hang report: which ranks have not submitted which tensors, and where each of them is.

Pure functions over a :class:`~pyhvd.observe.stall_inspector.Stall` and the answers of the ranks. A text
has at most MAX_CHARACTERS, for any number of ranks and tensors: a longer one is made again with less detail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import combinations, product

from pyhvd.common.processes import ProcessPlace, ProcessState
from pyhvd.common.stacks import MAX_FRAMES, ThreadStack
from pyhvd.common.text import cut, cut_lines, describe_hosts, describe_ranks, list_hosts
from pyhvd.controller import Stalled
from pyhvd.errors import StallError
from pyhvd.negotiation.messages import (
    GLOBAL_SET,
    JOIN_NAME,
    ErrorInfo,
    ErrorKind,
    bits_of,
    iter_bits,
    lowest_bit,
)
from pyhvd.observe.stall_inspector import ANSWER_SECONDS, MOST_ASKED, Answer, Stall

MAX_CHARACTERS = 4000
"""Most characters of a warning, or of an error's text."""


def warning_of(
    finding: Stall, answers: Mapping[int, Answer], places: Sequence[ProcessPlace], now: float
) -> str:
    """Return the report of tensors that have waited for too long.

    ``answers`` has, by missing rank that was asked, its stacks or the state of its process. ``places`` has
    every rank's place. ``now`` is a time (s) of the finding's clock.
    """
    return _fit(_StallReport(finding, answers, places, now).warning)


def error_of(
    finding: Stall, answers: Mapping[int, Answer], places: Sequence[ProcessPlace], now: float
) -> ErrorInfo:
    """Return the error that ends the job: the facts of :func:`warning_of`, with the stacks in a field."""
    report = _StallReport(finding, answers, places, now)
    lists = {ranks: iter_bits(ranks) for ranks in {each.missing for each in finding.stalled}}
    missing = {_shown(each.name): lists[each.missing] for each in finding.stalled}
    stacks = {rank: "\n".join(report.stacks_of(rank)) for rank in answers}
    return ErrorInfo(ErrorKind.STALL, _fit(report.error), missing=missing, stacks=stacks)


@dataclass(frozen=True, slots=True)
class _Detail:
    """How much a text says.

    Attributes
    ----------
    names : int
        Tensors that a list names.
    name : int
        Characters of a name.
    lines : int
        Lines about tensors, and about ranks that wait for each other.
    blocks : int
        Ranks that are described, or groups of ranks of which the same is known.
    frames : int
        Calls of each thread.
    width : int
        Characters of a line.
    """

    names: int = 6
    name: int = 1_000_000
    lines: int = 12
    blocks: int = MOST_ASKED
    frames: int = MAX_FRAMES
    width: int = 1_000_000


_FRAMES = (MAX_FRAMES, 6, 3, 1, 0)
_ALL = _Detail()
_DETAILS = (
    _ALL,
    *(_Detail(name=80, frames=frames) for frames in _FRAMES),
    *(_Detail(names=3, name=80, lines=3, frames=frames) for frames in _FRAMES),
    _Detail(names=2, name=60, lines=2, blocks=8, frames=0),
    _Detail(names=1, name=40, lines=2, blocks=4, frames=0, width=200),  # this fits always
)
"""From most to least: frames go first, the outermost ones of each thread."""


def _fit(make: Callable[[_Detail], list[str]]) -> str:
    """Return the text with the most detail that is not too long."""
    text = ""
    for detail in _DETAILS:
        text = "\n".join(cut(line, detail.width) for line in make(detail))
        if len(text) <= MAX_CHARACTERS:
            break
    return text


@dataclass(frozen=True, slots=True)
class _RankBlock:
    """Ranks that lack and have submitted the same, and of which the same is known.

    Attributes
    ----------
    ranks : list of int
        The ranks.
    where : str
        Where they are, or the state of their processes; as a text about one of them.
    threads : sequence of ThreadStack
        Their stacks.
    lacking, waits : sequence of Stalled
        The tensors that they have not submitted; and those that they have, and that wait for other ranks.
    """

    ranks: list[int]
    where: str
    threads: Sequence[ThreadStack]
    lacking: Sequence[Stalled]
    waits: Sequence[Stalled]


_Deadlock = tuple[int, int, Stalled, Stalled]
"""Ranks (a bit vector) that wait for other ranks with a tensor, and these for the former with another one."""


@dataclass(eq=False)
class _StallReport:
    """What is known of a stall, and the lines of text about it."""

    finding: Stall
    answers: Mapping[int, Answer]
    places: Sequence[ProcessPlace]
    now: float
    _texts: dict[tuple[int, bool], str] = field(default_factory=dict)  # of bit vectors of ranks

    def warning(self, detail: _Detail) -> list[str]:
        """Return the lines of a warning."""
        blocks = self._blocks[: detail.blocks]
        return [
            _headline(self.finding),
            *self._tensor_lines(detail),
            *(line for block in blocks for line in self._block_lines(block, detail)),
            *self._not_shown(detail),
            *self._deadlock_lines(detail),
            *([] if detail.frames else self._stacks_left_out()),
        ]

    def error(self, detail: _Detail) -> list[str]:
        """Return the lines of an error's text: without stacks."""
        return [
            f"the job was ended: {_headline(self.finding)}",
            *self._tensor_lines(detail),
            *(self._block_head(block, detail) for block in self._blocks[: detail.blocks]),
            *self._not_shown(detail),
            *self._deadlock_lines(detail),
            f"({self.finding.limit:g} s is PYHVD_STALL_SHUTDOWN_TIME_SECONDS)",
        ]

    def stacks_of(self, rank: int) -> list[str]:
        """Return all lines about one rank that was asked."""
        return self._block_lines(self._block_of(rank), _ALL)

    # -- the tensors

    @cached_property
    def _tensors(self) -> list[list[Stalled]]:
        """The stalled tensors; those that wait for the same ranks are together."""
        together: dict[tuple[int, int], list[Stalled]] = {}
        for each in self.finding.stalled:
            together.setdefault((each.missing, each.submitted), []).append(each)
        return [*together.values()]

    def _tensor_lines(self, detail: _Detail) -> list[str]:
        show = partial(self._tensor_line, detail)
        return cut_lines(self._tensors, detail.lines, "lines of such tensors", show)

    def _tensor_line(self, detail: _Detail, tensors: Sequence[Stalled]) -> str:
        oldest = self.now - min(each.since for each in tensors)
        submitted = tensors[0].submitted
        by = self._ranks(submitted) if submitted else "no rank"
        return (
            f"  {names_of(tensors, detail)}: not {_done(tensors)} by"
            f" {self._ranks(tensors[0].missing, with_hosts=True)},"
            f" {_done(tensors)} by {by} (waiting for {oldest:.0f} s)"
        )

    def _ranks(self, ranks: int, *, with_hosts: bool = False) -> str:
        """Return the text of a bit vector of ranks; of many ranks with their hosts, if asked for."""
        key = ranks, with_hosts
        if key not in self._texts:
            listed = iter_bits(ranks)
            note = self._describe_share(listed) if with_hosts and len(listed) > MOST_ASKED else ""
            self._texts[key] = describe_ranks(listed, note)
        return self._texts[key]

    def _describe_share(self, ranks: Sequence[int]) -> str:
        """Return how many of the ranks are on which hosts: on those with all their ranks, then on others."""
        here = Counter(self.places[rank].host for rank in ranks)
        whole = [host for host, count in here.items() if count == self._per_host[host]]
        others = {host: count for host, count in here.items() if count < self._per_host[host]}
        texts = [f"all ranks of {_count_hosts(whole)}"] if whole else []
        if others:
            least, most = min(others.values()), max(others.values())
            each = f"{least}-{most} ranks" if most > least else f"{most} rank{'s' if most > 1 else ''}"
            texts.append(f"{each} on {'each of ' if len(others) > 1 else ''}{_count_hosts([*others])}")
        return "; ".join(texts)

    @cached_property
    def _per_host(self) -> Counter[str]:
        return Counter(place.host for place in self.places)

    # -- the ranks that were asked

    @cached_property
    def _blocks(self) -> list[_RankBlock]:
        blocks: dict[object, _RankBlock] = {}
        for rank in self.answers:
            block = self._block_of(rank)
            key = block.where, repr(block.threads), (*block.lacking,), (*block.waits,)
            if key in blocks:
                blocks[key].ranks.append(rank)
            else:
                blocks[key] = block
        return [*blocks.values()]

    def _block_of(self, rank: int) -> _RankBlock:
        answer = self.answers[rank]
        threads = answer if not isinstance(answer, ProcessState) else ()
        if isinstance(answer, ProcessState):
            where = describe_state(answer, self.places[rank])
        elif not answer:
            where = "none of its threads runs Python code of the program"
        else:
            inside = f", inside {answer[0].inside}" if answer[0].inside else ""
            where = f"it is at {answer[0].frames[0]}{inside}"
        lacking = [each for each in self.finding.stalled if each.missing >> rank & 1]
        waits = [each for each in self.finding.pending if each.submitted >> rank & 1]
        return _RankBlock([rank], where, threads, lacking, waits)

    def _block_head(self, block: _RankBlock, detail: _Detail) -> str:
        lacking = f"not {_done(block.lacking)} {names_of(block.lacking, detail)}"
        if len(block.ranks) == 1:
            place = self.places[block.ranks[0]]
            return f"rank {block.ranks[0]} on {place} has {lacking}: {block.where}"
        hosts = [*dict.fromkeys(self.places[rank].host for rank in block.ranks)]
        where = (
            block.where.replace("it is", "they are", 1) if block.threads else f"of each rank, {block.where}"
        )
        return f"{describe_ranks(block.ranks)} on {describe_hosts(hosts)} have {lacking}: {where}"

    def _block_lines(self, block: _RankBlock, detail: _Detail) -> list[str]:
        """Return a line on where missing ranks are, then their stacks, then lines on what they wait for."""
        lines = [self._block_head(block, detail)]
        for thread in block.threads if detail.frames else ():
            frames = thread.frames[: detail.frames]
            lines.append(f"    {thread.name}:")
            lines += [f"      {frame}: {frame.text}" if frame.text else f"      {frame}" for frame in frames]
            if left := thread.left_out + len(thread.frames) - len(frames):
                lines.append(f"      ... and {left} calls further out")
        who = f"rank {block.ranks[0]} has" if len(block.ranks) == 1 else "they have"
        lines += [
            f"    {who} submitted {_name_of(each, detail)}, which waits for {self._ranks(each.missing)}"
            for each in block.waits[: detail.names]
        ]
        if len(block.waits) > detail.names:
            lines.append(f"    ... and {len(block.waits) - detail.names} more")
        return lines

    def _not_shown(self, detail: _Detail) -> list[str]:
        """Return lines about the missing ranks that the text does not describe."""
        asked = bits_of(self.answers)
        left = sum(1 << rank for block in self._blocks[detail.blocks :] for rank in block.ranks)
        lines = [f"{self._ranks(left)}: not shown, as the report is long"] if left else []
        if left := bits_of(self.finding.missing) & ~asked:
            lines.append(f"{self._ranks(left)}: not asked, as they are too many for one report")
        return lines

    def _stacks_left_out(self) -> list[str]:
        threads = [thread for block in self._blocks for thread in block.threads]
        calls = sum(len(thread.frames) + thread.left_out for thread in threads)
        return [f"stacks are left out, with {calls} calls, as the report is long"] if threads else []

    # -- ranks that wait for each other

    def _deadlock_lines(self, detail: _Detail) -> list[str]:
        show = partial(self._deadlock_line, detail)
        return cut_lines(self._deadlocks, detail.lines, "lines of such pairs", show)

    @cached_property
    def _deadlocks(self) -> list[_Deadlock]:
        """Two sets of ranks each that wait for each other; if all these are few pairs of ranks, each pair."""
        alike: dict[tuple[int, int], Stalled] = {}
        for each in self.finding.pending:
            alike.setdefault((each.submitted, each.missing), each)
        found: dict[tuple[int, int], _Deadlock] = {}
        for x, y in combinations(alike.values(), 2):
            a, b = x.submitted & y.missing, y.submitted & x.missing
            if a and b:
                found.setdefault((a, b), (a, b, x, y))
        if sum(a.bit_count() * b.bit_count() for a, b in found) <= _ALL.lines:
            pairs = _pairs([*found.values()])
            order = self.finding.pending.index
            return sorted(pairs, key=lambda pair: (order(pair[2]), lowest_bit(pair[0]), lowest_bit(pair[1])))
        return [*map(_lower_first, found.values())]

    def _deadlock_line(self, detail: _Detail, deadlock: _Deadlock) -> str:
        a, b, x, y = deadlock
        wait = "waits" if a.bit_count() == 1 else "wait"
        has, have = ("has" if ranks.bit_count() == 1 else "have" for ranks in (b, a))
        return (
            f"deadlock: {self._ranks(a)} {wait} for {_name_of(x, detail)}, which {self._ranks(b)} {has} not"
            f" submitted, and {self._ranks(b)} for {_name_of(y, detail)}, which {self._ranks(a)} {have}"
            " not: let all ranks submit both before they wait, or in the same order"
        )


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
    states: Mapping[int, ProcessState]
    passed: float

    @property
    def suspects(self) -> list[int]:
        """The ranks that may be the cause.

        If a tensor is being carried out here, and on rank 0: those whose processes are lost, or all others.
        Else those that are stopped or held by a debugger, or rank 0: a rank 0 that can speak names ranks that
        have ended, and these may have ended because they gave up too.
        """
        lost = [rank for rank, state in self.states.items() if state.is_lost]
        if self.under_way or not self.rank:
            return lost or list(self.states)
        return [rank for rank in lost if self.states[rank] is not ProcessState.GONE] or [0]


def describe_stall(snapshot: StallSnapshot, places: Sequence[ProcessPlace]) -> str:
    """Return the report of a rank on which no call ends any more."""
    them = "it" if len(snapshot.names) == 1 else "them"
    why = (
        f"all ranks have submitted {them}, but some do not carry {them} out"
        if snapshot.under_way
        else "rank 0, which decides what runs, has not said why"
    )
    return "\n".join([f"{_wait_of(snapshot)}: {why}", *_suspect_lines(snapshot, places)])


def describe_silence(snapshot: StallSnapshot, state: ProcessState, place: ProcessPlace) -> str:
    """Return the report of a rank that waits while rank 0 does not answer, from rank 0's state and place."""
    return (
        f"{_wait_of(snapshot)}: rank 0, which decides what runs, does not answer\n"
        f"rank 0 on {place}: {describe_state(state, place)}"
    )


def _wait_of(snapshot: StallSnapshot) -> str:
    tensors = [Stalled(GLOBAL_SET, name, 0.0, 0, 0) for name in snapshot.names]
    what = names_of(tensors) if tensors else "the other ranks to join"
    return f"rank {snapshot.rank} has waited for {what} for {snapshot.passed:.0f} s"


def describe_late_end(snapshot: StallSnapshot, places: Sequence[ProcessPlace]) -> str:
    """Return the report of a shutdown that takes too long."""
    first = f"shutting down: not all ranks have shut down within {snapshot.passed:.0f} s"
    return "\n".join([first, *_suspect_lines(snapshot, places)])


def _suspect_lines(snapshot: StallSnapshot, places: Sequence[ProcessPlace]) -> list[str]:
    suspects = snapshot.suspects
    lines = [
        f"rank {rank} on {places[rank]}: {_describe_process(snapshot.states[rank], places[rank])}"
        for rank in suspects[:MOST_ASKED]
    ]
    left = suspects[MOST_ASKED:]
    return [*lines, f"{describe_ranks(left)}: not shown, as they are too many"] if left else lines


def error_of_stall(snapshot: StallSnapshot, places: Sequence[ProcessPlace]) -> StallError:
    """Return the error of a rank that ends without an order from rank 0."""
    text, suspects = describe_stall(snapshot, places), snapshot.suspects
    missing = {name: [*suspects] for name in snapshot.names}
    stacks = dict(zip(suspects[:MOST_ASKED], text.splitlines()[1:], strict=False))
    limit = "more than PYHVD_STALL_SHUTDOWN_TIME_SECONDS have passed"
    return StallError(f"rank {snapshot.rank} has given up: {text}\n({limit})", missing, stacks)


def _pairs(deadlocks: Sequence[_Deadlock]) -> list[_Deadlock]:
    """Return each two ranks that wait for each other, the lower one first, with their first tensors."""
    pairs: dict[tuple[int, int], _Deadlock] = {}
    for ranks, others, x, y in deadlocks:
        for a, b in product(iter_bits(ranks), iter_bits(others)):
            each = _lower_first((1 << a, 1 << b, x, y))
            pairs.setdefault(each[:2], each)
    return [*pairs.values()]


def _lower_first(deadlock: _Deadlock) -> _Deadlock:
    """Return the same with the ranks first among which is the lowest one."""
    a, b, x, y = deadlock
    return deadlock if lowest_bit(a) < lowest_bit(b) else (b, a, y, x)


def _count_hosts(names: Sequence[str]) -> str:
    """Return ``"host a"`` or ``"625 hosts: h0-h624"``."""
    return f"host {names[0]}" if len(names) == 1 else f"{len(names):,} hosts: {list_hosts(names)}"


def _name_of(tensor: Stalled, detail: _Detail = _ALL) -> str:
    if tensor.name == JOIN_NAME:
        return _shown(tensor.name)
    name, most = tensor.name, detail.name
    if len(name) > most:
        name = f"{name[: most // 2]}...{name[-(most // 2 - 3) :]}"  # names often differ in their ends only
    name = repr(name)
    return name if tensor.process_set == GLOBAL_SET else f"{name} of process set {tensor.process_set}"


def _shown(name: str) -> str:
    return "join()" if name == JOIN_NAME else name


def names_of(tensors: Sequence[Stalled], detail: _Detail = _ALL) -> str:
    """Return the names of tensors; of many, by default, the first six and the number of the others."""
    shown = ", ".join(_name_of(each, detail) for each in tensors[: detail.names])
    more = len(tensors) - detail.names
    return f"{shown} and {more} more" if more > 0 else shown


def describe_state(state: ProcessState, place: ProcessPlace) -> str:
    """Return why a process does not answer, as far as its state tells."""
    if state.is_lost:
        return _describe_process(state, place)
    silent = f"its background thread does not answer within {ANSWER_SECONDS:g} s"
    if state is ProcessState.RUNNING:
        return f"{silent}, and a thread of its process computes: probably C code that holds the GIL"
    if state is ProcessState.UNKNOWN:
        return f"{silent}, and its process {state.value}"
    return f"{silent}, and its process {state.value}: it is blocked, perhaps while it holds the GIL"


def _describe_process(state: ProcessState, place: ProcessPlace) -> str:
    hint = f": kill -CONT {place.pid} lets it go on" if state is ProcessState.STOPPED else ""
    return f"its process {state.value}{hint}"


def _headline(finding: Stall) -> str:
    count = len(finding.stalled)
    if finding.stalled[0].name == JOIN_NAME:
        return f"join() has waited for more than {finding.limit:g} s, because some ranks have not called it"
    what, them = ("a tensor has", "it") if count == 1 else (f"{count} tensors have", "them")
    return f"{what} waited for more than {finding.limit:g} s, because some ranks have not submitted {them}"


def _done(tensors: Sequence[Stalled]) -> str:
    """Return "called" for join(), and "submitted" for tensors; a report never has both."""
    return "called" if tensors[0].name == JOIN_NAME else "submitted"

"""coordinator: rank 0's CPU time and memory for a step of ResNet-50's gradients, by number of ranks.

The ranks are simulated, eight on each host: rank 0's real coordinator gets their encoded messages, merged by
the real leaders. The times include decoding the messages and sending the response list to rank 0's children.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from benchmarks.harness import OURS, PEER, Figures, Outcome
from benchmarks.question import Options, Question, main
from benchmarks.report import Target
from benchmarks.tensors import resnet50
from pyhvd.controller import Coordinator, Worker
from pyhvd.dtypes import Code, ReduceOp
from pyhvd.engine.runtime import ResponseQueue
from pyhvd.negotiation.leader import Leader
from pyhvd.negotiation.messages import (
    MergedList,
    Request,
    RequestList,
    RequestType,
    ResponseList,
    decode_merged,
    decode_requests,
    encode,
)
from pyhvd.transport.inprocess import InProcessTransport, ThreadBell
from pyhvd.transport.tree import Tree

PER_HOST = 8
CAPACITY = 1024
CACHED_STEPS = 5
STEPS = ("first step", "cached step")
ALONE = ", one message a rank"
P = ParamSpec("P")
R = TypeVar("R")
AT_LEADER = ", at the busiest leader"


@dataclass(frozen=True)
class Step:
    """One step's messages: rank 0's own, and those that arrive there, as (source, payload)."""

    own: RequestList
    arriving: list[tuple[int, bytes]]


@dataclass(frozen=True)
class Made:
    """The messages of both steps, and the time (s) that the busiest leader spent on each."""

    steps: list[Step]
    leader: list[float] = field(default_factory=list)


class Carrier(InProcessTransport):
    """Rank 0's transport, which drops what it sends."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree, [], ThreadBell(0, []))
        self.sent: deque[bytes] = deque(maxlen=1)

    def send(self, destination: int, payload: bytes) -> Carrier:  # noqa: ARG002
        """Keep the last message only."""
        self.sent.append(payload)
        return self

    def gone(self) -> bool:
        """Return True: the message has been dropped."""
        return True


def hosts_of(size: int, merged: bool) -> list[int]:
    """Return the lowest rank of each rank's host; without merging all ranks send to rank 0."""
    return [rank - rank % PER_HOST if merged else 0 for rank in range(size)]


def messages(size: int) -> list[RequestList]:
    """Return a rank's messages of the first and of a cached step; all ranks send the same."""
    requests = [
        (0, Request(RequestType.ALLREDUCE, f"gradient.{i}", Code.FLOAT32, (count,), ReduceOp.AVERAGE))
        for i, count in enumerate(resnet50())
    ]
    worker, coordinator = Worker(0, size), Coordinator(1, CAPACITY)
    first = worker.compose(requests, site_of=lambda *_: "train.py:71")
    coordinator.receive(MergedList.of(0, first))
    answer = coordinator.respond()
    assert answer is not None
    worker.process(answer)
    cached = worker.compose(requests)
    assert cached.bits
    assert not cached.requests
    return [first, cached]


def make(size: int, merged: bool) -> Made:
    """Return what arrives at rank 0 in both steps."""
    hosts = hosts_of(size, merged)
    root = Tree.of(0, hosts)
    composed = messages(size)
    if not merged:
        return Made([Step(each, [(r, encode(each)) for r in root.children]) for each in composed])
    ranks = range(PER_HOST, size, PER_HOST)
    trees = {rank: Tree.of(rank, hosts) for rank in ranks}
    sets = {0: tuple(range(size))}
    leaders = {r: Leader(t.branch, sets) for r, t in trees.items()}
    made = Made([])
    for message in composed:
        plain = encode(message)
        up: dict[int, bytes] = {}
        times: list[float] = []
        for rank in reversed(ranks):  # a leader's children have higher ranks
            tree, leader = trees[rank], leaders[rank]
            begun = time.process_time()
            leader.take(rank, MergedList.of(rank, message).parts, 0.0)
            for child in tree.children:
                leader.take(child, read(tree, child, up.get(child, plain)).parts, 0.0)
            assert leader.due == 0.0, "all ranks below have submitted everything"
            up[rank] = encode(leader.flush())
            times.append(time.process_time() - begun)
        made.leader.extend([max(times)] if times else [])
        made.steps.append(Step(message, [(r, up.get(r, plain)) for r in root.children]))
    return made


def play(size: int, merged: bool, steps: list[Step]) -> tuple[list[float], float]:
    """Return rank 0's CPU time (s) of both steps, and the most memory (MiB) that they take."""
    seconds = run(size, merged, [steps[0], *steps[1:] * CACHED_STEPS])
    tracemalloc.start()  # takes time, so in a run of its own
    run(size, merged, steps)
    _, peak = tracemalloc.get_traced_memory()
    return [seconds[0], statistics.median(seconds[1:])], peak / (1 << 20)


def run(size: int, merged: bool, steps: list[Step]) -> list[float]:
    """Let a new coordinator take some steps; return the CPU time (s) of each."""
    tree = Tree.of(0, hosts_of(size, merged))
    coordinator, queue = Coordinator(size, CAPACITY), ResponseQueue(Carrier(tree))
    seconds = []
    for number, step in enumerate(steps):
        begun = time.process_time()
        answer = take(coordinator, tree, step)
        queue.publish(answer, coordinator.audience(answer))
        queue.pop()
        seconds.append(time.process_time() - begun)
        counts = (len(answer.responses), sum(bits.count(b"\xff") for bits in answer.cached.values()))
        assert counts == ((161, 0) if number == 0 else (0, 20)), counts
    return seconds


def take(coordinator: Coordinator, tree: Tree, step: Step) -> ResponseList:
    """Let the coordinator take a step's messages, and respond after each; return the one response list."""
    coordinator.receive(MergedList.of(0, step.own))
    answer = coordinator.respond()
    for source, payload in step.arriving:
        assert answer is None
        coordinator.receive(read(tree, source, payload))
        answer = coordinator.respond()
    assert answer is not None
    return answer


def read(tree: Tree, source: int, payload: bytes) -> MergedList:
    """Read a message as the runtime does."""
    return (
        decode_merged(payload) if source in tree.leaders else MergedList.of(source, decode_requests(payload))
    )


def measure(ranks: int, options: Options) -> tuple[list[Outcome], list[str]]:  # noqa: ARG001
    """Simulate each number of ranks, in fresh processes: the memory of an earlier one would be used again."""
    times, memory = [], []
    for size in options.sizes:
        samples: dict[str, list[float]] = {}
        for _ in range(options.repeats):
            for merged, suffix in ((True, ""), (False, ALONE)):
                made = _apart(make, size, merged)
                seconds, grown = _apart(play, size, merged, made.steps)
                for step, each in zip(STEPS, seconds, strict=True):
                    samples.setdefault(step + suffix, []).append(each)
                for step, each in zip(STEPS, made.leader, strict=False):
                    samples.setdefault(step + AT_LEADER, []).append(each)
                samples.setdefault("memory" + suffix, []).append(grown)
        figures = [
            Figures.of(name, OURS if name in (*STEPS, "memory") else PEER, each, name.partition(",")[0])
            for name, each in samples.items()
        ]
        times.append(Outcome(label(size), size, "s", [each for each in figures if "step" in each.name]))
        grown_by = [each for each in figures if "memory" in each.name]
        memory.append(Outcome(f"{label(size)}, memory", size, "MiB", grown_by))
    return [*times, *memory], [f"{PER_HOST} ranks a host; CPU time of one process, without MPI"]


def _apart(function: Callable[P, R], *arguments: P.args, **_: P.kwargs) -> R:
    """Call a function in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def label(size: int) -> str:
    """Return a case's label."""
    return f"{size:,} ranks"


def _targets() -> list[Target]:
    limits = {1000: ((0.1, 0.01), (2e-3, 2e-4), (200, 2)), 10000: ((1.5, 0.02), (20e-3, 1e-3), (200, 2))}
    targets = []
    for size, of_size in limits.items():
        for ours, limit in zip((*STEPS, "memory"), of_size, strict=True):
            case = label(size) + (", memory" if ours == "memory" else "")
            targets.append(Target(f"{ours}, {label(size)}", case, ours, (), *limit, fewer=True, ranks=(1,)))
    return targets


QUESTION = Question(
    name="coordinator",
    title="coordinator: rank 0's work for a step of 161 gradients",
    sizes_are="simulated ranks",
    sizes=(8, 64, 512, 1000, 4000, 10000),
    tiny=(8, 64),
    ranks=(1,),
    repeats=3,
    probe=measure,
    targets=tuple(_targets()),
    log_sizes=True,
)

if __name__ == "__main__":
    sys.exit(main(QUESTION))

"""TensorQueue: no submission is lost or doubled, and each one wakes the runtime."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import CodeType
from typing import Any, cast

import pytest

from pyhvd.errors import DuplicateNameError, HorovodInternalError, ShutDownError
from pyhvd.native.shared_memory import find_site
from pyhvd.negotiation.messages import JOIN_NAME, Request, RequestType
from pyhvd.queue import TensorEntry, TensorQueue
from tests.unit.negotiation.simulation import allreduce, grouped

NEVER = 1e6


class Wakes:
    """Counts wake-ups."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def ignore(result: Any, error: BaseException | None) -> None:
    """Ignore a completion."""


def entry(name: str, set_id: int = 0) -> TensorEntry:
    return TensorEntry(set_id, allreduce(name), None, None, ignore)


def names(fresh: list[tuple[int, Request]]) -> list[str]:
    return [request.name for _, request in fresh]


def test_taken_in_order_once_due() -> None:
    queue = TensorQueue(Wakes(), cycle_time=10.0)
    queue.add([entry("a")])
    queue.add([entry("b"), entry("c")])
    now = time.monotonic()
    assert queue.take(now) == []
    assert names(queue.take(now + 10.1)) == ["a", "b", "c"]
    assert queue.take(now + 20) == []


def test_flush_makes_due_what_is_there_and_nothing_later() -> None:
    queue = TensorQueue(Wakes(), NEVER)
    queue.flush()
    queue.add([entry("a")])
    assert queue.take(time.monotonic()) == []
    queue.flush()
    assert names(queue.take(time.monotonic())) == ["a"]
    queue.add([entry("b")])
    assert queue.take(time.monotonic()) == []


def test_a_refusal_is_due_at_once_and_takes_no_name() -> None:
    queue = TensorQueue(Wakes(), NEVER)
    queue.add([entry("a")])
    queue.announce(3, Request(RequestType.ALLREDUCE, "a", error="no"))
    fresh = queue.take(time.monotonic())
    assert [(set_id, r.name, r.error) for set_id, r in fresh] == [(0, "a", ""), (3, "a", "no")]
    queue.add([entry("a", 3)])


def test_the_runtime_is_woken_once_and_only_if_it_sleeps() -> None:
    wakes = Wakes()
    queue = TensorQueue(wakes, NEVER)
    queue.add([entry("a")])
    assert wakes.count == 0
    due = queue.sleep_until()
    assert due is not None
    assert due > time.monotonic()
    queue.add([entry("b")])
    queue.add([entry("c")])
    assert wakes.count == 1
    queue.sleep_until()
    queue.flush()
    queue.flush()
    assert wakes.count == 2
    assert queue.sleep_until() == 0.0
    queue.take(time.monotonic())
    assert queue.sleep_until() is None
    queue.awake()
    queue.announce(0, Request(RequestType.ALLREDUCE, "x", error="no"))
    assert wakes.count == 2


def test_a_flush_before_sleep_forbids_it() -> None:
    queue = TensorQueue(Wakes(), NEVER)
    queue.add([entry("a")])
    queue.flush()
    assert queue.sleep_until() == 0.0


def test_names_are_free_again_once_answered() -> None:
    queue = TensorQueue(Wakes(), NEVER)
    first = entry("a")
    queue.add([first])
    queue.add([entry("a", 1)])
    with pytest.raises(DuplicateNameError) as error:
        queue.add([entry("a")])
    assert str(error.value) == (
        "allreduce 'a': a tensor of this name is still in flight on this rank:"
        " use another name, or synchronize the first one before"
    )
    assert queue.pop(0, "a") is first
    assert queue.pop(0, "a") is None
    queue.add([entry("a")])


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_group_is_added_as_a_whole_or_not_at_all(where: int) -> None:
    queue = TensorQueue(Wakes(), 0.0)
    queue.add([entry("taken")])
    group = [entry("x"), entry("y")]
    group.insert(where, entry("taken"))
    with pytest.raises(DuplicateNameError, match=r"'taken'.*still in flight"):
        queue.add(group)
    with pytest.raises(DuplicateNameError, match=r"'z'.*occurs twice in one grouped call"):
        queue.add([entry("z"), entry("y"), entry("z")])
    assert names(queue.take(time.monotonic() + 1)) == ["taken"]
    queue.add([entry("x"), entry("y"), entry("z")])


def test_a_set_is_taken_out_as_a_whole() -> None:
    queue = TensorQueue(Wakes(), NEVER)
    entries = [entry(f"t{i}", i % 2) for i in range(6)]
    for each in entries:
        queue.add([each])
    assert queue.pop_set(1) == entries[1::2]
    assert queue.pop_set(1) == []
    assert queue.pop(0, "t0") is entries[0]


def test_closed_with_the_first_reason() -> None:
    queue = TensorQueue(Wakes(), NEVER)
    first = entry("a")
    queue.add([first])
    assert queue.close(ShutDownError("rank 1 left")) == [first]
    assert queue.close(ShutDownError("later")) == []
    with pytest.raises(ShutDownError, match="rank 1 left"):
        queue.add([entry("a")])
    queue.announce(0, Request(RequestType.ALLREDUCE, "x", error="no"))
    queue.flush()
    assert queue.take(time.monotonic() + NEVER) == []
    assert queue.sleep_until() is None


class Sleeper:
    """A runtime's thread with only the queue and a bell; it reads the queue only after the bell rings."""

    def __init__(self, cycle_time: float) -> None:
        self._bell = threading.Semaphore(0)
        self.queue = TensorQueue(self._bell.release, cycle_time)
        self.taken: list[str] = []
        self.sleeps = 0
        self._end = False
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while True:
            fresh = self.queue.take(time.monotonic())
            for set_id, request in fresh:
                self.taken.append(request.name)
                if not request.error:
                    answered = self.queue.pop(set_id, request.name)
                    assert answered is not None
                    answered.done(request.name, None)
            if fresh:
                continue
            if self._end:
                return
            due = self.queue.sleep_until()
            if due is None:
                self.sleeps += 1
                self._bell.acquire()
            elif due > (now := time.monotonic()):
                self._bell.acquire(timeout=due - now)
            self.queue.awake()

    def stop(self) -> None:
        self._end = True
        self._bell.release()
        self.thread.join(30)
        assert not self.thread.is_alive()


@pytest.mark.parametrize("cycle_time", [0.0, 1e-4, NEVER])
def test_many_threads_lose_nothing(cycle_time: float) -> None:
    """With an endless cycle time only a waiting thread's flush wakes the runtime: a lost one would hang."""
    sleeper = Sleeper(cycle_time)
    sleeper.thread.start()
    rounds, failures = 150, []

    def work(me: int) -> None:
        for step in range(rounds):
            ended = threading.Semaphore(0)

            def done(result: Any, error: BaseException | None, ended: threading.Semaphore = ended) -> None:
                ended.release()

            group = [
                TensorEntry(0, request, None, None, done)
                for request in grouped(f"{me}.{step % 3}", [(1,)] * 3)
            ]
            sleeper.queue.add(group)
            if step % 5 == 0:
                sleeper.queue.announce(0, Request(RequestType.ALLREDUCE, f"no.{me}.{step}", error="no"))
            sleeper.queue.flush()
            for _ in group:
                if not ended.acquire(timeout=20):
                    failures.append((me, step))
                    return

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sleeper.stop()
    assert failures == []
    refused = [name for name in sleeper.taken if name.startswith("no.")]
    assert len(set(refused)) == len(refused) == 6 * rounds / 5
    tensors = [name for name in sleeper.taken if not name.startswith("no.")]
    assert len(tensors) == 6 * rounds * 3
    starts = tensors[::3]
    assert all(tensors[3 * i + 1] == f"{n[:-4]}2of3" for i, n in enumerate(starts)), "groups stay together"


def test_closing_under_fire_answers_everybody_once() -> None:
    queue = TensorQueue(Wakes(), 0.0)
    ended: list[str] = []
    refused: list[str] = []
    start = threading.Barrier(5)

    def work(me: int) -> None:
        start.wait()
        for i in range(2000):
            name = f"{me}.{i}"
            try:
                queue.add([TensorEntry(0, allreduce(name), None, None, ignore)])
            except ShutDownError:
                refused.append(name)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    popped = []
    for _ in range(50):
        popped += [e for s, r in queue.take(time.monotonic()) if (e := queue.pop(s, r.name)) is not None]
    ended = [e.request.name for e in (*popped, *queue.close(ShutDownError("over")))]
    for thread in threads:
        thread.join()
    assert sorted(ended + refused) == sorted(f"{me}.{i}" for me in range(4) for i in range(2000))


class Lane:
    """The part of the fast path that the queue uses."""

    def __init__(self) -> None:
        self.paused = False
        self.held: set[str] = set()

    def find(self, set_id: int, name: str) -> object | None:
        """Return the tensor in flight under a name, or None."""
        return name if name in self.held else None

    def find_group(self, set_id: int, name: str) -> object | None:
        """Return None: no group is in flight."""
        return None


def join_entry() -> TensorEntry:
    return TensorEntry(0, Request(RequestType.JOIN, JOIN_NAME), None, None, ignore)


def test_who_has_joined_submits_nothing_in_any_set() -> None:
    lane = Lane()
    queue = TensorQueue(Wakes(), 0.0, cast(Any, lane))
    queue.add([entry("before")])
    queue.add([join_entry()])
    assert lane.paused
    for late in ([entry("late")], [entry("late", set_id=1)], [join_entry()], grouped_entries("late")):
        with pytest.raises(HorovodInternalError, match=r"'(late|join\.noname)': this rank has joined"):
            queue.add(late)
    with pytest.raises(HorovodInternalError, match="this rank has joined"):
        queue.check_joined(allreduce("late"))
    queue.announce(0, Request(RequestType.ALLREDUCE, "late", error="no"))
    queue.announce(1, Request(RequestType.ALLREDUCE, "late", error="no"))
    assert names(queue.take(time.monotonic())) == ["before", JOIN_NAME]
    assert not queue.refusals


def test_the_answer_to_a_join_lets_in_again_before_anybody_hears_of_it() -> None:
    lane = Lane()
    queue = TensorQueue(Wakes(), 0.0, cast(Any, lane))
    queue.add([join_entry()])
    queue.pop(0, JOIN_NAME)  # completes the join
    assert not lane.paused
    queue.add([entry("after")])
    queue.announce(0, Request(RequestType.ALLREDUCE, "wrong", error="no"))
    assert queue.refusals == {(0, "wrong"): 1}


def test_a_join_that_is_refused_is_none() -> None:
    lane = Lane()
    lane.held.add(JOIN_NAME)
    queue = TensorQueue(Wakes(), 0.0, cast(Any, lane))
    with pytest.raises(DuplicateNameError):
        queue.add([join_entry()])
    assert not lane.paused
    queue.add([entry("a")])


def grouped_entries(name: str) -> list[TensorEntry]:
    return [TensorEntry(0, request, None, None, ignore) for request in grouped(name, [(2,), (3,)])]


def site_text(site: tuple[CodeType, int] | None) -> str:
    queue = TensorQueue(Wakes(), NEVER)
    queue.add([TensorEntry(0, allreduce("a"), None, None, ignore, site=site)])
    assert queue.site_of(0, "b") == ""
    return queue.site_of(0, "a")


def test_a_site_is_the_line_of_the_call() -> None:
    site = find_site()
    line = sys._getframe().f_lineno - 1
    assert site_text(site).endswith(f"test_queue.py:{line} in test_a_site_is_the_line_of_the_call")
    assert site_text(None) == ""


def test_a_site_is_relative_to_the_current_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert site_text(find_site()).startswith("test_queue.py:")


def test_a_long_site_loses_its_beginning(tmp_path: Path) -> None:
    code = compile("def f(): return find_site()\nsite = f()", str(tmp_path / ("d" * 250 + ".py")), "exec")
    space: dict[str, Any] = {"find_site": find_site}
    exec(code, space)
    text = site_text(space["site"])
    assert text.startswith("...")
    assert text.endswith("d.py:1 in f")
    assert len(text) == 160


def test_a_removed_set_leaves_nothing_due_and_no_refusal() -> None:
    """A thread submits, and refuses, in a set while the set is removed; the set's id is used again."""
    queue = TensorQueue(Wakes(), NEVER)
    queue.add([entry("a", set_id=1)])
    queue.announce(1, Request(RequestType.ALLREDUCE, "no", error="no"))
    assert [each.request.name for each in queue.pop_set(1)] == ["a"]
    assert queue.refusals == {}
    assert queue.sleep_until() is None
    queue.announce(0, Request(RequestType.ALLREDUCE, "kept", error="no"))
    queue.announce(1, Request(RequestType.ALLREDUCE, "no", error="no"))
    queue.pop_set(1)
    assert queue.refusals == {(0, "kept"): 1}
    assert queue.sleep_until() == 0.0

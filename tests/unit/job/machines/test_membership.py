"""The hosts of an elastic job, and when ranks start anew: random schedules, and an example of each rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, note, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyhvd.job.errors import LaunchError
from pyhvd.job.machines.machine import Say
from pyhvd.job.machines.member_host import FoundHost
from pyhvd.job.machines.membership import (
    Action,
    AskToLeave,
    EndAgent,
    EndGeneration,
    Finish,
    GiveUp,
    Membership,
    StartAgent,
    StartGeneration,
    Suspend,
)
from pyhvd.job.machines.roster import ElasticLimits, Place
from pyhvd.job.spec import argument_of
from tests.thinning import examples

NAMES = ["a", "b", "c", "d"]
TIMEOUT_S = 600.0
LEAVE_S = 60.0
RESIZE_S = 10.0
LIMITS = st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.booleans()).map(
    lambda n: ElasticLimits(n[0], n[0] + n[1] + n[2] if n[3] else None, n[0] + n[1])
)


class Schedule(RuleBasedStateMachine):
    """A job whose hosts, agents and ranks do anything; the rules are checked in the simplest way."""

    @initialize(
        limits=LIMITS,
        reset_limit=st.sampled_from([None, None, None, 0, 2]),
        cooldown=st.sampled_from([None, (10.0, 300.0), (10.0, 300.0)]),
        fixed=st.none() | st.lists(st.integers(1, 3), min_size=1, max_size=4),
    )
    def begin(
        self,
        limits: ElasticLimits,
        reset_limit: int | None,
        cooldown: tuple[float, float] | None,
        fixed: list[int] | None,
    ) -> None:
        self.now = 100.0
        self.limits = ElasticLimits(
            limits.min_np, limits.max_np, limits.start_np, reset_limit, TIMEOUT_S, cooldown
        )
        self.fixed = fixed is not None
        hosts = [FoundHost(name, slots) for name, slots in zip(NAMES, fixed or (), strict=False)]
        self.machine = Membership(self.limits, self.now, hosts if self.fixed else None)
        self.discovered = False
        self.slots: dict[str, set[int]] = {host.name: {host.slots} for host in hosts}
        self.missing: dict[str, int] = {}
        self.agents: dict[str, str] = {}
        self.joined: dict[str, int] = {}  # when a host first got ranks, while its agent is up
        self.out_since: dict[str, float] = {}
        self.drained: set[str] = set()
        self.rank_failures: dict[str, int] = {}
        self.lost: set[str] = set()  # since the last commit
        self.ranks: tuple[Place, ...] = ()
        self.number = -1
        self.asked_at = self.ended_at = math.inf
        self.waits_since = self.now
        self.commit = 0
        self.held: dict[str, int] = {}  # the newest commit of each host
        self.failures: list[Exception | None] = []
        self.over: GiveUp | Finish | None = None
        self.tick()

    # ---- what the driver does

    def tick(self) -> None:
        actions = self.machine.tick(self.now)
        for action in actions:
            assert self.over is None
            match action:
                case StartAgent(host):
                    assert host not in self.agents
                    assert self.now >= self.out_since.get(host, -math.inf)
                    self.agents[host] = "starting"
                case EndAgent(host):
                    assert host not in self.placed or not self.ranks
                    del self.agents[host]
                    self.joined.pop(host, None)
                    assert self.held.pop(host, 0) <= max(self.held.values(), default=0)
                case StartGeneration():
                    self.start(action)
                case AskToLeave(number):
                    assert self.ranks
                    assert number == self.number + 1
                    assert math.isinf(self.asked_at)
                    self.asked_at = self.now
                case EndGeneration():
                    assert self.ranks
                    assert math.isinf(self.ended_at)
                    self.ended_at = self.now
                case GiveUp() | Finish():
                    assert action is actions[-1]
                    self.check_end(action)
                    self.over = action
                case Say(text):
                    assert text.startswith("pyhvd: ")
                    assert "\n" not in text

    def start(self, action: StartGeneration) -> None:
        assert not self.ranks
        assert action.number == self.number + 1
        assert self.limits.reset_limit is None or action.number <= self.limits.reset_limit
        size = sum(place.slots for place in action.places)
        assert self.limits.min_np <= size <= (self.limits.max_np or math.inf)
        names = [place.host for place in action.places]
        assert len(set(names)) == len(names)
        for place in action.places:
            assert self.agents[place.host] == "up"
            assert 1 <= place.slots <= max(self.slots[place.host])
        old = {name: at for name, at in self.joined.items() if name in names}
        if old:
            assert names[0] == min(old, key=lambda name: old[name])
        for name in names:
            self.joined.setdefault(name, len(self.joined) + 1000 * action.number)
        self.ranks, self.number = action.places, action.number
        self.asked_at = self.ended_at = math.inf

    def check_end(self, action: GiveUp | Finish) -> None:
        if isinstance(action, Finish):
            return
        limit = self.limits.reset_limit
        if len(self.failures) >= 3:
            assert self.failures[0] in (action.error, None)
        elif limit is None or self.number < limit:
            assert not self.ranks
            assert isinstance(action.error, LaunchError)
            assert self.fixed or not self.discovered or self.now >= self.waits_since + TIMEOUT_S

    @property
    def placed(self) -> set[str]:
        return {place.host for place in self.ranks}

    @property
    def runs(self) -> bool:
        return self.over is None

    def end_generation(self) -> None:
        self.ranks = ()
        self.waits_since = self.now

    # ---- events

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 3.5, 11.0, 61.0, 400.0]))
    def wait(self, seconds: float) -> None:
        if self.runs:
            self.now += seconds
            self.tick()

    @precondition(lambda self: self.runs and not self.fixed)
    @rule(
        hosts=st.lists(
            st.tuples(st.sampled_from(NAMES), st.integers(1, 3)), max_size=4, unique_by=lambda h: h[0]
        ),
        times=st.sampled_from([1, 2, 3]),
        bad=st.sampled_from([False, False, False, True]),
    )
    def discover(self, hosts: list[tuple[str, int]], times: int, bad: bool) -> None:
        self.discovered = True
        for _ in range(times):
            if not self.runs:
                return
            for name, slots in hosts:
                self.slots.setdefault(name, set()).add(slots)
                if self.missing.get(name, 0) >= 2 and name not in self.agents:
                    self.drained.discard(name)
                self.missing[name] = 0
            for name in self.slots:
                if hosts and not bad and name not in dict(hosts):
                    self.missing[name] = self.missing.get(name, 0) + 1
            found = [FoundHost(name, slots) for name, slots in hosts]
            self.now += 1.0
            self.machine.discover(found, self.now, ["line 9, 'x y': expected h"] if bad else [])
            self.tick()

    @precondition(lambda self: self.runs and not self.fixed)
    @rule()
    def fail_to_discover(self) -> None:
        self.machine.discovery_failed("exit code 1", self.now)
        self.tick()
        assert self.runs == self.discovered

    def pick(self, data: st.DataObject, state: str) -> str | None:
        names = sorted(name for name, now in self.agents.items() if now == state)
        return data.draw(st.sampled_from(names)) if names else None

    @precondition(lambda self: self.runs and "starting" in self.agents.values())
    @rule(data=st.data())
    def come_up(self, data: st.DataObject) -> None:
        for _ in range(data.draw(st.integers(1, 4))):
            host = self.pick(data, "starting")
            if host is not None and self.runs:
                self.agents[host] = "up"
                self.machine.agent_up(host, self.now)
                self.tick()

    @precondition(lambda self: self.runs and "starting" in self.agents.values())
    @rule(data=st.data(), jitter=st.floats(0, 1))
    def fail_to_start(self, data: st.DataObject, jitter: float) -> None:
        host = self.pick(data, "starting")
        assert host is not None
        self.put_out(host)
        self.machine.agent_lost(host, "ssh says no", self.now, jitter)
        self.tick()

    def put_out(self, host: str) -> None:
        del self.agents[host]
        self.joined.pop(host, None)
        self.held.pop(host, None)
        if host not in self.drained:
            self.out_since[host] = math.inf if self.limits.cooldown is None else self.now + 10.0

    @precondition(lambda self: self.runs and "up" in self.agents.values())
    @rule(data=st.data(), jitter=st.floats(0, 1), as_failure=st.booleans())
    def lose(self, data: st.DataObject, jitter: float, as_failure: bool) -> None:
        host = self.pick(data, "up")
        assert host is not None
        in_it = host in self.placed
        cause = OSError("reset")
        if in_it and self.ended_at == math.inf:
            if host in self.lost:
                self.failures.append(cause if as_failure else None)
            self.lost.add(host)
        self.put_out(host)
        if in_it and as_failure:
            self.end_generation()
            self.machine.host_failed(cause, host, "reset", self.now, jitter)
        else:
            self.machine.agent_lost(host, "reset", self.now, jitter)
        self.tick()
        assert not (in_it and not as_failure and self.runs and self.ended_at == math.inf)

    @precondition(lambda self: self.runs and self.ranks)
    @rule(data=st.data(), jitter=st.floats(0, 1), times=st.sampled_from([1, 1, 3]))
    def fail(self, data: st.DataObject, jitter: float, times: int) -> None:
        for _ in range(times):
            if not (self.runs and self.ranks):
                return
            host = data.draw(st.sampled_from(sorted(self.placed)))
            before, agents, killed = self.ranks, dict(self.agents), self.ended_at < math.inf
            cause = RuntimeError(f"failure of generation {self.number}")
            if not killed:
                self.failures.append(cause)
                self.rank_failures[host] = self.rank_failures.get(host, 0) + 1
            self.end_generation()
            self.machine.rank_failed(cause, host, self.now, jitter)
            self.tick()
            assert len(self.failures) < 3 or isinstance(self.over, GiveUp)
            if self.runs and not killed and all(map(self.is_steady, agents)):
                assert self.ranks[: len(before)] == before

    def is_steady(self, host: str) -> bool:
        """Return whether nothing but a failure of ranks has happened to a host."""
        steady = self.missing.get(host, 0) == 0 and len(self.slots[host]) == 1
        return (
            steady
            and host not in self.drained
            and self.rank_failures.get(host, 0) < 3
            and host in self.joined
        )

    @precondition(lambda self: self.runs and self.number >= 0)
    @rule(data=st.data(), times=st.sampled_from([0, 1, 50]))
    def make_commits(self, data: st.DataObject, times: int) -> None:
        """Let some hosts hold a new commit, or the newest one that others hold."""
        able = sorted(self.placed & set(self.joined))
        if able:
            if times:
                self.commit += times
                self.failures.clear()
                self.lost.clear()
            newest = self.commit if times else max(self.held.values(), default=0)
            self.held |= dict.fromkeys(data.draw(st.sets(st.sampled_from(able), min_size=1)), newest)
        self.machine.committed(self.held, self.now)
        self.tick()

    @precondition(lambda self: self.runs and self.ranks and min(self.asked_at, self.ended_at) < math.inf)
    @rule()
    def leave(self) -> None:
        self.end_generation()
        self.machine.generation_over(self.now, done=False)
        self.tick()

    @precondition(lambda self: self.runs and self.slots)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        host = data.draw(st.sampled_from([*sorted(self.slots), "unknown"]))
        if host != "unknown":
            self.drained.add(host)
        self.machine.drain(host)
        self.tick()

    @precondition(lambda self: self.runs and self.ranks and self.number > 2)
    @rule()
    def finish(self) -> None:
        self.machine.generation_over(self.now, done=True)
        self.tick()
        assert self.over == Finish()
        assert self.machine.tick(self.now + 1.0) == []

    # ---- what holds at any time

    @invariant()
    def never_waits_for_ever(self) -> None:
        if not hasattr(self, "machine") or self.over is not None:
            return
        if self.ranks:
            return
        assert self.now < self.waits_since + TIMEOUT_S
        usable = sum(
            min(self.slots[name])
            for name, state in self.agents.items()
            if state == "up"
            and name not in self.drained
            and self.missing.get(name, 0) < 2
            and self.rank_failures.get(name, 0) < 3
        )
        assert usable < (self.limits.min_np if self.number >= 0 else self.limits.start_np)

    @invariant()
    def agrees_with_the_machine(self) -> None:
        if hasattr(self, "machine") and self.over is None:
            assert self.machine.running == bool(self.ranks)
            assert self.machine.number == self.number

    def teardown(self) -> None:
        """Leave the job alone, with hosts that never come: it ends, or runs."""
        if hasattr(self, "machine"):
            note(self.machine.story())  # shown if an example fails
        if not hasattr(self, "machine") or self.over is not None:
            return
        for _ in range(2000):
            if self.over is not None or (self.ranks and math.isinf(min(self.asked_at, self.ended_at))):
                return
            if self.ranks:
                self.leave()
            for host in [name for name, state in self.agents.items() if state == "starting"]:
                self.put_out(host)
                self.machine.agent_lost(host, "no route", self.now, 0.5)
            self.now += 5.0
            self.tick()
        raise AssertionError("the job neither runs nor ends")


Schedule.TestCase.settings = settings(max_examples=examples(1000, longest=True), stateful_step_count=40)
TestSchedule = Schedule.TestCase


class Job:
    """A machine, and what it has said; agents come up at once, if they may."""

    def __init__(self, hosts: dict[str, int] | None = None, script: bool = False, **limits: Any) -> None:
        given = {"min_np": 1, "max_np": None, "start_np": sum((hosts or {}).values()) or 1, **limits}
        self.now = 0.0
        self.said: list[str] = []
        self.agents: set[str] = set()
        found = [FoundHost(*each) for each in (hosts or {}).items()]
        self.machine = Membership(ElasticLimits(**given), 0.0, None if script else found)
        if script and hosts:
            self.print(hosts, times=2)
        self.started = self.bring_up()

    def tick(self, seconds: float = 0.0) -> list[Action]:
        """Return what is to be done, without lines."""
        self.now += seconds
        actions = self.machine.tick(self.now)
        self.said += [action.text for action in actions if isinstance(action, Say)]
        return [action for action in actions if not isinstance(action, Say)]

    def bring_up(self, seconds: float = 0.0) -> list[Action]:
        """Bring up all agents that are to be started; return what else is to be done."""
        actions = self.tick(seconds)
        for action in actions:
            if isinstance(action, StartAgent):
                self.machine.agent_up(action.host, self.now)
        rest = [action for action in actions if not isinstance(action, StartAgent)]
        return rest + self.tick()

    def print(self, hosts: dict[str, int], times: int = 1) -> None:
        """Let the discovery script print hosts."""
        for _ in range(times):
            self.machine.discover([FoundHost(*each) for each in hosts.items()], self.now)

    def commit(self, number: int, hosts: str = "") -> None:
        """Let hosts hold a commit; all that have had ranks, unless some are named."""
        self.machine.committed(dict.fromkeys(hosts or self.machine.hosts, number), self.now)

    def fail(self, host: str, text: str = "rank 0 was ended by SIGKILL") -> list[Action]:
        """Let a rank fail; return what follows."""
        self.machine.rank_failed(RuntimeError(text), host, self.now, 0.0)
        return self.tick()

    def lose(self, host: str) -> list[Action]:
        """Let a host with ranks be lost; return what follows."""
        self.machine.host_failed(OSError("reset"), host, "connection reset", self.now, 0.0)
        return self.tick()

    def leave(self) -> list[Action]:
        """Let the ranks leave; return what follows."""
        self.machine.generation_over(self.now, done=False)
        return self.bring_up()


def start(number: int, **places: int) -> list[Action]:
    return [StartGeneration(number, tuple(Place(*each) for each in places.items()))]


def error_of(actions: Sequence[Action]) -> Exception:
    assert isinstance(actions[-1], GiveUp)
    return actions[-1].error


def test_a_rank_that_fails_is_started_again_in_the_same_places() -> None:
    job = Job({"a": 2, "b": 2})
    assert job.started == start(0, a=2, b=2)
    job.commit(41)
    assert job.fail("b", "pyhvd: rank 2 of 4 on host b was ended by SIGKILL\nmore") == start(1, a=2, b=2)
    assert job.said == [
        "pyhvd: generation 1: 4 ranks on 2 hosts, from commit 41: rank 2 of 4 on host b was ended by SIGKILL"
    ]


def test_of_a_traceback_the_exception_is_said() -> None:
    job = Job({"a": 2})
    frames = 'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n    step()'
    stall = "StallError: tensors were not submitted:\n  'gradient'\n(2 s is the limit)"
    job.fail("a", f"pyhvd: rank 1 of 2 failed:\n{frames}\nOSError: away\n\n{frames}\n{stall}")
    job.fail("a", "pyhvd: rank 1 of 2 called sys.exit:\nno data")
    whys = [line.partition("beginning: ")[2] for line in job.said]
    assert whys == [
        "rank 1 of 2 failed: StallError: tensors were not submitted:",
        "rank 1 of 2 called sys.exit: no data",
    ]


def test_the_third_failure_without_a_new_commit_ends_the_job_with_the_first() -> None:
    job = Job({"a": 2})
    job.fail("a", "zeroth")
    job.commit(1)
    assert job.fail("a", "first") == start(2, a=2)
    job.commit(1)
    assert job.fail("a", "second") == start(3, a=2)
    assert str(error_of(job.fail("a", "third"))) == "first"
    assert job.tick(1.0) == []


def test_a_single_host_survives_any_number_of_failures_with_progress() -> None:
    job = Job({"a": 2})
    for number in range(1, 20):
        job.commit(number)
        assert job.fail("a") == start(number, a=2)


def test_a_host_with_three_rank_failures_is_left_out_for_a_time() -> None:
    job = Job({"a": 2, "b": 2}, min_np=2)
    for number in range(1, 3):
        job.commit(number)
        assert job.fail("b") == start(number, a=2, b=2)
    job.commit(3)
    assert job.fail("b") == [*start(3, a=2), EndAgent("b")]
    assert job.said[-1].endswith("host b is left out for 10 s: 3 ranks failed there within 10 min")
    assert job.bring_up(9.9) == []
    assert job.bring_up(0.2) == [AskToLeave(4)]
    assert job.leave() == start(4, a=2, b=2)
    assert job.said[-1].endswith(": host b joined")


def test_rank_failures_long_ago_do_not_count() -> None:
    job = Job({"a": 2, "b": 2}, min_np=2)
    for number in range(1, 9):
        job.tick(300.0)
        job.commit(number)
        assert job.fail("b") == start(number, a=2, b=2)


def test_a_host_that_is_lost_again_and_again_is_left_out_for_longer() -> None:
    job = Job({"a": 1, "b": 1})
    waits = []
    for number in range(1, 14, 2):
        job.commit(number)
        assert job.lose("b") == start(number, a=1)
        assert job.tick(9.9) == []
        waits.append(10)
        while not (actions := job.tick(1.0)):
            waits[-1] += 1
        assert actions == [StartAgent("b")]
        job.machine.agent_up("b", job.now)
        job.tick()
        assert job.leave() == start(number + 1, a=1, b=1)
    assert waits == [10, 20, 40, 80, 160, 300, 300]
    job.tick(600.0)
    job.commit(100)
    job.lose("b")
    assert "host b: connection reset; it is left out for 10 s" in job.said[-1]


def test_a_host_is_left_out_for_ever() -> None:
    job = Job({"a": 1, "b": 1}, cooldown=None)
    assert job.lose("b") == start(1, a=1)
    assert job.tick(1e6) == []
    error = error_of(job.lose("a"))
    assert isinstance(error, LaunchError)
    assert str(error) == (
        "too few hosts: 0 of at least 1 slots are up\n"
        "host a: left out for ever: connection reset\n"
        "host b: left out for ever: connection reset"
    )


def test_an_agent_that_is_lost_ends_the_generation() -> None:
    job = Job({"a": 1, "b": 1})
    job.machine.agent_lost("b", "is silent", 1.0, 0.5)
    assert job.tick() == [EndGeneration()]
    job.machine.agent_lost("b", "is silent", 1.0, 0.5)
    job.machine.host_failed(OSError("other"), "b", "is silent", 1.5, 0.5)
    assert job.tick(2.0) == start(1, a=1)
    assert job.said[-1].endswith("after 1.0 s: host b: is silent; it is left out for 15 s")


def test_the_loss_of_many_hosts_is_survived_and_a_program_that_ends_hosts_is_not() -> None:
    job = Job(dict.fromkeys("abcde", 1))
    for number, host in enumerate("abcd", 1):
        assert isinstance(job.lose(host)[-1], StartGeneration)
        assert job.machine.number == number
    job = Job({"a": 1, "b": 1}, min_np=2)
    for _ in range(3):
        job.lose("b")
        job.bring_up(300.0)
    assert str(error_of(job.lose("b"))) == "reset"


def test_a_start_waits_for_the_wanted_slots_but_not_for_ever() -> None:
    job = Job({"a": 2}, script=True, start_np=4, min_np=2)
    assert job.started == []
    assert job.tick(2.9) == []
    assert job.tick(0.2) == start(0, a=2)
    assert job.said[-1] == "pyhvd: 2 ranks on 1 host to begin with, of 4"


def test_a_start_waits_for_agents_that_are_starting() -> None:
    job = Job(script=True, start_np=4, min_np=2)
    job.print({"a": 2, "b": 2})
    assert job.tick() == [StartAgent("a"), StartAgent("b")]
    job.machine.agent_up("b", 0.0)
    assert job.tick(100.0) == []
    job.machine.agent_lost("a", "ssh: no route", job.now, 0.0)
    assert job.tick() == start(0, b=2)


def test_the_oldest_host_has_rank_0() -> None:
    job = Job({"a": 1, "b": 1})
    assert job.lose("a") == start(1, b=1)
    assert job.bring_up(11.0) == [AskToLeave(2)]
    assert job.leave() == start(2, b=1, a=1)


def test_hosts_join_in_the_order_of_the_script() -> None:
    job = Job({"m": 1}, script=True)
    job.print({"z": 1, "m": 1, "a": 1}, times=2)
    assert job.tick() == [StartAgent("z"), StartAgent("a")]
    job.machine.agent_up("a", 0.0)
    job.machine.agent_up("z", 0.0)
    assert job.tick() == [AskToLeave(1)]
    assert job.leave() == start(1, m=1, z=1, a=1)


def test_ranks_grow_at_most_every_ten_seconds() -> None:
    job = Job({"a": 1}, script=True)
    job.print({"a": 1, "b": 1}, times=2)
    assert job.bring_up() == [AskToLeave(1)]
    assert job.leave() == start(1, a=1, b=1)
    job.print({"a": 1, "b": 1, "c": 1}, times=2)
    assert job.bring_up(9.9) == []
    assert job.tick(0.2) == [AskToLeave(2)]
    assert job.tick(1000.0) == []


def test_spare_hosts_are_up_without_ranks_and_take_over() -> None:
    job = Job({"a": 2, "b": 2, "c": 2}, max_np=3, start_np=3)
    assert job.started == start(0, a=2, b=1)
    assert job.lose("a") == start(1, b=2, c=1)


def test_a_host_that_is_gone_leaves_after_two_results() -> None:
    job = Job({"a": 1, "b": 1}, script=True)
    job.print({"a": 1})
    assert job.tick() == []
    job.machine.discovery_failed("exit code 1", job.now)
    assert job.tick() == []
    job.print({"a": 1})
    assert job.tick() == [AskToLeave(1)]
    assert job.tick(59.9) == []
    assert job.tick(0.2) == [EndGeneration()]
    assert job.leave() == [*start(1, a=1), EndAgent("b")]
    assert job.said[-1].endswith("from the beginning: host b left")
    job.print({"a": 1, "b": 1})
    assert job.tick() == [StartAgent("b")]


def test_fewer_slots_are_a_change_too() -> None:
    job = Job({"a": 4, "b": 2}, script=True, min_np=3)
    job.print({"a": 2, "b": 2}, times=2)
    assert job.tick() == [AskToLeave(1)]
    assert job.leave() == start(1, a=2, b=2)
    assert job.said[-1].endswith("the hosts have other slots")
    job.print({"a": 1, "b": 1}, times=3)
    assert job.tick() == [AskToLeave(2)]
    assert job.leave() == start(2, a=1, b=2)


def test_the_script_alone_never_takes_too_many_hosts() -> None:
    job = Job({"a": 1, "b": 1}, script=True, min_np=2)
    job.print({"a": 1}, times=5)
    assert job.tick() == []
    assert job.fail("a") == start(1, a=1, b=1)
    job.print({"a": 1, "c": 1}, times=2)
    assert job.bring_up() == [AskToLeave(2)]
    assert job.leave() == [*start(2, a=1, c=1), EndAgent("b")]


@pytest.mark.parametrize("bad", [True, False])
def test_a_result_with_bad_lines_or_without_hosts_takes_no_host_away(bad: bool) -> None:
    job = Job({"a": 1, "b": 1}, script=True)
    problems = [f"line {number}, 'x y': expected h" for number in range(5)] if bad else []
    for _ in range(20):
        job.machine.discover([], job.now, problems)
        assert job.tick(1.0) == []
    if bad:
        assert len(job.said) == 3
        assert job.said[0] == (
            "pyhvd: host discovery: line 0, 'x y': expected h; while lines are bad no host is taken away"
        )
    else:
        assert job.said == ["pyhvd: host discovery: no host was found; the last good result holds"]


def test_a_result_with_bad_lines_takes_no_single_host_away() -> None:
    """The others would suffice."""
    job = Job({"a": 1, "b": 1}, script=True)
    for _ in range(20):
        job.machine.discover([FoundHost("a", 1)], job.now, ["line 2, 'b x': expected b"])
        assert job.tick(1.0) == []


def test_a_script_that_fails_ends_the_job_only_at_first() -> None:
    job = Job(script=True)
    job.machine.discovery_failed("the script ended with code 1", 0.0)
    assert str(error_of(job.tick())) == "host discovery: the script ended with code 1"
    job = Job({"a": 1}, script=True)
    for _ in range(70):
        job.machine.discovery_failed("the script ended with code 1", job.now)
        assert job.tick(1.0) == []
    line = "pyhvd: host discovery: the script ended with code 1; the last good result holds"
    assert job.said == [line, line]


def test_a_host_that_is_drained_leaves_and_stays_away() -> None:
    job = Job({"a": 1, "b": 1}, script=True)
    job.commit(5)
    job.machine.drain("b")
    assert job.tick() == [AskToLeave(1)]
    assert job.leave() == [*start(1, a=1), EndAgent("b")]
    job.print({"a": 1, "b": 1}, times=3)
    assert job.tick(1000.0) == []
    job.print({"a": 1}, times=2)
    job.print({"a": 1, "b": 1})
    assert job.tick() == [StartAgent("b")]
    job.machine.drain("x")
    job.tick()
    assert job.said[-1] == "pyhvd: cannot drain host x: it is none of the job's hosts: a, b"


def test_a_drained_host_hands_its_state_over_first() -> None:
    job = Job({"a": 2, "b": 2}, max_np=2, start_np=2)
    job.commit(5)
    job.machine.drain("a")
    assert job.tick() == [AskToLeave(1)]
    assert job.leave() == start(1, a=1, b=1)
    job.commit(5, "a")
    assert job.fail("b") == start(2, a=1, b=1)
    job.commit(5)
    assert job.tick() == [AskToLeave(3)]
    assert job.leave() == [*start(3, b=2), EndAgent("a")]


def test_a_drained_host_that_alone_holds_the_newest_commit_hands_it_over() -> None:
    job = Job({"a": 1, "b": 1})
    job.commit(5)
    job.machine.drain("b")
    assert job.tick() == [AskToLeave(1)]
    job.commit(6, "b")
    assert job.fail("a") == start(1, a=1, b=1)
    assert "from commit 6" in job.said[-1]
    job.commit(6)
    assert job.tick() == [AskToLeave(2)]
    assert job.leave() == [*start(2, a=1), EndAgent("b")]


def test_a_drained_host_hands_over_an_older_commit_when_the_newer_one_is_lost() -> None:
    job = Job({"a": 1, "b": 1, "c": 1}, max_np=2, start_np=2)
    job.commit(5)
    job.commit(6, "b")
    job.machine.drain("a")
    assert job.tick() == [AskToLeave(1)]
    assert job.lose("b") == start(1, a=1, c=1)


def test_a_drained_host_that_alone_may_have_ranks_keeps_its_rank() -> None:
    job = Job({"a": 1}, script=True, max_np=1)
    job.commit(5)
    job.print({"a": 1, "b": 1})
    assert job.bring_up() == []
    job.machine.drain("a")
    assert job.tick(100.0) == []


def test_after_a_rollback_older_holders_count() -> None:
    job = Job({"a": 1, "b": 1, "c": 1}, max_np=2, start_np=2)
    job.commit(5)
    assert job.lose("a") == start(1, b=1, c=1)
    job.machine.rolled_back(4)
    job.machine.drain("b")
    assert job.tick() == []
    assert job.fail("c") == start(2, b=1, c=1)
    assert "from commit 4" in job.said[-1]
    job.commit(5)
    assert job.tick() == [AskToLeave(3)]
    assert job.leave() == [*start(3, c=1), EndAgent("b")]


def test_too_few_hosts_are_waited_for_and_named() -> None:
    job = Job({"a": 1, "b": 1}, min_np=2, elastic_timeout=15.0)
    job.machine.host_failed(OSError("reset"), "b", "connection reset", 0.0, 0.0)
    assert job.tick() == []
    assert job.said == [
        "pyhvd: waiting up to 15 s for hosts: 1 of at least 2 slots are up;"
        " host b: left out for 10 s: connection reset"
    ]
    assert job.tick(10.0) == [StartAgent("b")]
    assert job.tick(4.9) == []
    error = error_of(job.tick(0.1))
    assert isinstance(error, LaunchError)
    assert str(error) == (
        "too few hosts after 15 s (--elastic-timeout): 1 of at least 2 slots are up\n"
        "host b: its agent is starting, after: connection reset"
    )
    assert len(job.said) == 1


@pytest.mark.parametrize("elastic_timeout", [5.0, 600.0])
def test_the_first_wait_may_have_a_limit_of_its_own(elastic_timeout: float) -> None:
    job = Job(script=True, min_np=2, start_np=2, elastic_timeout=elastic_timeout, start_timeout=20.0)
    assert job.tick(19.9) == []
    assert job.said[0].startswith("pyhvd: waiting up to 20 s for hosts: ")
    assert str(error_of(job.tick(0.1))).startswith("too few hosts after 20 s (--start-timeout): ")
    job = Job(script=True, min_np=2, start_np=2, start_timeout=20.0, name_of=argument_of)
    assert str(error_of(job.tick(20.0))).startswith("too few hosts after 20 s (start_timeout): ")


def test_a_script_that_finds_nothing_is_waited_for() -> None:
    job = Job(script=True, min_np=2, start_np=2)
    assert job.tick(3.0) == []
    assert job.said == [
        "pyhvd: waiting up to 600 s for hosts: 0 of at least 2 slots are up; no other host was found"
    ]
    assert isinstance(error_of(job.tick(597.0)), LaunchError)


def test_failures_use_up_the_restarts() -> None:
    job = Job({"a": 1}, reset_limit=1)
    assert job.fail("a", "first") == start(1, a=1)
    assert str(error_of(job.fail("a", "second"))) == "second"
    assert job.said[-1] == (
        "pyhvd: the ranks were started again 1 times, as often as --reset-limit allows; last: second"
    )


def test_no_restart_is_spent_on_hosts_that_come_or_go_at_the_limit() -> None:
    job = Job({"a": 1, "b": 1}, script=True, reset_limit=0)
    job.print({"a": 1, "c": 1}, times=3)
    assert job.bring_up(20.0) == []
    job.machine.drain("a")
    assert job.tick() == [AskToLeave(1)]
    assert str(error_of(job.leave())) == (
        "the ranks were started again 0 times, as often as --reset-limit allows, and the hosts have changed"
    )


def test_ranks_that_are_killed_are_no_failure() -> None:
    job = Job({"a": 1, "b": 1})
    job.machine.drain("b")
    assert job.tick() == [AskToLeave(1)]
    assert job.tick(60.0) == [EndGeneration()]
    assert job.fail("a") == [*start(1, a=1), EndAgent("b")]
    assert job.said[-1].endswith("host b left")


def test_a_job_is_over_when_all_ranks_have_returned() -> None:
    job = Job({"a": 1})
    job.machine.generation_over(1.0, done=True)
    assert job.tick() == [Finish()]
    assert job.tick(1.0) == []


@pytest.mark.parametrize("numbers", [(0, None, 1), (2, None, 1), (1, 2, 3)])
def test_limits_are_in_order(numbers: tuple[int, int | None, int]) -> None:
    min_np, max_np, start_np = numbers
    with pytest.raises(ValueError, match="expected 1 <= min_np <= start_np <= max_np"):
        ElasticLimits(min_np, max_np, start_np)


@given(st.lists(st.sets(st.sampled_from("abc"), min_size=1), max_size=30), st.integers(1, 2))
def test_hosts_that_flap_never_start_ranks_again(results: list[set[str]], min_np: int) -> None:
    known = {"a", "b"}
    job = Job(dict.fromkeys("ab", 1), script=True, min_np=min_np)
    assert job.started == start(0, a=1, b=1)
    before = known
    for result in results:
        # No host of the job is missing twice in a row, and the new one is not found twice in a row.
        printed = (result | (known - before)) - ({"c"} & before) or known
        before = printed
        job.print(dict.fromkeys(sorted(printed), 1))
        assert not any(isinstance(action, AskToLeave) for action in job.bring_up(1.0))


def test_a_host_that_refuses_ends_its_generation_once() -> None:
    job = Job({"a": 2, "b": 2}, min_np=2)
    job.machine.agent_lost("b", "the script is another", job.now, 0.0)
    assert job.fail("") == start(1, a=2)
    assert "host b: the script is another" in job.said[-1]


def test_a_host_that_is_lost_after_all_ranks_returned_changes_nothing() -> None:
    job = Job({"a": 2, "b": 2})
    job.machine.generation_over(job.now, done=True)
    job.machine.agent_lost("b", "its agent is gone", job.now, 0.0)
    assert job.tick() == [Finish()]


def test_a_host_whose_ranks_fail_often_stays_if_it_would_not_come_back() -> None:
    job = Job({"a": 1, "b": 1}, leaves_out=False)
    for number in range(1, 6):
        job.machine.committed({"a": number, "b": number}, job.now)
        assert job.fail("b") == start(number, a=1, b=1)


def test_a_job_that_is_suspended_ends_when_its_ranks_have_left() -> None:
    job = Job({"a": 2, "b": 2})
    job.commit(3, "ab")
    job.machine.suspend("the launcher got SIGTERM")
    job.machine.suspend("the launcher got SIGTERM")
    assert job.tick() == [AskToLeave(1, suspends=True)]
    assert job.said[-1] == "pyhvd: the launcher got SIGTERM: the ranks leave at their next commit or check"
    assert job.leave() == [Suspend()]


def test_ranks_of_a_suspended_job_that_do_not_leave_are_ended() -> None:
    job = Job({"a": 2})
    job.machine.suspend("the launcher got SIGTERM")
    job.tick()
    assert job.tick(LEAVE_S) == [EndGeneration()]


def test_ranks_that_leave_already_are_told_that_the_job_is_suspended() -> None:
    job = Job({"a": 2, "b": 2})
    job.machine.drain("a")
    assert job.tick() == [AskToLeave(1)]
    job.machine.suspend("the launcher got SIGTERM")
    assert job.tick() == [AskToLeave(1, suspends=True)]
    assert job.tick() == []


@pytest.mark.parametrize("resumable", [True, False])
def test_a_job_whose_hosts_are_all_drained_is_suspended_if_it_can_be_resumed(resumable: bool) -> None:
    job = Job({"a": 1, "b": 1}, resumable=resumable)
    job.machine.drain("a")
    job.machine.drain("b")
    assert job.tick() == [AskToLeave(1, suspends=resumable)]
    (end,) = job.leave()
    assert isinstance(end, Suspend if resumable else GiveUp)


def test_a_job_that_is_resumed_counts_its_generations_on() -> None:
    job = Job({"a": 1}, first=4, reset_limit=1)
    assert job.started == start(4, a=1)
    assert job.said == ["pyhvd: generation 4: 1 rank on 1 host: the job is resumed"]
    assert job.fail("a") == start(5, a=1)
    job.fail("a")
    assert "the ranks were started again 1 times" in job.said[-1]

"""The life of a job under random schedules: agents that come, fail and go, ranks that fail, and signals."""

from __future__ import annotations

import math
import signal
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyhvd.errors import RankFailedError
from pyhvd.job.errors import Interrupted, LaunchError, RankError, StartTimeoutError
from pyhvd.job.machines.agent_pool import AgentPool
from pyhvd.job.machines.machine import (
    Action,
    Begin,
    Done,
    End,
    HostTexts,
    JobMachine,
    Late,
    PassOn,
    Pause,
    Say,
    StartCommand,
)
from pyhvd.job.messages import Facts, HostNetwork, Member
from pyhvd.job.mpi.rendezvous import RankPlacement, assign
from pyhvd.job.network.network_choice import Wanted
from pyhvd.job.process.exit_report import (
    ENDED,
    EXCEPTION,
    EXIT,
    INTERRUPT,
    LOST,
    SECONDARY,
    SIGNAL,
    ExitReport,
)
from pyhvd.spark.job import TaskTexts

EPOCH = 1_000_000.0
NAMES = [f"h{index}" for index in range(5)]
START_S = 30.0
BETTER_CAUSE_S = 1.0
OTHERS_S = 2.0
GRACE_S = 5.0
OWN = (EXCEPTION, EXIT, SIGNAL)


def placed(groups: Any) -> list[RankPlacement]:
    return assign(member for group in groups for member in group for _ in range(member.slots))


def member_of(index: int, slots: int, attempt: int = 0) -> Member:
    facts = Facts("MPICH", "MPICH 5", True, "", HostNetwork())
    return Member(index, attempt, f"hash{index}", f"h{index}", slots, facts)


def on_hosts(size: int, names: list[str]) -> JobMachine:
    pool, texts = AgentPool(names, starts=True), HostTexts(size, names, START_S)
    return JobMachine(size, pool, texts, START_S, EPOCH, Wanted(probe=False))


class Schedule(RuleBasedStateMachine):
    """A job on hosts; what must follow from the events is computed here in the simplest way."""

    @initialize(slots=st.lists(st.integers(1, 3), min_size=1, max_size=5), data=st.data())
    def begin(self, slots: list[int], data: st.DataObject) -> None:
        self.now = data.draw(st.floats(0, 100))
        self.slots = slots
        self.size = sum(slots)
        self.machine = on_hosts(self.size, NAMES[: len(slots)])
        self.machine.until = self.now + START_S
        self.ahead = [data.draw(st.floats(-3600, 3600)) for _ in slots]
        self.starting: set[int] = set()
        self.members: dict[int, Member] = {}
        self.again_at: dict[int, float] = {}
        self.problems: dict[int, float] = {}
        self.begun = False
        self.over: Action | None = None
        self.placements: dict[int, RankPlacement] = {}
        self.left: set[int] = set()
        self.failed: list[tuple[str, float, int]] = []  # kind, true time, rank
        self.failed_at = math.inf
        self.signals: list[float] = []
        self.tick()

    def tick(self) -> None:
        for action in self.machine.tick(self.now):
            assert self.over is None
            if isinstance(action, StartCommand):
                assert not self.begun
                assert action.host not in self.starting | set(self.members)
                assert self.now >= self.again_at.get(action.host, -math.inf)
                self.starting.add(action.host)
            elif isinstance(action, Begin):
                assert not self.begun
                assert not self.problems
                assert sorted(self.members) == list(range(len(self.slots)))
                self.begun = True
                placements = placed(action.groups)
                self.placements = {each.rank: each for each in placements}
                self.left = set(self.placements)
                self.machine.place(placements)
            elif isinstance(action, Say):
                assert self.signals
            else:
                self.check_end(action)
                self.over = action

    def check_end(self, action: Action) -> None:
        if isinstance(action, Done):
            assert self.begun
            assert not self.left
            assert not self.failed
            assert not self.signals
            return
        assert isinstance(action, End)
        error = action.error
        if self.signals:
            assert isinstance(error, Interrupted)
            return
        if isinstance(error, LaunchError):
            assert not self.begun
            lines = str(error).splitlines()
            named = {int(line.split(":")[0].removeprefix("host h")) for line in lines}
            assert set(self.problems) <= named
            if not self.problems:
                assert self.now > self.machine.until
                assert named == set(range(len(self.slots))) - set(self.members)
            return
        assert isinstance(error, RankError)
        assert self.failed
        assert error.rank == self.cause()
        if error.rank >= 0:
            assert error.host == f"h{self.placements[error.rank].index}"

    def cause(self) -> int:
        """Return the rank of the failure that explains the others."""
        order = {**dict.fromkeys(OWN, 1), INTERRUPT: 2, SECONDARY: 3, LOST: 4}
        best = min(self.failed, key=lambda each: (order[each[0]], each[1]))
        if best[0] == SECONDARY:
            lost = [each for each in self.failed if each[0] == LOST]
            best = min(lost, key=lambda each: each[1], default=best)
        return best[2]

    @property
    def runs(self) -> bool:
        return self.over is None

    @rule(seconds=st.sampled_from([0.0, 0.01, 0.3, 0.7, 1.1, 2.5, 6.0]))
    def wait(self, seconds: float) -> None:
        if self.runs:
            self.now += seconds
            self.tick()

    @precondition(lambda self: self.runs and self.starting)
    @rule(data=st.data())
    def come_up(self, data: st.DataObject) -> None:
        host = data.draw(st.sampled_from(sorted(self.starting)))
        self.starting.remove(host)
        member = member_of(host, self.slots[host])
        self.machine.pool.ahead[host] = self.ahead[host]
        assert self.machine.register(member) == ""
        self.members[host] = member
        self.tick()

    @precondition(lambda self: self.runs and self.starting)
    @rule(data=st.data(), may_pass=st.booleans(), jitter=st.floats(0, 1))
    def fail_to_start(self, data: st.DataObject, may_pass: bool, jitter: float) -> None:
        host = data.draw(st.sampled_from(sorted(self.starting)))
        self.starting.remove(host)
        self.again_at[host] = self.now + 0.5
        if not may_pass:
            self.problems.setdefault(host, self.now)
        self.machine.pool.fail(host, "ssh says no", self.now, jitter, may_pass=may_pass)
        self.tick()

    @precondition(lambda self: self.runs and self.starting)
    @rule(data=st.data())
    def lack(self, data: st.DataObject) -> None:
        host = data.draw(st.sampled_from(sorted(self.starting)))
        self.problems.setdefault(host, self.now)
        self.machine.pool.refuse(host, "no directory", self.now)
        self.tick()

    @precondition(lambda self: self.runs and self.members and not self.begun)
    @rule(data=st.data(), jitter=st.floats(0, 1))
    def lose_before_the_start(self, data: st.DataObject, jitter: float) -> None:
        host = data.draw(st.sampled_from(sorted(self.members)))
        self.machine.pool.fail(host, "reset", self.now, jitter, may_pass=True)
        self.machine.lose(self.members.pop(host), "is lost", self.now)
        self.again_at[host] = self.now + 0.5
        self.tick()

    @precondition(lambda self: self.runs and self.left)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(sorted(self.left)))
        self.left.remove(rank)
        self.machine.end(rank, self.now)
        self.tick()

    @precondition(lambda self: self.runs and self.left)
    @rule(data=st.data(), kind=st.sampled_from([EXCEPTION, EXIT, SECONDARY]), before=st.floats(0, 0.2))
    def fail(self, data: st.DataObject, kind: str, before: float) -> None:
        rank = data.draw(st.sampled_from(sorted(self.left)))
        self.left.remove(rank)
        true = EPOCH + self.now - before
        when = true + self.ahead[self.placements[rank].index]
        self.machine.report(ExitReport(rank, kind, 1, "failed", when), self.now)
        if not self.signals:
            self.note(kind, when - self.ahead[self.placements[rank].index], rank)
        self.tick()

    @precondition(lambda self: self.runs and self.begun)
    @rule(data=st.data(), waited=st.booleans())
    def lose(self, data: st.DataObject, waited: bool) -> None:
        host = data.draw(st.sampled_from(sorted(self.members)))
        member = self.members[host]
        owned = {rank for rank, each in self.placements.items() if each.index == host}
        self.machine.lose(member, "is lost", self.now, waited=waited)
        has_failed = {rank for _, _, rank in self.failed}
        left = owned & self.left
        if left and not owned & has_failed and not self.signals:
            self.note(LOST, EPOCH + self.now, min(left), waited)
        self.left -= owned
        self.tick()

    def note(self, kind: str, when: float, rank: int, waited: bool = False) -> None:
        self.failed.append((kind, when, rank))
        wait = BETTER_CAUSE_S if kind in (SECONDARY, LOST) and not waited else 0.0
        self.failed_at = min(self.failed_at, self.now + wait)

    @precondition(lambda self: self.runs and len(self.signals) < 2)
    @rule(number=st.sampled_from([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]))
    def interrupt(self, number: int) -> None:
        assert self.machine.signal(number, self.now) == [PassOn(number)]
        if number != signal.SIGUSR1:
            self.signals.append(self.now)
        self.tick()

    @invariant()
    def ends_in_time(self) -> None:
        if not hasattr(self, "machine") or self.over is not None:
            return
        if self.signals:
            assert self.begun
            assert self.now < self.signals[0] + GRACE_S
            assert len(self.signals) < 2
            return
        assert self.now < self.failed_at
        if self.problems:
            assert self.now <= min(self.problems.values()) + OTHERS_S
        assert self.begun or self.now <= self.machine.until


Schedule.TestCase.settings = settings(max_examples=300, stateful_step_count=40)
TestSchedule = Schedule.TestCase


def machine(agents: int = 2) -> JobMachine:
    texts = TaskTexts(agents, START_S)
    made = JobMachine(agents, AgentPool([""] * agents, starts=False), texts, START_S, EPOCH)
    made.until = START_S
    return made


def test_an_agent_is_replaced_by_a_newer_attempt_only() -> None:
    made = machine()
    assert made.register(member_of(0, 1, attempt=1)) == ""
    assert "newer attempt" in made.register(member_of(0, 1))
    assert made.register(member_of(0, 1, attempt=2)) == ""
    made.lose(member_of(0, 1, attempt=1), "is gone", 0.0)  # the attempt that was replaced
    assert made.register(member_of(1, 1)) == ""
    assert isinstance(made.tick(0.0)[0], Begin)
    assert "registered already" in made.register(member_of(1, 1, attempt=9))


def test_an_earlier_failure_of_an_agent_that_is_up_is_no_problem() -> None:
    made = on_hosts(2, NAMES[:2])
    made.until = START_S
    assert made.tick(0.0) == [StartCommand(0), StartCommand(1)]
    made.pool.fail(0, "ssh says: connection reset", 0.0, 0.0, may_pass=True)
    assert made.tick(1.0) == [StartCommand(0)]
    assert made.register(member_of(0, 1)) == ""
    made.pool.fail(1, "no such host", 1.0, 0.0, may_pass=False)
    (action,) = made.tick(1.0)
    assert isinstance(action, End)
    assert str(action.error) == "host h1: no such host"


def test_those_that_do_not_come_are_named() -> None:
    made = machine(3)
    made.register(member_of(1, 1))
    assert made.tick(START_S) == []
    (action,) = made.tick(START_S + 0.1)
    assert isinstance(action, End)
    assert isinstance(action.error, StartTimeoutError)
    assert action.error.missing == [0, 2]


def test_ranks_that_do_not_find_each_other() -> None:
    made = machine(1)
    made.register(member_of(0, 1))
    assert isinstance(made.tick(0.0)[0], Begin)
    assert made.tick(START_S) == []
    assert made.tick(START_S + 0.1) == [Late()]
    assert "mpiexec waits" in str(made.texts.late_error("mpiexec waits"))


def test_an_agent_that_is_lost_as_ranks_begin_is_the_cause() -> None:
    made = machine(1)
    made.register(member_of(0, 1))
    made.tick(0.0)
    made.lose(member_of(0, 1), "is gone", 1.0)
    assert made.tick(1.5) == []
    (action,) = made.tick(2.0)
    assert isinstance(action, End)
    assert str(action.error) == "Spark task 0 on host h0 is gone"


def test_mpiexec_that_fails_in_spark_before_its_ranks_have_ended() -> None:
    made = machine()
    for index in range(2):
        made.register(member_of(index, 1))
    (begin,) = made.tick(0.0)
    assert isinstance(begin, Begin)
    made.place(placed(begin.groups))
    made.blame(-1, "mpiexec ended", 1, 1.0, ENDED)
    for rank in range(2):
        made.end(rank, 1.1)
    assert made.tick(1.5) == []
    (action,) = made.tick(2.1)
    assert isinstance(action, End)
    assert str(action.error) == "mpiexec ended"


def test_a_rank_that_fails_in_spark() -> None:
    made = machine()
    for index in range(2):
        made.register(member_of(index, 1))
    (begin,) = made.tick(0.0)
    assert isinstance(begin, Begin)
    made.place(placed(begin.groups))
    made.report(ExitReport(1, EXCEPTION, 1, "raised", EPOCH), 1.0)
    (action,) = made.tick(1.0)
    assert isinstance(action, End)
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 on host h1 \(Spark task 1\) raised"):
        raise action.error


@pytest.mark.parametrize(("code", "ends_with"), [(9, 9), (0, 1), (256, 1), (-1, 255)])
def test_a_job_that_failed_never_ends_as_one_that_did_not(code: int, ends_with: int) -> None:
    made = on_hosts(1, NAMES[:1])
    made.blame(0, f"called MPI_Abort with code {code}", code, 1.0)
    (action,) = made.tick(1.0)
    assert isinstance(action, End)
    assert isinstance(action.error, RankError)
    assert action.error.code == ends_with


def test_ctrl_z_stops_the_ranks_first_and_then_lets_them_go_on() -> None:
    made = on_hosts(2, NAMES[:1])
    assert made.signal(signal.SIGTSTP, 1.0) == [PassOn(signal.SIGTSTP), Pause(), PassOn(signal.SIGCONT)]
    assert made.tick(1.0) == [StartCommand(0)]


def test_ranks_that_do_not_stop_are_named_once() -> None:
    made = on_hosts(2, NAMES[:1])
    made.until = START_S
    assert made.tick(0.0) == [StartCommand(0)]
    made.register(member_of(0, 2))
    (begin,) = made.tick(0.0)
    assert isinstance(begin, Begin)
    made.place(placed(begin.groups))
    made.signal(signal.SIGINT, 1.0)
    made.report(ExitReport(0, INTERRUPT, 130, "KeyboardInterrupt", 0.0), 1.5)
    assert made.tick(1.9) == []
    (say,) = made.tick(2.0)
    assert isinstance(say, Say)
    assert say.text == (
        "pyhvd: rank 1 is still stopping, and will be killed 5 s after the signal, or at once by Ctrl-C"
    )
    assert made.tick(3.0) == []
    (action,) = made.tick(6.0)
    assert isinstance(action, End)
    assert isinstance(action.error, Interrupted)
    assert (action.error.number, str(action.error)) == (signal.SIGINT, "KeyboardInterrupt")


def started(slots: int = 3, ends_late: bool = False) -> JobMachine:
    """Return a job on two hosts whose ranks have started at time 0."""
    machine = on_hosts(2 * slots, NAMES[:2])
    machine.ends_late = ends_late
    machine.tick(0.0)
    for index in range(2):
        assert machine.register(member_of(index, slots)) == ""
    (begin,) = (action for action in machine.tick(0.0) if isinstance(action, Begin))
    machine.place(placed(begin.groups))
    return machine


def error_in(actions: list[Action]) -> RankError:
    (end,) = actions
    assert isinstance(end, End)
    assert isinstance(end.error, RankError)
    return end.error


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_rank_that_ends_before_init_while_others_wait_there(order: tuple[int, int]) -> None:
    machine = started()
    machine.end(5, 1.0)
    assert machine.tick(1.0) == []  # no rank may want init()
    steps = (lambda: machine.enter(2, 2.0), lambda: machine.end(4, 2.0))
    for number in order:
        steps[number]()
    error = error_in(machine.tick(2.0))
    assert (error.rank, error.code, error.host) == (4 if order == (1, 0) else 5, 1, "h1")
    assert str(error) == (
        f"pyhvd: rank {error.rank} of 6 on host h1 ended without calling init(), and rank 2 waits for it"
        " there: every rank must call pyhvd.init(), or none"
    )


def test_ranks_that_end_after_init_or_all_without_it() -> None:
    for enters in (True, False):
        machine = started()
        for rank in range(6):
            if enters:
                machine.enter(rank, 1.0)
        for rank in range(6):
            assert machine.tick(1e6) == []
            machine.end(rank, 2.0)
        assert machine.tick(1e6) == [Done()]


def test_several_ranks_that_are_late_in_init() -> None:
    machine = started(ends_late=True)
    machine.enter(1, 0.0)
    assert str(error_in(machine.tick(START_S))) == (
        "pyhvd: rank 0 of 6 on host h0 has not called init() within the start timeout of 30 s, nor have ranks"
        " 2-5, and rank 1 waits for it there"
    )


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_that_is_late_in_init(ends: bool) -> None:
    machine = started(ends_late=ends)
    assert machine.tick(1000.0) == []  # all may be slow
    for rank in (3, 0, 1, 2):
        machine.enter(rank, 1000.0 + rank)
    assert machine.tick(1003.0 + START_S - 0.01) == []
    late = machine.tick(1003.0 + START_S)
    text = (
        "pyhvd: rank 4 of 6 on host h1 has not called init() within the start timeout of 30 s, nor has rank"
        " 5, and ranks 0-3 wait for it there"
    )
    if ends:
        assert str(error_in(late)) == text
        return
    assert late == [Say(f"{text}; the job goes on, as no start timeout was given that would end it")]
    assert machine.tick(1e6) == []  # said once
    for rank in (4, 5):
        machine.enter(rank, 1e6)
    assert machine.tick(1e9) == []

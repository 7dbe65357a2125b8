"""Hang reports of simulated clusters: when, by whom, and with which text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from pyhvd.common.processes import ProcessPlace, ProcessState
from pyhvd.controller import Stalled
from pyhvd.negotiation.messages import bits_of
from pyhvd.observe.hang_report import MAX_CHARACTERS, warning_of
from pyhvd.observe.stall_inspector import Stall
from pyhvd.simulation.program import Action, Compute, Hang, Program, StepEnd, Submit, Tensor, Wait
from pyhvd.simulation.stalls import IN_STEP, Stalls
from pyhvd.simulation.world import SimulatedWorld

TENSORS = [Tensor(f"grad{i}") for i in range(3)]


def hanging(missing: Sequence[int], tensors: Sequence[Tensor] = TENSORS) -> Program:
    """Return a program of two steps, of which these ranks never begin the second one."""

    def program(rank: int, _: int) -> Iterator[Action]:
        for step in range(2):
            yield Compute(0.1)
            if step and rank in missing:
                yield Hang()
            yield Submit(tensors)
            yield Wait()
            yield StepEnd()

    return program


def make_world(hosts: int, local_ranks: int, program: Program) -> SimulatedWorld:
    world = SimulatedWorld(hosts, local_ranks, program, cpu=1e-5)
    world.run(0.0)
    return world


@pytest.mark.parametrize(("hosts", "local_ranks"), [(8, 8), (70, 1)], ids=["ready tables", "messages alone"])
def test_half_of_the_ranks_hangs(hosts: int, local_ranks: int) -> None:
    size = hosts * local_ranks
    world = make_world(hosts, local_ranks, hanging(range(size // 2, size)))
    stalls = Stalls(world)
    world.clock.run(50.0)
    assert world.steps[0].ended == size
    assert not stalls.reports
    world.clock.run(120.0)
    (report,) = stalls.reports
    # With ready tables, the time begins when rank 0's second look has the tensors submitted by message.
    assert 60.0 <= report.at < (110.0 if world.tables else 80.0)
    text = report.text.splitlines()
    half, middle = size // 2, hosts // 2
    where = f"all ranks of {hosts - middle} hosts: " + (
        "h4, h5, h6, h7" if hosts == 8 else f"h{middle}-h{hosts - 1}"
    )
    assert text[0] == "3 tensors have waited for more than 60 s, because some ranks have not submitted them"
    assert text[1].startswith(
        f"  'grad0', 'grad1', 'grad2': not submitted by ranks {half}-{size - 1} ({where}),"
        f" submitted by ranks 0-{half - 1} (waiting for "
    )
    on = "hosts h4, h5" if hosts == 8 else "hosts h35-h50 (16 hosts)"
    assert text[2] == (
        f"ranks {half}-{half + 15} on {on} have not submitted 'grad0', 'grad1', 'grad2':"
        " they are at train.py:71 in step"
    )
    assert text[-1] == f"ranks {half + 16}-{size - 1}: not asked, as they are too many for one report"
    assert stalls.longest > 0


def test_the_job_ends_and_reports_come_again() -> None:
    world = make_world(2, 2, hanging([2, 3]))
    stalls = Stalls(world, warn_s=10.0, end_s=25.0)
    world.clock.run(100.0)
    *warnings, end = stalls.reports
    assert [report.text.partition(" have waited")[0] for report in warnings] == ["3 tensors"] * len(warnings)
    assert len(warnings) == 2
    assert 25.0 <= end.at < 31.0
    assert end.text.startswith("the job was ended: 3 tensors have waited for more than 25 s")
    # Nothing reaches ranks 2 and 3 but this order.
    assert {rank: text for rank, (_, text) in world.ends.items()} == dict.fromkeys(range(4), end.text)


def test_ranks_that_have_ended_do_not_answer() -> None:
    world = make_world(70, 2, hanging([1, 3, 138, 139]))
    stalls = Stalls(world)
    world.clock.at(1.0, world.wires.lose, 69)
    world.clock.at(1.0, world.end, world.ranks[1], "killed")
    world.clock.run(100.0)
    (report,) = stalls.reports
    lacks = "not submitted 'grad0', 'grad1', 'grad2'"
    assert report.text.splitlines()[2:] == [
        f"rank 1 on host h0 (pid 1001) has {lacks}: its process has ended",
        f"rank 3 on host h1 (pid 1003) has {lacks}: it is at train.py:71 in step",
        "    MainThread:",
        "      train.py:71 in step",
        "      train.py:90 in <module>",
        f"ranks 138-139 on host h69 have {lacks}: of each rank, its background thread does not answer"
        " within 2 s, and its process cannot be seen from here",
    ]


def test_nothing_is_reported_while_ranks_train() -> None:
    world = make_world(2, 2, hanging([]))
    stalls = Stalls(world)
    world.clock.run(300.0)
    assert all(rank.done for rank in world.ranks)
    assert not stalls.reports


@pytest.mark.parametrize(
    "missing", [range(1, 10_000, 2), range(5000, 10_000)], ids=["odd ranks", "last hosts"]
)
def test_the_text_for_ten_thousand_ranks(missing: Sequence[int]) -> None:
    size = 10_000
    lacking = bits_of(missing)
    places = [ProcessPlace(f"h{rank // 8}", 1000 + rank, str(rank // 8)) for rank in range(size)]
    stalled = tuple(
        Stalled(0, f"layer{i}/weights.grad", 0.0, ((1 << size) - 1) & ~lacking, lacking) for i in range(161)
    )
    finding = Stall(stalled, stalled, 60.0, ends_job=False)
    asked = finding.missing[:16]
    answers = {rank: IN_STEP if rank != asked[3] else ProcessState.UNKNOWN for rank in asked}
    text = warning_of(finding, answers, places, 60.0)
    assert len(text) <= MAX_CHARACTERS
    assert text.count("it is at") == 0
    assert text.count("they are at train.py:71 in step") == 1
    assert text.count("its process cannot be seen from here") == 1

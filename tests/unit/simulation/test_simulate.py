"""Simulated jobs: time, order, messages and reports. Turns take a fixed CPU time, so all runs are equal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from pyhvd.config import Config
from pyhvd.negotiation.messages import RequestType
from pyhvd.simulation import (
    AddSet,
    Compute,
    Hang,
    HostLost,
    Network,
    RankKilled,
    StepEnd,
    Submit,
    Tensor,
    Wait,
    training,
)
from pyhvd.simulation.clock import Clock, SimulatedProcess
from pyhvd.simulation.network import Wires
from pyhvd.simulation.program import Action, Program
from pyhvd.simulation.world import SimulatedWorld
from pyhvd.testing import Simulation, simulate

CPU_S = 20e-6
GRADIENTS = [Tensor(f"gradient.{i}", 40_000) for i in range(20)]


def run(hosts: int, local_ranks: int, program: Program, **options: object) -> Simulation:
    return simulate(hosts, local_ranks, program, cpu=CPU_S, **options)  # type: ignore[arg-type]


# -- time


def test_events_of_one_time_keep_their_order() -> None:
    clock, seen = Clock(), list[str]()
    clock.at(2.0, seen.append, "late")
    clock.at(1.0, seen.append, "first")
    clock.at(1.0, seen.append, "second")
    clock.at(1.0, lambda: clock.at(0.5, seen.append, "in the past: now"))
    assert clock.run(until=1.5)
    assert seen == ["first", "second", "in the past: now"]
    assert not clock.run(until=2.0)
    assert clock.now == 2.0


@pytest.mark.parametrize("sharers", [1, 2])
def test_a_process_works_one_turn_after_the_other(sharers: int) -> None:
    clock, seen = Clock(), list[tuple[float, str]]()
    process = SimulatedProcess(clock, cpu=0.25, settle=lambda: None, sharers=sharers)

    def work(name: str) -> None:
        seen.append((clock.now, name))
        process.spend(0.75)

    process.call(work, "a")
    clock.at(0.5, process.call, work, "b")
    clock.at(0.6, process.call, work, "c")
    clock.run(10.0)
    # What has come meanwhile is one turn.
    assert seen == [(0.0, "a"), (1.0 * sharers, "b"), (1.0 * sharers, "c")]
    assert process.busy == 1.0 + 1.75


def test_messages_share_a_link_and_keep_their_order() -> None:
    clock, seen = Clock(), list[tuple[float, str]]()
    wires = Wires(clock, Network(latency=1.0, rate=1000.0, jitter=5.0), seed=3)
    for number in range(20):
        name = str(number)
        wires.send(("a", "b"), (0, 1), 922, 0.0, lambda name=name: seen.append((clock.now, name)))
    clock.run(1000.0)
    assert [name for _, name in seen] == [str(number) for number in range(20)]
    assert seen[-1][0] >= 20 * 1000 / 1000 + 1.0  # each message has 78 bytes of headers
    assert (wires.traffic[0].messages, wires.traffic[1].nbytes) == (20, 20_000)


def test_what_is_under_way_to_and_from_a_lost_host_is_lost() -> None:
    clock, seen = Clock(), list[str]()
    wires = Wires(clock, Network(latency=1.0), seed=0)
    for source, target in ((0, 1), (1, 0), (0, 2)):
        wires.send((source, target), (source, target), 1, 0.0, seen.append, f"{source} to {target}")
    clock.at(0.5, wires.lose, 1)
    clock.run(10.0)
    # What host 1 had sent before may still arrive: TCP's buffers are the network's.
    assert seen == ["1 to 0", "0 to 2"]


# -- jobs


@pytest.mark.parametrize("hosts", [1, 2, 9, 64, 65])
def test_a_job_trains(hosts: int) -> None:
    job = run(hosts, 2, training(GRADIENTS, compute=0.05, steps=4))
    assert not job.unfinished
    assert len(job.steps) == 4
    for step in job.steps:
        parts = step.compute + step.late + step.agreement + step.link + step.cpu + step.latency
        assert math.isclose(parts, step.seconds)
        assert math.isclose(step.compute, 0.05)
        assert step.agreement >= 0
    first, *cached = job.steps
    assert all(step.nbytes <= first.nbytes for step in cached)
    assert all(step.agreement < first.agreement for step in cached)
    assert (first.messages > 0) == (hosts > 1)


def test_the_same_job_gives_the_same_result() -> None:
    network = Network(jitter=1e-4)
    faults = [HostLost(3, 0.12, silent=True)]
    one, same, other = (
        run(9, 2, training(GRADIENTS, compute=0.05, steps=40), network=network, faults=faults, seed=seed)
        for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other


def test_all_ranks_carry_out_the_same_batches() -> None:
    """Ranks submit in their own orders; some tensors are fused."""

    def program(rank: int, _: int) -> Iterator[Action]:
        for step in range(6):
            order = GRADIENTS[rank:] + GRADIENTS[:rank]
            yield Submit(order[:10])
            yield Compute(0.001 * ((rank * 7 + step) % 5))
            yield Submit(order[10:])
            yield Wait()
            yield StepEnd()

    world = SimulatedWorld(3, 3, program, Network(jitter=1e-3), seed=4, cpu=CPU_S)
    assert not world.run(100.0)
    assert all(rank.done for rank in world.ranks)
    assert world.ranks[0].carried_out
    assert all(rank.carried_out == world.ranks[0].carried_out for rank in world.ranks)


@pytest.mark.parametrize("hosts", [4, 66])
def test_a_late_rank_delays_a_step_by_its_lateness(hosts: int) -> None:
    plain, late = (
        run(hosts, 2, training(GRADIENTS, compute=0.05, steps=4, late=late)) for late in ({}, {1: 0.03})
    )
    gained = late.steps[-1].seconds - plain.steps[-1].seconds
    assert 0.0295 < gained < 0.031
    assert late.steps[-1].late == pytest.approx(0.03 * (1 - 1 / (2 * hosts)), rel=0.01)  # from the mean


def test_large_tensors_take_the_time_of_the_link() -> None:
    nbytes, network = 400_000_000, Network(rate=1e9 / 8)
    job = run(2, 1, training([Tensor("large", nbytes)], compute=0.1, steps=2), network=network)
    at_least = nbytes / network.rate  # 2 n (H - 1) / H with two hosts
    assert at_least <= job.steps[1].seconds - 0.1 <= 1.1 * at_least
    assert job.steps[1].link > 0.9 * at_least


def test_computing_hides_reductions() -> None:
    at_once, in_parts = (run(4, 2, training(GRADIENTS, compute=0.1, steps=3, parts=p)) for p in (1, 10))
    assert at_once.steps[-1].hidden == 0
    assert in_parts.steps[-1].hidden > 0


def test_a_process_set_is_added_and_used() -> None:
    def program(rank: int, _: int) -> Iterator[Action]:
        yield AddSet((0, 2, 3))
        if rank != 1:
            yield Submit([Tensor("mine")], process_set=1)
            yield Wait()
        yield Submit([Tensor("all", kind=RequestType.BROADCAST)])
        yield Wait()
        yield StepEnd()

    job = run(2, 2, program)
    assert not job.unfinished
    assert len(job.steps) == 1


def test_ranks_that_wait_for_ever_are_named_and_reported() -> None:
    def program(rank: int, _: int) -> Iterator[Action]:
        if rank == 2:
            yield Hang()
        yield Submit([Tensor("loss")])
        yield Wait()

    config = replace(Config(), stall_check_time_seconds=5.0)
    job = run(2, 2, program, config=config, hang_reports=True, until=30.0)
    assert job.unfinished == [0, 1, 2, 3]
    assert "'loss': not submitted by rank 2" in job.hang_reports[0].text
    assert run(2, 2, program, until=30.0).hang_reports == []


# -- faults


@pytest.mark.parametrize(("hosts", "crash_s"), [(8, 1e-3), (66, 1.1)])
def test_all_ranks_learn_of_a_lost_host(hosts: int, crash_s: float) -> None:
    """Hosts with links see a connection that closes; without links the launcher waits for a better cause."""
    for silent, limit in ((False, crash_s), (True, 5.5)):
        job = run(hosts, 2, training(GRADIENTS, 0.05, 400), faults=[HostLost(5, 1.0, silent)])
        assert job.failure is not None
        assert not job.unfinished
        assert 0 < job.failure.known - 1.0 <= limit
        assert "on host h5 " in job.failure.cause
        assert sum(job.failure.texts.values()) == 2 * (hosts - 1)


def test_a_killed_rank_is_the_cause() -> None:
    failure = run(4, 2, training(GRADIENTS, 0.05, 400), faults=[RankKilled(5, 1.0)]).failure
    assert failure is not None
    assert failure.cause == "pyhvd: rank 5 of 8 on host h2 was killed by SIGKILL"
    assert failure.known < 1.01


def test_an_elastic_job_starts_its_ranks_again() -> None:
    job = run(4, 2, training(GRADIENTS, 0.05, 400), faults=[HostLost(1, 1.0)], elastic=True)
    assert job.restart is not None
    assert 0 < job.restart.ended <= job.restart.told <= job.restart.wired < 1.5


# -- errors


@pytest.mark.parametrize(
    ("hosts", "local_ranks", "faults", "text"),
    [
        (0, 1, [], "hosts=0: a cluster has at least 1"),
        (1, -1, [], "local_ranks=-1: a cluster has at least 1"),
        (2, 2, [HostLost(2, 1.0)], "there are hosts 0 to 1"),
        (2, 2, [RankKilled(4, 1.0)], "there are ranks 0 to 3"),
    ],
)
def test_what_is_no_cluster_is_refused(
    hosts: int, local_ranks: int, faults: list[HostLost], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        run(hosts, local_ranks, training(GRADIENTS, 0.1, 1), faults=faults)

"""Faults of simulated clusters: no rank waits for ever, logs agree, and the named cause is the first one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings, strategies as st

from pyhvd.job.machines.failure import REPORT_S
from pyhvd.simulation import HostLost, Network, RankKilled, Tensor, training
from pyhvd.simulation.faults import Fault, Faults
from pyhvd.simulation.launcher import Launcher
from pyhvd.simulation.world import SimulatedWorld
from tests.thinning import examples

LOCAL = 2
TENSORS = [Tensor(f"gradient.{i}", 4096) for i in range(3)]


def host_of(fault: Fault) -> int:
    return fault.host if isinstance(fault, HostLost) else fault.rank // LOCAL


def faults_of(hosts: int) -> st.SearchStrategy[list[Fault]]:
    """Return some faults, each on a host of its own; host 0 may be lost too."""
    times = st.floats(0.0, 8.0).map(lambda at: round(at, 3))
    lost = st.builds(HostLost, st.integers(0, hosts - 1), times, st.booleans())
    killed = st.builds(RankKilled, st.integers(0, hosts * LOCAL - 1), times)
    return st.lists(lost | killed, min_size=1, max_size=4, unique_by=host_of)


@pytest.mark.timeout(900)
@settings(max_examples=examples(1000, longest=True), deadline=None)
@example([HostLost(8, 0.0, True), HostLost(9, 0.0, True)], 128)
@given(faults_of(64), st.integers(0, 1 << 30))
def test_hosts_with_links(faults: list[Fault], seed: int) -> None:
    check(64, faults, seed)


@pytest.mark.timeout(900)
@settings(max_examples=examples(200, longest=True), deadline=None)
@given(faults_of(66), st.integers(0, 1 << 30))
def test_hosts_without_links(faults: list[Fault], seed: int) -> None:
    check(66, faults, seed)


def check(hosts: int, faults: Sequence[Fault], seed: int) -> None:
    """Check what every schedule must keep."""
    program = training(TENSORS, compute=0.3, steps=40, parts=3)
    world = SimulatedWorld(hosts, LOCAL, program, Network(jitter=50e-6), seed, cpu=20e-6)
    launcher = Launcher(world)
    happened = Faults(world, launcher, faults, seed)
    assert not world.run(60.0)
    waiting = [rank.rank for rank in world.ranks if not rank.error and not rank.done]
    assert not waiting, f"ranks {waiting} wait for ever"
    longest = max((rank.carried_out for rank in world.ranks), key=len)
    for rank in world.ranks:
        assert rank.carried_out == longest[: len(rank.carried_out)], f"rank {rank.rank} has another log"
    # Of faults that have all happened when the first one is noticed, each may be named: silence is seen late.
    first = happened.noticed[0]
    causes = {world.name_of(host_of(fault)) for fault in faults if fault.at <= first + REPORT_S}
    assert any(f" on host {name} " in launcher.error for name in causes), (launcher.error, causes)

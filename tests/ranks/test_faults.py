"""Test fault plans: their random choices, and their effects on ranks that are threads."""

from __future__ import annotations

import random

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.testing import Fault, FaultPlan, InjectedFault, RanksFailed, run_ranks


def test_a_seed_is_a_plan() -> None:
    plans = [FaultPlan(5, 8, count=20, within=3.0, seconds=0.5, spare=[2, 3]) for _ in range(2)]
    assert plans[0].faults == plans[1].faults
    assert plans[0].faults != FaultPlan(6, 8, count=20, within=3.0, seconds=0.5, spare=[2, 3]).faults
    faults = plans[0].faults
    assert len(faults) == 20
    assert [fault.when for fault in faults] == sorted(fault.when for fault in faults)
    assert all(0 <= fault.when <= 3.0 and 0 <= fault.seconds <= 0.5 for fault in faults)
    assert {fault.rank for fault in faults} <= {0, 1, 4, 5, 6, 7}
    assert {fault.kind for fault in faults} == {"delay", "stop", "kill"}
    assert [f for r in range(8) for f in plans[0].of(r)] == sorted(faults, key=lambda f: f.rank)


def test_what_cannot_be_planned() -> None:
    with pytest.raises(ValueError, match="faults are delay, stop, kill, raise, not flood"):
        FaultPlan(1, 2, kinds=["flood"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="at least one kind of fault"):
        FaultPlan(1, 2, spare=[0, 1])


def test_threads_cannot_be_stopped() -> None:
    plan = FaultPlan(1, 2, kinds=["stop"], within=0.0)

    def body() -> None:
        with pytest.raises(ValueError, match="cannot stop or kill a rank that is a thread"), plan.inject():
            pass
        if plan.of(hvd.rank()):
            with pytest.raises(ValueError, match="cannot stop a rank that is a thread"):
                plan.strike(0)

    run_ranks(2, body, timeout=30)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_programs_with_late_ranks_are_right(seed: int) -> None:
    plan = FaultPlan(seed, 4, kinds=["delay"], count=12, within=40, seconds=0.02)

    def body() -> None:
        draw = random.Random(seed)
        for number in range(40):
            plan.strike(number)
            n = draw.choice((1, 900, 5000))
            if draw.random() < 0.3:
                assert hvd.allgather(np.full(1, hvd.rank()), name="rows").tolist() == [0, 1, 2, 3]
            else:
                total = hvd.allreduce(np.full(n, hvd.rank()), op=hvd.Sum, name=f"x{n}")
                assert (total == 6).all()

    run_ranks(4, body, timeout=60)


@pytest.mark.parametrize("seed", [4, 5, 6])
def test_one_rank_raises_and_all_others_learn_which(seed: int) -> None:
    plan = FaultPlan(seed, 3, kinds=["raise"], within=20)
    victim = plan.faults[0].rank

    def body() -> None:
        for number in range(30):
            plan.strike(number)
            hvd.allreduce(np.ones(10), name=f"x{number % 4}")

    with pytest.raises(RanksFailed, match=f"rank {victim} of 3 raised InjectedFault") as caught:
        run_ranks(3, body, timeout=60)
    errors = caught.value.errors
    assert sorted(errors) == [0, 1, 2]
    assert isinstance(errors.pop(victim), InjectedFault)
    for error in errors.values():
        assert isinstance(error, hvd.RankFailedError)
        assert error.rank == victim
        assert "InjectedFault" in str(error.__cause__)


def test_a_fault_says_what_it_is() -> None:
    assert Fault(1, "delay", 2.0, 0.5) == Fault(rank=1, kind="delay", when=2.0, seconds=0.5)

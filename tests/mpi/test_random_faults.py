"""Random programs on ranks that are late, stopped and killed: right results, or an error that names the rank.

No rank hangs: every remaining rank gets its error within the configured time and a margin.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyhvd.testing import FaultPlan
from tests.mpi.run_support import launcher_command, run, script

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked at in /proc"),
    pytest.mark.any_mpi,
]

PROGRAM = """
import math, os, pathlib, random, sys, time
import numpy as np, pyhvd as hvd
from pyhvd.testing import FaultPlan

hvd.init()
size, rank, folder = hvd.size(), hvd.rank(), pathlib.Path(sys.argv[0]).parent
plan = FaultPlan({plan})
draw = random.Random(plan.faults[0].when)  # the same on every rank
started = time.monotonic()


def step(number):
    n, kind = draw.choice((1, 500, 70_000)), draw.randrange(8)
    name = f"{{kind}}.{{n}}"
    values = np.arange(n) + rank
    expected = size * np.arange(n) + sum(range(size))
    if kind == 0:
        assert (hvd.allgather(np.full((2, 3), rank), name=name)[::2, 0] == np.arange(size)).all()
    elif kind == 1:
        assert (hvd.broadcast(values, size - 1, name=name) == np.arange(n) + size - 1).all()
    elif kind == 2:
        handles = [hvd.allreduce_async(values, op=hvd.Sum, name=f"{{name}}.{{k}}") for k in range(4)]
        assert all((handle.result() == expected).all() for handle in handles)
    elif kind == 3:
        assert (hvd.alltoall(np.full((2 * size, n), rank), name=name)[::2, 0] == np.arange(size)).all()
    elif kind == 4:
        rows = hvd.reducescatter(np.full((2 * size, n), rank), op=hvd.Sum, name=name)
        assert rows.shape == (2, n)
        assert (rows == sum(range(size))).all()
    elif kind == 5:
        hvd.barrier()
    else:
        assert (hvd.allreduce(values, op=hvd.Sum, name=name) == expected).all()


over = number = 0
with plan.inject():
    try:
        while not over:
            step(number)
            number += 1
            if number % 20 == 0:  # all ranks end after the same step
                over = hvd.allreduce(int(time.monotonic() - started > {seconds}), op=hvd.Max, name="over")
    except hvd.HorovodInternalError as exc:
        (folder / f"{{rank}}.txt").write_text(f"{{type(exc).__name__}}: {{exc}}")
        left = size - len({{fault.rank for fault in plan.faults}})
        until = time.monotonic() + 10
        while len(list(folder.glob("*.txt"))) < left and time.monotonic() < until:
            time.sleep(0.05)
        raise
os.write(1, b"right\\n")
hvd.shutdown()
"""
SHORT = ("--stall-check-warning-time-seconds", 0.4, "--stall-check-shutdown-time-seconds", 0.8)
LONG = ("--stall-check-warning-time-seconds", 15, "--stall-check-shutdown-time-seconds", 30)
SIZE = 3


def launch(
    folder: Path, plan: str, seconds: float, lane: str, limits: tuple[object, ...] = SHORT
) -> tuple[int, str, str, float]:
    path = script(folder, PROGRAM.format(plan=plan, seconds=seconds))
    ended = run(launcher_command("-n", SIZE, *limits, path), env={"PYHVD_FAST_LANE": lane})
    return ended.code, ended.out, ended.err, ended.seconds


@pytest.mark.parametrize(("seed", "lane"), [(1, "0"), (2, "1")])
def test_what_passes_is_survived(tmp_path: Path, seed: int, lane: str) -> None:
    plan = f"{seed}, size, kinds=('delay', 'stop'), count=12, seconds=0.05"
    code, out, err, _ = launch(tmp_path, plan, 1.2, lane, LONG)
    assert code == 0, err
    assert out == "right\n" * SIZE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "lane", "spare"),
    [
        (3, "0", 0),
        pytest.param(4, "1", 0, marks=pytest.mark.slow),
        (5, "1", None),
        pytest.param(6, "0", None, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_stopped_for_ever_is_named_by_all(
    tmp_path: Path, seed: int, lane: str, spare: int | None
) -> None:
    spared = [rank for rank in range(SIZE) if (rank == 0) == (spare == 0)]
    victim = FaultPlan(seed, SIZE, kinds=["stop"], spare=spared).faults[0].rank
    plan = f"{seed}, size, kinds=['stop'], seconds=math.inf, spare={spared}"
    code, _, err, _ = launch(tmp_path, plan, 60, lane)
    assert code == 1, err
    for rank in set(range(SIZE)) - {victim}:
        text = (tmp_path / f"{rank}.txt").read_text()
        assert f"rank {victim} on host" in text, text
        assert "its process is stopped" in text, text
    assert f"rank {victim} on host" in err.rpartition("pyhvd: rank")[2], "the cause is the last thing shown"


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    victim = FaultPlan(7, SIZE, kinds=["kill"]).faults[0].rank
    code, _, err, seconds = launch(tmp_path, "7, size, kinds=['kill']", 60, "1")
    assert code == 128 + 9
    assert f"pyhvd: rank {victim} of {SIZE} " in err.rstrip().splitlines()[-1]
    assert "SIGKILL" in err
    assert seconds < 20

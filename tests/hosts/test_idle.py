"""Ranks on several hosts sleep: without work, and while a rank of another host is late."""

from __future__ import annotations

import resource
import time

import numpy as np
import pytest

import pyhvd as hvd
from tests.hosts.jobs import HostsJob, name_of

# After the last message a rank looks for another one, ever more rarely; bare wakes take 2 s more.
SETTLE_S = 2.0
BARE_WAKES = 4
WHILE_S = 4.0
# Where a bare wake of a thread takes WAKE_S of CPU time; on some virtual machines it takes ten times that.
SHARE = 0.002
WAKE_S = 1e-4
# On a busy machine beats come late. While one is overdue, each rank looks four times a second: so a rank may
# wake too often in one window, but not in all of them.
WINDOWS = 3
# Of a rank's threads: its beats, beats of the other hosts, and a look at the messages.
WAKES_PER_S = {2: 4.0, 4: 7.0}
LATE_S = 2.0
LATE_CPU_S = 0.03
REDUCING_CPU_S = 0.1  # 16 MiB


def _used() -> tuple[float, float, int]:
    """Return the time, the CPU seconds of this process, and how often its threads have slept."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.monotonic(), used.ru_utime + used.ru_stime, used.ru_nvcsw


def _wake_s() -> float:
    """Return the CPU time that a bare wake of a thread takes."""
    before = time.thread_time()
    for _ in range(BARE_WAKES):
        time.sleep(0.5)
    return (time.thread_time() - before) / BARE_WAKES


def _sleep_without_work(wakes_per_s: float) -> None:
    hvd.init()
    for _ in range(20):
        assert hvd.allreduce(np.ones(100), op=hvd.Sum, name="warm")[0] == hvd.size()
    for _ in range(WINDOWS):
        time.sleep(SETTLE_S)
        wake_s = _wake_s()
        before = _used()
        time.sleep(WHILE_S)
        passed, cpu, wakes = (now - then for now, then in zip(_used(), before, strict=True))
        # What happens once a second happens up to n + 1 times in n seconds.
        slept = cpu < SHARE * passed * max(1, wake_s / WAKE_S) and wakes < wakes_per_s * (passed + 1)
        if hvd.allreduce(np.array(slept, np.int32), op=hvd.Min, name="slept"):
            break
    hvd.shutdown()
    assert slept, (
        f"an idle rank used {cpu / passed:.2%} of a core, and woke {wakes / passed:.1f} times per second;"
        f" a bare wake takes {wake_s * 1e3:.2f} ms"
    )


def _wait_for_a_late_rank() -> None:
    hvd.init()
    dear = max(1, _wake_s() / WAKE_S)
    for count, limit in ((1, LATE_CPU_S), (4 << 20, LATE_CPU_S + REDUCING_CPU_S)):
        array = np.ones(count, np.float32)
        for _ in range(3):
            hvd.allreduce_(array, op=hvd.Max, name=f"late.{count}")
        hvd.barrier()
        if hvd.rank() == 0:
            time.sleep(LATE_S)
        before = _used()
        hvd.allreduce_(array, op=hvd.Max, name=f"late.{count}")
        passed, cpu, _ = (now - then for now, then in zip(_used(), before, strict=True))
        if hvd.rank():
            assert passed > LATE_S / 2
            assert cpu < limit * dear, f"{cpu:.3f} s of CPU to wait {passed:.1f} s for {count} floats"
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize(
    "job", [(2, 2), pytest.param((1, 1, 1, 1), marks=pytest.mark.any_mpi)], indirect=True, ids=name_of
)
def test_ranks_without_work_sleep(job: HostsJob) -> None:
    job.run(_sleep_without_work, wakes_per_s=WAKES_PER_S[len(job.shape)])


@pytest.mark.parametrize("job", [(2, 2)], indirect=True, ids=name_of)
def test_waiting_for_a_late_rank_costs_no_cpu(job: HostsJob) -> None:
    job.run(_wait_for_a_late_rank)

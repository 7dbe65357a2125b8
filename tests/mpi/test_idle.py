"""An idle rank uses no CPU: no polling in the background, without work or while another rank is late."""

from __future__ import annotations

import resource
import time

import numpy as np

import pyhvd as hvd
from tests.mpi.harness import on_ranks

SHARE = 0.01
WHILE_S = 2.0


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@on_ranks(2, 4)
def test_idle_ranks_use_no_cpu() -> None:
    hvd.init()
    for step in range(20):
        assert hvd.allreduce(np.full(100, step), op=hvd.Sum, name="warm")[0] == step * hvd.size()
    hvd.barrier()
    # A collective has just ended; the work after it must end too.
    before, started = _cpu(), time.monotonic()
    time.sleep(WHILE_S)
    share = (_cpu() - before) / (time.monotonic() - started)
    assert share < SHARE, f"an idle rank used {share:.1%} of a core"
    # All ranks but one wait for a tensor that comes late.
    if hvd.rank() == hvd.size() - 1:
        time.sleep(WHILE_S)
    before, started = _cpu(), time.monotonic()
    assert hvd.allreduce(np.ones(3), op=hvd.Sum, name="late")[0] == hvd.size()
    waited = time.monotonic() - started
    if hvd.rank() != hvd.size() - 1:
        share = (_cpu() - before) / waited
        assert waited > WHILE_S / 2
        assert share < 2 * SHARE, f"a waiting rank used {share:.1%} of a core"

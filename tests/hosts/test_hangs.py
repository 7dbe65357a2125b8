"""What ranks of several hosts say while rank 0 does not answer."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.hosts.launch import Site
from tests.mpi.run_support import bare_environment, run, script

pytestmark = pytest.mark.any_mpi

SILENT = """
    import ctypes, time
    import numpy as np
    import pyhvd as hvd

    hvd.init()
    for _ in range(3):
        hvd.allreduce(np.ones(4), name="x")
    hvd.barrier()
    if hvd.rank() == 0:
        ctypes.PyDLL(None).sleep(6)
    hvd.allreduce(np.ones(4), name="x")
    hvd.shutdown()
"""


def test_one_rank_of_each_host_says_that_rank_0_does_not_answer(site: Site, tmp_path: Path) -> None:
    command = site.command([2, 2], sys.executable, "-m", "mpi4py", script(tmp_path, SILENT))
    ended = run(command, {**bare_environment(), "PYHVD_STALL_CHECK_TIME_SECONDS": "1"})
    assert ended.code == 0, ended.out + ended.err
    said = re.findall(
        r"pyhvd\[(\d)\] WARNING: .* rank 0, which decides what runs, does not answer\n"
        r"rank 0 on host h0 \(pid \d+\): its background thread does not answer within 2 s, and its process"
        r" (.+)",
        ended.err,
    )
    known = dict(said)
    assert len(known) == 2, ended.err
    assert known.pop("1") == "sleeps: it is blocked, perhaps while it holds the GIL"
    assert [*known.values()] == ["cannot be seen from here"]

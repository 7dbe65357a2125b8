"""Timelines of real jobs: merge and summary, killed jobs, an unwritable path, the launcher's option."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.observe.trace.files import rank_path
from pyhvd.observe.trace.loading import load
from pyhvd.observe.trace.summary import summarise
from tests.chrome_trace import check_events
from tests.mpi import run_support as support
from tests.mpi.harness import on_ranks

SLOW = 2
TRAIN = f"""
    import time
    import numpy as np
    import pyhvd as hvd
    hvd.init()
    data = np.ones(50_000, np.float32)
    for step in range(20):
        if hvd.rank() == {SLOW}:
            time.sleep(0.05)
        handles = [hvd.allreduce_async(data, name=f"grad/w{{k}}") for k in range(4)]
        for handle in handles:
            handle.result()
"""


def _tool(*arguments: object) -> support.Ended:
    return support.run([sys.executable, "-m", "pyhvd", "trace", *map(str, arguments)])


@pytest.mark.any_mpi
@pytest.mark.parametrize("lane", ["1", "0"], ids=["shared memory", "messages"])
def test_a_job_of_four_ranks(tmp_path: Path, lane: str) -> None:
    folder = f"{tmp_path}/traces/"
    ended = support.pyhvdrun(
        *("-np", 4, "--timeline-filename", folder, "--timeline-mark-cycles"),
        support.script(tmp_path, TRAIN),
        env={"PYHVD_FAST_LANE": lane},
    )
    assert ended.code == 0, ended.err
    for rank in range(4):
        events = json.loads(rank_path(folder, rank).read_text())
        check_events(events)
        names = {event["name"] for event in events}
        assert names >= {
            "NEGOTIATE_ALLREDUCE",
            "ALLREDUCE",
            "QUEUE",
            "MEMCPY_IN_FUSION_BUFFER",
            "CYCLE_START",
        }
        assert ("SHM_ALLREDUCE" if lane == "1" else "MPI_ALLREDUCE") in names
    output = tmp_path / "merged.json"
    merged = _tool("merge", folder, "-o", output)
    assert merged.code == 0, merged.err
    assert f"{output}: " in merged.out
    assert "clock of rank 3 (" in merged.err
    trace = json.loads(output.read_text())
    check_events(trace["traceEvents"])
    assert {event["pid"] for event in trace["traceEvents"]} == set(range(4))
    # All ranks read one host's clock, so the measured offset is the error of the measurement.
    for facts in trace["metadata"]["pyhvd_ranks"].values():
        assert abs(facts["offset_us"]) <= facts["uncertainty_us"] + 1e-3
    summary = _tool("summary", folder, "--top", 2)
    assert summary.code == 0, summary.err
    assert "allreduce.grad/w" in summary.out
    assert "(2 more)" in summary.out
    everything, _ = summarise(load([folder]))
    assert everything.turns == 80
    assert everything.slowest_rank() == SLOW


STUCK = """
    import os, time
    import numpy as np
    import pyhvd as hvd
    hvd.init()
    for step in range(20):
        hvd.allreduce(np.ones(5000), name="w")
    handle = hvd.allreduce_async(np.ones(3), name="stuck") if hvd.rank() != 3 else None
    os.write(1, f"pid {os.getpid()}\\n".encode())
    time.sleep(60)
"""


@pytest.mark.any_mpi
def test_a_killed_job(tmp_path: Path) -> None:
    folder = f"{tmp_path}/traces/"
    command = support.launcher_command(
        *("-np", 4, "--timeline-filename", folder), support.script(tmp_path, STUCK)
    )
    with support.started(command) as job:
        pids = support.read_pids(job, 4)
        until = time.monotonic() + 20
        while not (
            all("stuck" in rank_path(folder, rank).read_text() for rank in range(3))
            and all(sum(turn.key[2] == "w" for turn in trace.turns) == 20 for trace in load([folder]))
        ):
            assert time.monotonic() < until, "the ranks do not write"
            time.sleep(0.02)
        os.kill(pids[1], signal.SIGKILL)
        job.communicate(timeout=support.TIMEOUT_S)
    for rank in range(4):
        check_events(json.loads(rank_path(folder, rank).read_text()), complete=False)
    merged = _tool("merge", folder, "-o", tmp_path / "merged.json")
    assert merged.code == 0, merged.err
    assert "the recording was not ended (killed?)" in merged.err
    assert "allreduce.stuck was still in NEGOTIATE_ALLREDUCE" in merged.err
    check_events(json.loads((tmp_path / "merged.json").read_text())["traceEvents"])
    assert all(sum(turn.key[2] == "w" for turn in trace.turns) == 20 for trace in load([folder]))


@on_ranks(2, 4, env={"PYHVD_TIMELINE": "/proc/none/t.json"})
def test_an_unwritable_path_fails_init_on_every_rank() -> None:
    with pytest.raises(
        hvd.TimelineError, match=r"rank 0 on .* cannot write its timeline to '/proc/none/t.json'"
    ):
        hvd.init()
    os.environ["PYHVD_TIMELINE"] = ""
    hvd.init()
    assert hvd.allreduce(np.ones(2), op=hvd.Sum)[0] == hvd.size()


@on_ranks(4, env={"HOROVOD_TIMELINE": "DYNAMIC"})
def test_a_program_written_for_horovod(tmp_path: Path) -> None:
    hvd.init()
    for name in ("first.json", "second.json"):
        path = str(tmp_path / name)
        hvd.start_timeline(path, mark_cycles=True)
        hvd.barrier()
        hvd.allreduce(np.ones(3), name="test_allreduce")
        hvd.barrier()
        hvd.stop_timeline()
        if hvd.rank() == 0:
            text = (tmp_path / name).read_text()
            json.loads(text)
            for expected in (
                *("allreduce.test_allreduce", "start_time_since_epoch_in_micros", "NEGOTIATE_ALLREDUCE"),
                *("ALLREDUCE", "CYCLE_START"),
            ):
                assert expected in text
        hvd.barrier()

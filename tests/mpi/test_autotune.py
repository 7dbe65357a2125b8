"""Autotuning in real jobs: the launcher's flags, the CSV file, and the knobs in force on every rank."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.mpi.run_support import bare, pyhvdrun, script

pytestmark = pytest.mark.any_mpi

TRAIN = """
import os, sys
import numpy as np
import pyhvd as hvd
from pyhvd.engine import context

hvd.init()
gradients = [np.full(n, hvd.rank() + 1.0, np.float32) for n in (10, 3000, 60_000)]
want = hvd.size() * (hvd.size() + 1) / 2
for step in range(50_000):
    handles = [hvd.allreduce_async(g, name=f"g{i}", op=hvd.Sum) for i, g in enumerate(gradients)]
    assert all((hvd.synchronize(handle) == want).all() for handle in handles)
    if step % 20 == 0:
        done = hvd.rank() == 0 and ",done," in open(sys.argv[1]).read()
        if hvd.broadcast(np.array([done]), 0, name="done")[0]:
            break
hvd.barrier()  # what has been decided is in force behind it
t = context.current().runtime.tuning
line = f"{t.fusion_threshold} {t.cycle_time_ms:g} {t.chunk_size} {t.staging_size}\\n"
os.write(1, line.encode())
"""

FAIL = """
import os
import pyhvd as hvd

try:
    hvd.init()
except ValueError as exc:
    os.write(1, f"{type(exc).__name__}: {exc}\\n".encode())
"""


@pytest.mark.parametrize("fast", ["1", "0"])
def test_a_job_is_tuned(fast: str, tmp_path: Path) -> None:
    path = tmp_path / "tuned.csv"
    ended = pyhvdrun(
        *("-n", 3, "--autotune", "--autotune-log-file", path, "--autotune-steps-per-sample", 1),
        *("--autotune-warmup-samples", 1, "--cycle-time-ms", 2, script(tmp_path, TRAIN), path),
        env={"PYHVD_FAST_LANE": fast, "PYHVD_LOG_LEVEL": "info"},
    )
    assert ended.code == 0, ended.err
    rows = list(csv.DictReader(path.read_text().splitlines()))
    kept = rows[-1]
    assert kept["state"] == "done"
    knobs = ("fusion_threshold", "cycle_time_ms", "chunk_size", "staging_size")
    assert ended.out.splitlines() == [" ".join(kept[knob].removesuffix(".0") for knob in knobs)] * 3
    assert ended.err.count("INFO: autotune: ") == 1
    tried = {knob: {row[knob] for row in rows} for knob in knobs}
    held = {"cycle_time_ms", "staging_size" if fast == "1" else "chunk_size"}
    assert {knob for knob, values in tried.items() if len(values) == 1} == held
    assert tried["cycle_time_ms"] == {"2.0"}


def test_a_log_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "tuned.csv")
    ended = pyhvdrun("-n", 2, "--autotune", "--autotune-log-file", path, script(tmp_path, FAIL))
    what = f"PYHVD_AUTOTUNE_LOG={path!r} cannot be written: No such file or directory"
    assert sorted(ended.out.splitlines()) == [
        f"ConfigError: {what}",
        f"ValueError: pyhvd initialization failed: rank 0: ConfigError: {what}",
    ]


SHOW = """
import os
from pyhvd import Config

config, _ = Config.from_env()
os.write(1, f"{config.fusion_threshold} {config.cycle_time_ms:g} {sorted(config.given)}\\n".encode())
"""
SHOWN = ["1048576 7 ['cycle_time_ms', 'fusion_threshold']"] * 2


def test_flags_reach_the_ranks_and_win(tmp_path: Path) -> None:
    flags = ("--fusion-threshold-mb", 1, "--cycle-time-ms", 7)
    for ended in (
        pyhvdrun("-n", 2, *flags, script(tmp_path, SHOW), env={"PYHVD_CYCLE_TIME": "5"}),
        bare(2, *flags, script(tmp_path, SHOW), env={"HOROVOD_CYCLE_TIME": "5"}),
    ):
        assert ended.out.splitlines() == SHOWN, ended.err

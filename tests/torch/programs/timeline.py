"""Reads the timeline that it writes: the file is there, and has the words of Horovod's, while it is open."""

import tempfile
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.common.util import env

WORDS = ("allreduce.test_allreduce", "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START")

hvd.init()
with tempfile.TemporaryDirectory() as own:
    path = Path(hvd.broadcast_object(own, root_rank=0), "timeline.json")
    hvd.shutdown()
    with env(HOROVOD_TIMELINE=str(path), HOROVOD_TIMELINE_MARK_CYCLES="1"):
        hvd.init()
    hvd.allreduce(torch.ones(3), name="test_allreduce")
    until = time.monotonic() + 20
    while hvd.rank() == 0 and (missing := [word for word in WORDS if word not in path.read_text()]):
        assert time.monotonic() < until, missing
        time.sleep(0.02)
    hvd.shutdown()
hvd.init()

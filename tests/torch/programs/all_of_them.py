"""Runs programs in one job, one after the other: starting torch takes longer than each of them."""

import runpy
import sys

import horovod.torch as hvd

paths = sys.argv[1:]
for path in paths:
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
    hvd.barrier()
    if hvd.rank() == 0:
        print("passed:", path)

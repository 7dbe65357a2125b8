"""A rank's line: where it is, and what Slurm and pyhvd have given it."""

import os

import numpy as np

import pyhvd as hvd

hvd.init()
total = hvd.allreduce(np.ones(4), op=hvd.Sum, name="ones")[0]
numbers = f"{hvd.rank()} {hvd.size()} {hvd.local_rank()} {hvd.local_size()} {total:g}"
given = [
    os.environ.get(name, "-") for name in ("SLURMD_NODENAME", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
]
print("rank", numbers, os.uname().nodename, *given, flush=True)

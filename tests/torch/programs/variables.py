"""Asks what libraries ask: the variables by which they know horovodrun, and Horovod's own test of Gloo."""

import os

import horovod.torch as hvd
from horovod.common.util import gloo_built, mpi_built

for name in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"):
    assert os.environ[f"HOROVOD_{name.upper()}"] == str(getattr(hvd, name)()), name
assert os.environ["HOROVOD_HOSTNAME"]
assert gloo_built(verbose=True)
assert mpi_built()

"""The situations of Horovod's test_torch.py, a function each, as programs that import ``horovod``.

test_under_mpiexec.py runs them. The ranks of a job run one after the other without a shutdown between, so
unnamed calls must pair again after errors.
"""

import os
from unittest import mock

from pyhvd.job.mpi.rank_env import AS_HOROVOD
from pyhvd.job.rank.imports import offer_horovod

with mock.patch.dict(os.environ, {AS_HOROVOD: "1"}):
    offer_horovod()

"""mpi4py's MPI, for every module here: outside mpiexec it is loaded but not initialised.

A process that starts jobs must be no MPI process itself: with Open MPI the jobs would inherit its identity.
"""

from __future__ import annotations

import mpi4py

from pyhvd.job.mpi.rank_env import read_rank_env

if read_rank_env() is None:
    mpi4py.rc.initialize = False

from mpi4py import MPI

__all__ = ["MPI"]

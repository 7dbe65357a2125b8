"""What is asked of the MPI that is there."""

from __future__ import annotations

from pyhvd.run.check_build import probe_mpi


def test_it_says_whether_it_takes_device_memory() -> None:
    """As Open MPI 2 and MPICH 4.1 do, and all that is tested with is newer."""
    assert isinstance(probe_mpi().cuda_aware, bool)

"""Print the MPI in use at the top of pytest's report."""

from __future__ import annotations

from tests.mpi.launch import mpi_version, mpiexec_path


def pytest_report_header() -> str:
    return f"mpi: {mpi_version()} ({mpiexec_path()})"

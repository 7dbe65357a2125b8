"""What a launcher sets in the process of a rank that it supervises."""

from __future__ import annotations

from collections.abc import Callable

supervised = False
"""Whether a launcher watches this rank; if so, it reports the rank's failure and ends the job."""

tell_mpi_init: Callable[[bool], object] = bool
"""Called with True before pyhvd calls MPI_Init, which waits for the other ranks, and with False after it.

:mod:`pyhvd.job.rank.imports` replaces it. If the import of ``mpi4py.MPI`` calls MPI_Init, that module sees
it.
"""

tell_up: Callable[[bool], object] = bool
"""Called with True after ``init()``, and with False before the shutdown; ``python -m pyhvd.run`` replaces it.

While pyhvd is up, a rank that exits leaves others waiting.
"""

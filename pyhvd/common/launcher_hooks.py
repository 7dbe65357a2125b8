"""What a launcher sets in the process of a rank that it supervises."""

from __future__ import annotations

from collections.abc import Callable

supervised = False
"""Whether a launcher watches this rank; if so, it reports the rank's failure and ends the job."""

before_mpi_init: Callable[[], object] = bool
"""Called before pyhvd calls MPI_Init, which waits for the other ranks.

:mod:`pyhvd.job.rank.imports` replaces this hook and the next one. If the import of ``mpi4py.MPI`` calls
MPI_Init, that module sees it.
"""

after_mpi_init: Callable[[], object] = bool
"""Called when that MPI_Init has returned."""

tell_up: Callable[[], object] = bool
"""Called after ``init()``; ``python -m pyhvd.run`` replaces this hook and the next one.

While pyhvd is up, a rank that exits leaves others waiting.
"""

tell_down: Callable[[], object] = bool
"""Called before the shutdown."""

"""Objects, compression, handles and names under mpiexec."""

from __future__ import annotations

import pyhvd as hvd
from tests.conformance import objects, promises
from tests.conformance.cases import run_all
from tests.mpi.harness import on_ranks


@on_ranks(1, 4, timeout=60)
def test_objects_and_promises() -> None:
    hvd.init()
    run_all([*objects.CASES, *promises.CASES])

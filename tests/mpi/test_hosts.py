"""Test messages through leaders under mpiexec: MPICH makes hosts of the even and of the odd ranks."""

from __future__ import annotations

import pytest

import pyhvd as hvd
from pyhvd.engine.context import current
from tests.conformance import disagreements, joining, refusals, sets
from tests.conformance.cases import Case, Cases, each, run
from tests.mpi.harness import on_ranks
from tests.mpi.launch import mpi_version

pytestmark = pytest.mark.skipif(not mpi_version().startswith("MPICH"), reason="needs MPICH's cliques")

TWO_HOSTS = {"MPIR_CVAR_NUM_CLIQUES": "2", "PYHVD_DYNAMIC_PROCESS_SETS": "1"}


@on_ranks(4, env=TWO_HOSTS)
def test_the_tree_has_a_leader() -> None:
    hvd.init()
    assert (hvd.local_size(), hvd.cross_size()) == (2, 2)
    tree = current().runtime._control.tree
    below = {0: {2: 0b0100, 1: 0b1010}, 1: {3: 0b1000}}
    assert tree.children == below.get(hvd.rank(), {})
    assert tree.parent == {0: -1, 1: 0, 2: 0, 3: 1}[hvd.rank()]


@each(
    Cases([*disagreements.CASES, *refusals.CASES, *joining.CASES, *joining.IN_SETS, *sets.DYNAMIC]),
    4,
    count="nranks",
)
@on_ranks(env=TWO_HOSTS, warm=True)
def test_case(case: Case) -> None:
    run(case)

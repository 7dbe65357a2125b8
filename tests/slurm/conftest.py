"""A cluster of three nodes for the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, cluster, why_not


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with cluster(("n1", "n2", "n3"), tmp_path_factory.mktemp("slurm")) as made:
        yield made

"""Ray on two simulated hosts, each with its own network and shared memory: the example trains on both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bed import why_not
from tests.ray.bed_cluster import bed_cluster

_LIMIT_S = 200.0


@pytest.mark.timeout(2 * _LIMIT_S)
def test_the_digits_are_trained_on_two_hosts(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="make test-ray installs it")
    if reason := why_not():
        pytest.skip(f"no simulated hosts: {reason}")
    with bed_cluster(("n1", "n2"), tmp_path) as cluster:
        done = cluster.run("examples/ray_digits.py", "--address", cluster.address, seconds=_LIMIT_S)
    assert done.returncode == 0, done.stdout
    assert "4 ranks on 2 hosts" in done.stdout
    accuracies = [float(found) for found in re.findall(r"held-out accuracy ([\d.]+)%", done.stdout)]
    assert len(accuracies) == 4
    assert accuracies[-1] > 90

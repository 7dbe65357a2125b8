"""What is seen of links between hosts whose rates are known: by metrics, by the doctor, in a timeline."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pyhvd.observe.trace.loading import load
from pyhvd.observe.trace.summary import summarise_hosts
from pyhvd.tools.doctor.advice import examine
from pyhvd.tools.doctor.facts import DoctorFacts
from pyhvd.tools.doctor.trial_facts import LinkFacts, RankFacts, RingFacts, Trial, TrialFacts
from tests.bed import bed, why_not
from tests.hosts.launch import Site
from tests.mpi.launch import mpiexec_path
from tests.mpi.run_support import bare_environment, run, script

pytestmark = pytest.mark.any_mpi

NAMES = ["h0", "h1", "h2", "h3"]
GIGABIT, SLOW = 1e9 / 8, 200e6 / 8
"""Bytes per second of the links, and of those of the last host."""

MEASURE = """
    import sys
    import msgspec
    from mpi4py import MPI
    from pyhvd.tools.doctor.ranks import _measure_links

    found = _measure_links(MPI.COMM_WORLD, lambda stage: None)
    if MPI.COMM_WORLD.Get_rank() == 0:
        print(msgspec.json.encode(found).decode())
"""

TRAIN = """
    import dataclasses, json, time
    import numpy as np
    import pyhvd as hvd

    hvd.init()
    x = np.ones(1_000_000, np.float32)
    for _ in range(3):
        hvd.allreduce_(x, name="x", op=hvd.Max)
    before = hvd.metrics()
    for _ in range(10):
        hvd.allreduce_(x, name="x", op=hvd.Max)
    after = hvd.metrics()
    if hvd.rank() == 0:
        print(json.dumps([dataclasses.asdict(each) for each in (before, after)]))
    hvd.shutdown()
"""


@pytest.fixture(scope="module")
def slow_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site with links of 1 Gbit/s; the last host's has 200 Mbit/s."""
    if reason := "no mpiexec" if mpiexec_path() is None else why_not("1gbit"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("seeing")
    with bed(NAMES, folder) as made:
        made.limit("1gbit")
        made.limit_host(made.hosts[NAMES[-1]], "200mbit")
        yield Site(made, folder)


def run_script(site: Site, hosts: int, folder: Path, code: str, env: dict[str, str] | None = None) -> Any:
    """Run a script on the first hosts, one rank each; return what rank 0 prints, from JSON."""
    command = site.command([1] * hosts, sys.executable, "-m", "mpi4py", script(folder, code))
    ended = run(command, {**bare_environment(), **(env or {})})
    assert ended.code == 0, ended.out + ended.err
    return json.loads(ended.out)


def test_the_doctor_measures_the_links_and_names_the_slow_ones(slow_site: Site, tmp_path: Path) -> None:
    found = msgspec.convert(run_script(slow_site, len(NAMES), tmp_path, MEASURE), list[LinkFacts])
    assert [link.ranks for link in found] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    for link in found:
        limit = SLOW if len(NAMES) - 1 in link.ranks else GIGABIT
        assert 0.6 * limit < link.rate < 1.1 * limit, link
        assert 0 < link.latency < 0.1
        assert len(set(link.addresses)) == 2
    ranks = [RankFacts(rank, name, 1, [0]) for rank, name in enumerate(NAMES)]
    facts = TrialFacts(ranks, RingFacts([], []), [], [], 1e9, [], found)
    texts = [each.text for each in examine(DoctorFacts(), 4, Trial(4, 1.0, facts)) if "moves" in each.text]
    assert len(texts) == 3
    assert all(f"h3 ({found[2].addresses[1]})" in text for text in texts)


def test_a_rank_that_waits_for_a_slow_link_says_so(slow_site: Site, tmp_path: Path) -> None:
    env = {"PYHVD_TIMELINE": f"{tmp_path}/traces/"}
    before, after = run_script(slow_site, 2, tmp_path, TRAIN, env)
    seconds = after["seconds"] - before["seconds"]
    nbytes = 10 * 4_000_000
    for field in ("link_sent_bytes", "link_received_bytes"):
        moved = after[field]["h1"]["rail"] - before[field]["h1"]["rail"]
        assert nbytes <= moved < 1.01 * nbytes
    assert moved / seconds < 1.05 * GIGABIT
    slept = after["link_wait_seconds"]["h1"] - before["link_wait_seconds"]["h1"]
    assert 0 <= slept < seconds  # where other programs use the cores, the wait may be yields alone
    assert after["late_exchanges"]["h1"] - before["late_exchanges"]["h1"] >= 8
    across = summarise_hosts(load([f"{tmp_path}/traces"]))
    assert set(across.waited_for) == {"h0", "h1"}
    assert across.nbytes > 2 * nbytes
    assert across.time / 1e6 > 0.5 * nbytes / GIGABIT

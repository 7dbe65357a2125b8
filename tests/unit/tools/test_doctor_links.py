"""The doctor's test of links: who measures with whom, and a measurement between threads."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from pyhvd.config import Config
from pyhvd.tools.doctor import links
from pyhvd.tools.doctor.trial_facts import LinkFacts
from pyhvd.transport.fabric import Unavailable
from pyhvd.transport.inprocess import ThreadWorlds


@pytest.mark.parametrize("count", range(2, 12))
def test_all_pairs_meet_once_in_rounds_of_disjoint_pairs(count: int) -> None:
    hosts = [10 * k for k in range(count)]
    rounds = list(links.rounds_of(hosts))
    assert len(rounds) == count - 1 + count % 2
    for pairs in rounds:
        met = [host for pair in pairs for host in pair]
        assert len(set(met)) == len(met) == count // 2 * 2
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(hosts, 2))


def _measure(hosts: list[int], config: Config) -> list[list[LinkFacts]]:
    worlds = ThreadWorlds(len(hosts), 30.0, hosts)
    found: dict[int, Any] = {}

    def play(rank: int) -> None:
        world = worlds.world(rank)
        found[rank] = links.measure_links(world, config, world.fabric.barrier)
        world.fabric.close()

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(found) == len(hosts)
    return [found[rank] for rank in range(len(hosts))]


def test_the_lowest_ranks_of_each_two_hosts_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_LARGE_S", 0.005)
    by_rank = _measure([0, 0, 1, 2], Config())
    assert [sorted(link.ranks for link in found) for found in by_rank] == [[(0, 2), (0, 3)], [], [(2, 3)], []]
    for link in itertools.chain(*by_rank):
        assert 0 < link.latency < 1
        assert link.nbytes >= 1 << 20
        assert link.rate > 1e6
        assert all(link.addresses)


def test_the_bytes_follow_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_reduce", lambda *_: None)
    window: Any = None
    assert links._bytes_for(window, 0.01) == 10 << 20
    assert links._bytes_for(window, 1.0) == 1 << 20
    assert links._bytes_for(window, 1e-6) == 64 << 20


def test_many_hosts_meet_some_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MOST_ROUNDS", 1)
    monkeypatch.setattr(links, "_LARGE_S", 0.005)
    by_rank = _measure([0, 1, 2, 3], Config())
    assert sum(map(len, by_rank)) == 2


def test_without_links_there_is_a_warning_and_no_measurement(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pyhvd.transport.hosts.open_links", lambda *_, **__: Unavailable("a wall"))
    assert _measure([0, 1], Config()) == [[], []]
    assert "so they use MPI: a wall" in caplog.text

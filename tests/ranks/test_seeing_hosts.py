"""Test what a job on several simulated hosts says of its links, and of the hosts that others wait for."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.observe.trace.loading import load
from pyhvd.observe.trace.summary import summarise, summarise_hosts
from pyhvd.testing import run_ranks
from tests.chrome_trace import check_events

LATE = 0.2
SMALL, LARGE = 4000, 400_000
"""Bytes of the two tensors: the flat way, and several chunks."""


def names_of(hosts: list[int]) -> list[str]:
    """Return, by rank, what its host is called: all simulated hosts share one host name."""
    name = socket.gethostname()
    return [f"{name} (rank {hosts.index(host)})" for host in hosts]


def late_program(late: int, steps: int) -> list[hvd.Metrics]:
    """Return metrics before and after ``steps`` steps, in each of which one rank is late."""
    tensors = {name: np.ones(n, np.uint8) for name, n in (("small", SMALL), ("large", LARGE))}
    for _ in range(3):
        hvd.grouped_allreduce(list(tensors.values()), name="g", op=hvd.Max)
    hvd.barrier()
    before = hvd.metrics()
    for _ in range(steps):
        hvd.barrier()
        if hvd.rank() == late:
            time.sleep(LATE)
        handles = [hvd.allreduce_async(each, name=name, op=hvd.Max) for name, each in tensors.items()]
        for handle in handles:
            handle.result()
    hvd.barrier()
    return [before, hvd.metrics()]


def grown(pair: list[hvd.Metrics], field: str, *keys: str) -> Any:
    values: list[Any] = [getattr(each, field) for each in pair]
    for key in keys:
        values = [each[key] for each in values]
    return values[1] - values[0]


@pytest.mark.parametrize(
    ("hosts", "late"), [([0, 0, 1, 1], 3), ([0, 0, 1, 1], 0), ([0, 1], 1), ([0, 1, 2], 2)], ids=str
)
def test_what_crosses_and_who_is_late(hosts: list[int], late: int) -> None:
    steps = 4  # the first one is by message
    names, late_host = names_of(hosts), names_of(hosts)[late]
    pairs = run_ranks(len(hosts), late_program, late, steps, hosts=hosts)
    count, slices = len(set(hosts)), max(map(hosts.count, hosts))
    part = 2 * LARGE // count // slices
    for rank, pair in enumerate(pairs):
        others = set(names) - {names[rank]}
        reports = hosts.index(hosts[rank]) == rank
        assert pair[1].link_sent_bytes.keys() == pair[1].link_received_bytes.keys() == others
        for other in others:
            sent = grown(pair, "link_sent_bytes", other, "rail")
            assert part * steps <= sent < (part * 1.01 + SMALL) * steps + 1000
            assert grown(pair, "link_received_bytes", other, "rail") == pytest.approx(sent, abs=100)
            assert pair[1].link_sent_bytes[other].keys() == ({"rail", "agreement"} if reports else {"rail"})
            assert 0 <= grown(pair, "link_wait_seconds", other) < LATE * steps
        # The two tensors of a step may be fused.
        assert steps <= sum(grown(pair, "late_exchanges", each) for each in set(names)) <= 2 * steps
        assert pair[1].host_late_tensors.keys() == (set(names) if reports else set())
        if reports:
            tensors, barriers = 2 * (steps - 1), steps + 1
            late_ones = sum(grown(pair, "host_late_tensors", each) for each in set(names))
            assert 0 <= tensors + barriers - late_ones <= 1  # the first barrier may be one by message
            assert tensors <= grown(pair, "host_late_tensors", late_host) <= tensors + barriers
            for other in others - {late_host}:
                assert grown(pair, "host_awaited_seconds", other) < LATE * steps / 2
        if reports and names[rank] != late_host:
            assert 0.9 * LATE * (steps - 1) < grown(pair, "host_awaited_seconds", late_host) < 10 * LATE
    _check_ranks(hosts, late, pairs[0], steps)


def _check_ranks(hosts: list[int], late: int, pair: list[hvd.Metrics], steps: int) -> None:
    """Rank 0 knows its own host's ranks, and a rank that is alone on its host."""
    tensors = pair[1].late_tensors[late] - pair[0].late_tensors[late]
    awaited = pair[1].awaited_seconds[late] - pair[0].awaited_seconds[late]
    if hosts[late] == hosts[0] or hosts.count(hosts[late]) == 1:
        assert tensors >= 2 * steps
        assert awaited > 0.9 * LATE * steps
    else:
        assert awaited > 0.9 * LATE  # by message


def test_other_verbs_count_too() -> None:
    def rank() -> list[list[hvd.Metrics]]:
        part, found = np.ones(100_000, np.float32), []
        verbs: list[Callable[[], object]] = [
            lambda: hvd.allgather(part, name="g"),
            lambda: hvd.broadcast(part, 0, name="b"),
            lambda: hvd.alltoall(part, name="a"),
            lambda: hvd.reducescatter(part, name="s", op=hvd.Sum),
        ]
        for verb in verbs:
            hvd.barrier()
            before = hvd.metrics()
            verb()
            found.append([before, hvd.metrics()])
        return found

    hosts = [0, 0, 1, 1]
    names, by_rank = names_of(hosts), run_ranks(4, rank, hosts=hosts)
    full = 400_000
    # What host 0 sends: two parts; the root's part; half of each rank's parts; half of its partial result.
    for verb, expected in enumerate((2 * full, full, full, full // 2)):
        pairs = [by_rank[r][verb] for r in (0, 1)]
        sent = sum(grown(pair, "link_sent_bytes", names[2], "rail") for pair in pairs)
        assert expected <= sent < 1.05 * expected + 2000, verb
        for pair in pairs:
            assert sum(grown(pair, "late_exchanges", each) for each in set(names)) >= 1


def test_agreement_is_reported_by_one_rank_of_a_host() -> None:
    def rank() -> list[hvd.Metrics]:
        hvd.allreduce(np.ones(1), name="x")
        before = hvd.metrics()
        for _ in range(50):
            hvd.allreduce(np.ones(1), name="x")
        return [before, hvd.metrics()]

    hosts = [0, 0, 1]
    pairs = run_ranks(3, rank, hosts=hosts)
    (_, _, other), name = names_of(hosts), names_of(hosts)[0]
    assert 50 * 48 < grown(pairs[0], "link_sent_bytes", other, "agreement") < 50 * 500
    assert 50 * 48 < grown(pairs[2], "link_received_bytes", name, "agreement") < 50 * 500
    assert pairs[1][1].host_late_tensors == {}


@pytest.mark.parametrize("knobs", [{"links": False}, {"fast_lane": False}], ids=str)
def test_without_links_nothing_is_named(knobs: dict[str, Any]) -> None:
    def rank() -> hvd.Metrics:
        hvd.allreduce(np.ones(1), name="x")
        return hvd.metrics()

    for seen in run_ranks(2, rank, hosts=[0, 1], knobs=knobs):
        assert (seen.link_sent_bytes, seen.late_exchanges, seen.host_late_tensors) == ({}, {}, {})


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1], [0, 0, 0, 1]], ids=str)
def test_the_exchange_is_in_the_timeline(hosts: list[int], tmp_path: Path) -> None:
    steps, elements, late = 6, 700_000, len(hosts) - 1
    few = 600  # too many to travel with the agreement

    def rank() -> None:
        small, large = np.ones(few, np.float32), np.ones(elements, np.float32)
        for _ in range(steps):
            if hvd.rank() == late:
                time.sleep(0.02)
            hvd.allreduce(small, name="small")
            hvd.allreduce(large, name="large")

    run_ranks(len(hosts), rank, hosts=hosts, knobs={"timeline": f"{tmp_path}/"})
    names = names_of(hosts)
    slices = max(map(hosts.count, hosts))
    for trace in load([str(tmp_path)]):
        events = json.loads(trace.path.read_text())
        check_events(events)
        exchanges = [each for each in trace.phases if each.name == "LINKS_EXCHANGE"]
        assert {each.batch for each in exchanges} == {turn.batch for turn in trace.turns}
        assert {each.last_host for each in exchanges} == set(names) - {names[trace.rank]}
        owned = slices // hosts.count(hosts[trace.rank])
        moved = sum(each.nbytes for each in exchanges)
        # On two hosts each rank sends and receives its slices once. Stretches under 1 us are not recorded.
        assert 0.9 < moved / (2 * 4 * elements * steps * owned / slices) < 1.1
        if hosts[trace.rank] != hosts[late]:
            ticks = [each["name"] for each in events if each["name"] == f"host {names[late]}"]
            assert len(ticks) >= steps - 1
    traces = load([str(tmp_path)])
    across, everything = summarise_hosts(traces), summarise(traces)[0]
    assert 0 < across.share < 1
    assert across.last.total() == 2 * steps * len(hosts)
    assert everything.parts["between hosts"] == pytest.approx(across.time)
    assert (everything.parts["wait"] > 0) == (slices > 1)


def test_the_exchange_of_other_verbs_is_in_the_timeline(tmp_path: Path) -> None:
    hosts = [0, 0, 1, 1]
    part = np.ones(100_000, np.float32)

    def rank() -> None:
        hvd.allgather(part, name="g")
        hvd.broadcast(part, 3, name="b")
        hvd.alltoall(part, name="a")
        hvd.reducescatter(part, name="s", op=hvd.Sum)

    run_ranks(4, rank, hosts=hosts, knobs={"timeline": f"{tmp_path}/"})
    names = names_of(hosts)
    for trace in load([str(tmp_path)]):
        check_events(json.loads(trace.path.read_text()))
        verb_of = {turn.batch: turn.key[1] for turn in trace.turns}
        moved: set[str] = set()
        for each in trace.phases:
            if each.name == "LINKS_EXCHANGE" and each.nbytes > 10_000:  # not the exchange of sizes
                assert each.last_host == names[(trace.rank + 2) % 4]
                moved.add(verb_of[each.batch])
        assert moved == {"ALLGATHER", "ALLTOALL", "BROADCAST", "REDUCESCATTER"}

"""Messages between simulated hosts use control connections, and ranks hear of one that ends."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import pytest

import pyhvd as hvd
from pyhvd.engine.context import current
from pyhvd.testing import run_ranks
from pyhvd.transport.hosts import HostsFabric
from pyhvd.transport.link_control import LinkTransport


def peers() -> list[int] | None:
    """Return the ranks to which this one has control connections; None: it uses no links for messages."""
    for number in range(20):
        assert hvd.allreduce(np.ones(100 * number + 1), op=hvd.Sum, name=f"new.{number}")[0] == hvd.size()
    control = current().runtime._control
    return sorted(control._by_rank) if isinstance(control, LinkTransport) else None


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([0, 0, 1, 1], [[2], [], [0], []]),
        ([1, 0, 1, 2], [[1, 3], [0], [], [0]]),
        ([0, 0], [None, None]),
    ],
)
def test_leaders_have_connections(hosts: list[int], expected: list[list[int] | None]) -> None:
    assert run_ranks(len(hosts), peers, hosts=hosts) == expected


@pytest.mark.parametrize("knobs", [{"links": False}, {"fast_lane": False}], ids=str)
def test_without_links_there_are_none(knobs: dict[str, Any]) -> None:
    assert run_ranks(2, peers, hosts=[0, 1], knobs=knobs) == [None, None]


def test_every_rank_hears_of_an_end() -> None:
    def rank() -> str:
        hvd.allreduce(np.ones(1), name="x")
        fabric = current().runtime._executor.fabric
        assert isinstance(fabric, HostsFabric)
        if hvd.rank() == 2:
            fabric.control[0].shutdown(socket.SHUT_RDWR)
        try:
            for number in range(10_000):
                hvd.allreduce(np.ones(1), name=f"x.{number}")
        except hvd.RankFailedError as error:
            return str(error)
        return "no error"

    name = socket.gethostname()
    texts = set(run_ranks(4, rank, hosts=[0, 0, 1, 1]))
    ends = [f"host {name} (ranks 0-1)", f"host {name} (ranks 2-3)"]
    why = "has failed: a process there has ended"
    assert texts <= {f"the connection from {one} to {other} {why}" for one, other in (ends, ends[::-1])}
    assert texts

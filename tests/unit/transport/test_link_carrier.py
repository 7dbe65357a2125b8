"""The choice of the links' carrier, without MPI."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pyhvd.transport import link_carrier
from pyhvd.transport.inprocess import ThreadFabric, ThreadGroup
from pyhvd.transport.link_carrier import MPI_SHARE, OpenCarrier, choose_carrier, has_fast_network

MPI: Any = object()


@pytest.fixture(autouse=True)
def fast_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_carrier, "has_fast_network", lambda: True)


class Choice:
    """One rank's choice: what it did, and its result.

    Parameters
    ----------
    wanted : str
        The setting.
    tcp, mpi : float
        The seconds that are measured.
    why : str
        Why MPI cannot be used; empty: it can.
    """

    def __init__(self, wanted: str, tcp: float = 2e-3, mpi: float = 1e-3, why: str = "") -> None:
        self.done: list[Any] = []

        def measure(carrier: Any) -> float:
            self.done.append(carrier)
            return tcp if carrier is None else mpi

        opened = OpenCarrier(MPI, lambda: self.done.append("closed"))
        fabric = ThreadFabric(ThreadGroup(1, 1.0), 0)
        self.result = choose_carrier(fabric, wanted, lambda _: why or opened, measure)
        self.is_mpi = self.result.mpi is opened


@pytest.mark.parametrize(("mpi", "taken"), [(1.5e-3, "MPI"), (1.501e-3, "TCP"), (1.999e-3, "TCP")])
def test_mpi_is_taken_if_it_is_much_faster(mpi: float, taken: str, caplog: pytest.LogCaptureFixture) -> None:
    assert MPI_SHARE == 0.75
    with caplog.at_level(logging.INFO, "pyhvd"):
        choice = Choice("auto", 2e-3, mpi)
    assert choice.is_mpi == (taken == "MPI")
    assert choice.done == [MPI, None, *([] if choice.is_mpi else ["closed"])]
    text = f"1 MiB takes 2.000 ms by TCP, {mpi * 1e3:.3f} ms by MPI"
    assert str(choice.result) == f"{taken}: {text}"
    assert caplog.messages == [f"the links between the hosts of 1 ranks use {taken}: {text}"]


def test_without_a_fast_network_tcp_is_used_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_carrier, "has_fast_network", lambda: False)
    choice = Choice("auto")
    assert (choice.is_mpi, choice.done) == (False, [])
    assert str(choice.result) == "TCP: not every host has InfiniBand, RoCE, EFA, Omni-Path or Slingshot"


@pytest.mark.parametrize("wanted", ["tcp", "mpi"])
def test_a_demanded_carrier_is_used_untried(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_carrier, "has_fast_network", lambda: wanted == "tcp")
    choice = Choice(wanted)
    assert (choice.is_mpi, choice.done) == (wanted == "mpi", [])
    assert str(choice.result) == f"{wanted.upper()}: PYHVD_LINK_CARRIER={wanted}"


@pytest.mark.parametrize(("wanted", "level"), [("mpi", logging.WARNING), ("auto", logging.INFO)])
def test_the_log_says_why_mpi_cannot_be_used(
    wanted: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pyhvd"):
        assert not Choice(wanted, why="no MPI_Issend").is_mpi
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (level, "the links between the hosts of 1 ranks use TCP: no MPI_Issend")
    ]


_ETHERNET = {"net/eth0/operstate": "up\n"}


@pytest.mark.parametrize(
    ("files", "fast"),
    [
        ({}, False),
        (_ETHERNET, False),
        (_ETHERNET | {"infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"}, True),
        ({"infiniband/rdmap0s6/ports/1/state": "4: ACTIVE\n"}, True),
        ({"infiniband/hfi1_0/ports/1/state": "2: INIT\n"}, False),
        ({f"infiniband/mlx5_{n}/ports/1/state": s for n, s in enumerate(("1: DOWN\n", "4: ACTIVE\n"))}, True),
        (_ETHERNET | {"cxi/cxi0/uevent": "MAJOR=240\nMINOR=0\nDEVNAME=cxi0\n"}, True),
    ],
)
def test_a_fast_network_is_seen(files: dict[str, str], fast: bool, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    assert has_fast_network(tmp_path) == fast

"""The choice of the links' carrier, without MPI."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pyhvd.transport.inprocess import ThreadFabric, ThreadGroup
from pyhvd.transport.link_carrier import OpenCarrier, choose_carrier, has_rdma_port

MPI: Any = object()


class Choice:
    """One rank's choice: what it did, and its result."""

    def __init__(
        self, wanted: str, port: bool = True, tcp: float = 2e-3, mpi: float = 1e-3, why: str = ""
    ) -> None:
        self.closed = 0
        self.measured: list[Any] = []

        def close() -> None:
            self.closed += 1

        def measure(carrier: Any) -> float:
            self.measured.append(carrier)
            return tcp if carrier is None else mpi

        opened = OpenCarrier(MPI, close)
        fabric = ThreadFabric(ThreadGroup(1, 1.0), 0)
        self.result = choose_carrier(fabric, wanted, lambda _: why or opened, measure, lambda: port)
        self.is_mpi = self.result is opened


def test_without_rdma_ports_tcp_is_used_untried() -> None:
    choice = Choice("auto", port=False)
    assert (choice.is_mpi, choice.measured) == (False, [])


@pytest.mark.parametrize("faster", ["tcp", "mpi"])
def test_with_rdma_ports_the_faster_carrier_is_used(faster: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pyhvd"):
        seconds = {"tcp": 2e-3, "mpi": 1e-3} | {faster: 0.5e-3}
        choice = Choice("auto", tcp=seconds["tcp"], mpi=seconds["mpi"])
    assert choice.measured == [None, MPI]
    assert choice.is_mpi == (faster == "mpi")
    assert choice.closed == (faster == "tcp")
    text = "1 MiB takes {tcp:.3f} ms by TCP, {mpi:.3f} ms by MPI".format(
        **{name: value * 1e3 for name, value in seconds.items()}
    )
    assert caplog.messages == [f"the links between the hosts of 1 ranks use {faster.upper()}: {text}"]


def test_a_demanded_carrier_is_used_untried() -> None:
    choice = Choice("mpi", port=False)
    assert (choice.is_mpi, choice.measured) == (True, [])
    assert not Choice("tcp").is_mpi


@pytest.mark.parametrize(("wanted", "level"), [("mpi", logging.WARNING), ("auto", logging.INFO)])
def test_the_log_says_why_mpi_cannot_be_used(
    wanted: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pyhvd"):
        assert not Choice(wanted, why="no MPI_Issend").is_mpi
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (level, "the links between the hosts of 1 ranks use TCP: no MPI_Issend")
    ]


@pytest.mark.parametrize(("state", "active"), [("4: ACTIVE\n", True), ("1: DOWN\n", False), ("", False)])
def test_an_active_port_is_found(tmp_path: Path, state: str, active: bool) -> None:
    if state:
        port = tmp_path / "mlx5_0" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert has_rdma_port(tmp_path) == active

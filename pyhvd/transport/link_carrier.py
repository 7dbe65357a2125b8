"""Which carrier the links of a process set use: TCP, or MPI for fabrics such as InfiniBand.

Owns the choice, the same on all ranks, and its log lines. Knows no MPI: the world opens that carrier.

1. ``tcp``: TCP. ``mpi``: MPI, or TCP with a warning if MPI cannot be used.
2. ``auto``: TCP, unless every host has an active RDMA port. Then a trial of both, and the faster one.

The choice is made once, when the set is created: all ranks are there, and no tensor waits for a trial.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pyhvd.native.shared_memory import MpiCarrier
from pyhvd.transport.fabric import Fabric, allgather_bytes

_log = logging.getLogger("pyhvd")
_PORTS = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class OpenCarrier:
    """MPI, opened for the links of one process set.

    Attributes
    ----------
    native : MpiCarrier
        The carrier.
    close : callable
        Frees the communicator; collective.
    """

    native: MpiCarrier
    close: Callable[[], None]


OpenMpi = Callable[[Fabric], OpenCarrier | str]
"""Opens MPI as a carrier, or returns why it cannot be used; collective, one outcome for all ranks."""


def has_rdma_port(ports: Path = _PORTS) -> bool:
    """Return whether this host has an active RDMA port."""
    try:
        return any("ACTIVE" in state.read_text() for state in ports.glob("*/ports/*/state"))
    except OSError:
        return False


def choose_carrier(
    fabric: Fabric,
    wanted: str,
    open_mpi: OpenMpi,
    measure: Callable[[MpiCarrier | None], float],
    has_port: Callable[[], bool] = has_rdma_port,
) -> OpenCarrier | None:
    """Return MPI as the carrier for a set's links, or None for TCP; collective.

    Parameters
    ----------
    fabric : Fabric
        The set's fabric.
    wanted : str
        ``auto``, ``tcp`` or ``mpi``; the same on all ranks.
    open_mpi : callable
        Opens the carrier.
    measure : callable
        ``measure(carrier)`` returns the seconds that a reduction of 1 MiB takes; collective.
    has_port : callable
        Whether this host has an active RDMA port.
    """
    if wanted == "tcp":
        return None
    if wanted == "auto" and not all(allgather_bytes(fabric, b"1" if has_port() else b"")):
        return None
    opened = open_mpi(fabric)
    if isinstance(opened, str):
        if fabric.rank == 0:
            level = logging.WARNING if wanted == "mpi" else logging.INFO
            _log.log(level, "the links between the hosts of %d ranks use TCP: %s", fabric.size, opened)
        return None
    if wanted == "mpi":
        return opened
    tcp, mpi = (_slowest(fabric, measure(each)) for each in (None, opened.native))
    if fabric.rank == 0:
        figures = f"1 MiB takes {tcp * 1e3:.3f} ms by TCP, {mpi * 1e3:.3f} ms by MPI"
        use = "MPI" if mpi < tcp else "TCP"
        _log.info("the links between the hosts of %d ranks use %s: %s", fabric.size, use, figures)
    if mpi < tcp:
        return opened
    opened.close()
    return None


def _slowest(fabric: Fabric, seconds: float) -> float:
    return max(float(each) for each in allgather_bytes(fabric, repr(seconds).encode()))

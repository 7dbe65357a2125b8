"""Which carrier the links of a process set use: TCP, or MPI for fabrics such as InfiniBand and Slingshot.

Owns the choice, the same on all ranks, and its log line. Knows no MPI: the world opens that carrier.

1. ``tcp``: TCP. ``mpi``: MPI, or TCP with a warning if MPI cannot be used.
2. ``auto``: TCP, unless every host has a fast network of ``FAST_NETWORKS``. Then a trial of both: MPI, if it
   takes at most ``MPI_SHARE`` of TCP's time; else TCP.

Without a fast network there is no trial. MPI would use TCP too: it could win by noise, or because the network
lets short bursts pass. And it would connect hosts which may be unable to reach each other at MPI's ports.
With one, TCP is still preferred: its waits sleep, and it writes into no array after a lost host has ended the
call. So noise does not choose MPI where MPI goes over the same network by TCP.

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
MPI_SHARE = 0.75
FAST_NETWORKS = (
    ("infiniband/*/ports/*/state", "ACTIVE"),  # InfiniBand, RoCE, Omni-Path, and Amazon's EFA
    ("cxi/*/uevent", ""),  # Slingshot
)
"""Files of /sys/class that show a network which MPI may reach without the kernel, and a word in each."""
_CLASSES = Path("/sys/class")


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


@dataclass(frozen=True, slots=True)
class CarrierChoice:
    """The carrier of a set's links, and the reason for it; both are the same on all ranks.

    Attributes
    ----------
    mpi : OpenCarrier or None
        MPI; None: TCP.
    why : str
        The setting, the figures of the trial, or why MPI cannot be used.
    """

    mpi: OpenCarrier | None
    why: str

    def __str__(self) -> str:
        return f"{'MPI' if self.mpi else 'TCP'}: {self.why}"


def has_fast_network(classes: Path = _CLASSES) -> bool:
    """Return whether this host has a network of ``FAST_NETWORKS``.

    Parameters
    ----------
    classes : Path
        The folder with the classes of the system's devices.
    """
    try:
        return any(word in file.read_text() for files, word in FAST_NETWORKS for file in classes.glob(files))
    except OSError:
        return False


def choose_carrier(
    fabric: Fabric, wanted: str, open_mpi: OpenMpi, measure: Callable[[MpiCarrier | None], float]
) -> CarrierChoice:
    """Return the carrier for a set's links; collective.

    Parameters
    ----------
    fabric : Fabric
        The set's fabric.
    wanted : str
        ``auto``, ``tcp`` or ``mpi``; the same on all ranks.
    open_mpi : callable
        Opens the carrier.
    measure : callable
        ``measure(carrier)`` returns the seconds that a reduction of 1 MiB takes on the slowest rank; None is
        TCP. Collective, and the same number on all ranks.
    """
    if wanted == "tcp":
        opened: OpenCarrier | str = "PYHVD_LINK_CARRIER=tcp"
    elif wanted == "auto" and not all(allgather_bytes(fabric, b"1" if has_fast_network() else b"")):
        opened = "not every host has InfiniBand, RoCE, EFA, Omni-Path or Slingshot"
    else:
        opened = open_mpi(fabric)
    if isinstance(opened, str):
        choice = CarrierChoice(None, opened)
    elif wanted == "mpi":
        choice = CarrierChoice(opened, "PYHVD_LINK_CARRIER=mpi")
    else:
        choice = _try_both(opened, measure)
    if fabric.rank == 0:
        level = logging.WARNING if wanted == "mpi" and choice.mpi is None else logging.INFO
        _log.log(level, "the links between the hosts of %d ranks use %s", fabric.size, choice)
    return choice


def _try_both(opened: OpenCarrier, measure: Callable[[MpiCarrier | None], float]) -> CarrierChoice:
    # TCP last: when MPI's communicator is freed, no link uses it.
    mpi, tcp = measure(opened.native), measure(None)
    figures = f"1 MiB takes {tcp * 1e3:.3f} ms by TCP, {mpi * 1e3:.3f} ms by MPI"
    if mpi <= MPI_SHARE * tcp:
        return CarrierChoice(opened, figures)
    opened.close()
    return CarrierChoice(None, figures)

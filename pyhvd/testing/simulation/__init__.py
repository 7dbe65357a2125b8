"""Simulated clusters: pyhvd's own machines on virtual time.

:mod:`~pyhvd.testing.simulation.clock` and :mod:`~pyhvd.testing.simulation.network` know nothing of pyhvd.
:mod:`~pyhvd.testing.simulation.ranks`, :mod:`~pyhvd.testing.simulation.agreement` and
:mod:`~pyhvd.testing.simulation.launcher` give the machines what threads, sockets and agents give them in a
job. The data path is a model: :mod:`~pyhvd.testing.simulation.data_path`.
"""

from pyhvd.testing.simulation.cluster import simulate
from pyhvd.testing.simulation.data_path import Machine
from pyhvd.testing.simulation.faults import HostLost, RankKilled
from pyhvd.testing.simulation.network import Network
from pyhvd.testing.simulation.program import (
    AddSet,
    Compute,
    Hang,
    Part,
    StepEnd,
    Submit,
    Tensor,
    Wait,
    training,
    training_in_parts,
)
from pyhvd.testing.simulation.report import Failure, Restart, Simulation, StepReport
from pyhvd.testing.simulation.stalls import HangReport

__all__ = [
    "AddSet",
    "Compute",
    "Failure",
    "Hang",
    "HangReport",
    "HostLost",
    "Machine",
    "Network",
    "Part",
    "RankKilled",
    "Restart",
    "Simulation",
    "StepEnd",
    "StepReport",
    "Submit",
    "Tensor",
    "Wait",
    "simulate",
    "training",
    "training_in_parts",
]

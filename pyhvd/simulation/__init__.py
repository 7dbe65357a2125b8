"""Simulated clusters: pyhvd's own machines on virtual time.

:mod:`~pyhvd.simulation.clock` and :mod:`~pyhvd.simulation.network` know nothing of pyhvd.
:mod:`~pyhvd.simulation.ranks`, :mod:`~pyhvd.simulation.agreement` and
:mod:`~pyhvd.simulation.launcher` give the machines what threads, sockets and agents give them in a
job. The data path is a model: :mod:`~pyhvd.simulation.data_path`.
"""

from pyhvd.simulation.cluster import simulate
from pyhvd.simulation.data_path import Machine
from pyhvd.simulation.faults import HostLost, RankKilled
from pyhvd.simulation.network import Network
from pyhvd.simulation.program import (
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
from pyhvd.simulation.report import Failure, Restart, Simulation, StepReport
from pyhvd.simulation.stalls import HangReport

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

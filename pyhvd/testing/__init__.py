"""Public tools for tests and plans: ranks as threads of one process, injected faults, simulated clusters."""

from pyhvd.simulation import Simulation, simulate
from pyhvd.testing.faults import Fault, FaultPlan, InjectedFault
from pyhvd.testing.ranks import RanksFailed, run_ranks

__all__ = ["Fault", "FaultPlan", "InjectedFault", "RanksFailed", "Simulation", "run_ranks", "simulate"]

"""Public tools for tests and plans: ranks as threads of one process, injected faults, simulated clusters."""

from pyhvd.testing.faults import Fault, FaultPlan, InjectedFault
from pyhvd.testing.ranks import RanksFailed, run_ranks
from pyhvd.testing.simulation import Simulation, simulate

__all__ = ["Fault", "FaultPlan", "InjectedFault", "RanksFailed", "Simulation", "run_ranks", "simulate"]

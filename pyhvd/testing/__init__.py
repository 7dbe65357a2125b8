"""Public tools for tests: ranks as threads of one process, without MPI, and injected faults."""

from pyhvd.testing.faults import Fault, FaultPlan, InjectedFault
from pyhvd.testing.ranks import RanksFailed, run_ranks

__all__ = ["Fault", "FaultPlan", "InjectedFault", "RanksFailed", "run_ranks"]

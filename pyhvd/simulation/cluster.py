"""``simulate``: what a job would do on a cluster. pyhvd's own machines run, on virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from pyhvd.config import Config
from pyhvd.simulation.data_path import Machine
from pyhvd.simulation.faults import Fault, Faults
from pyhvd.simulation.launcher import ElasticLauncher, Launcher
from pyhvd.simulation.network import Network
from pyhvd.simulation.program import Program
from pyhvd.simulation.report import Simulation, report_on
from pyhvd.simulation.stalls import Stalls
from pyhvd.simulation.world import SimulatedWorld


def simulate(
    hosts: int,
    local_ranks: int,
    program: Program,
    network: Network | None = None,
    faults: Sequence[Fault] = (),
    seed: int = 0,
    *,
    machine: Machine | None = None,
    config: Config | None = None,
    elastic: bool = False,
    hang_reports: bool = False,
    cpu: float | None = None,
    until: float = 3600.0,
) -> Simulation:
    """Run a job on a simulated cluster: pyhvd's real machines, on virtual time. No data moves.

    Parameters
    ----------
    hosts, local_ranks : int
        Number of hosts, and of ranks on each.
    program : callable
        ``program(rank, size)`` returns an iterator of what the rank does, as :func:`training` does.
    network : Network, optional
        Latency (s), rate (bytes/s) and jitter (s) between hosts; by default 25 Gbit/s and 20 us.
    faults : sequence of HostLost or RankKilled
        What happens to hosts and ranks.
    seed : int
        Of the network's jitter, and of the moments at which hosts beat.
    machine : Machine, optional
        How fast a host copies, adds and sends.
    config : Config, optional
        The job's knobs: fusion threshold, cycle time, chunk, staging and cache sizes, stall check.
    elastic : bool
        Whether the launcher starts the ranks again, until they know each other's addresses.
    hang_reports : bool
        Whether rank 0 reports tensors that some ranks do not submit, as in a job.
    cpu : float, optional
        CPU seconds of each turn of a process. Without it they are measured, so that no two runs are equal.
    until : float
        The simulation ends at this virtual time (s).

    Returns
    -------
    Simulation
        What happened.

    Raises
    ------
    ValueError
        A number is not positive, or a fault names a host or rank that does not exist.
    """
    network, machine, knobs = network or Network(), machine or Machine(), config or Config()
    world = SimulatedWorld(hosts, local_ranks, program, network, seed, machine, knobs, cpu)
    happened = Faults(world, (ElasticLauncher if elastic else Launcher)(world), faults, seed)
    if hang_reports:
        Stalls(world, knobs.stall_check_time_seconds, knobs.stall_shutdown_time_seconds)
    world.run(until)
    return report_on(world, happened)

"""Elastic ranks on Ray: an actor on each node starts its agent; ranks are started again as nodes come and go.

Ranks, agents and actors of a call end with it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pyhvd.job.agent.function_process import dump_call
from pyhvd.job.driver.expected_agents import AgentOrder, ExpectedHosts, run_elastic_call
from pyhvd.job.driver.logged_values import Callbacks
from pyhvd.job.machines.roster import ElasticLimits
from pyhvd.job.rank.call import module_paths
from pyhvd.job.spec import ElasticSpec, JobSpec, argument_of
from pyhvd.ray.actors import HERE, end_actor, expect_agents, make_actor, serve_agent
from pyhvd.ray.discovery import find_node
from pyhvd.ray.errors import StartTimeoutError
from pyhvd.ray.settings import RaySettings, WorkerShape
from pyhvd.ray.worker import Call, Executable, call_anew

_LOOK_S = 0.5


class ElasticRanks:
    """The ranks of an elastic executor.

    Parameters
    ----------
    shape : WorkerShape
        What each rank needs.
    settings : RaySettings
        Of the executor; its discovery finds the nodes and their slots.
    limits : ElasticLimits
        The numbers of ranks and restarts.
    """

    def __init__(self, shape: WorkerShape, settings: RaySettings, limits: ElasticLimits) -> None:
        self._shape, self._settings, self._limits = shape, settings, limits

    def start(self, executable: Executable, env: Mapping[str, str]) -> None:
        """Wait until the nodes have room for the fewest ranks; keep what :meth:`run` needs."""
        self._executable = executable
        self._variables = [(name.encode(), value.encode()) for name, value in env.items()]
        seconds, least = self._limits.elastic_timeout, self._limits.min_np
        until = time.monotonic() + seconds
        while (room := sum((found := self._find()).values())) < least:
            if time.monotonic() > until:
                raise StartTimeoutError(
                    f"after {seconds:g} s (elastic_timeout) Ray's nodes have room for {room} of at least"
                    f" {least} ranks, each of which needs {self._shape.resources(1)}: {found}. Add nodes, or"
                    " ask for fewer ranks"
                )
            time.sleep(min(_LOOK_S, seconds))

    def run(self, call: Call, callbacks: Callbacks = None) -> list[Any]:
        """Make a call on ranks that are started again as often as needed; return the last ones' results."""
        limits, settings = self._limits, self._settings
        whole: Call = call_anew, (self._executable, call), {}
        code, seconds = dump_call(whole, HERE, self._variables, module_paths()), settings.timeout_s
        elastic = ElasticSpec(limits.max_np or 0)
        spec = JobSpec(code, True, start_timeout=seconds, elastic=elastic, name_of=argument_of)
        room = sum(self._find().values())
        begins = max(limits.min_np, min(room, limits.max_np or room))
        agents = expect_agents(settings, self._start_agent)
        hosts = ExpectedHosts(agents, self._find, HERE)
        return run_elastic_call(spec, dataclasses.replace(limits, start_np=begins), hosts, callbacks)

    def close(self) -> None:
        """Do nothing: a call leaves nothing."""

    def _find(self) -> dict[str, int]:
        """Return the slots of each node, at most as many as ranks are wanted."""
        assert self._settings.discovery is not None
        found = self._settings.discovery.find_available_hosts_and_slots()
        return {name: min(slots, self._limits.max_np or slots) for name, slots in found.items()}

    def _start_agent(self, order: AgentOrder) -> Callable[[], object]:
        """Start an actor on a node, which holds what all ranks there need, and let it start the agent."""
        shape, strategy = self._shape, NodeAffinitySchedulingStrategy(find_node(order.host), soft=False)
        actor = make_actor(shape.cpus * order.slots, shape.gpus * order.slots, strategy)
        # Ray sets this variable to the number of the actor's CPUs, which are those of all ranks.
        serve_agent(actor, order, {"OMP_NUM_THREADS": f"{max(1, int(shape.cpus))}"})
        return lambda: end_actor(actor)

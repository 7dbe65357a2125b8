"""The driver's side of the actors: they start agents, and Ray tells when they end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import ray

from pyhvd.job.driver.expected_agents import AgentOrder, ExpectedAgents, StartAgent
from pyhvd.job.rank.call import interface_addresses
from pyhvd.ray.host_actor import HostActor
from pyhvd.ray.settings import RaySettings

HERE = "."
"""The ranks run where Ray runs their actor."""


def expect_agents(settings: RaySettings, start: StartAgent) -> ExpectedAgents:
    """Return what lets actors start agents."""
    own = interface_addresses(settings.nics) if settings.nics else [ray.util.get_node_ip_address()]
    remedy = "can these hosts reach the driver? See timeout_s and nics of create_settings()"
    return ExpectedAgents(start, own, settings.timeout_s, remedy, settings.nics or ())


def make_actor(cpus: float, gpus: float, strategy: Any) -> Any:
    """Start an actor with these CPUs and GPUs. It sees all GPUs of its node if it asks for none."""
    given = {"num_cpus": cpus, "scheduling_strategy": strategy} | ({"num_gpus": gpus} if gpus else {})
    return ray.remote(HostActor).options(**given).remote()


def serve_agent(actor: Any, order: AgentOrder, env: Mapping[str, str]) -> None:
    """Let an actor start an agent, with more variables, and watch the actor."""
    watch(actor.serve.remote(order.addresses, order.secret, order.number, env), order)


def watch(call: Any, order: AgentOrder) -> None:
    """Note in an agent's order when a call of an actor has ended: so has the actor, or its agent."""

    def note(ended: Future[Any]) -> None:
        if not ended.cancelled():
            error = ended.exception()
            how = type(error).__name__ if error else f"its agent's exit code is {ended.result()}"
            order.on_end(f"its Ray actor has ended ({how})")

    call.future().add_done_callback(note)


def end_actor(actor: Any) -> None:
    """End an actor, unless Ray itself is gone."""
    with contextlib.suppress(Exception):
        ray.kill(actor)

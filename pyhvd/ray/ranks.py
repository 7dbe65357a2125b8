"""The ranks of a ``RayExecutor``: actors start the agents, the agents connect, and living ranks begin."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pyhvd.errors import RemoteError
from pyhvd.job.agent.function_process import dump_call
from pyhvd.job.agent.rank_process import RANK_OF_CALLS
from pyhvd.job.driver.agent_source import Checked, CommandSource, HostSlots
from pyhvd.job.driver.arrivals import Arrivals
from pyhvd.job.driver.console import Console, log_warning
from pyhvd.job.driver.generation_driver import GenerationDriver
from pyhvd.job.driver.kept_agents import KeptAgents
from pyhvd.job.driver.living_ranks import Answer, LivingRanks
from pyhvd.job.driver.output import Output
from pyhvd.job.machines.member_host import FoundHost
from pyhvd.job.messages import Facts
from pyhvd.job.mpi.rank_env import MPICH
from pyhvd.job.mpi.rendezvous import PmiRendezvous
from pyhvd.job.network.network_choice import Wanted
from pyhvd.job.network.network_plans import parse_wishes
from pyhvd.job.rank.call import interface_addresses, module_paths
from pyhvd.job.spec import JobSpec, argument_of
from pyhvd.ray.errors import RayError, StartTimeoutError
from pyhvd.ray.host_actor import HostActor
from pyhvd.ray.placement import NodeShare, Placement
from pyhvd.ray.settings import RaySettings, WorkerShape
from pyhvd.ray.worker import set_up
from pyhvd.transport.tcp.connection import Secret

_log = logging.getLogger("pyhvd")
_LOOK_S = 0.01
HERE = "."
"""The ranks run where Ray runs their actor."""


def end_of(_host: str, _code: int, _said: str) -> tuple[str, bool]:
    """Explain the end of an agent; see :data:`pyhvd.job.driver.agent_source.Explain`."""
    return "its agent has ended, and Ray's log of its actor may say why", False


def checked() -> Checked:
    """Return what all hosts must have."""
    return Checked(HERE, "", Facts(MPICH, "MPICH", True, ""), PmiRendezvous())


@dataclass
class NodeActors:
    """The actors of one node: the first starts the agent, others hold GPUs."""

    share: NodeShare
    actors: list[Any]

    @property
    def first(self) -> Any:
        """The actor that has the agent."""
        return self.actors[0]


def check_driver() -> None:
    """Raise RayError in a Ray Client, as agents must reach this process."""
    if ray.util.client.ray.is_connected():
        raise RayError(
            "RayExecutor needs a driver inside the cluster, and this one is a Ray Client (ray://): run it by"
            " ray job submit, or call it inside a task with num_cpus=0"
        )


class RayRanks:
    """Actors, agents and living ranks, from the first actor to the last; ended by :meth:`close`.

    Parameters
    ----------
    shape : WorkerShape
        The ranks.
    settings : RaySettings
        Of the executor.
    use_current : bool
        See :class:`~pyhvd.ray.placement.Placement`.
    on_logged : callable
        Called with a rank and each value that it logs.
    """

    def __init__(
        self,
        shape: WorkerShape,
        settings: RaySettings,
        *,
        use_current: bool,
        on_logged: Callable[[int, Any], object],
    ) -> None:
        self._settings = settings
        self._on_logged = on_logged
        self._stack = contextlib.ExitStack()
        patience = settings.placement_group_timeout_s
        self._placement = self._stack.enter_context(
            contextlib.closing(Placement(shape, use_current=use_current, patience=patience))
        )
        with self._undone_on_error():
            self._stack.callback(self._end_actors)
            self.nodes: list[NodeActors] = []
            for share in self._placement.shares:
                self.nodes.append(NodeActors(share, self._make_actors(shape, share)))

    def start(self, executable: tuple[Any, Any, Any], env: Mapping[str, str]) -> LivingRanks:
        """Start agents and ranks, and make each rank's executable; return the ranks."""
        variables = [(name.encode(), value.encode()) for name, value in env.items()]
        code = dump_call((set_up, executable, {}), HERE, variables, module_paths(), RANK_OF_CALLS)
        with self._undone_on_error():
            kept = self._stack.enter_context(contextlib.closing(KeptAgents()))
            self._gather_agents(kept)
            output = self._stack.enter_context(Output())
            spec = JobSpec(code, True, start_timeout=self._settings.timeout_s, name_of=argument_of)
            hosts = [HostSlots(node.share.name, node.share.slots, [node.share.name]) for node in self.nodes]
            source = CommandSource(spec, hosts, checked, end_of, kept)
            console = Console(lambda text: _log.debug("%s", text), log_warning)
            wanted = Wanted(parse_wishes(self._settings.nics or []), name_of=argument_of)
            living = LivingRanks(
                GenerationDriver(spec, source, output, console, wanted), source, self._on_logged
            )
            self._stack.callback(living.end)
            self._watch(living)
            living.begin()
        return living

    def references(self, call: int, answers: Sequence[Answer]) -> list[Any]:
        """Return an ObjectRef for each rank's answer to a call, in rank order."""
        return [self._reference(call, rank, answer) for rank, answer in enumerate(answers)]

    def _reference(self, call: int, rank: int, answer: Answer) -> Any:
        actor = self._actor_of(rank)

        def give(done: Answer) -> None:
            error = done.exception()
            assert error is None or isinstance(error, Exception)
            with contextlib.suppress(Exception):  # without an actor the reference has an error already
                actor.give.remote(
                    *(call, rank, b"" if error else bytes(done.result()), error, _remote_cause(error))
                )

        reference = actor.take.remote(call, rank)
        answer.add_done_callback(give)
        return reference

    def _actor_of(self, rank: int) -> Any:
        for node in self.nodes:
            if rank < node.share.slots:
                return node.first
            rank -= node.share.slots
        raise IndexError(rank)

    def close(self) -> None:
        """End the ranks after their calls, then agents, actors and the placement group."""
        self._stack.close()

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _make_actors(self, shape: WorkerShape, share: NodeShare) -> list[Any]:
        """Return an actor for each bundle that has GPUs; without GPUs one for the node."""
        actors: list[Any] = []
        for index, workers in share.bundles.items():
            if actors and not shape.gpus:
                break
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=self._placement.group,
                placement_group_bundle_index=index,
                placement_group_capture_child_tasks=False,
            )
            options: dict[str, Any] = {"num_cpus": shape.cpus, "scheduling_strategy": strategy}
            if shape.gpus:
                options["num_gpus"] = shape.gpus * workers
            actors.append(ray.remote(HostActor).options(**options).remote())
        return actors

    def _end_actors(self) -> None:
        for node in self.nodes:
            for actor in node.actors:
                with contextlib.suppress(Exception):  # Ray itself may be gone
                    ray.kill(actor)

    def _gather_agents(self, kept: KeptAgents) -> None:
        """Start an agent on each node, and wait until all have connected."""
        secret, nics = Secret(), self._settings.nics
        own = interface_addresses(nics) if nics else [ray.util.get_node_ip_address()]
        names = [node.share.name for node in self.nodes]

        def describe(number: int, _address: str) -> FoundHost:
            return FoundHost(names[number], self.nodes[number].share.slots)

        with contextlib.closing(Arrivals(secret, own, describe)) as arrivals:
            addresses = list(zip(own, arrivals.ports, strict=True))
            begun = [
                node.first.begin.remote(addresses, secret, number, self._devices(node))
                for number, node in enumerate(self.nodes)
            ]
            self._wait_for(arrivals, begun, names)
            for name in names:
                kept.keep([name], arrivals.release(name))

    def _wait_for(self, arrivals: Arrivals, begun: Sequence[Any], names: Sequence[str]) -> None:
        seconds = self._settings.timeout_s
        until = time.monotonic() + seconds
        while set(arrivals.numbers) != set(names):
            arrivals.take()
            for name, ref in zip(names, begun, strict=True):
                if ray.wait([ref], timeout=0)[0]:
                    _get(ref, f"the agent of host {name} could not be started")
            if time.monotonic() > until:
                late = [name for name in names if name not in arrivals.numbers]
                raise StartTimeoutError(
                    f"no agent has connected from {', '.join(late)} within {seconds:g} s: can these hosts"
                    " reach the driver? See timeout_s and nics of create_settings()",
                    [names.index(name) for name in late],
                )
            time.sleep(_LOOK_S)

    def _devices(self, node: NodeActors) -> dict[str, str]:
        """Return the variable with all CUDA devices of a node, of which each actor has some."""
        if len(node.actors) == 1:
            return {}
        found = ray.get([actor.gpus.remote() for actor in node.actors], timeout=self._settings.timeout_s)
        devices = list(dict.fromkeys(device for each in found for device in each))
        return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}

    def _watch(self, living: LivingRanks) -> None:
        """Note the ends of actors: a node's end is known there before its agent's connection ends."""

        def note(name: str, ended: Any) -> None:
            if not ended.cancelled() and (error := ended.exception()) is not None:
                living.lose_host(name, f"its Ray actor has ended ({type(error).__name__})")

        for node in self.nodes:
            name = node.share.name
            for actor in node.actors:
                waits = actor.wait if actor is node.first else actor.hold
                waits.remote().future().add_done_callback(lambda ended, name=name: note(name, ended))


def _remote_cause(error: BaseException | None) -> RemoteError | None:
    """Return the traceback of a rank from the causes of an error: Ray's pickles of errors have no causes."""
    while error is not None and not isinstance(error, RemoteError):
        error = error.__cause__
    return error


def _get(ref: Any, failing: str) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayError as exc:
        raise RayError(f"{failing}: {str(exc).strip().splitlines()[-1]}") from exc

"""The ranks of a ``RayExecutor`` in a placement group: actors start the agents, and living ranks begin."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pyhvd.errors import RemoteError
from pyhvd.job.agent.function_process import dump_call
from pyhvd.job.agent.rank_process import RANK_OF_CALLS
from pyhvd.job.driver.expected_agents import AgentOrder, living_ranks
from pyhvd.job.driver.living_ranks import Answer, LivingRanks
from pyhvd.job.driver.logged_values import Callbacks
from pyhvd.job.rank.call import module_paths
from pyhvd.job.rank.pickles import dump_functions
from pyhvd.job.spec import JobSpec, argument_of
from pyhvd.ray.actors import HERE, end_actor, expect_agents, make_actor, serve_agent, watch
from pyhvd.ray.placement import Placement
from pyhvd.ray.settings import RaySettings, WorkerShape
from pyhvd.ray.worker import Call, Executable, set_up


class RayRanks:
    """Ranks that live from :meth:`start` to :meth:`close`.

    Parameters
    ----------
    shape : WorkerShape
        The ranks.
    settings : RaySettings
        Of the executor.
    use_current : bool
        See :class:`~pyhvd.ray.placement.Placement`.

    Attributes
    ----------
    actors : dict of str to list
        The actors of each node: the first starts the agent, others hold GPUs.
    """

    def __init__(self, shape: WorkerShape, settings: RaySettings, *, use_current: bool) -> None:
        self._shape, self._settings, self._use_current = shape, settings, use_current
        self._calls = itertools.count()
        self.actors: dict[str, list[Any]] = {}

    def start(self, executable: Executable, env: Mapping[str, str]) -> None:
        """Start actors, agents and ranks, and make each rank's executable."""
        settings, wait_s = self._settings, self._settings.placement_group_timeout_s
        variables = [(name.encode(), value.encode()) for name, value in env.items()]
        code = dump_call((set_up, executable, {}), HERE, variables, module_paths(), RANK_OF_CALLS)
        spec = JobSpec(code, True, start_timeout=settings.timeout_s, name_of=argument_of)
        with contextlib.ExitStack() as stack:
            placement = Placement(self._shape, use_current=self._use_current, patience=wait_s)
            stack.callback(placement.close)
            stack.callback(self._end_actors)
            for share in placement.shares:
                # Without GPUs one actor is enough: the ranks' CPUs are those of their bundles.
                bundles = list(share.bundles)[: None if self._shape.gpus else 1]
                actors = self.actors[share.name] = []
                actors += [self._make_actor(placement.group, each, share.bundles[each]) for each in bundles]
            self._slots = {share.name: share.slots for share in placement.shares}
            agents = stack.enter_context(contextlib.closing(expect_agents(settings, self._start_agent)))
            ranks = living_ranks(agents, self._slots, spec, HERE)
            self._living: LivingRanks = stack.enter_context(ranks)
            self._stack = stack.pop_all()

    def run(self, call: Call, callbacks: Callbacks = None, ranks: Sequence[int] | None = None) -> list[Any]:
        """Make a call on all ranks, or some; return the results in their order."""
        return self._living.run(call, ranks, callbacks)

    def run_remote(self, call: Call) -> list[Any]:
        """Begin a call; return an ObjectRef for each rank's answer, in rank order."""
        answers, number = self._living.call(dump_functions(call)), next(self._calls)
        return [self._reference(number, rank, answer) for rank, answer in enumerate(answers)]

    def close(self) -> None:
        """End the ranks after their calls, then agents, actors and the placement group."""
        self._stack.close()

    def _reference(self, call: int, rank: int, answer: Answer) -> Any:
        hosts = [host for host, slots in self._slots.items() for _ in range(slots)]
        actor = self.actors[hosts[rank]][0]

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

    def _make_actor(self, group: Any, bundle: int, workers: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(group, bundle, placement_group_capture_child_tasks=False)
        return make_actor(self._shape.cpus, self._shape.gpus * workers, strategy)

    def _start_agent(self, order: AgentOrder) -> Callable[[], object]:
        """Let a node's first actor start its agent, which gets the CUDA devices of all of them."""
        first, *others = actors = self.actors[order.host]
        env = {}
        if others:
            found = ray.get([actor.gpus.remote() for actor in actors], timeout=self._settings.timeout_s)
            env["CUDA_VISIBLE_DEVICES"] = ",".join(dict.fromkeys(itertools.chain(*found)))
        for actor in others:
            watch(actor.hold.remote(), order)
        serve_agent(first, order, env)
        return lambda: None  # references wait for values of the actor

    def _end_actors(self) -> None:
        for actor in itertools.chain(*self.actors.values()):
            end_actor(actor)
        self.actors.clear()


def _remote_cause(error: BaseException | None) -> RemoteError | None:
    """Return the traceback of a rank from the causes of an error: Ray's pickles of errors have no causes."""
    while error is not None and not isinstance(error, RemoteError):
        error = error.__cause__
    return error

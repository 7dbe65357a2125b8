"""``RayExecutor``: Horovod's executor on Ray, whose ranks live from ``start()`` to ``shutdown()``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyhvd.common.text import describe_import_error
from pyhvd.job.driver.discovery import FindsHosts
from pyhvd.job.driver.logged_values import Callbacks
from pyhvd.job.rank.call import check_call, expect, rank_variables
from pyhvd.ray.discovery import RayHostDiscovery
from pyhvd.ray.errors import RayError, as_ray_errors
from pyhvd.ray.settings import (
    RaySettings,
    WorkerShape,
    check_counts,
    count_gpus,
    elastic_limits,
    warn_of_ssh,
)
from pyhvd.ray.worker import Call, run_on_executable

if TYPE_CHECKING:  # they need Ray, which docs and type checkers do not
    from pyhvd.ray.elastic import ElasticRanks
    from pyhvd.ray.ranks import RayRanks

Args = Sequence[Any] | None
Kwargs = Mapping[str, Any] | None


class RayExecutor:
    """Runs functions on ranks inside a Ray cluster.

    The ranks live from :meth:`start` to :meth:`shutdown`: each call finds the executable, the variables of
    modules and what :func:`pyhvd.init` has made. A call that fails on one rank ends all ranks.

    With `min_workers` the ranks are elastic: each call starts ranks on the nodes that Ray has, and starts
    them again when ranks or nodes are lost, or nodes come. Its function calls one that
    :func:`pyhvd.elastic.run` decorates.

    Parameters
    ----------
    settings : RaySettings, optional
        Of :meth:`create_settings`.
    num_workers : int, optional
        The number of ranks, which Ray packs on few hosts.
    num_hosts, num_workers_per_host : int, optional
        Instead of `num_workers`: the number of hosts, and of ranks on each.
    cpus_per_worker : int
        The CPUs of each rank.
    use_gpu, gpus_per_worker : bool, int, optional
        Whether ranks have GPUs, and how many; each sees all GPUs of the job on its host.
    use_current_placement_group : bool
        Whether to run in the placement group of the caller, if there is one. Not for elastic ranks.
    min_workers, max_workers : int, optional
        The fewest and the most elastic ranks; the most by default as many as the nodes have room for.
    reset_limit, cooldown_range, elastic_timeout : optional
        Of :func:`pyhvd.launch`.
    override_discovery : bool
        Whether Ray's live nodes are used; otherwise the attribute `discovery` of `settings` finds them.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Iterable[str] | None = None,
    ) -> RaySettings:
        """Return settings: the time limits of the start, and the network interfaces.

        The arguments for ssh have no effect.
        """
        warn_of_ssh(ssh_identity_file, ssh_str)
        return RaySettings(timeout_s, placement_group_timeout_s, None if nics is None else sorted(nics))

    def __init__(
        self,
        settings: RaySettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,  # noqa: FBT001, FBT002 - Horovod's
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,  # noqa: FBT001, FBT002 - Horovod's
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,  # noqa: FBT001, FBT002 - Horovod's
    ) -> None:
        counts = {"num_workers": num_workers, "min_workers": min_workers, "max_workers": max_workers}
        check_counts(num_hosts, num_workers_per_host=num_workers_per_host, **counts)
        gpus = count_gpus(gpus_per_worker, use_gpu=use_gpu)
        workers = num_workers or min_workers or num_workers_per_host
        self._shape = WorkerShape(workers, num_hosts, cpus_per_worker, gpus)
        self._settings = settings or RaySettings()
        self._use_current = use_current_placement_group
        self._ranks: RayRanks | ElasticRanks | None = None
        self._limits = None
        if min_workers is not None:
            limits = {"reset_limit": reset_limit, "cooldown_range": cooldown_range}
            self._limits = elastic_limits(min_workers, max_workers, elastic_timeout=elastic_timeout, **limits)
            if override_discovery:
                self._settings.discovery = RayHostDiscovery(use_gpu, cpus_per_worker, gpus)
            what = "an object with find_available_hosts_and_slots(), as override_discovery is False"
            found = self._settings.discovery
            expect(isinstance(found, FindsHosts), "settings.discovery", found, what)

    @property
    def num_workers(self) -> int:
        """The number of ranks; of elastic ranks the fewest."""
        return self._shape.size

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Args = None,
        executable_kwargs: Kwargs = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks, and make each rank's executable, ``executable_cls(*args, **kwargs)``, if given.

        For elastic ranks, wait until the nodes have room for the fewest: each call starts ranks, and each of
        these makes its executable.

        Raises
        ------
        StartTimeoutError, RayError, RankFailedError, ValueError
            Ray has too few resources, or agents did not connect in time; the ranks could not start; an
            executable could not be made; an argument is invalid, or :meth:`start` was called before.
        """
        if self._ranks is not None:
            raise ValueError("this executor has been started: call shutdown() first")
        executable = executable_cls, executable_args, executable_kwargs
        env = rank_variables({name: str(value) for name, value in (extra_env_vars or {}).items()}, None)
        check_driver()
        from pyhvd.ray.elastic import ElasticRanks
        from pyhvd.ray.ranks import RayRanks

        ranks: RayRanks | ElasticRanks
        if self._limits is None:
            ranks = RayRanks(self._shape, self._settings, use_current=self._use_current)
        else:
            ranks = ElasticRanks(self._shape, self._settings, self._limits)
        with as_ray_errors():
            ranks.start(executable, env)
        self._ranks = ranks

    def run(
        self, fn: Callable[..., Any], args: Args = None, kwargs: Kwargs = None, callbacks: Callbacks = None
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank; return the results in rank order.

        Raises
        ------
        RankFailedError, RayError
            A rank failed, and its exception is the ``__cause__``. The ranks have ended, or not been started.
        """
        with as_ray_errors():
            results: list[Any] = self._started().run(_call_of(fn, args, kwargs), callbacks)
        return results

    def run_remote(self, fn: Callable[..., Any], args: Args = None, kwargs: Kwargs = None) -> list[Any]:
        """Do :meth:`run`, but return an ObjectRef for each rank at once; ``ray.get`` waits, and raises.

        Elastic ranks raise NotImplementedError.
        """
        with as_ray_errors():
            return self._living("run_remote").run_remote(_call_of(fn, args, kwargs))

    def execute(self, fn: Callable[[Any], Any], callbacks: Callbacks = None) -> list[Any]:
        """Run ``fn(executable)`` on every rank; return the results, and raise the errors, of :meth:`run`."""
        return self.run(run_on_executable, (fn,), callbacks=callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Run ``fn(executable)`` on rank 0, and return its result; raise the errors of :meth:`run_remote`."""
        with as_ray_errors():
            living = self._living("execute_single")
            (result,) = living.run(_call_of(run_on_executable, (fn,), None), ranks=[0])
        return result

    def shutdown(self) -> None:
        """End the ranks, agents and actors; a call that still runs has 5 s to end."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def _started(self) -> Any:
        if self._ranks is None:
            raise RayError("the ranks have not been started, or have been shut down: call start() first")
        return self._ranks

    def _living(self, method: str) -> RayRanks:
        if self._limits is not None:
            raise NotImplementedError(
                f"{method} needs ranks that stay, and not elastic ones: use run or execute"
            )
        ranks: RayRanks = self._started()
        return ranks


def _call_of(fn: Any, args: Any, kwargs: Any) -> Call:
    """Return a function with its arguments; raise ValueError if one is of a wrong type."""
    call = fn, () if args is None else args, {} if kwargs is None else kwargs
    check_call(call, None, None)
    return fn, tuple(call[1]), dict(call[2])


def check_driver() -> None:
    """Raise RayError without Ray, and in a Ray Client, as agents must reach this process."""
    try:
        ray = importlib.import_module("ray")
    except ImportError as exc:
        raise RayError(f"pyhvd.ray needs {describe_import_error(exc, 'ray', 'ray')}") from None
    if ray.util.client.ray.is_connected():
        raise RayError(
            "RayExecutor needs a driver inside the cluster, and this one is a Ray Client (ray://): run it by"
            " ray job submit, or call it inside a task with num_cpus=0"
        )

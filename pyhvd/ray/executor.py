"""``RayExecutor``: Horovod's executor on Ray, whose ranks live from ``start()`` to ``shutdown()``."""

from __future__ import annotations

import importlib
import itertools
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyhvd.common.text import describe_import_error
from pyhvd.job.driver.living_ranks import Answer, LivingRanks, load_results
from pyhvd.job.rank.call import check_call, rank_variables
from pyhvd.job.rank.pickles import dump_functions
from pyhvd.ray.errors import RayError, as_ray_errors
from pyhvd.ray.settings import RaySettings, WorkerShape, check_counts, count_gpus, warn_of_ssh
from pyhvd.ray.worker import run_on_executable

if TYPE_CHECKING:  # it needs Ray, which docs and type checkers do not
    from pyhvd.ray.ranks import RayRanks

Callbacks = Sequence[Callable[[Any], object]] | None
"""Functions that get each value that rank 0 logs by :func:`pyhvd.ray.ray_logger.log` during a call."""
_OVER = object()


class RayExecutor:
    """Runs functions on ranks inside a Ray cluster.

    The ranks live from :meth:`start` to :meth:`shutdown`: each call finds the executable, the variables of
    modules and what :func:`pyhvd.init` has made. A call that fails on one rank ends all ranks.

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
        Whether to run in the placement group of the caller, if there is one.
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
    ) -> None:
        check_counts(num_workers, num_hosts, num_workers_per_host)
        gpus = count_gpus(gpus_per_worker, use_gpu=use_gpu)
        workers = num_workers_per_host if num_workers is None else num_workers
        self._shape = WorkerShape(workers, num_hosts, cpus_per_worker, gpus)
        self._settings = settings or RaySettings()
        self._use_current = use_current_placement_group
        self._ranks: RayRanks | None = None
        self._living: LivingRanks | None = None
        self._logged: queue.SimpleQueue[Any] | None = None
        self._calls = itertools.count()

    @property
    def num_workers(self) -> int:
        """The number of ranks."""
        return self._shape.size

    def start(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the ranks, and make each rank's executable, ``executable_cls(*args, **kwargs)``, if given.

        Raises
        ------
        StartTimeoutError, RayError, RankFailedError, ValueError
            Ray has too few resources, or agents did not connect in time; the ranks could not start; an
            executable could not be made; an argument is invalid, or :meth:`start` was called before.
        """
        if self._ranks is not None:
            raise ValueError("this executor has been started: call shutdown() first")
        _import_ray()
        from pyhvd.ray.ranks import RayRanks, check_driver

        check_driver()
        env = rank_variables({name: str(value) for name, value in (extra_env_vars or {}).items()}, None)
        with as_ray_errors():
            ranks = RayRanks(
                *(self._shape, self._settings), use_current=self._use_current, on_logged=self._note
            )
            self._living = ranks.start((executable_cls, executable_args, executable_kwargs), env)
            self._ranks = ranks

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Callbacks = None,
    ) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank; return the results in rank order.

        Raises
        ------
        RankFailedError, RayError
            A rank failed, and its exception is the ``__cause__``. The ranks have ended, or not been started.
        """
        with as_ray_errors():
            return self._wait(self._call(fn, args, kwargs), callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Do :meth:`run`, but return an ObjectRef for each rank at once; ``ray.get`` waits, and raises."""
        call = next(self._calls)
        with as_ray_errors():
            answers = self._call(fn, args, kwargs)
        assert self._ranks is not None
        return self._ranks.references(call, answers)

    def execute(self, fn: Callable[[Any], Any], callbacks: Callbacks = None) -> list[Any]:
        """Run ``fn(executable)`` on every rank; return the results, and raise the errors, of :meth:`run`."""
        return self.run(run_on_executable, (fn,), callbacks=callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Run ``fn(executable)`` on rank 0, and return its result; raise the errors of :meth:`run`."""
        with as_ray_errors():
            (result,) = self._wait(self._call(run_on_executable, (fn,), None, ranks=[0]), None)
        return result

    def shutdown(self) -> None:
        """End the ranks, agents and actors; a call that still runs has 5 s to end."""
        ranks, self._ranks, self._living = self._ranks, None, None
        if ranks is not None:
            ranks.close()

    def _call(self, fn: Any, args: Any, kwargs: Any, ranks: Sequence[int] | None = None) -> list[Answer]:
        call = fn, () if args is None else args, {} if kwargs is None else kwargs
        check_call(call, None, None)
        if self._living is None:
            raise RayError("the ranks have not been started, or have been shut down: call start() first")
        return self._living.call(dump_functions((fn, tuple(call[1]), dict(call[2]))), ranks)

    def _wait(self, answers: Sequence[Answer], callbacks: Callbacks) -> list[Any]:
        """Return the values of answers; meanwhile call the callbacks in this thread."""
        assert self._living is not None
        if callbacks:
            logged = self._logged = queue.SimpleQueue()
            for answer in answers:
                answer.add_done_callback(lambda _: logged.put(_OVER))
            try:
                _pass_on(logged, answers, callbacks)
            except BaseException:
                self._living.end(now=True)
                raise
            finally:
                self._logged = None
        return load_results(self._living.results(answers))

    def _note(self, rank: int, value: Any) -> None:
        logged = self._logged
        if rank == 0 and logged is not None:
            logged.put(value)


def _import_ray() -> None:
    try:
        importlib.import_module("ray")
    except ImportError as exc:
        raise RayError(f"pyhvd.ray needs {describe_import_error(exc, 'ray', 'ray')}") from None


def _pass_on(logged: queue.SimpleQueue[Any], answers: Sequence[Answer], callbacks: Iterable[Any]) -> None:
    left = len(answers)
    while left:
        value = logged.get()
        if value is _OVER:
            left -= 1
            continue
        for callback in callbacks:
            callback(value)

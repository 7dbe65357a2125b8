"""``ElasticRayExecutor``: Horovod's other executor of elastic ranks, with Horovod's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pyhvd.job.driver.logged_values import Callbacks
from pyhvd.ray.executor import RayExecutor
from pyhvd.ray.settings import RaySettings, warn_of_ssh


class ElasticRayExecutor:
    """Runs a function on elastic ranks, on all nodes of a Ray cluster.

    Parameters
    ----------
    settings : RaySettings
        Of :meth:`create_settings`.
    use_gpu : bool
        Whether ranks have GPUs.
    cpus_per_slot : int
        The CPUs of each rank.
    gpus_per_slot : int, optional
        The GPUs of each rank; by default 1 with `use_gpu`.
    env_vars : mapping of str to str, optional
        Variables of the ranks.
    override_discovery : bool
        Whether Ray's live nodes are used; otherwise the attribute `discovery` of `settings` finds them.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Iterable[str] | None = None,
        **others: Any,
    ) -> RaySettings:
        """Return settings: the fewest and the most ranks, the restarts, and the time limits.

        `others` may have ``cooldown_range``, and the old names ``min_np`` and ``max_np``; the rest has no
        effect.
        """
        warn_of_ssh(ssh_identity_file, others.pop("ssh_str", None))
        elastic = {
            "min_workers": others.pop("min_np", min_num_proc),
            "max_workers": others.pop("max_np", max_num_proc),
            "cooldown_range": others.pop("cooldown_range", None),
        }
        if others:
            warnings.warn(f"without effect: {', '.join(others)}", stacklevel=2)
        elastic |= {"reset_limit": reset_limit, "elastic_timeout": elastic_timeout}
        return RaySettings(timeout_s, nics=None if nics is None else sorted(nics), elastic=elastic)

    def __init__(
        self,
        settings: RaySettings,
        use_gpu: bool = False,  # noqa: FBT001, FBT002 - Horovod's
        cpus_per_slot: int = 1,
        gpus_per_slot: float | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,  # noqa: FBT001, FBT002 - Horovod's
    ) -> None:
        shape = {"cpus_per_worker": cpus_per_slot, "use_gpu": use_gpu, "gpus_per_worker": gpus_per_slot}
        given: dict[str, Any] = {**shape, **settings.elastic, "override_discovery": override_discovery}
        self._executor = RayExecutor(settings, **given)
        self._env = env_vars

    def start(self) -> None:
        """Wait until the nodes have room for the fewest ranks; see :meth:`RayExecutor.start`."""
        self._executor.start(extra_env_vars=self._env)

    def run(self, worker_fn: Callable[[], Any], callbacks: Callbacks = None) -> list[Any]:
        """Run a function on the ranks: :meth:`RayExecutor.run` says what is returned and raised."""
        return self._executor.run(worker_fn, callbacks=callbacks)

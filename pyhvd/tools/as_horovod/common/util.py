"""``horovod.common.util``: what programs and tests use of it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from pyhvd.api.topology import (
    ccl_built as ccl_built,
    ddl_built as ddl_built,
    gloo_built as _gloo_built,
    mpi_built as _mpi_built,
    nccl_built as nccl_built,
)

T = TypeVar("T")
_cache = functools.cache


def mpi_built(verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's
    """Return whether there is MPI: pyhvd always works over it."""
    return _mpi_built()


def gloo_built(verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's
    """Return whether there is Gloo: pyhvd never has it."""
    return _gloo_built()


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:  # noqa: ARG001 - Horovod's
    """Return whether pyhvd supports a framework that is installed: torch."""
    return ext_base_name == "torch" and importlib.util.find_spec("torch") is not None


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework can use a GPU here."""
    if not extension_available(ext_base_name, verbose):
        return False
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
    before = dict(os.environ)
    try:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


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

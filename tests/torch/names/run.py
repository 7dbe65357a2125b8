"""Runs situations on a rank, one after the other."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import FunctionType

import horovod.torch as hvd
import pytest

_MODULES = (
    *("ranks", "allreduce", "allgather", "broadcast", "alltoall"),
    *("reducescatter", "joining", "state", "optimizers"),
)


def find_situations() -> dict[str, Callable[[], None]]:
    """Return all situations by name: the public functions without parameters of these modules."""
    modules = [importlib.import_module(f"tests.torch.names.{name}") for name in _MODULES]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and _is_situation(value)
    }


def _is_situation(function: FunctionType) -> bool:
    return not function.__name__.startswith("_") and not function.__code__.co_argcount


def run(names: list[str], folder: str) -> None:
    """Run situations; write a line for each into a file of this rank. The first failure is raised."""
    hvd.init()
    situations = find_situations()
    with Path(folder, f"rank{hvd.rank()}").open("w") as results:
        for name in names:
            reason = ""
            try:
                situations[name]()
            except pytest.skip.Exception as skipped:
                reason = str(skipped)
            results.write(json.dumps([name, reason]) + "\n")
            results.flush()

"""``horovod.torch``: :mod:`pyhvd.torch`."""

import importlib as _importlib

import torch as _torch

from pyhvd.torch import *  # noqa: F403


def _check_has_gpu() -> bool:
    """Return whether torch can use a GPU."""
    return bool(_torch.cuda.is_available())


def __getattr__(name: str) -> object:
    why = ": pyhvd has no elastic training" if name == "elastic" else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}")


# After that, so that they replace pyhvd.torch's own.
for _name in ("compression", "functions", "mpi_ops", "optimizer", "sync_batch_norm"):
    _importlib.import_module(f"{__name__}.{_name}")

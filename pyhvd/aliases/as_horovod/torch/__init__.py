"""``horovod.torch``: :mod:`pyhvd.torch`."""

import importlib as _importlib

import torch as _torch

from pyhvd.torch import *  # noqa: F403


def _check_has_gpu() -> bool:
    """Return whether torch can use a GPU."""
    return bool(_torch.cuda.is_available())


# After that, so that they replace pyhvd.torch's own.
for _name in ("compression", "elastic", "functions", "mpi_ops", "optimizer", "sync_batch_norm"):
    _importlib.import_module(f"{__name__}.{_name}")

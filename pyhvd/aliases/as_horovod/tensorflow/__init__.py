"""``horovod.tensorflow``: :mod:`pyhvd.tensorflow`."""

import importlib as _importlib

import pyhvd.tensorflow as _tensorflow
from pyhvd.tensorflow import *  # noqa: F403

# After that, so that they replace pyhvd.tensorflow's own.
for _name in ("compression", "elastic", "functions", "mpi_ops"):
    _importlib.import_module(f"{__name__}.{_name}")


def __getattr__(name: str) -> object:
    """Return what pyhvd.tensorflow loads when it is asked for."""
    return getattr(_tensorflow, name)

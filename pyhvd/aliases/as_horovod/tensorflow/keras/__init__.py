"""``horovod.tensorflow.keras``: :mod:`pyhvd.keras`."""

import importlib as _importlib

from pyhvd.keras import *  # noqa: F403

# After that, so that they replace pyhvd.keras's own.
for _name in ("callbacks", "elastic"):
    _importlib.import_module(f"{__name__}.{_name}")

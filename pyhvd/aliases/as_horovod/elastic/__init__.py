"""``horovod.elastic``: :mod:`pyhvd.elastic`."""

import importlib as _importlib

from pyhvd.elastic import *  # noqa: F403

for _name in ("sampler", "state"):
    _importlib.import_module(f"{__name__}.{_name}")
